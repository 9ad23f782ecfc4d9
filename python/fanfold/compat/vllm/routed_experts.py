# SPDX-License-Identifier: Apache-2.0
"""A drop-in for vLLM's RoutedExpertsCapturer, on ``fanfold.RoutingCapture``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy

from fanfold._core import CaptureLayout, Communicator, RoutingCapture
from fanfold.compat.vllm.row_rules import Kept, RowRules, StepTokens
from fanfold.errors import InvalidArgument, InvalidState, Unsupported

_MAX_UINT8_EXPERTS = 256
_MAX_UINT16_EXPERTS = 65536


class LayerOutOfRange(InvalidArgument, IndexError):
    """There is no such layer. State: unchanged."""


class RoutedExpertsCapturer:
    """Record the experts of each token as vLLM's class of this name does, or say why not.

    Takes vLLM's constructor arguments, or plain values and callables where there is no vLLM. Where
    it differs from vLLM's class:

    - A row count that fits several of vLLM's rules is an error where they would keep different
      rows. ``sequence_parallel`` says which are meant: with one token and two tensor-parallel
      ranks nothing else can.
    - Cells that were not recorded are known, and ``snapshot_routing_data`` refuses them.
    - An id at or past ``num_experts`` is an error of ``capture``. -1 is kept, as rows of padding
      may have it, and an error of ``snapshot_routing_data`` where a requested token has it.
    - A step has an end. ``snapshot_routing_data`` ends it; so does ``begin_step``, and ``capture``
      of a cell that the step has already.

    Ids are logical and lie on the CPU. One call at a time; threads of micro-batches take turns.

    Args:
        max_num_batched_tokens: tokens of one step.
        vllm_config: gives what is None below; its ``model_config`` is asked for
            ``get_total_num_hidden_layers()``, ``get_num_experts()`` and
            ``get_num_experts_per_tok()``, its ``parallel_config`` for ``data_parallel_rank``,
            ``tensor_parallel_size`` and, where they exist, ``data_parallel_size`` and
            ``prefill_context_parallel_size``. None: the values below are all.
        num_layers: layers of the model; ``layer_id`` is below.
        num_experts: logical experts, at most 65536, whose ids uint16 holds.
        top_k: experts per token.
        dp_rank: this rank among the data-parallel ones; without a config, 0 if not given.
        dp_size: data-parallel ranks; None: as many as the metadata says.
        tp_rank: this rank among the tensor-parallel ones; None: that of ``comm``, else not known,
            and then nobody checks that a gather put this rank's rows in their place.
        tp_size: tensor-parallel ranks; without a config, those of ``comm``, else 1.
        sequence_parallel: True: rows are shards of a sequence, or what was gathered from them;
            False: they never are; None: judged by their number. True needs ``tp_size`` above 1.
        forward_context: gives the forward context of the running step: an object with
            ``dp_metadata`` (None, or with ``num_tokens_across_dp_cpu`` and ``local_sizes``) and
            ``batch_descriptor`` (None, or with ``num_tokens``). None: vLLM's
            ``get_forward_context``.
        token_offset: gives, for a forward context, the token at which the running micro-batch
            begins. None: 0 without ``ubatch_slices`` in the context, else the start of the slice
            that vLLM's ``dbo_current_ubatch_id`` names.
        tp_all_gather: gives, for ``[n, top_k]`` ids, those of all tensor-parallel ranks,
            ``[tp_size * n, top_k]``, by rank; collective. None: that of ``comm``, else that of
            vLLM's tensor-parallel group. vLLM itself is looked up when one of these is needed.
        comm: the tensor-parallel ranks.
        library: "torch" or "numpy", what arrays and dtypes belong to. None: "torch" with a
            ``vllm_config``, else "numpy".

    Raises:
        InvalidArgument: values that lack or contradict each other.
        Unsupported: context parallelism of the prefill.

    Source: vLLM 0.33.0, ``vllm.model_executor.layers.fused_moe.routed_experts_capturer``.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        vllm_config: Any = None,
        *,
        num_layers: int | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        tp_rank: int | None = None,
        tp_size: int | None = None,
        sequence_parallel: bool | None = None,
        forward_context: Callable[[], Any] | None = None,
        token_offset: Callable[[Any], int] | None = None,
        tp_all_gather: Callable[[Any], Any] | None = None,
        comm: Communicator | None = None,
        library: Literal["torch", "numpy"] | None = None,
    ) -> None:
        known = {} if vllm_config is None else _config_values(vllm_config)
        self._max_tokens = _at_least_one("max_num_batched_tokens", max_num_batched_tokens)
        self._num_layers = _required("num_layers", num_layers, known)
        num_experts = _required("num_experts", num_experts, known, _MAX_UINT16_EXPERTS)
        top_k = _required("top_k", top_k, known)
        if comm is not None:
            known |= {"tp_rank": comm.rank, "tp_size": comm.num_ranks}
        self._dp_size = known.get("dp_size") if dp_size is None else dp_size
        dp_rank = known.get("dp_rank", 0) if dp_rank is None else dp_rank
        self.dp_rank = _in_range("dp_rank", dp_rank, self._dp_size)
        tp_size = known.get("tp_size", 1) if tp_size is None else tp_size
        self.tp_size = _at_least_one("tp_size", tp_size)
        tp_rank = known.get("tp_rank") if tp_rank is None else tp_rank
        self._tp_rank = None if tp_rank is None else _in_range("tp_rank", tp_rank, self.tp_size)
        if comm is not None:
            _check_comm(comm, self._tp_rank, self.tp_size)
        if sequence_parallel and self.tp_size == 1:
            raise InvalidArgument("sequence_parallel: expected tp_size above 1 for shards, got 1")
        self._library = library or ("numpy" if vllm_config is None else "torch")
        if self._library not in ("torch", "numpy"):
            raise InvalidArgument(f'library: expected "torch" or "numpy", got {library!r}')
        self._rules = RowRules(self.dp_rank, self.tp_size, sequence_parallel)
        self._forward_context = forward_context or _vllm_forward_context
        self._token_offset = token_offset or _vllm_token_offset
        self._tp_all_gather = tp_all_gather
        self._comm = comm
        self._capture = RoutingCapture(
            num_layers=self._num_layers,
            num_experts=num_experts,
            top_k=top_k,
            max_tokens=max_num_batched_tokens,
            max_in_flight=1,
            comm=comm,
        )
        self.shape_per_token = (self._num_layers, top_k)
        self.output_dtype_name = "uint8" if num_experts <= _MAX_UINT8_EXPERTS else "uint16"
        self._step_id = 0
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self.begin_step()

    @property
    def output_dtype(self) -> Any:
        """The dtype of what ``snapshot_routing_data`` gives, torch's or NumPy's."""
        if self._library == "torch":
            return getattr(_torch(), self.output_dtype_name)
        return numpy.dtype(self.output_dtype_name)

    @property
    def device_buffer(self) -> Any:
        """What this step recorded: ``[max_num_batched_tokens, num_layers, top_k]`` int32.

        Unlike vLLM's buffer it is a copy, made anew each time it is asked for: writing to it
        records nothing. Cells that were not recorded are -1, and after a snapshot all are.
        """
        with self._capture.snapshot(self._max_tokens) as snapshot:
            return self._given(snapshot.array.astype(numpy.int32))

    def begin_step(self) -> None:
        """Forget what was recorded. Not in vLLM's class; needed only after a step without snapshot.

        Such as a warm-up, or one on a rank that does not return routing. Without it the next step
        begins by itself with the first cell that is recorded again.
        """
        self._step_id += 1
        self._spans.clear()
        self._capture.begin_step(self._step_id)

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Record the ids of one layer, for those rows that are this rank's tokens.

        Args:
            layer_id: the layer, 0 to ``num_layers - 1``.
            topk_ids: ``[rows, top_k]`` integers on the CPU, anything with DLPack; used during the
                call. The number of rows says what they are: the tokens of all data-parallel ranks,
                of this one, the gathered shards of all ranks, or a shard, which is gathered from
                the tensor-parallel ranks; all rows where the context says nothing.

        Raises:
            IndexError: no such layer (a ``fanfold.InvalidArgument`` too); checked first.
            InvalidArgument: a number of rows that fits no rule, or several that keep different
                rows: names them and the counts; tokens past ``max_num_batched_tokens``; another
                shape or type; an id at or past ``num_experts``. Of these rows nothing is recorded.
            InvalidState: there is no vLLM, and the callable that is needed was not given.
        """
        if not 0 <= layer_id < self._num_layers:
            raise LayerOutOfRange(f"layer_id: expected 0 to {self._num_layers - 1}, got {layer_id}")
        context = self._forward_context()
        step = StepTokens.of_context(context)
        if step.has_dp_metadata and self._dp_size not in (None, len(step.counts)):
            raise InvalidArgument(
                f"num_tokens_across_dp_cpu: expected {self._dp_size} entries (dp_size), got "
                f"{len(step.counts)}: {list(step.counts)}"
            )
        num_rows = _num_rows(topk_ids)
        kept = self._rules.keep(num_rows, step)
        offset = int(self._token_offset(context))
        if offset < 0:
            raise InvalidArgument(f"token_offset: expected 0 or more, got {offset}")
        rows, layout = self._rows_and_layout(topk_ids, num_rows, kept, offset)
        first, last = offset, offset + kept.count
        spans = self._spans.get(layer_id, [])
        if kept.count and any(first < end and begin < last for begin, end in spans):
            self.begin_step()
        self._capture.record(layer_id, rows, layout)
        if kept.count:
            self._spans.setdefault(layer_id, []).append((first, last))

    def snapshot_routing_data(self, num_tokens: int) -> Any:
        """Give the routing of the first tokens of the step, and end the step.

        Args:
            num_tokens: 0 to ``max_num_batched_tokens``.

        Returns:
            ``[num_tokens, num_layers, top_k]`` of ``output_dtype``, in memory of its own: uint8 up
            to 256 experts, else uint16.

        Raises:
            InvalidState: a layer lacks a requested token in this step: names the layers.
            InvalidArgument: more tokens than there can be (the step goes on), or a requested token
                has -1 for an id, which the dtype cannot hold.
        """
        with self._capture.snapshot(num_tokens) as snapshot:
            missing = snapshot.missing_layers
            missing_rows = snapshot.missing_rows
            ids = numpy.array(snapshot.array)
        self.begin_step()
        if missing:
            lacking = ", ".join(f"{layer} ({missing_rows[layer]})" for layer in missing)
            raise InvalidState(
                f"snapshot_routing_data: expected {num_tokens} tokens to be recorded by every "
                f"layer in this step, got layers that lack some (how many): {lacking}"
            )
        negative = numpy.argwhere(ids < 0)
        if len(negative):
            token, layer, column = negative[0].tolist()
            raise InvalidArgument(
                f"topk_ids: expected ids that {self.output_dtype_name} holds, got "
                f"{ids[token, layer, column]} (no expert) at token {token}, layer {layer}, column "
                f"{column}, and {len(negative)} in all"
            )
        return self._given(ids.astype(self.output_dtype_name))

    def _rows_and_layout(
        self, topk_ids: Any, num_rows: int, kept: Kept, offset: int
    ) -> tuple[Any, CaptureLayout]:
        """The rows to record, gathered where need be, and what they are."""
        if not kept.gather or kept.count == 0:
            behind = num_rows - kept.first - kept.count
            blocks = [kept.first, kept.count, behind]
            return topk_ids, CaptureLayout.concatenated(blocks, 1, token_offset=offset)
        if self._comm is not None and self._tp_all_gather is None:
            counts = [num_rows] * self.tp_size
            return topk_ids, CaptureLayout.sharded(
                counts, self._comm.rank, kept.count, token_offset=offset
            )
        rows = (self._tp_all_gather or _vllm_tp_all_gather)(topk_ids)
        expected = num_rows * self.tp_size
        if _num_rows(rows) != expected:
            raise InvalidArgument(
                f"tp_all_gather: expected {expected} rows (tp_size {self.tp_size} shards of "
                f"{num_rows}), got {_num_rows(rows)}"
            )
        if self._tp_rank is not None:
            mine = _as_numpy(rows)[self._tp_rank * num_rows :][:num_rows]
            if not numpy.array_equal(mine, _as_numpy(topk_ids)):
                raise InvalidArgument(
                    f"tp_all_gather: expected the rows of tp_rank {self._tp_rank} in shard "
                    f"{self._tp_rank}, got other rows there"
                )
        blocks = [0, kept.count, expected - kept.count]
        return rows, CaptureLayout.concatenated(blocks, 1, token_offset=offset)

    def _given(self, array: Any) -> Any:
        return _torch().from_numpy(array) if self._library == "torch" else array


def _config_values(vllm_config: Any) -> dict[str, int]:
    """What a vLLM config says, by the names of our constructor."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    if pcp_size > 1:
        raise Unsupported(
            f"prefill_context_parallel_size: expected 1, got {pcp_size}; routing of context "
            "shards is not captured"
        )
    values = {
        "num_layers": model.get_total_num_hidden_layers(),
        "num_experts": model.get_num_experts(),
        "top_k": model.get_num_experts_per_tok(),
        "dp_rank": parallel.data_parallel_rank,
        "tp_size": parallel.tensor_parallel_size,
    }
    if hasattr(parallel, "data_parallel_size"):
        values["dp_size"] = parallel.data_parallel_size
    return values


def _required(name: str, given: int | None, known: dict[str, int], most: int | None = None) -> int:
    value = known.get(name) if given is None else given
    if value is None:
        raise InvalidArgument(f"{name}: expected a value, or vllm_config, got neither")
    if most is not None and value > most:
        raise InvalidArgument(f"{name}: expected at most {most}, got {value}")
    return _at_least_one(name, value)


def _check_comm(comm: Communicator, tp_rank: int | None, tp_size: int) -> None:
    if (tp_rank, tp_size) != (comm.rank, comm.num_ranks):
        raise InvalidArgument(
            f"comm: expected rank {tp_rank} of {tp_size} (tp_rank, tp_size), got rank {comm.rank} "
            f"of {comm.num_ranks}"
        )


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise InvalidArgument(f"{name}: expected at least 1, got {value}")
    return value


def _in_range(name: str, value: int, size: int | None) -> int:
    if value < 0 or (size is not None and value >= size):
        among = "0 or more" if size is None else f"0 to {size - 1}"
        raise InvalidArgument(f"{name}: expected {among}, got {value}")
    return value


def _num_rows(topk_ids: Any) -> int:
    shape = topk_ids.shape if hasattr(topk_ids, "shape") else _as_numpy(topk_ids).shape
    if len(shape) != 2:
        raise InvalidArgument(f"topk_ids: expected [rows, top_k], got shape {list(shape)}")
    return int(shape[0])


def _as_numpy(tensor: Any) -> Any:
    return numpy.asarray(tensor) if hasattr(tensor, "__array__") else numpy.from_dlpack(tensor)


def _torch() -> Any:
    """The torch that is in use; it is not imported here."""
    if "torch" not in sys.modules:
        raise InvalidState('library: expected torch to be imported already, got library="torch"')
    return sys.modules["torch"]


def _from_vllm(module: str, name: str, instead: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidState(
            f"{instead}: expected vLLM's {module}.{name}, or {instead}= in the constructor, got "
            f"neither ({error})"
        ) from error


def _vllm_forward_context() -> Any:
    return _from_vllm("vllm.forward_context", "get_forward_context", "forward_context")()


def _vllm_token_offset(context: Any) -> int:
    slices = getattr(context, "ubatch_slices", None)
    if not slices:
        return 0
    current = _from_vllm("vllm.v1.worker.ubatching", "dbo_current_ubatch_id", "token_offset")
    return int(slices[current()].token_slice.start)


def _vllm_tp_all_gather(topk_ids: Any) -> Any:
    group = _from_vllm("vllm.distributed.parallel_state", "get_tp_group", "tp_all_gather")
    return group().all_gather(topk_ids, dim=0)
