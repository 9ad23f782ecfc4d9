# SPDX-License-Identifier: Apache-2.0
"""One test per rule on arguments: type and text of the error, and a group that works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
from support.rounds import DEFAULTS, STRATEGIES, ids, make, tokens, weights, works

import fanfold
from fanfold.testing import spawn_threads

F32 = numpy.float32
Rule = tuple[str, dict[str, Any], str]

# What is wrong with a configuration: name, arguments, text.
CONFIGURATIONS: list[Rule] = [
    ("no experts", {"num_experts": 0}, r"num_experts: expected a value in \[1, .*got 0"),
    ("negative experts", {"num_experts": -3}, "num_experts: .*got -3"),
    ("no top_k", {"top_k": 0}, r"top_k: expected a value in \[1, 1024\], got 0"),
    ("top_k too large", {"top_k": 1025}, "top_k: .*got 1025"),
    ("no tokens", {"max_tokens_per_rank": 0}, "max_tokens_per_rank: .*got 0"),
    ("no hidden", {"hidden": 0}, "hidden: .*got 0"),
    ("negative extra", {"extra_bytes_per_token": -1}, "extra_bytes_per_token: .*got -1"),
    ("no rows", {"dispatch_row_bytes": 0}, "dispatch_row_bytes: .*got 0"),
    ("no combine rows", {"combine_row_bytes": 0}, "combine_row_bytes: .*got 0"),
    ("no round", {"max_in_flight": 0}, r"max_in_flight: expected a value in \[1, 64\], got 0"),
    ("too many rounds", {"max_in_flight": 65}, "max_in_flight: .*got 65"),
    ("timeout", {"timeout_s": -1.0}, "timeout_s: expected seconds >= 0, got -1"),
    ("strategy", {"strategy": "fast"}, 'strategy: expected one of auto, broadcast.*got "fast"'),
    ("layout", {"layout": "flatt"}, 'layout: expected one of rank_major.*got "flatt"'),
    ("weighting", {"weighting": "never"}, 'weighting: expected one of applied.*got "never"'),
    ("check_ids", {"check_ids": "maybe"}, 'check_ids: expected one of .*got "maybe"'),
    ("placement", {"placement": "random"}, 'placement: expected .*linear.*"?random"?'),
    ("short placement", {"placement": [0, 1]}, "placement: expected a table of 4 ranks.*got 2"),
    ("placement rank", {"placement": [0, 1, 2, 0]}, "placement: .*2"),
    ("negative placement", {"placement": [0, 1, -1, 0]}, "placement: .*-1"),
    ("dtype", {"dtype": "float31"}, "float31"),
    ("dtype cannot be added", {"dtype": "uint8"}, "combine_dtype: expected float32, float16"),
    ("combine_dtype", {"combine_dtype": "int32"}, "combine_dtype: .*got int32"),
    ("layout and weighting", {"weighting": "carried"}, "rank_major expects applied, got carried"),
    ("guard", {"test_knobs": {"row_guard_bytes": 3}}, "row_guard_bytes: .*got 3"),
    ("isa", {"test_knobs": {"isa": "mmx"}}, "mmx"),
    ("first_epoch", {"test_knobs": {"first_epoch": 0}}, "first_epoch: .*got 0"),
]


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rules(table: list[Any]) -> Callable[[Any], Any]:
    return pytest.mark.parametrize(
        ("arguments", "text"), [pytest.param(*row[1:], id=row[0]) for row in table]
    )


@rules(CONFIGURATIONS)
def test_configuration(arguments: dict[str, Any], text: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.InvalidArgument, match=text) as caught:
            make(comm, **arguments)
        assert isinstance(caught.value, ValueError)
        works(make(comm), comm.rank)

    spawn_threads(2, fn)


def test_a_layout_that_the_strategy_lacks_is_unsupported() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        text = "one_sided gives rank_major, expert_major, flat, flat_by_expert; got gathered"
        with pytest.raises(fanfold.Unsupported, match=text):
            make(comm, layout="gathered")
        with pytest.raises(fanfold.Unsupported, match="expected a build with the GPU backend"):
            make(comm, device="cuda")
        works(make(comm), comm.rank)

    spawn_threads(2, fn)


def test_required_bytes_checks_like_creation() -> None:
    config = {name: DEFAULTS[name] for name in DEFAULTS if name != "timeout_s"}
    for _, arguments, text in CONFIGURATIONS:
        if set(arguments) & {"timeout_s", "test_knobs", "check_ids"}:
            continue
        with pytest.raises(fanfold.InvalidArgument, match=text):
            fanfold.AllToAll.required_bytes(num_ranks=2, **{**config, **arguments})


X = tokens(2)
GOOD: dict[str, Any] = {"topk_ids": ids([0, 3], [2, 1]), "payloads": [X]}
STRIDED = numpy.zeros((2, 16), F32)[:, ::2]

DISPATCHES: list[Rule] = [
    ("id too large", {"topk_ids": ids([0, 1], [2, 4])}, "topk_ids.*4.*row 1, column 1"),
    ("uint32 id", {"topk_ids": ids([0, 2**32 - 1], [2, 3], dtype="uint32")}, "4294967295"),
    ("ids missing", {"topk_ids": None}, "topk_ids: expected a tensor .*got none"),
    ("ids dtype", {"topk_ids": numpy.zeros((2, 2), F32)}, r"topk_ids: .*got float32 \[2, 2\]"),
    ("ids columns", {"topk_ids": numpy.zeros((2, 3), "i4")}, r"\[num_tokens, 2\], got .*\[2, 3\]"),
    ("ids dims", {"topk_ids": numpy.zeros(4, "i4")}, r"topk_ids: .*got int32 \[4\]"),
    ("ids strided", {"topk_ids": numpy.zeros((2, 4), "i4")[:, ::2]}, "topk_ids: .*contiguous"),
    ("ids no tensor", {"topk_ids": [[0, 1]]}, r"topk_ids: expected a DLPack tensor, got .*list"),
    ("no payload", {"payloads": []}, "payloads: expected 1 to 16 tensors, got 0"),
    ("many payloads", {"payloads": [X[:, :1].copy()] * 17}, "payloads: .*got 17"),
    ("payload no list", {"payloads": X}, "payloads: expected a list of tensors, got .*ndarray"),
    ("payload None", {"payloads": [X, None]}, r"payloads.*: expected .*tensor.*, got None"),
    ("payload rows", {"payloads": [tokens(3)]}, r"payloads\[0\]: expected \[2, \.\.\.\].*\[3, 8\]"),
    ("payload scalar", {"payloads": [numpy.float32(1)]}, r"payloads\[0\]: expected"),
    ("payload empty rows", {"payloads": [X[:, :0]]}, r"payloads\[0\]: .*at least one byte"),
    ("payload strided", {"payloads": [STRIDED]}, r"payloads\[0\]: .*contiguous"),
    ("payload bytes", {"payloads": [tokens(2, 25)]}, "at most 96 bytes per token.*got 100"),
    ("weights dtype", {"topk_weights": numpy.zeros((2, 2))}, r"expected float32 \[2, 2\]"),
    ("weights shape", {"topk_weights": weights([1, 2])}, r"topk_weights: .*got float32 \[1, 2\]"),
    ("m too large", {"round_max_tokens": 5}, r"round_max_tokens: .*\[0, 4\].*got 5"),
    ("m negative", {"round_max_tokens": -1}, "round_max_tokens: .*got -1"),
    ("m too small", {"round_max_tokens": 1}, r"at most 1 tokens \(round_max_tokens\), got 2"),
    ("num_tokens large", {"num_tokens": numpy.int32([3])}, r"num_tokens: .*\[0, 2\].*got 3"),
    ("num_tokens negative", {"num_tokens": numpy.int32([-1])}, "num_tokens: .*got -1"),
    ("num_tokens dtype", {"num_tokens": numpy.int64([1])}, "num_tokens: expected one int32"),
    ("num_tokens shape", {"num_tokens": numpy.int32([1, 1])}, "num_tokens: expected one int32"),
    ("known counts", {"num_tokens_per_rank": [2]}, "expected 2 entries, got 1"),
    ("own count", {"num_tokens_per_rank": [1, 1]}, "num_tokens_per_rank: expected 2 tokens.*got 1"),
    ("invalid id", {"invalid_expert_id": 2**31}, "invalid_expert_id: .*int32 holds"),
    ("timeout", {"timeout_s": -2.0}, "timeout_s: expected seconds >= 0"),
    ("stream", {"stream": 7}, "stream: expected None for CPU tensors"),
]  # fmt: skip


@rules(DISPATCHES)
def test_dispatch(strategy: str, arguments: dict[str, Any], text: str) -> None:
    """Nothing is sent on any rank, and a corrected call continues the round."""

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        with pytest.raises(fanfold.InvalidArgument, match=text):
            a2a.dispatch(**{**GOOD, **arguments})
        assert not a2a.is_failed
        a2a.dispatch(**GOOD).release()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_weighting_carried_needs_weights(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout="expert_major", weighting="carried")
        with pytest.raises(fanfold.InvalidArgument, match=r"topk_weights: .*carried.*got none"):
            a2a.dispatch(**GOOD)
        a2a.dispatch(**GOOD, topk_weights=weights([1, 2], [3, 4])).release()

    spawn_threads(2, fn)


def test_received_rows_cannot_be_sent_in_place(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, max_in_flight=2)
        recv = a2a.dispatch(**GOOD)
        inside = recv.payloads[0].reshape(-1, 8)[:2]
        with pytest.raises(
            fanfold.InvalidArgument, match=r"payloads\[0\]: .*outside this AllToAll"
        ):
            a2a.dispatch(GOOD["topk_ids"], [inside])
        recv.release()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_routing_must_fit(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        other = make(comm, strategy=strategy, hidden=4)
        recv = a2a.dispatch(**GOOD)
        routing = recv.routing
        recv.release()
        cases = [
            (other, {"payloads": [tokens(2, 4)]}, "equally configured"),
            (a2a, {"payloads": [tokens(3)]}, r"payloads\[0\]: expected \[2"),
            (a2a, {"payloads": [X], "round_max_tokens": 3}, r"round_max_tokens: expected 4"),
            (a2a, {"payloads": [X], "topk_weights": weights([1, 2], [3, 4])}, "routing: .*beside"),
        ]
        for target, arguments, text in cases:
            with pytest.raises(fanfold.InvalidArgument, match=text):
                target.dispatch(None, routing=routing, **arguments)
        with pytest.raises(fanfold.InvalidArgument, match=r"routing: .*beside"):
            a2a.dispatch(GOOD["topk_ids"], [X], routing=routing)
        a2a.dispatch(None, [X], routing=routing).release()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


Y = numpy.zeros((2, 4, 8), F32)
OUT = numpy.zeros((2, 8), F32)
COMBINES: list[Rule] = [
    ("y shape", {"y": numpy.zeros((2, 3, 8), F32)}, r"y: .*\[2, 4, hidden\], got .*\[2, 3, 8\]"),
    ("y dims", {"y": numpy.zeros((8, 8), F32)}, r"y: .*\[2, 4, hidden\], got float32 \[8, 8\]"),
    ("y dtype", {"y": numpy.zeros((2, 4, 8))}, "y: expected float32, float16 or bfloat16.*float64"),
    ("y strided", {"y": numpy.zeros((2, 4, 16), F32)[..., ::2]}, "y: expected a contiguous"),
    ("y too wide", {"y": numpy.zeros((2, 4, 9), F32)}, "hidden of the combine: .*32 bytes.*9 elem"),
    ("y no tensor", {"y": "rows"}, r"y: expected a DLPack tensor, got .*str"),
    ("y none", {"y": None}, "y: expected"),
    ("out shape", {"out": numpy.zeros((3, 8), F32)}, r"out: .*\[2, 8\], got float32 \[3, 8\]"),
    ("out hidden", {"out": numpy.zeros((2, 7), F32)}, r"out: .*\[2, 8\], got float32 \[2, 7\]"),
    ("out dtype", {"out": numpy.zeros((2, 8), "i4")}, r"out: expected float32.*got int32"),
    ("out strided", {"out": numpy.zeros((2, 16), F32)[:, ::2]}, "out: .*contiguous"),
    ("weights", {"topk_weights": weights([1, 2], [3, 4])}, "topk_weights: expected none.*origin"),
    ("timeout", {"timeout_s": -1.0}, "timeout_s"),
    ("stream", {"stream": 7}, "stream: expected None for CPU tensors"),
]


@rules(COMBINES)
def test_combine(strategy: str, arguments: dict[str, Any], text: str) -> None:
    """The round stays open, and a corrected call ends it."""

    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(**GOOD)
        with pytest.raises(fanfold.InvalidArgument, match=text):
            recv.combine(**{"y": Y, "out": OUT.copy(), **arguments})
        assert recv.is_open
        assert not a2a.is_failed
        recv.combine(Y)
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_y_elsewhere_inside_the_memory_names_both_rounds() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, max_in_flight=2)
        first, second = a2a.dispatch(**GOOD), a2a.dispatch(**GOOD)
        text = "combine buffer of round 1.*got the combine buffer of round 0"
        with pytest.raises(fanfold.InvalidArgument, match=text):
            second.combine(first.combine_buffer())
        with pytest.raises(
            fanfold.InvalidArgument, match=r"combine buffer of round 1.*other memory"
        ):
            second.combine(second.payloads[0])
        with pytest.raises(fanfold.InvalidArgument, match=r"out: .*outside this AllToAll"):
            second.combine(Y, out=first.payloads[0][0, :2])
        second.combine(second.combine_buffer())
        first.combine(first.combine_buffer())
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_origin_weights_must_come_from_somewhere(strategy: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout="expert_major", weighting="origin")
        recv = a2a.dispatch(**GOOD)
        y = numpy.zeros((2, 8, 8), F32)
        with pytest.raises(fanfold.InvalidArgument, match=r"topk_weights: .*origin.*got none"):
            recv.combine(y)
        with pytest.raises(
            fanfold.InvalidArgument, match=r"topk_weights: expected float32 \[2, 2\]"
        ):
            recv.combine(y, topk_weights=weights([1, 2]))
        recv.combine(y, topk_weights=weights([1, 2], [3, 4]))

    spawn_threads(2, fn)


BUFFERS: list[Rule] = [
    ("too wide", {"hidden": 9}, "hidden of the combine: .*9 elements"),
    ("no hidden", {"hidden": 0}, "hidden of the combine: .*0 elements"),
    ("dtype", {"dtype": "int32"}, "dtype of the combine.*got int32"),
    ("other dtype", {"dtype": "float16"}, "expected float32 .combine_dtype.*got float16"),
    ("unknown dtype", {"dtype": "half"}, "half"),
]


@rules(BUFFERS)
def test_combine_buffer(strategy: str, arguments: dict[str, Any], text: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(**GOOD)
        with pytest.raises(fanfold.InvalidArgument, match=text):
            recv.combine_buffer(**arguments)
        recv.combine(recv.combine_buffer())
        works(a2a, comm.rank)

    spawn_threads(2, fn)


IDS = numpy.zeros((2, 4, 2), "i4")
COUNTS = numpy.int32([1, 2])
SANITIZES: list[Rule] = [
    ("dtype", {"ids": IDS.astype(F32)}, "ids: expected int16.*got float32"),
    ("dims", {"ids": IDS.reshape(-1)}, "ids: expected"),
    ("counts dtype", {"counts": numpy.int64([1, 2])}, r"counts: expected int32 \[2\]"),
    ("counts length", {"counts": numpy.int32([1])}, r"counts: expected int32 \[2\]"),
    ("counts range", {"counts": numpy.int32([1, 5])}, r"counts: .*in \[0, 4\].*5 at 1"),
    ("negative count", {"counts": numpy.int32([-1, 0])}, "counts: .*-1 at 0"),
    ("policy", {"policy": "all"}, 'policy: expected one of padding.*got "all"'),
    ("out shape", {"out": numpy.zeros((2, 3, 2), "i4")}, "out: expected"),
    ("out dtype", {"out": IDS.astype("i8")}, "out: expected"),
    ("invalid id", {"ids": IDS.astype("i2"), "invalid_expert_id": 40000}, "expert_id: .*int16"),
]  # fmt: skip


@rules(SANITIZES)
def test_sanitize(arguments: dict[str, Any], text: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm)
        with pytest.raises(fanfold.InvalidArgument, match=text):
            a2a.sanitize(**{"ids": IDS, "counts": COUNTS, **arguments})
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_active_mask() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm)
        with pytest.raises(fanfold.InvalidArgument, match="expected 2 entries, got 3"):
            a2a.set_active_mask([True, True, True])
        with pytest.raises(fanfold.InvalidArgument, match=rf"expected this rank \({comm.rank}\)"):
            a2a.set_active_mask([comm.rank != 0, comm.rank != 1])
        works(a2a, comm.rank)
        broadcast = make(comm, strategy="broadcast")
        with pytest.raises(fanfold.Unsupported, match="broadcast cannot leave ranks out"):
            broadcast.set_active_mask([True, True])

    spawn_threads(2, fn)


def test_metainfo_knows_its_names_only() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        metainfo = make(comm).metainfo
        assert dict(metainfo.items())["top_k"] == metainfo["top_k"] == 2
        assert metainfo["payload_offset"] % 128 == 0
        with pytest.raises(fanfold.InvalidArgument, match="no_such_offset"):
            _ = metainfo["no_such_offset"]

    spawn_threads(1, fn)


def test_read_only_results_are_refused() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm)
        recv = a2a.dispatch(ids([0, 1]), [tokens(1)])
        out = numpy.zeros((1, 8), "float32")
        out.flags.writeable = False
        with pytest.raises(fanfold.InvalidArgument, match="out: expected a tensor that may be"):
            recv.combine(recv.combine_buffer(), out)
        with pytest.raises(fanfold.InvalidArgument, match="recv: expected a tensor that may be"):
            comm.all_reduce(tokens(1), out)
        recv.combine(recv.combine_buffer())
        a2a.close()

    spawn_threads(2, fn)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_experts", "x", "num_experts: expected an integer that its type holds, got 'x'"),
        ("top_k", 1.5, "top_k: expected an integer that its type holds, got 1.5"),
        ("num_experts", 2**40, "num_experts: expected an integer"),
        ("layout", 3, "layout: expected a string, got 3"),
        ("name", 5, "name: expected a string, got 5"),
        ("placement", [0, "a"], "placement: expected linear, round_robin, a list of ranks"),
        ("test_knobs", {"hidden": 4}, "test_knobs: expected names of .*; got 'hidden'"),
        ("check_ids", "", 'check_ids: expected one of auto, raise, drop; got ""'),
    ],
)
def test_a_field_of_the_wrong_type_is_named(field: str, value: object, text: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.InvalidArgument, match=text):
            make(comm, **{field: value})

    spawn_threads(1, fn)


def test_an_exchange_keeps_its_allocator() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        allocator = fanfold.Allocator(comm)
        a2a = make(comm, allocator=allocator)
        del allocator
        others = [fanfold.Allocator(comm) for _ in range(4)]
        a2a.close()
        assert all(other.stats.reserved == 0 for other in others)

    spawn_threads(2, fn)
