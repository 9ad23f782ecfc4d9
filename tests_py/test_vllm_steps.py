# SPDX-License-Identifier: Apache-2.0
"""Where a step of the drop-in for vLLM's capturer begins and ends, and layers without a router."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from support.vllm_capture import Step, config, context, rows

import fanfold
from fanfold.compat.vllm import RoutedExpertsCapturer


class WeakContext(SimpleNamespace):
    """A context that takes weak references, as vLLM's does; SimpleNamespace takes none."""

    __slots__ = ("__weakref__",)


def weak_context() -> Any:
    return WeakContext(**vars(context()))


CONTEXTS = pytest.mark.parametrize("make", [context, weak_context], ids=["strong", "weak"])


# --- Forward contexts ---------------------------------------------------------------------------


@CONTEXTS
def test_a_binding_lost_after_a_warm_up_is_missed(make: Any) -> None:
    step = Step(make(), num_layers=2)
    for layer in (0, 1):
        step.capturer.capture(layer, rows(8, 50))  # warm-up: nobody asks for its routing
    step.context = make()
    step.capturer.capture(1, rows(2))
    with pytest.raises(fanfold.InvalidState, match=r": 0 \(2\)"):
        step.capturer.snapshot_routing_data(2)


@CONTEXTS
def test_an_aborted_step_is_not_completed_by_another(make: Any) -> None:
    step = Step(make(), num_layers=2)
    step.capturer.capture(0, rows(2, 50))  # then the step fails
    step.context = make()
    step.capturer.capture(1, rows(2))
    assert (step.recorded(0), step.recorded(1)) == ([], [0, 1])
    with pytest.raises(fanfold.InvalidState, match=r": 0 \(2\)"):
        step.capturer.snapshot_routing_data(2)


def test_after_a_warm_up_and_begin_step_a_binding_lost_everywhere_is_missed() -> None:
    step = Step(num_layers=2)
    for layer in (0, 1):
        step.capturer.capture(layer, rows(8, 50))
    step.capturer.begin_step()
    with pytest.raises(fanfold.InvalidState, match=r": 0 \(2\), 1 \(2\)"):
        step.capturer.snapshot_routing_data(2)


def test_rows_that_are_refused_begin_the_step_of_their_context() -> None:
    step = Step(context(num_tokens=2), num_layers=2)
    step.capturer.capture(0, rows(2, 50))
    step.context = context(num_tokens=2)
    with pytest.raises(fanfold.InvalidArgument, match="got 3"):
        step.capturer.capture(1, rows(3))
    assert step.recorded(0) == []


@CONTEXTS
def test_a_context_goes_on_until_the_next(make: Any) -> None:
    step = Step(make(), num_layers=2)
    for first in (10, 20, 30):
        for layer in (0, 1):
            step.capturer.capture(layer, rows(2, first + layer))
        ids = step.capturer.snapshot_routing_data(2)
        assert ids[:, :, 0].tolist() == [[first, first + 1], [first + 1, first + 2]]
        if first == 20:
            step.context = make()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_micro_batches_have_contexts_of_their_own_in_one_step(order: tuple[int, ...]) -> None:
    step = Step(num_layers=2)
    for _ in range(2):
        contexts = [context(), context()]
        for layer in (0, 1):
            for part in order:
                step.context, step.offset = contexts[part], 2 * part
                step.capturer.capture(layer, rows(2, 10 + 2 * part))
        ids = step.capturer.snapshot_routing_data(4)
        assert ids[:, 0, 0].tolist() == ids[:, 1, 0].tolist() == [10, 11, 12, 13]


def test_micro_batches_of_an_aborted_step_are_forgotten() -> None:
    step = Step(num_layers=2)
    for layer in (0, 1):  # after layer 0 the step fails
        for part in (0, 1):
            step.context, step.offset = context(), 2 * part
            step.capturer.capture(layer, rows(2))
    with pytest.raises(fanfold.InvalidState, match=r": 0 \(4\)"):
        step.capturer.snapshot_routing_data(4)


@pytest.mark.parametrize("same", [None, context()], ids=["none", "reused"])
def test_without_contexts_begin_step_says_where_a_step_ends(same: Any) -> None:
    step = Step(num_layers=2)
    step.context = same
    step.capturer.capture(0, rows(2, 50))
    step.capturer.capture(1, rows(2))
    assert step.recorded(0) == [50, 51], "nothing says that this was another step"
    step.capturer.begin_step()
    step.capturer.capture(1, rows(2))
    assert step.recorded(0) == []


def test_a_context_is_not_kept_alive_and_its_successor_is_another() -> None:
    step = Step(weak_context(), num_layers=2)
    step.capturer.capture(0, rows(2))
    gone = weakref.ref(step.context)
    step.context = None
    gc.collect()
    assert gone() is None
    step.context = weak_context()  # perhaps at the same address
    step.capturer.capture(1, rows(2))
    assert step.recorded(0) == []


# --- Ends ---------------------------------------------------------------------------------------


def test_a_snapshot_of_no_token_ends_the_step() -> None:
    step = Step()
    step.capturer.capture(0, rows(2))
    assert step.capturer.snapshot_routing_data(0).shape == (0, 1, 2)
    assert step.recorded() == []


def test_a_snapshot_that_is_refused_ends_the_step() -> None:
    step = Step()
    step.capturer.capture(0, rows(2))
    with pytest.raises(fanfold.InvalidState, match="expected 3 tokens"):
        step.capturer.snapshot_routing_data(3)
    assert step.recorded() == []
    step.capturer.capture(0, numpy.array([[1, 2], [3, -1]]))
    with pytest.raises(fanfold.InvalidArgument, match="at token 1"):
        step.capturer.snapshot_routing_data(2)
    assert step.recorded() == []


# --- Micro-batches of vLLM ----------------------------------------------------------------------


def test_micro_batches_of_which_the_context_says_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled = [True]
    module = SimpleNamespace(dbo_enabled=lambda: enabled[0], dbo_current_ubatch_id=lambda: 1)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.ubatching", module)
    now = context()
    values: dict[str, Any] = {"num_layers": 1, "num_experts": 100, "top_k": 2}
    capturer = RoutedExpertsCapturer(16, forward_context=lambda: now, **values)
    with pytest.raises(fanfold.InvalidState, match=r"got none: give token_offset= in the"):
        capturer.capture(0, rows(2))
    assert (capturer.device_buffer == -1).all()
    enabled[0] = False
    capturer.capture(0, rows(2))
    assert capturer.snapshot_routing_data(2).shape == (2, 1, 2)
    enabled[0] = True
    given = RoutedExpertsCapturer(
        16, forward_context=lambda: now, token_offset=lambda _: 2, **values
    )
    given.capture(0, rows(2))
    assert given.device_buffer[:4, 0, 0].tolist() == [-1, -1, 0, 1]


# --- Layers without a router --------------------------------------------------------------------


def test_layers_without_a_router_are_zero() -> None:
    step = Step(num_layers=4, moe_layers=[3, 1])
    assert step.capturer.shape_per_token == (4, 2)
    for layer in (1, 3):
        step.capturer.capture(layer, rows(2, 10 * layer))
    assert step.capturer.device_buffer.shape == (16, 4, 2)
    assert step.recorded(1) == [10, 11] and step.recorded(0) == []
    ids = step.capturer.snapshot_routing_data(2)
    assert ids[:, :, 0].tolist() == [[0, 10, 0, 30], [0, 11, 0, 31]]
    assert (ids[:, [0, 2]] == 0).all() and ids.dtype == numpy.uint8
    step.capturer.capture(1, rows(2))
    with pytest.raises(fanfold.InvalidState, match=r"how many\): 3 \(2\); moe_layers= in the"):
        step.capturer.snapshot_routing_data(2)


def test_a_layer_that_has_no_router_cannot_capture() -> None:
    step = Step(num_layers=3, moe_layers=[1, 2])
    text = r"layer_id: expected a layer that moe_layers= has, \[1, 2\], got 0"
    with pytest.raises(fanfold.InvalidArgument, match=text):
        step.capturer.capture(0, rows(1))
    with pytest.raises(IndexError, match="expected 0 to 2, got 3"):
        step.capturer.capture(3, rows(1))


def test_minus_one_is_named_by_the_models_layer() -> None:
    step = Step(num_layers=3, moe_layers=[2])
    step.capturer.capture(2, numpy.array([[1, -1]]))
    with pytest.raises(fanfold.InvalidArgument, match="token 0, layer 2, column 1, and 1 in all"):
        step.capturer.snapshot_routing_data(1)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], r"one or more, each once, got \[\]"),
        ([1, 0, 1], r"one or more, each once, got \[0, 1, 1\]"),
        ([3], "expected 0 to 2, got 3"),
        ([-1], "expected 0 to 2, got -1"),
    ],
)
def test_layers_that_cannot_be_are_refused(layers: list[int], text: str) -> None:
    with pytest.raises(fanfold.InvalidArgument, match=f"moe_layers: .*{text}"):
        Step(num_layers=3, moe_layers=layers)


@pytest.mark.parametrize(
    ("hf", "given", "expected"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        ({}, None, [0, 1, 2, 3, 4]),
        ({"first_k_dense_replace": 0}, None, [0, 1, 2, 3, 4]),
        ({"first_k_dense_replace": 3}, None, [3, 4]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, None, [1, 2, 3, 4]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, None, [2, 4]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": [0, 1, 1, 1, 1]}, None, [0, 1, 2, 3, 4]),
        ({"first_k_dense_replace": 3}, [1, 2], [1, 2]),
    ],
)
@pytest.mark.parametrize("name", ["hf_text_config", "hf_config"])
def test_a_config_says_which_layers_have_routers(
    hf: dict[str, Any] | None, given: list[int] | None, expected: list[int], name: str
) -> None:
    values = config(num_layers=5, hf=hf)
    if hf is not None:
        setattr(values.model_config, name, values.model_config.__dict__.pop("hf_text_config"))
    step = Step(vllm_config=values, num_layers=None, num_experts=None, moe_layers=given)
    for layer in expected:
        step.capturer.capture(layer, numpy.array([[6, 7]]))
    found = step.capturer.snapshot_routing_data(1)[0, :, 0].tolist()
    assert found == [6 if layer in expected else 0 for layer in range(5)]
