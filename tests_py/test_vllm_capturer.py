# SPDX-License-Identifier: Apache-2.0
"""The drop-in for vLLM's RoutedExpertsCapturer, with stand-ins for vLLM's objects."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from support.vllm_capture import Step, config, context, rows

import fanfold
from fanfold.compat.vllm import RoutedExpertsCapturer

# The public methods of vLLM 0.33.0's class and what they take, in order.
EXPECTED_PARAMETERS = {
    "__init__": ["self", "max_num_batched_tokens", "vllm_config"],
    "capture": ["self", "layer_id", "topk_ids"],
    "snapshot_routing_data": ["self", "num_tokens"],
}
EXPECTED_ATTRIBUTES = [
    "shape_per_token",
    "output_dtype",
    "output_dtype_name",
    "device_buffer",
    "dp_rank",
    "tp_size",
]
REAL_FILE = "model_executor/layers/fused_moe/routed_experts_capturer.py"


# --- What it looks like -------------------------------------------------------------------------


def test_names_and_parameters_are_those_of_vllm() -> None:
    for name, expected in EXPECTED_PARAMETERS.items():
        parameters = inspect.signature(getattr(RoutedExpertsCapturer, name)).parameters
        assert list(parameters)[: len(expected)] == expected, name
        more = list(parameters.values())[len(expected) :]
        for parameter in more:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, (name, parameter)
            assert parameter.default is None, (name, parameter)
        for parameter in list(parameters.values())[: len(expected)]:
            assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, (name, parameter)
    capturer = RoutedExpertsCapturer(4, config())
    for name in EXPECTED_ATTRIBUTES:
        assert hasattr(capturer, name), name


def test_the_table_is_that_of_an_installed_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vllm is not installed: the table was not compared with its real file")
    path = Path(found.origin).parent / REAL_FILE
    module = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    real = classes["RoutedExpertsCapturer"]
    methods = {
        node.name: [argument.arg for argument in node.args.args]
        for node in real.body
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: methods.get(name) for name in EXPECTED_PARAMETERS} == EXPECTED_PARAMETERS
    written = {node.attr for node in ast.walk(real) if isinstance(node, ast.Attribute)}
    assert set(EXPECTED_ATTRIBUTES) <= written | set(methods)


def test_the_import_loads_neither_vllm_nor_torch() -> None:
    program = (
        "import sys, fanfold.compat.vllm; lazy = 'numpy' in sys.modules;"
        "fanfold.compat.vllm.RoutedExpertsCapturer;"
        "print(lazy, {'torch', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False set()\n"


def test_there_is_nothing_else_in_the_module() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Capturer'"):
        _ = fanfold.compat.vllm.Capturer  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_experts", "name"), [(256, "uint8"), (257, "uint16")])
def test_a_vllm_config_gives_torch_tensors(num_experts: int, name: str) -> None:
    now = context()
    capturer = RoutedExpertsCapturer(
        max_num_batched_tokens=8,
        vllm_config=config(num_experts, data_parallel_rank=1, tensor_parallel_size=4),
        forward_context=lambda: now,
    )
    assert (capturer.dp_rank, capturer.tp_size) == (1, 4)
    assert capturer.shape_per_token == (3, 2)
    assert capturer.output_dtype_name == name
    assert capturer.output_dtype is getattr(torch, name)
    assert capturer.device_buffer.shape == (8, 3, 2)
    assert capturer.device_buffer.dtype is torch.int32
    ids = torch.tensor([[0, num_experts - 1], [7, 1]])
    for layer in range(3):
        capturer.capture(layer_id=layer, topk_ids=ids)
    assert capturer.device_buffer[:2, 1].tolist() == ids.tolist()
    routing = capturer.snapshot_routing_data(2)
    assert routing.dtype is capturer.output_dtype
    assert routing.cpu().numpy().tolist() == [[row] * 3 for row in ids.tolist()]


@pytest.mark.parametrize(("num_experts", "name"), [(256, "uint8"), (257, "uint16")])
def test_values_give_numpy_arrays(num_experts: int, name: str) -> None:
    step = Step(num_experts=num_experts)
    assert step.capturer.output_dtype == numpy.dtype(name)
    step.capturer.capture(0, numpy.array([[num_experts - 1, 0]], numpy.int32))
    routing = step.capturer.snapshot_routing_data(1)
    assert routing.tolist() == [[[num_experts - 1, 0]]]
    assert routing.dtype == numpy.dtype(name)


def test_values_go_before_those_of_the_config() -> None:
    capturer = RoutedExpertsCapturer(4, config(), num_layers=1, dp_rank=2, library="numpy")
    assert (capturer.shape_per_token, capturer.dp_rank) == ((1, 2), 2)
    assert capturer.output_dtype == numpy.dtype("uint8")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_layers": None}, "num_layers: expected a value, or vllm_config, got neither"),
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
        ({"top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"num_experts": 65537}, "num_experts: expected at most 65536, got 65537"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank: expected 0 to 1, got 2"),
        ({"dp_rank": -1}, "dp_rank: expected 0 or more, got -1"),
        ({"tp_size": 0}, "tp_size: expected at least 1, got 0"),
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank: expected 0 to 1, got 2"),
        ({"sequence_parallel": True}, "sequence_parallel: expected tp_size above 1"),
        ({"library": "jax"}, 'library: expected "torch" or "numpy", got \'jax\''),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(fanfold.InvalidArgument, match=text):
        Step(**values)


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(fanfold.Unsupported, match="prefill_context_parallel_size: expected 1"):
        RoutedExpertsCapturer(4, config(prefill_context_parallel_size=2))


def test_without_vllm_the_callables_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # cannot be imported, installed or not
    capturer = RoutedExpertsCapturer(4, num_layers=1, num_experts=8, top_k=2, tp_size=2)
    with pytest.raises(fanfold.InvalidState, match=r"forward_context: expected vLLM's .* or"):
        capturer.capture(0, rows(1))
    for now, name in (
        (context(slices=[slice(0, 2), slice(2, 4)]), "token_offset"),
        (context([4]), "tp_all_gather"),
    ):
        capturer = RoutedExpertsCapturer(
            4, config(tensor_parallel_size=2), forward_context=lambda now=now: now
        )
        with pytest.raises(fanfold.InvalidState, match=f"{name}: expected vLLM's .* {name}="):
            capturer.capture(0, rows(2))


def test_vllms_functions_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    now = context([8], slices=[slice(0, 4), slice(4, 12)])
    group = SimpleNamespace(all_gather=lambda ids, dim: torch.cat([ids, ids + 4], dim=dim))
    for module, values in {
        "vllm": {},
        "vllm.forward_context": {"get_forward_context": lambda: now},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.ubatching": {"dbo_current_ubatch_id": lambda: 1},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: group},
    }.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**values))
    capturer = RoutedExpertsCapturer(16, config(32, tensor_parallel_size=2))
    capturer.capture(0, torch.from_numpy(rows(4)))
    assert capturer.device_buffer[:, 0, 0].tolist() == [-1] * 4 + list(range(8)) + [-1] * 4


@pytest.mark.parametrize("layer", [-1, 1, 100])
def test_a_layer_out_of_range_is_an_index_error_before_all_else(layer: int) -> None:
    def no_context() -> Any:
        raise AssertionError("the context was asked for")

    capturer = RoutedExpertsCapturer(
        4, num_layers=1, num_experts=8, top_k=2, forward_context=no_context
    )
    with pytest.raises(IndexError, match=f"layer_id: expected 0 to 0, got {layer}") as caught:
        capturer.capture(layer, "no tensor")
    assert isinstance(caught.value, fanfold.InvalidArgument)


# --- Steps --------------------------------------------------------------------------------------


def test_micro_batches_lie_side_by_side() -> None:
    step = Step(context())
    for first, count in ((0, 3), (3, 2)):
        step.offset = first
        step.capturer.capture(0, rows(count, 10 + first))
    assert step.capturer.snapshot_routing_data(5)[:, 0, 0].tolist() == [10, 11, 12, 13, 14]
    step.offset = 15
    with pytest.raises(fanfold.InvalidArgument, match=r"at most 1 tokens from token 15 on"):
        step.capturer.capture(0, rows(2))
    step.offset = -1
    with pytest.raises(fanfold.InvalidArgument, match="token_offset: expected 0 or more, got -1"):
        step.capturer.capture(0, rows(2))


def test_a_micro_batch_that_is_missing_is_missed() -> None:
    step = Step(context())
    step.offset = 3
    step.capturer.capture(0, rows(2))
    with pytest.raises(fanfold.InvalidState, match=r"expected 5 tokens .*lack some .*: 0 \(3\)"):
        step.capturer.snapshot_routing_data(5)


def test_layers_that_were_not_recorded_are_named() -> None:
    step = Step(context(), num_layers=4)
    for layer in (0, 2):
        step.capturer.capture(layer, rows(3))
    with pytest.raises(
        fanfold.InvalidState, match=r"by every layer in this step.*: 1 \(2\), 3 \(2\)"
    ):
        step.capturer.snapshot_routing_data(2)
    assert step.capturer.snapshot_routing_data(0).shape == (0, 4, 2)


def test_what_an_earlier_step_recorded_is_not_handed_out() -> None:
    step = Step(context(), num_layers=2)
    capturer = step.capturer
    for layer in (0, 1):
        capturer.capture(layer, rows(2))
    assert capturer.snapshot_routing_data(2).shape == (2, 2, 2)
    with pytest.raises(fanfold.InvalidState, match=r"0 \(2\), 1 \(2\)"):
        capturer.snapshot_routing_data(2)  # the binding is lost: nothing was captured

    capturer.capture(0, rows(2))
    with pytest.raises(fanfold.InvalidState, match=r": 1 \(2\)"):
        capturer.snapshot_routing_data(2)
    capturer.capture(1, rows(2))
    with pytest.raises(fanfold.InvalidState, match=r": 0 \(2\)"):
        capturer.snapshot_routing_data(2)  # layer 0 was of the step that was refused


def test_a_step_without_snapshot_ends_with_the_next() -> None:
    step = Step(context(), num_layers=2)
    capturer = step.capturer
    for layer in (0, 1):
        capturer.capture(layer, rows(4))
    capturer.capture(0, rows(2, 10))
    assert (step.recorded(0), step.recorded(1)) == ([10, 11], [])
    with pytest.raises(fanfold.InvalidState, match=r": 1 \(2\)"):
        capturer.snapshot_routing_data(2)
    capturer.capture(0, rows(2))
    capturer.begin_step()
    assert step.recorded() == []


def test_rows_of_no_token_end_no_step() -> None:
    step = Step(context(), num_layers=1)
    step.capturer.capture(0, rows(4))
    step.offset = 2
    step.capturer.capture(0, rows(0))
    assert step.capturer.snapshot_routing_data(4).shape == (4, 1, 2)


def test_more_tokens_than_there_can_be_end_no_step() -> None:
    step = Step(context())
    step.capturer.capture(0, rows(2))
    for num_tokens in (-1, 17):
        with pytest.raises(fanfold.InvalidArgument, match=f"0 to 16 .*, got {num_tokens}"):
            step.capturer.snapshot_routing_data(num_tokens)
    assert step.capturer.snapshot_routing_data(2).shape == (2, 1, 2)


# --- Ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_experts", [255, 256, 257, 65536])
def test_an_id_past_the_experts_is_refused_by_name(num_experts: int) -> None:
    step = Step(num_experts=num_experts)
    with pytest.raises(fanfold.InvalidArgument, match=f"got {num_experts} at row 1, column 0"):
        step.capturer.capture(0, numpy.array([[0, 1], [num_experts, 1]]))
    assert step.recorded() == []
    step.capturer.capture(0, numpy.array([[0, num_experts - 1]]))
    assert step.capturer.snapshot_routing_data(1).tolist() == [[[0, num_experts - 1]]]


@pytest.mark.parametrize("num_experts", [8, 256, 257])
def test_minus_one_never_becomes_a_valid_id(num_experts: int) -> None:
    step = Step(num_experts=num_experts)
    ids = numpy.array([[0, 1], [2, -1], [-1, -1]])
    step.capturer.capture(0, ids)
    name = step.capturer.output_dtype_name
    text = f"that {name} holds, got -1 .no expert. at token 1, layer 0, column 1, and 3 in all"
    with pytest.raises(fanfold.InvalidArgument, match=text):
        step.capturer.snapshot_routing_data(3)
    step.capturer.capture(0, ids)
    routing = step.capturer.snapshot_routing_data(1)  # padding behind the tokens does not matter
    assert routing.tolist() == [[[0, 1]]]


def test_ids_of_other_ranks_are_not_looked_at() -> None:
    ids = numpy.array([[999, -1], [1, 2], [999, 999]])
    step = Step(context([1, 1, 1]), dp_rank=1)
    step.capturer.capture(0, ids)
    assert step.capturer.snapshot_routing_data(1).tolist() == [[[1, 2]]]


def test_shapes_that_do_not_fit_are_refused() -> None:
    step = Step()
    with pytest.raises(fanfold.InvalidArgument, match=r"expected \[rows, top_k\], got shape \[4\]"):
        step.capturer.capture(0, numpy.arange(4))
    with pytest.raises(fanfold.InvalidArgument, match=r"\[rows, 2\], got int64 \[4, 3\]"):
        step.capturer.capture(0, numpy.zeros((4, 3), numpy.int64))


class OnlyDLPack:
    """A tensor that can nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **more: Any) -> Any:
        return self._array.__dlpack__(**more)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("kind", [numpy.asarray, torch.from_numpy, OnlyDLPack])
@pytest.mark.parametrize("dtype", [numpy.uint8, numpy.int16, numpy.int32, numpy.int64])
def test_anything_with_dlpack_is_taken(kind: Any, dtype: Any) -> None:
    step = Step(context([3]), tp_size=2, tp_rank=0)
    whole = rows(4).astype(dtype)
    step.capturer._tp_all_gather = lambda _: kind(whole)
    step.capturer.capture(0, kind(whole[:2]))
    assert step.recorded() == [0, 1, 2]


def test_the_buffer_is_a_copy() -> None:
    step = Step()
    step.capturer.capture(0, rows(2))
    step.capturer.device_buffer[:] = 7
    assert step.recorded() == [0, 1]
    routing = step.capturer.snapshot_routing_data(2)
    step.capturer.capture(0, rows(2, 50))
    assert routing[:, 0, 0].tolist() == [0, 1], "a snapshot has memory of its own"
