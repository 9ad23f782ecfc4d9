# SPDX-License-Identifier: Apache-2.0
"""The exchange: configuration in Python's terms; everything else is native."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanfold import _core
from fanfold.config import AllToAllConfig, native_config, shows_config

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AllToAll(_core.AllToAll):
    """One reusable dispatch/combine exchange over a group of ranks.

    Serves any number of layers of equal configuration. Every rank issues the same sequence of
    phases. An argument error is local: nothing was sent, and a corrected call continues the round.
    A difference between the ranks' calls, ``PeerTimeout`` and ``PeerAborted`` put the object into
    state failed until ``reset()`` on every rank; after ``PeerLost`` close it. One call at a time
    per object, else ``InvalidState``; ``abort`` may be called from any thread.

    Creation is collective: the ranks exchange and compare their configurations.

    On a GPU (``device="cuda"``) the calls of a round only enqueue work on their ``stream``, and
    "waits" means that the stream does. What goes wrong in that work (``PeerTimeout``,
    ``PeerAborted``, ``PeerLost``, ``InvalidArgument`` where the ranks' calls differ) is raised by
    the next call that looks: any of a round, ``check``, ``Received.host_counts``; work behind a
    failure does nothing. All tensors lie on the device and stay alive until the stream has passed
    the call; the caller orders the streams of one round. Nothing synchronizes but ``host_counts``,
    ``set_active_mask``, ``set_placement``, ``reset``, ``close`` and creation, which a graph capture
    must not hold. A round that is dispatched in a capture must end in it; every rank replays its
    graphs in one order, and makes no round of its own between. Time-outs are those given when the
    work was enqueued, or captured. Close an exchange, or synchronize, before dropping it: what is
    enqueued and still waits for a peer is given up.

    Strategies: how rows travel. For equal layout, weighting and dtypes, without a wire,
    deterministic, all give the same results bit for bit.
        "one_sided": rows are pushed straight into the peers' memory; the fastest on one machine.
        "low_latency": one_sided whose rows may travel as FP8, for decode over few bytes.
        "high_throughput": counts first, so that symmetric memory grows with the rows received; for
            large prefill rounds. In layout flat_by_expert (without max_recv_rows) senders put rows
            straight among those of their expert.
        "two_sided": bounded FIFO channels; symmetric memory that does not grow with the tokens.
        "gather_scatter": every token to every rank, each partial sum to its token's rank only; for
            router logits without ids (layout gathered), and where a token goes to most ranks.
        "batched": nothing but an equal-split all-to-all of fixed capacity; for any transport.
        "broadcast": everything to every rank; the baseline that the others are compared with.
        "auto": decided here from the configuration; ``choice()`` says what and why.

    Layouts: how received rows lie. R ranks, m = round_max_tokens, L local experts.
        "rank_major": ``[R, m, ...]``, one row per (token, rank); fixed shape, for kernels that
            take ids.
        "gathered": ``[sum of T, ...]``, every token of every rank, routed here or not (broadcast,
            gather_scatter).
        "expert_major": ``[L, R*m, ...]``, one row per (token, local expert); fixed shape, for
            batched matrix products with counts.
        "flat": ``[N, ...]``, one row per (token, rank), nothing between them.
        "flat_by_expert": ``[N', ...]``, one row per (token, local expert) by expert, groups padded
            with zero rows to ``expert_alignment``; for grouped matrix products.
        ``capabilities.layouts`` lists those of the strategy, ``native_layouts`` those that need no
        local copy.

    Args:
        communicator: the group; its state is shared, it need not be kept.
        allocator: where symmetric memory comes from, so that later exchanges can reuse it, or that
            it lies in the caller's own buffers; for a GPU, one of memory of that device.
        workspace_of: another exchange of equal strategy, max_in_flight and (two_sided)
            channel_bytes whose memory and order of rounds this one shares, as two kinds of layers
            of one model may; its workspace must have room. Failure, reset, mask and abort are then
            shared, too. Not on a GPU.
        num_experts: E, over all ranks.
        top_k: K, experts per token, 1 to 1024.
        max_tokens_per_rank: M, the most tokens that *one* rank may have in a round.
        hidden: elements of a hidden-state row.
        dtype: of the hidden states: a torch or NumPy dtype, or a name.
        extra_bytes_per_token: room for further payloads (scales, LoRA ids, ...).
        dispatch_row_bytes: bytes of all payload rows of one token; overrides the sum of the above.
        combine_row_bytes: bytes of one combine row; default hidden * size of combine_dtype.
        strategy: see above.
        layout: see above.
        weighting: "applied", or for layouts per expert also "carried" or "origin".
        placement: "linear", "round_robin", a table with the rank of each expert, or a Placement,
            which can have replicas.
        combine_dtype: rows travel home in it; default ``dtype``.
        max_recv_rows: layouts flat and flat_by_expert. None: as many rows as a round brings, which
            dispatch waits for. n: tensors of n rows; rows beyond are dropped from the end, counted
            (``num_dropped_rows``) and missing from the sums.
        expert_alignment: layout flat_by_expert: each expert's group is a multiple of it, 1 to
            65536.
        max_local_experts: room for the placements of later ``set_placement`` calls; 0: what
            ``placement`` needs.
        dispatch_wire: low_latency: "fp8_e4m3" sends payload 0 as FP8 E4M3 with a scale per 128
            elements; it arrives as float8_e4m3fn with ``Received.scales``.
        combine_wire: low_latency, layouts per expert: "fp8_e4m3" sends the partial sums so.
        wire_scale: what these scales are: "float32" or "ue8m0" (powers of two, one byte).
        channel_bytes: two_sided: bytes of the channel from each rank to each other, 4096 to 2**30.
        max_in_flight: rounds that may be open at once, 1 to 64.
        deterministic: sums in the stated order. False lets broadcast and gather_scatter use their
            transport's own order; see ``capabilities.error_bound``.
        check_ids: "raise" (default on the CPU) or "drop" (default on a GPU) for ids >= num_experts.
        timeout_s: default deadline of every call, in seconds; on a GPU of each wait of a kernel.
        device: where the tensors lie and the rows move: "cpu", "cuda:1", a torch.device, or "cuda":
            torch's current device, else 0. A GPU on all ranks or on none; ranks may share one.
            There: strategies one_sided and low_latency ("auto" takes one_sided), layouts rank_major
            and expert_major, top_k up to 128, up to 256 ranks.
        name: appears in messages.
        debug_poison: fill regions that ended with NaN / 0xCD.
        test_knobs: for tests of the library itself; see ``TestKnobs`` in the C++ header.

    Raises:
        InvalidArgument: the configuration contradicts itself, or differs between ranks (on every
            rank, naming the field and both values).
        InvalidState: ``workspace_of`` is closed or has failed.
        Unsupported: the strategy lacks the layout or the wire, or there is no such device; for a
            GPU the text says what is missing.
        CapacityExceeded: the caller's buffers of ``allocator`` have no room (on every rank).
        PeerTimeout: a rank did not join in time.
        PeerLost: a rank is gone.
        SystemFailure: the system refused memory or another resource.
        MemoryError: a rank ran out of memory (on every rank).
    """

    @shows_config
    def __init__(
        self,
        communicator: _core.Communicator,
        *,
        allocator: _core.Allocator | None = None,
        workspace_of: AllToAll | None = None,
        **config: Unpack[AllToAllConfig],
    ) -> None:
        super().__init__(communicator, native_config(config), allocator, workspace_of)

    @staticmethod
    @shows_config
    def required_bytes(*, num_ranks: int, **config: Unpack[AllToAllConfig]) -> int:
        """Bytes that one rank's AllToAll of this configuration holds.

        ``max_tokens_per_rank`` counts one rank's tokens, whatever ``num_ranks`` is. Local: needs no
        communicator.

        Returns:
            Symmetric plus private bytes: exactly ``workspace_bytes`` of such an object when it is
            made. The counts and indices of a routing and small scratch of the collectives come on
            top. Layout flat_by_expert, where it is not native: the private area of its rows counts
            as its worst case, which is address space; it takes memory only where it is written.
            high_throughput holds, on every rank, room for the rows of the fullest rank of any round
            so far, by expert those of payloads and of results.

        Raises:
            InvalidArgument, Unsupported: as creation.
        """
        return _core.AllToAll.required_bytes_of(num_ranks, native_config(config))

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        """Close when the block ends well; after an exception the peers may never come."""
        if error is None:
            self.close()
