# SPDX-License-Identifier: Apache-2.0
"""Exchanges inside torch.compile: the ops, what the compiler may not do, and eager equality."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import fanfold
from fanfold.testing import spawn_processes, spawn_threads
from fanfold.torch_ops import TorchExchange

HIDDEN, TOP_K, EXPERTS = 16, 2, 4
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make(comm: fanfold.Communicator, **config: Any) -> fanfold.AllToAll:
    defaults: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "max_tokens_per_rank": 8,
        "hidden": HIDDEN,
        "dtype": torch.float32,
        "timeout_s": 60.0,
    }
    return fanfold.AllToAll(comm, **{**defaults, **config})


def exchange_of(a2a: fanfold.AllToAll, **how: Any) -> TorchExchange:
    return TorchExchange(a2a, [torch.empty(0, HIDDEN)], **how)


def inputs(seed: int, num_tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((num_tokens, HIDDEN), generator=generator)
    ids = torch.randint(0, EXPERTS, (num_tokens, TOP_K), generator=generator)
    return x, ids, torch.rand((num_tokens, TOP_K), generator=generator)


def two_layers(exchange: TorchExchange) -> Layer:
    """Two expert layers over one exchange, and a third whose result nobody reads."""

    def layers(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        recv = exchange.dispatch(ids, [x], weights)
        x = torch.relu(exchange.combine(recv.payloads[0] * 2 + 1, recv)) + x
        recv = exchange.dispatch(ids, [x], weights)
        x = exchange.combine(recv.payloads[0] * 3, recv)
        recv = exchange.dispatch(ids, [x], weights)
        exchange.combine(recv.payloads[0] - 1, recv)
        return x

    return layers


def by_hand(a2a: fanfold.AllToAll) -> Layer:
    """The same without the ops."""

    def one(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert: Any) -> torch.Tensor:
        recv = a2a.dispatch(ids, [x], topk_weights=weights)
        out: torch.Tensor = recv.combine(expert(recv.payloads[0]))
        return out

    def layers(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = torch.relu(one(x, ids, weights, lambda rows: rows * 2 + 1)) + x
        return one(x, ids, weights, lambda rows: rows * 3)

    return layers


@pytest.fixture
def comm() -> fanfold.Communicator:
    return fanfold.Communicator.threads(1)[0]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def rounds_run(exchange: TorchExchange) -> float:
    return float(exchange._state) / 2


def test_the_ops_in_eager_mode_do_what_the_exchange_does(comm: fanfold.Communicator) -> None:
    exchange, plain = exchange_of(make(comm)), make(comm)
    for seed in range(5):
        batch = inputs(seed, num_tokens=seed)
        assert torch.equal(two_layers(exchange)(*batch), by_hand(plain)(*batch))


@pytest.mark.parametrize("layout", ["rank_major", "flat_by_expert"])
def test_a_compiled_layer_equals_eager_and_drops_no_call(
    comm: fanfold.Communicator, layout: str
) -> None:
    more = {"max_recv_rows": 32} if layout.startswith("flat") else {}
    config = {"layout": layout, "strategy": "one_sided", **more}
    exchange, plain = exchange_of(make(comm, **config)), make(comm, **config)
    compiled = torch.compile(two_layers(exchange), fullgraph=True, dynamic=True)
    for seed, num_tokens in enumerate((5, 5, 3, 7, 8)):
        batch = inputs(seed, num_tokens)
        before = rounds_run(exchange)
        assert torch.equal(compiled(*batch), by_hand(plain)(*batch))
        assert rounds_run(exchange) - before == 3


def arguments_written(code: str) -> set[str]:
    """Return the arguments of the graph that a kernel of the generated code writes to."""
    found = re.findall(r"(\w+) = async_compile\.cpp_pybinding\(\[([^\]]*)\]", code)
    types = {name: listed.split(", ") for name, listed in found}
    written = set()
    for name, listed in re.findall(r"^ +(cpp_fused\w+)\(([^)]*)\)$", code, re.MULTILINE):
        for kind, argument in zip(types[name], listed.split(", "), strict=True):
            if "const" not in kind and argument.startswith("arg"):
                written.add(argument)
    return written


def test_compiled_code_passes_the_workspace_and_writes_none_of_it(
    comm: fanfold.Communicator,
) -> None:
    """Between its combine and the next dispatch the memory belongs to the peers."""
    exchange = exchange_of(make(comm, debug_poison=True))
    compiled = torch.compile(two_layers(exchange), fullgraph=True)
    _, (code,) = run_and_get_code(compiled, *inputs(1))
    calls = re.findall(r"torch\.ops\.fanfold\.(\w+)\.default\((.*)\)$", code, re.MULTILINE)
    assert [name for name, _ in calls] == ["dispatch", "combine"] * 3
    # The views and the state are arguments of the graph, the same in every call, ...
    tails = {text[text.rindex("[") :] for name, text in calls if name == "dispatch"}
    assert len(tails) == 1
    views = set(re.findall(r"\w+", tails.pop()))
    assert len(views) == len(exchange._views) + 1
    assert all(view.startswith("arg") for view in views)
    # ... which no kernel and no copy writes.
    assert not views & arguments_written(code)
    assert "copy_" not in code[code.index("def call") :]
    # What ended stays as combine left it.
    compiled(*inputs(2))
    assert bool((exchange._views[0].view(torch.uint8) == 0xCD).all())


def ranks_compile(comm: fanfold.Communicator, layout: str) -> list[bool]:
    """Run on every rank process: a compiled layer against one by hand, out of step."""
    torch.set_num_threads(1)
    plain = make(comm, layout=layout)
    exchange = exchange_of(make(comm, layout=layout, test_knobs={"delay_seed": 1 + comm.rank}))
    compiled = torch.compile(two_layers(exchange), fullgraph=True, dynamic=True)
    results = []
    delays = random.Random(comm.rank)
    for seed in range(30):
        batch = inputs(100 * seed + comm.rank, num_tokens=2 + (seed + comm.rank) % 5)
        results.append((batch, compiled(*batch)))
        time.sleep(delays.random() * 0.002)
    return [torch.equal(got, by_hand(plain)(*batch)) for batch, got in results]


@pytest.mark.multiproc
def test_two_ranks_run_compiled_layers_out_of_step() -> None:
    for equal in spawn_processes(2, ranks_compile, "expert_major", timeout_s=240.0):
        assert all(equal)


def test_a_backend_that_copies_is_refused_before_anything_is_sent(
    comm: fanfold.Communicator,
) -> None:
    exchange, plain = exchange_of(make(comm)), make(comm)
    with pytest.raises(fanfold.InvalidState, match=r"got a copy of it .* nothing was sent"):
        torch.compile(two_layers(exchange), fullgraph=True, backend="aot_eager")(*inputs(1))
    batch = inputs(2)
    assert torch.equal(two_layers(exchange)(*batch), by_hand(plain)(*batch))


def test_rows_read_late_are_those_of_the_later_dispatch_as_in_eager_mode(
    comm: fanfold.Communicator,
) -> None:
    exchange = exchange_of(make(comm))

    def late(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        first = exchange.dispatch(ids, [x], weights)
        rows = first.payloads[0]
        out = exchange.combine(rows * 2, first)
        again = exchange.dispatch(ids, [out], weights)
        return exchange.combine(again.payloads[0] + rows, again)

    batch = inputs(1)
    assert torch.equal(torch.compile(late, fullgraph=True)(*batch), late(*batch))


def test_packed_rows_come_with_their_scales(comm: fanfold.Communicator) -> None:
    config = {"layout": "expert_major", "strategy": "low_latency", "dispatch_wire": "fp8_e4m3"}
    exchange = exchange_of(make(comm, **config))
    x, ids, weights = inputs(1)
    recv = exchange.dispatch(ids, [x], weights)
    assert recv.payloads[0].dtype == torch.float8_e4m3fn
    assert recv.scales is not None
    assert recv.scales.shape == (*recv.payloads[0].shape[:-1], 1)
    exchange.combine(recv.payloads[0].to(torch.float32) * recv.scales, recv)


def test_two_exchanges_serve_one_graph(comm: fanfold.Communicator) -> None:
    first, second = exchange_of(make(comm)), exchange_of(make(comm))

    def both(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        a, b = first.dispatch(ids, [x], weights), second.dispatch(ids, [x * 2], weights)
        return first.combine(a.payloads[0] * 3, a) + second.combine(b.payloads[0] * 5, b)

    batch = inputs(3)
    assert torch.equal(torch.compile(both, fullgraph=True)(*batch), both(*batch))


class TestErrors:
    def test_several_rounds_in_flight_are_refused(self, comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.Unsupported, match=r"max_in_flight 1 .* got max_in_flight 2"):
            exchange_of(make(comm, max_in_flight=2))

    @pytest.mark.parametrize("layout", ["gathered", "flat", "flat_by_expert"])
    def test_a_layout_whose_shape_changes_is_refused(
        self, comm: fanfold.Communicator, layout: str
    ) -> None:
        with pytest.raises(fanfold.Unsupported, match=f"fixed shape .* got {layout}"):
            exchange_of(make(comm, layout=layout))

    def test_no_payload_is_refused(self, comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.InvalidArgument, match="payloads: expected 1 to 16 tensors"):
            TorchExchange(make(comm), [])

    def test_weights_must_come_as_announced(self, comm: fanfold.Communicator) -> None:
        exchange = exchange_of(make(comm), has_weights=False)
        x, ids, weights = inputs(1)
        with pytest.raises(fanfold.InvalidArgument, match="topk_weights: expected none"):
            exchange.dispatch(ids, [x], weights)
        recv = exchange.dispatch(ids, [x])
        assert recv.topk_weights is None
        assert exchange.combine(recv.payloads[0] * 1, recv).shape == x.shape

    @pytest.mark.parametrize("width", [HIDDEN - 1, HIDDEN // 2])
    def test_other_payloads_are_refused_before_anything_is_sent(
        self, comm: fanfold.Communicator, width: int
    ) -> None:
        exchange = exchange_of(make(comm))
        x, ids, weights = inputs(1)
        with pytest.raises(fanfold.InvalidArgument, match="as at construction"):
            exchange.dispatch(ids, [x[:, :width]], weights)
        with pytest.raises(fanfold.InvalidArgument, match="as at construction"):
            exchange.dispatch(ids, [x.to(torch.float16)], weights)
        recv = exchange.dispatch(ids, [x], weights)
        assert exchange.combine(recv.payloads[0] * 1, recv).shape == x.shape

    def test_combine_needs_an_open_round(self, comm: fanfold.Communicator) -> None:
        exchange = exchange_of(make(comm))
        x, ids, weights = inputs(1)
        recv = exchange.dispatch(ids, [x], weights)
        exchange.combine(recv.payloads[0] * 1, recv)
        with pytest.raises(fanfold.InvalidState, match="no round is open"):
            exchange.combine(recv.payloads[0] * 1, recv)

    def test_results_that_do_not_fit_leave_the_round_open(self, comm: fanfold.Communicator) -> None:
        exchange = exchange_of(make(comm))
        x, ids, weights = inputs(1)
        recv = exchange.dispatch(ids, [x], weights)
        with pytest.raises(fanfold.InvalidArgument, match="y: expected"):
            exchange.combine(recv.payloads[0][0] * 1, recv)
        assert exchange.combine(recv.payloads[0] * 1, recv).shape == x.shape

    def test_an_exchange_that_is_gone_is_named(self, comm: fanfold.Communicator) -> None:
        exchange = exchange_of(make(comm))
        key = exchange.key
        x, ids, weights = inputs(1)
        views, state = exchange._views, exchange._state
        del exchange
        with pytest.raises(fanfold.InvalidState, match=f"named .{key}. is gone"):
            torch.ops.fanfold.dispatch(key, ids, [x], weights, views, state)


def test_making_one_is_collective_and_works_on_threads() -> None:
    def fn(rank_comm: fanfold.Communicator) -> torch.Tensor:
        exchange = exchange_of(make(rank_comm))
        return two_layers(exchange)(*inputs(7))

    first, second = spawn_threads(2, fn)
    assert torch.equal(first, second)  # equal inputs, so equal results
