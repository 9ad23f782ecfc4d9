# SPDX-License-Identifier: Apache-2.0
"""A drop-in for vLLM's RoutedExpertsCapturer, on ``fanfold.RoutingCapture``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy

from fanfold._core import CaptureLayout, Communicator, RoutingCapture, RoutingSnapshot
from fanfold.compat.flashinfer.mnnvl import default_device
from fanfold.compat.vllm import vllm_values
from fanfold.compat.vllm.row_rules import Kept, RowRules, StepTokens
from fanfold.compat.vllm.step_contexts import StepContexts
from fanfold.errors import Error, InvalidArgument, InvalidState

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
      of a cell that the step has already, or within another forward context than the step's last.
      Call ``begin_step`` after a warm-up or a step that failed where the forward context is None
      or one object for all steps, or where a step may capture nothing at all: nothing else tells
      the old rows from those of the next step.

    - On a GPU kernels look at the ids: what is wrong with them is an error of
      ``snapshot_routing_data``, which waits for the copy, where vLLM's only enqueues it.

    Ids are logical and lie on ``device``. One call at a time; threads of micro-batches take turns.
    On a GPU everything is enqueued on torch's current stream, and ``capture`` may be in a graph
    capture: a replay records in the step that runs then, which the snapshot of the one before it
    (or ``begin_step``) has begun.

    Args:
        max_num_batched_tokens: tokens of one step.
        vllm_config: gives what is None below; its ``model_config`` is asked for
            ``get_total_num_hidden_layers()``, ``get_num_experts()`` and
            ``get_num_experts_per_tok()``, its ``parallel_config`` for ``data_parallel_rank``,
            ``tensor_parallel_size`` and, where they exist, ``data_parallel_size``,
            ``use_sequence_parallel_moe`` and ``prefill_context_parallel_size``. None: the values
            below are all.
        num_layers: layers of the model; ``layer_id`` is below.
        moe_layers: those of them whose routers capture; the others are dense: their cells of a
            snapshot are 0, as in vLLM. None: with a config whose ``hf_text_config`` (or
            ``hf_config``) has ``first_k_dense_replace``, from there on every ``moe_layer_freq``-th;
            else all.
        num_experts: logical experts, at most 65536, whose ids uint16 holds.
        top_k: experts per token.
        dp_rank: this rank among the data-parallel ones; without a config, 0 if not given.
        dp_size: data-parallel ranks; None: as many as the metadata says.
        tp_rank: this rank among the tensor-parallel ones; None: that of ``comm``, else not known,
            and then nobody checks that a gather put this rank's rows in their place.
        tp_size: tensor-parallel ranks; without a config, those of ``comm``, else 1.
        sequence_parallel: True: rows are shards of a sequence, or what was gathered from them;
            False: they never are; None: False if the config says so, else judged by their number.
            True needs ``tp_size`` above 1.
        forward_context: gives the forward context of the running step: an object with
            ``dp_metadata`` (None, or with ``num_tokens_across_dp_cpu`` and ``local_sizes``) and
            ``batch_descriptor`` (None, or with ``num_tokens``), the same object throughout a step
            or micro-batch: another one without token offset begins a step. None: vLLM's
            ``get_forward_context``.
        token_offset: gives, for a forward context, the token at which the running micro-batch
            begins. None: the start of the slice in ``ubatch_slices`` of the context that vLLM's
            ``dbo_current_ubatch_id`` names; without slices 0, or an error where vLLM's
            ``dbo_enabled`` says that micro-batches run.
        tp_all_gather: gives, for ``[n, top_k]`` ids, those of all tensor-parallel ranks,
            ``[tp_size * n, top_k]``, by rank; collective. None: that of ``comm``, else that of
            vLLM's tensor-parallel group. vLLM itself is looked up when one of these is needed.
        comm: the tensor-parallel ranks. On a GPU the first gather among them makes memory: it
            waits, and no graph capture may hold it.
        library: "torch" or "numpy", what arrays and dtypes belong to. None: "torch" with a
            ``vllm_config``, else "numpy". On a GPU "torch".
        device: where ids and snapshots lie: "cpu", "cuda:1", a torch.device. None: with a
            ``vllm_config`` torch's current CUDA device, if this build can use it; else "cpu".

    Raises:
        InvalidArgument: values that lack or contradict each other.
        Unsupported: context parallelism of the prefill; no such device.

    Source: vLLM 0.33.0, ``vllm.model_executor.layers.fused_moe.routed_experts_capturer``.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        vllm_config: Any = None,
        *,
        num_layers: int | None = None,
        moe_layers: Sequence[int] | None = None,
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
        device: Any = None,
    ) -> None:
        known = {} if vllm_config is None else vllm_values.of_config(vllm_config)
        self._max_tokens = _at_least_one("max_num_batched_tokens", max_num_batched_tokens)
        self._num_layers = _required("num_layers", num_layers, known)
        num_experts = _required("num_experts", num_experts, known, _MAX_UINT16_EXPERTS)
        top_k = _required("top_k", top_k, known)
        if comm is not None:
            known = {"tp_rank": comm.rank, "tp_size": comm.num_ranks, **known}
        if moe_layers is None and vllm_config is not None:
            moe_layers = vllm_values.moe_layers(vllm_config, self._num_layers)
        self._moe_layers = _moe_layers(moe_layers, self._num_layers)
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
        if sequence_parallel is None and vllm_config is not None:
            sequence_parallel = vllm_values.sequence_parallel(vllm_config)
        self._library = library or ("numpy" if vllm_config is None else "torch")
        if self._library not in ("torch", "numpy"):
            raise InvalidArgument(f'library: expected "torch" or "numpy", got {library!r}')
        if device is None:
            device = "cpu" if vllm_config is None else default_device()
        self._is_on_gpu = str(device) != "cpu"
        if self._is_on_gpu and self._library != "torch":
            raise InvalidArgument(
                f'library: expected "torch" on device {device}, whose streams are torch\'s, got '
                f"{self._library!r}"
            )
        self._rules = RowRules(self.dp_rank, self.tp_size, sequence_parallel)
        self._forward_context = forward_context or vllm_values.forward_context
        self._token_offset = token_offset or vllm_values.token_offset
        self._tp_all_gather = tp_all_gather
        self._comm = comm
        self._capture = RoutingCapture(
            num_layers=len(self._moe_layers),
            num_experts=num_experts,
            top_k=top_k,
            max_tokens=max_num_batched_tokens,
            layers=self._moe_layers,
            max_in_flight=1,
            comm=comm,
            device=device,
        )
        self.shape_per_token = (self._num_layers, top_k)
        self.output_dtype_name = "uint8" if num_experts <= _MAX_UINT8_EXPERTS else "uint16"
        self._step_id = 0
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._contexts = StepContexts()
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
        with self._snapshot(self._max_tokens) as snapshot:
            return self._given(self._of_all_layers(snapshot.array, -1))

    def begin_step(self) -> None:
        """Forget what was recorded. Not in vLLM's class; for a step that had no snapshot.

        Such as a warm-up, a step that failed, or one on a rank that does not return routing.
        Without it the next step begins with its forward context, if that is another object;
        else only with the first cell that is recorded again, and until then what is left of the
        old step counts as recorded.
        """
        self._step_id += 1
        self._spans.clear()
        self._contexts.forget()
        # What kernels have found wrong so far is of steps that are over.
        with contextlib.suppress(Error):
            self._capture.check()
        self._capture.begin_step(self._step_id, stream=self._stream())

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Record the ids of one layer, for those rows that are this rank's tokens.

        Args:
            layer_id: the layer, 0 to ``num_layers - 1``.
            topk_ids: ``[rows, top_k]`` integers on ``device``, anything with DLPack; used during
                the call, on a GPU until the stream has passed it. The number of rows says what they
                are: the tokens of all data-parallel ranks, of this one, the gathered shards of all
                ranks, or a shard, which is gathered from the tensor-parallel ranks; all rows where
                the context says nothing.

        Raises:
            IndexError: no such layer (a ``fanfold.InvalidArgument`` too); checked first.
            InvalidArgument: a layer that is not in ``moe_layers``; a number of rows that fits no
                rule, or several that keep different rows: names them and the counts; tokens past
                ``max_num_batched_tokens``; another shape or type; an id at or past
                ``num_experts``. Of these rows nothing is recorded.
            InvalidState: there is no vLLM, and the callable that is needed was not given; or vLLM
                runs micro-batches of which the context says nothing.
        """
        if not 0 <= layer_id < self._num_layers:
            raise LayerOutOfRange(f"layer_id: expected 0 to {self._num_layers - 1}, got {layer_id}")
        if layer_id not in self._moe_layers:
            raise InvalidArgument(
                f"layer_id: expected a layer that moe_layers= has, {self._moe_layers}, got "
                f"{layer_id}"
            )
        context = self._forward_context()
        offset = int(self._token_offset(context))
        if offset < 0:
            raise InvalidArgument(f"token_offset: expected 0 or more, got {offset}")
        if offset == 0 and self._contexts.is_other(context):
            self.begin_step()
        if offset == 0:
            self._contexts.keep(context)
        step = StepTokens.of_context(context)
        if step.has_dp_metadata and self._dp_size not in (None, len(step.counts)):
            raise InvalidArgument(
                f"num_tokens_across_dp_cpu: expected {self._dp_size} entries (dp_size), got "
                f"{len(step.counts)}: {list(step.counts)}"
            )
        num_rows = _num_rows(topk_ids)
        kept = self._rules.keep(num_rows, step)
        rows, layout = self._rows_and_layout(topk_ids, num_rows, kept, offset)
        first, last = offset, offset + kept.count
        spans = self._spans.get(layer_id, [])
        if kept.count and any(first < end and begin < last for begin, end in spans):
            self.begin_step()
            if offset == 0:
                self._contexts.keep(context)
        self._capture.record(layer_id, rows, layout, stream=self._stream())
        if kept.count:
            self._spans.setdefault(layer_id, []).append((first, last))

    def snapshot_routing_data(self, num_tokens: int) -> Any:
        """Give the routing of the first tokens of the step, and end the step.

        Args:
            num_tokens: 0 to ``max_num_batched_tokens``; 0 ends the step too.

        Returns:
            ``[num_tokens, num_layers, top_k]`` of ``output_dtype``, in memory of its own: uint8 up
            to 256 experts, else uint16. 0 in layers that are not in ``moe_layers``.

        Raises:
            InvalidArgument: more tokens than there can be; the step goes on.
            InvalidState: a layer of ``moe_layers`` lacks a requested token in this step: names the
                layers. The step has ended.
            InvalidArgument: a requested token has -1 for an id, which the dtype cannot hold; on a
                GPU also: the step recorded an id at or past ``num_experts``. The step has ended.
        """
        if not 0 <= num_tokens <= self._max_tokens:
            raise InvalidArgument(
                f"num_tokens: expected 0 to {self._max_tokens} (max_num_batched_tokens), got "
                f"{num_tokens}"
            )
        try:
            with self._snapshot(num_tokens) as snapshot:
                missing = snapshot.missing_layers
                missing_rows = dict(zip(self._moe_layers, snapshot.missing_rows, strict=True))
                ids = self._of_all_layers(snapshot.array, 0)
        finally:
            self.begin_step()
        if missing:
            lacking = ", ".join(f"{layer} ({missing_rows[layer]})" for layer in missing)
            raise InvalidState(
                f"snapshot_routing_data: expected {num_tokens} tokens to be recorded by every "
                f"layer in this step, got layers that lack some (how many): {lacking}; "
                "moe_layers= in the constructor leaves out layers without a router"
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

    def _snapshot(self, num_tokens: int) -> RoutingSnapshot:
        try:
            return self._capture.snapshot(num_tokens, stream=self._stream())
        except Error:
            # On a GPU it may be of an earlier step, whose kernels were late. An error of this step
            # is told again by what is read of its snapshot.
            return self._capture.snapshot(num_tokens, stream=self._stream())

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
        rows = (self._tp_all_gather or vllm_values.tp_all_gather)(topk_ids)
        expected = num_rows * self.tp_size
        if _num_rows(rows) != expected:
            raise InvalidArgument(
                f"tp_all_gather: expected {expected} rows (tp_size {self.tp_size} shards of "
                f"{num_rows}), got {_num_rows(rows)}"
            )
        if self._tp_rank is not None and not self._is_on_gpu:  # there it would wait
            mine = _as_numpy(rows)[self._tp_rank * num_rows :][:num_rows]
            if not numpy.array_equal(mine, _as_numpy(topk_ids)):
                raise InvalidArgument(
                    f"tp_all_gather: expected the rows of tp_rank {self._tp_rank} in shard "
                    f"{self._tp_rank}, got other rows there"
                )
        blocks = [0, kept.count, expected - kept.count]
        return rows, CaptureLayout.concatenated(blocks, 1, token_offset=offset)

    def _of_all_layers(self, recorded: Any, elsewhere: int) -> Any:
        """A copy of ids of ``moe_layers`` with a place for every layer."""
        ids = numpy.full((len(recorded), *self.shape_per_token), elsewhere, numpy.int32)
        ids[:, self._moe_layers] = recorded
        return ids

    def _given(self, array: Any) -> Any:
        if self._library != "torch":
            return array
        tensor = _torch().from_numpy(array)
        return tensor.to(self._capture.device) if self._is_on_gpu else tensor

    def _stream(self) -> int | None:
        """torch's current stream of the device; None on the CPU."""
        if not self._is_on_gpu:
            return None
        return int(_torch().cuda.current_stream(self._capture.device).cuda_stream)


def _required(name: str, given: int | None, known: dict[str, int], most: int | None = None) -> int:
    value = known.get(name) if given is None else given
    if value is None:
        raise InvalidArgument(f"{name}: expected a value, or vllm_config, got neither")
    if most is not None and value > most:
        raise InvalidArgument(f"{name}: expected at most {most}, got {value}")
    return _at_least_one(name, value)


def _moe_layers(given: Sequence[int] | None, num_layers: int) -> list[int]:
    layers = sorted(range(num_layers) if given is None else given)
    if not layers or len(set(layers)) < len(layers):
        raise InvalidArgument(f"moe_layers: expected one or more, each once, got {layers}")
    for layer in layers:
        _in_range("moe_layers", layer, num_layers)
    return layers


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
