# SPDX-License-Identifier: Apache-2.0
"""The exchange: configuration in Python's terms; everything else is native."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fanfold import _core
from fanfold.errors import InvalidArgument, Unsupported

_TEST_KNOBS = frozenset(
    {
        "delay_seed",
        "first_epoch",
        "isa",
        "kill_at_step",
        "row_guard_bytes",
        "stop_at_step",
        "streaming_stores",
    }
)


def _config(
    *,
    num_experts: int,
    top_k: int,
    max_tokens_per_rank: int,
    hidden: int,
    dtype: object,
    extra_bytes_per_token: int,
    dispatch_row_bytes: int | None,
    combine_row_bytes: int | None,
    strategy: str,
    layout: str,
    weighting: str,
    placement: str | Sequence[int],
    combine_dtype: object,
    max_in_flight: int,
    deterministic: bool,
    check_ids: str | None,
    timeout_s: float,
    device: str,
    name: str | None,
    debug_poison: bool,
    test_knobs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    if device != "cpu":
        raise Unsupported(f"device: this build has only cpu, got {device!r}")
    config: dict[str, Any] = {
        "num_experts": num_experts,
        "top_k": top_k,
        "max_tokens_per_rank": max_tokens_per_rank,
        "hidden": hidden,
        "dtype": dtype,
        "extra_bytes_per_token": extra_bytes_per_token,
        "strategy": strategy,
        "layout": layout,
        "weighting": weighting,
        "placement": placement if isinstance(placement, str) else list(placement),
        "max_in_flight": max_in_flight,
        "deterministic": deterministic,
        "check_ids": "auto" if check_ids is None else check_ids,
        "timeout_s": timeout_s,
        "name": name or "",
        "debug_poison": debug_poison,
    }
    optional = {
        "dispatch_row_bytes": dispatch_row_bytes,
        "combine_row_bytes": combine_row_bytes,
        "combine_dtype": combine_dtype,
    }
    config.update({key: value for key, value in optional.items() if value is not None})
    for knob, value in (test_knobs or {}).items():
        if knob not in _TEST_KNOBS:
            raise InvalidArgument(
                f"test_knobs: expected names of {', '.join(sorted(_TEST_KNOBS))}; got {knob!r}"
            )
        config[knob] = value
    return config


class AllToAll(_core.AllToAll):
    """One reusable dispatch/combine exchange over a group of ranks.

    Serves any number of layers of equal configuration. Every rank issues the same sequence of
    phases. An argument error is local: nothing was sent, and a corrected call continues the round.
    A difference between the ranks' calls, ``PeerTimeout`` and ``PeerAborted`` put the object into
    state failed until ``reset()`` on every rank; after ``PeerLost`` close it. One call at a time
    per object, else ``InvalidState``; ``abort`` may be called from any thread.

    Creation is collective: the ranks exchange and compare their configurations.

    Args:
        communicator: the group; its state is shared, it need not be kept.
        num_experts: E, over all ranks.
        top_k: K, experts per token, 1 to 1024.
        max_tokens_per_rank: M, the most tokens that *one* rank may have in a round.
        hidden: elements of a hidden-state row.
        dtype: of the hidden states: a torch or NumPy dtype, or a name.
        extra_bytes_per_token: room for further payloads (scales, LoRA ids, ...).
        dispatch_row_bytes: bytes of all payload rows of one token; overrides the sum of the above.
        combine_row_bytes: bytes of one combine row; default hidden * size of combine_dtype.
        strategy: "one_sided", "broadcast", or "auto" (decided here; see ``choice``).
        layout: "rank_major", "expert_major", or (broadcast) "gathered".
        weighting: "applied", or for expert_major also "carried" or "origin".
        placement: "linear", "round_robin", or a table with the rank of each expert.
        combine_dtype: rows travel home in it; default ``dtype``.
        max_in_flight: rounds that may be open at once, 1 to 64.
        deterministic: sums in the stated order (the only mode of these strategies).
        check_ids: "raise" (default) or "drop" for ids >= num_experts.
        timeout_s: default deadline of every call, in seconds.
        device: "cpu".
        allocator: where the workspace of one_sided comes from, so that later exchanges can
            reuse it.
        name: appears in messages.
        debug_poison: fill regions that ended with NaN / 0xCD.
        test_knobs: for tests of the library itself; see ``TestKnobs`` in the C++ header.

    Raises:
        InvalidArgument: the configuration contradicts itself, or differs between ranks (on every
            rank, naming the field and both values).
        Unsupported: the strategy lacks the layout.
        PeerTimeout: a rank did not join in time.
    """

    def __init__(
        self,
        communicator: _core.Communicator,
        *,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        hidden: int,
        dtype: object = "bfloat16",
        extra_bytes_per_token: int = 0,
        dispatch_row_bytes: int | None = None,
        combine_row_bytes: int | None = None,
        strategy: str = "auto",
        layout: str = "rank_major",
        weighting: str = "applied",
        placement: str | Sequence[int] = "linear",
        combine_dtype: object = None,
        max_in_flight: int = 1,
        deterministic: bool = True,
        check_ids: str | None = None,
        timeout_s: float = 60.0,
        device: str = "cpu",
        allocator: _core.Allocator | None = None,
        name: str | None = None,
        debug_poison: bool = False,
        test_knobs: Mapping[str, Any] | None = None,
    ) -> None:
        config = _config(
            num_experts=num_experts,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            hidden=hidden,
            dtype=dtype,
            extra_bytes_per_token=extra_bytes_per_token,
            dispatch_row_bytes=dispatch_row_bytes,
            combine_row_bytes=combine_row_bytes,
            strategy=strategy,
            layout=layout,
            weighting=weighting,
            placement=placement,
            combine_dtype=combine_dtype,
            max_in_flight=max_in_flight,
            deterministic=deterministic,
            check_ids=check_ids,
            timeout_s=timeout_s,
            device=device,
            name=name,
            debug_poison=debug_poison,
            test_knobs=test_knobs,
        )
        super().__init__(communicator, config, allocator)

    @staticmethod
    def required_bytes(
        *,
        num_ranks: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        hidden: int,
        dtype: object = "bfloat16",
        extra_bytes_per_token: int = 0,
        dispatch_row_bytes: int | None = None,
        combine_row_bytes: int | None = None,
        strategy: str = "auto",
        layout: str = "rank_major",
        weighting: str = "applied",
        placement: str | Sequence[int] = "linear",
        combine_dtype: object = None,
        max_in_flight: int = 1,
    ) -> int:
        """Bytes that one rank's AllToAll of this configuration holds.

        ``max_tokens_per_rank`` counts one rank's tokens, whatever ``num_ranks`` is.

        Returns:
            Symmetric plus private bytes: exactly ``workspace_bytes`` of such an object. The tables
            of a routing come on top.
        """
        config = _config(
            num_experts=num_experts,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            hidden=hidden,
            dtype=dtype,
            extra_bytes_per_token=extra_bytes_per_token,
            dispatch_row_bytes=dispatch_row_bytes,
            combine_row_bytes=combine_row_bytes,
            strategy=strategy,
            layout=layout,
            weighting=weighting,
            placement=placement,
            combine_dtype=combine_dtype,
            max_in_flight=max_in_flight,
            deterministic=True,
            check_ids=None,
            timeout_s=60.0,
            device="cpu",
            name=None,
            debug_poison=False,
            test_knobs=None,
        )
        return _core.AllToAll.required_bytes_of(num_ranks, config)

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        """Close when the block ends well; after an exception the peers may never come."""
        if error is None:
            self.close()
