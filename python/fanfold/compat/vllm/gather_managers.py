# SPDX-License-Identifier: Apache-2.0
"""Managers that gather: every rank of the group gets the tokens of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fanfold import _core
from fanfold.compat.vllm.exchanges import name_of, overlaps, row_bytes
from fanfold.compat.vllm.manager_base import All2AllManager
from fanfold.errors import InvalidArgument, InvalidState

_SUMMED = ("float32", "float16", "bfloat16")


@dataclass
class _Gathered:
    """One dispatch of a group, until its combine."""

    received: _core.Received
    combine_dtype: str
    combine_row_bytes: int


class GatherManager(All2AllManager):
    """What ``AgRsAll2AllManager`` and ``NaiveAll2AllManager`` share.

    Two groups: with ``is_sequence_parallel`` all ranks that hold experts (EP), each with its shard
    of the tokens; else the data-parallel group (DP), whose ranks have tokens of their own; with
    one data-parallel rank that of context parallelism.

    Gathered tensors are views that are valid until the combine of that dispatch, or the group's
    next dispatch. CPU tensors only.
    """

    _gathers = True

    def dispatch_router_logits(
        self,
        hidden_states: Any,
        router_logits: Any,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Any] | None = None,
    ) -> Any:
        """Gather tokens and router logits from all ranks of the group. Collective, waits.

        Args:
            hidden_states, router_logits: ``[T, ...]`` each, any dtype. Only read.
            is_sequence_parallel: over which group.
            extra_tensors: more of them, at most 14.

        Returns:
            Both as ``[sum of T, ...]``, tokens by rank; with extra_tensors, also their list.

        Raises:
            As ``dispatch``.
        """
        tensors = [hidden_states, router_logits, *(extra_tensors or [])]
        hidden, logits, *extra = self._gather(tensors, is_sequence_parallel)
        return (hidden, logits) if extra_tensors is None else (hidden, logits, extra)

    def dispatch(
        self,
        hidden_states: Any,
        topk_weights: Any,
        topk_ids: Any,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Any] | None = None,
    ) -> Any:
        """Gather tokens and their routing from all ranks of the group. Collective, waits.

        Args:
            hidden_states, topk_weights, topk_ids: ``[T, ...]`` each, any dtype. Only read; ids are
                gathered as they are, whatever they say.
            is_sequence_parallel: over which group.
            extra_tensors: more of them (scales, LoRA ids), at most 13.

        Returns:
            All three as ``[sum of T, ...]``, tokens by rank; with extra_tensors, also their list.

        Raises:
            InvalidArgument: T is not what the DP metadata says; ranks differ in what they send.
            InvalidState: there are several data-parallel ranks and no DP metadata.
            Unsupported: tensors of a GPU.
            PeerTimeout, PeerAborted, PeerLost: a rank is late or gone.
        """
        tensors = [hidden_states, topk_weights, topk_ids, *(extra_tensors or [])]
        hidden, weights, ids, *extra = self._gather(tensors, is_sequence_parallel)
        return (hidden, weights, ids) if extra_tensors is None else (hidden, weights, ids, extra)

    def combine(self, hidden_states: Any, is_sequence_parallel: bool = False) -> Any:
        """Add what all ranks of the group made of each token. Collective, waits.

        Sums are taken in float32, ranks ascending, and rounded once.

        Args:
            hidden_states: ``[sum of T, H]`` float32, float16 or bfloat16, tokens as dispatch
                gathered them; zeros where this rank has no expert of a token. Only read.
            is_sequence_parallel: over which group.

        Returns:
            ``[T, H]`` of this rank's tokens, dtype of ``hidden_states``.

        Raises:
            As ``dispatch``.
        """
        rank = self._group(is_sequence_parallel).rank
        num_tokens = self._sizes(hidden_states, is_sequence_parallel, is_gathered=True)[rank]
        output = hidden_states.new_empty((num_tokens, *hidden_states.shape[1:]))
        self.combine_into_output(hidden_states, output, is_sequence_parallel)
        return output

    def allocate_combine_input(
        self, shape: Any, dtype: Any, device: Any, is_sequence_parallel: bool = False
    ) -> Any:
        """Where experts may write what ``combine`` takes, so that it copies nothing.

        Returns:
            A tensor, valid until that combine; None where there is no dispatch to combine, or it
            does not fit: then any memory will do.
        """
        opened = self._open.get(id(self._group(is_sequence_parallel)))
        if opened is None or name_of(dtype) != opened.combine_dtype or len(shape) != 2:
            return None
        num_rows = int(opened.received.num_rows[0])
        if int(shape[0]) != num_rows or str(device) != "cpu":
            return None
        if int(shape[1]) * dtype.itemsize > opened.combine_row_bytes:
            return None
        return opened.received.combine_buffer(int(shape[1]), dtype)

    def combine_into_output(
        self, hidden_states: Any, output: Any, is_sequence_parallel: bool = False
    ) -> None:
        """``combine`` into ``output [T, H]``, float32, float16 or bfloat16, overwritten."""
        self.check_device(hidden_states, has_gpu_form=False)
        group = id(self._group(is_sequence_parallel))
        opened = self._open.get(group)
        dtype = name_of(hidden_states.dtype)
        if dtype in _SUMMED:
            self._foreseen[group] = (dtype, row_bytes(hidden_states))
        if opened is not None and self._fits(opened, hidden_states):
            y = hidden_states.contiguous()
            if any(overlaps(y, payload) for payload in opened.received.payloads):
                y = y.clone()  # results that were written over what peers may still write to
            opened.received.combine(y, output)
        else:
            self._reduce(hidden_states, output, is_sequence_parallel)
            if opened is not None:
                opened.received.release()
        self._open.pop(group, None)

    def cleanup(self) -> None:
        """Give all exchanges back; the next round makes its own. Collective."""
        self._open.clear()
        super().cleanup()

    # --- Within ---------------------------------------------------------------------------------

    def _set_up(self) -> None:
        # By group, of which there are two or one.
        self._open: dict[int, _Gathered] = {}
        # What its last combine was given: dtype and bytes of a row.
        self._foreseen: dict[int, tuple[str, int]] = {}

    def _group(self, is_sequence_parallel: bool) -> _core.Communicator:
        return self._groups.ep if is_sequence_parallel else self._groups.gather

    def _sizes(
        self, tensor: Any, is_sequence_parallel: bool, *, is_gathered: bool = False
    ) -> list[int]:
        """Rows of each rank of the group in this step.

        Raises:
            InvalidArgument: they are not those of the tensor.
            InvalidState: nothing says what they are.
        """
        comm = self._group(is_sequence_parallel)
        num_rows = int(tensor.shape[0])
        sizes = self._sizes_of_step(is_sequence_parallel)
        if sizes is None:
            if self.dp_world_size > 1 and comm.num_ranks > 1:
                raise InvalidState(
                    "forward_context: expected DP metadata, which says how many tokens each of "
                    f"{self.dp_world_size} data-parallel ranks has, got none"
                )
            sizes = [num_rows // comm.num_ranks if is_gathered else num_rows] * comm.num_ranks
        if len(sizes) != comm.num_ranks:
            raise InvalidArgument(
                f"forward_context: expected the sizes of {comm.num_ranks} ranks, those of "
                f"{'expert' if is_sequence_parallel else 'data'} parallelism, got {sizes}"
            )
        expected = sum(sizes) if is_gathered else sizes[comm.rank]
        if expected != num_rows:
            raise InvalidArgument(
                f"hidden_states: expected {expected} rows, by the sizes {sizes} of this step on "
                f"rank {comm.rank}, got {num_rows}"
            )
        return sizes

    def _sizes_of_step(self, is_sequence_parallel: bool) -> list[int] | None:
        del is_sequence_parallel
        return self.local_sizes() if self.dp_world_size > 1 else None

    def _gather(self, tensors: Sequence[Any], is_sequence_parallel: bool) -> list[Any]:
        hidden = tensors[0]
        self.check_device(hidden, has_gpu_form=False)
        sizes = self._sizes(hidden, is_sequence_parallel)
        comm = self._group(is_sequence_parallel)
        opened = self._open.pop(id(comm), None)
        if opened is not None and opened.received.is_open:
            opened.received.release()  # nobody combined it, on any rank
        payloads = [tensor.contiguous() for tensor in tensors]
        dtype, combine_bytes = self._foreseen.get(id(comm)) or _results_of(hidden)
        exchange = self._exchanges.grow(
            comm,
            self._complete(
                {
                    # Where rows go does not depend on experts: all go everywhere.
                    "num_experts": comm.num_ranks,
                    "top_k": 1,
                    "hidden": 1,
                    "dtype": dtype,
                    "layout": "gathered",
                }
            ),
            {
                "max_tokens_per_rank": rounded_up(max(sizes)),
                "dispatch_row_bytes": max(1, sum(row_bytes(payload) for payload in payloads)),
                "combine_row_bytes": combine_bytes,
            },
        )
        received = exchange.dispatch(
            None, payloads, round_max_tokens=max(sizes), num_tokens_per_rank=sizes
        )
        room = exchange.config["combine_row_bytes"] or 0
        self._open[id(comm)] = _Gathered(received, dtype, room)
        return list(received.payloads)

    @staticmethod
    def _fits(opened: _Gathered, hidden_states: Any) -> bool:
        return bool(
            name_of(hidden_states.dtype) == opened.combine_dtype
            and row_bytes(hidden_states) <= opened.combine_row_bytes
        )

    def _reduce(self, hidden_states: Any, output: Any, is_sequence_parallel: bool) -> None:
        """Without a dispatch that foresaw it: the same sums, by the communicator."""
        sizes = self._sizes(hidden_states, is_sequence_parallel, is_gathered=True)
        comm = self._group(is_sequence_parallel)
        wide = hidden_states.float().contiguous()  # rounded once, like the exchange's sums
        summed = wide.new_empty((sizes[comm.rank], *wide.shape[1:]))
        comm.reduce_scatter_v(wide, summed, sizes, timeout_s=self.timeout_s)
        output.copy_(summed)


class AgRsAll2AllManager(GatherManager):
    """vLLM's manager of all-gather and reduce-scatter, over strategy ``gather_scatter``."""

    strategy = "gather_scatter"


class NaiveAll2AllManager(GatherManager):
    """vLLM's former manager of broadcasts and an all-reduce, over strategy ``broadcast``.

    vLLM 0.33.0 has it no more; its ``dispatch`` takes extra_tensors here.
    """

    strategy = "broadcast"

    def naive_multicast(
        self, x: Any, cu_tokens_across_sp_cpu: Any, is_sequence_parallel: bool
    ) -> Any:
        """Every rank's rows, by one broadcast per rank. Collective, waits.

        Args:
            x: ``[T, ...]`` on the CPU.
            cu_tokens_across_sp_cpu: inclusive sums of the ranks' T, one per rank of the group.
            is_sequence_parallel: over which group.

        Returns:
            ``[sum of T, ...]``, a tensor of its own.

        Raises:
            InvalidArgument: T is not what the sums say.
            Unsupported: a tensor of a GPU.
        """
        self.check_device(x, has_gpu_form=False)
        comm = self._group(is_sequence_parallel)
        ends = [int(end) for end in cu_tokens_across_sp_cpu]
        begins = [0, *ends[:-1]]
        if len(ends) != comm.num_ranks or ends[comm.rank] - begins[comm.rank] != x.shape[0]:
            raise InvalidArgument(
                f"x: expected the rows of rank {comm.rank} of {comm.num_ranks}, by the sums "
                f"{ends}, got {x.shape[0]}"
            )
        buffer = x.new_empty((ends[-1], *x.shape[1:]))
        buffer[begins[comm.rank] : ends[comm.rank]].copy_(x)
        for source in range(comm.num_ranks):
            rows = buffer[begins[source] : ends[source]]
            comm.broadcast(rows, source, timeout_s=self.timeout_s)
        return buffer

    def _sizes_of_step(self, is_sequence_parallel: bool) -> list[int] | None:
        metadata = getattr(self._forward_context(), "dp_metadata", None)
        if metadata is None:
            return None
        sp_size = self.tp_group.world_size if is_sequence_parallel else 1
        ends = [int(end) for end in metadata.cu_tokens_across_sp(sp_size)]
        return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _results_of(hidden: Any) -> tuple[str, int]:
    """Dtype and bytes of a row of the results, as far as the tokens tell."""
    dtype = name_of(hidden.dtype)
    if dtype in _SUMMED:
        return dtype, max(1, row_bytes(hidden))
    return "bfloat16", max(1, 4 * row_bytes(hidden))  # quantised, maybe two elements to a byte


def rounded_up(num_tokens: int) -> int:
    """A power of two, so that steps that grow a little do not make a new exchange each."""
    return 1 << max(0, num_tokens - 1).bit_length()
