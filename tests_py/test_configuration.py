# SPDX-License-Identifier: Apache-2.0
"""The arguments that describe an AllToAll: names, defaults, rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from support.rounds import DEFAULTS, make, works

import fanfold
from fanfold import _core
from fanfold.testing import spawn_threads

REQUIRED = {"num_experts": 4, "top_k": 2, "max_tokens_per_rank": 4, "hidden": 8}
FP8: dict[str, Any] = {
    "strategy": "low_latency",
    "layout": "expert_major",
    "hidden": 200,  # the second block of 128 is short
    "dispatch_wire": "fp8_e4m3",
}


def alone(fn: Callable[[fanfold.Communicator], Any]) -> Any:
    """Run with one rank."""
    return spawn_threads(1, fn)[0]


# -- names and defaults --------------------------------------------------------------------------


def test_help_shows_every_argument_and_its_default() -> None:
    fields = fanfold.AllToAllConfig.__required_keys__ | fanfold.AllToAllConfig.__optional_keys__
    for function, own in (
        (fanfold.AllToAll, {"communicator", "allocator", "workspace_of"}),
        (fanfold.AllToAll.required_bytes, {"num_ranks"}),
    ):
        parameters = inspect.signature(function).parameters
        assert set(parameters) == fields | own
        required = {
            name for name, parameter in parameters.items() if parameter.default is parameter.empty
        }
        assert required == set(REQUIRED) | (own & {"communicator", "num_ranks"})
        assert parameters["strategy"].default == "auto"
        assert parameters["wire_scale"].default == "float32"
        assert parameters["strategy"].annotation == "str"


def test_every_argument_is_described() -> None:
    text = inspect.getdoc(fanfold.AllToAll) or ""
    for name in inspect.signature(fanfold.AllToAll).parameters:
        assert f"\n    {name}: " in text, name


def test_a_missing_or_unknown_argument_is_a_type_error() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        for create in (
            lambda **config: fanfold.AllToAll(comm, **config),
            lambda **config: fanfold.AllToAll.required_bytes(num_ranks=1, **config),
        ):
            with pytest.raises(TypeError, match="missing a required argument: 'hidden'"):
                create(num_experts=4, top_k=2, max_tokens_per_rank=4)
            with pytest.raises(TypeError, match="unexpected keyword argument 'stratgy'"):
                create(**REQUIRED, stratgy="auto")

    alone(fn)


def test_the_defaults_are_those_of_the_header() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        ours = fanfold.AllToAll(comm, **REQUIRED)
        header = _core.AllToAll(comm, dict(REQUIRED))
        assert ours.config == header.config
        assert set(ours.config) == set(inspect.signature(fanfold.AllToAll).parameters) - {
            "communicator", "allocator", "workspace_of", "test_knobs",
        }  # fmt: skip

    alone(fn)


CONFIGS: list[dict[str, Any]] = [
    {},
    {
        "name": "moe",
        "max_in_flight": 3,
        "timeout_s": 1.5,
        "check_ids": "drop",
        "debug_poison": True,
    },
    {"layout": "flat_by_expert", "max_recv_rows": 9, "expert_alignment": 4},
    {"placement": [1, 0, 1, 0], "max_local_experts": 3, "weighting": "applied"},
    {"placement": "round_robin", "extra_bytes_per_token": 128, "combine_dtype": "bfloat16"},
    {"placement": fanfold.Placement([0, 1, 1, 0], [0, 0, 1, 1])},
    {"strategy": "two_sided", "channel_bytes": 8192},
    {"strategy": "broadcast", "layout": "gathered", "deterministic": False},
    {**FP8, "combine_wire": "fp8_e4m3", "wire_scale": "ue8m0"},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ", ".join(config) or "defaults")
def test_what_an_exchange_says_of_itself_makes_another_like_it(config: dict[str, Any]) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        first = make(comm, **config)
        said = first.config
        for name, value in config.items():
            expected = fanfold.Placement(value) if isinstance(value, list) else value
            assert said[name] == expected, name  # type: ignore[literal-required]
        second = fanfold.AllToAll(comm, **said)
        assert second.config == said
        assert second.metainfo.items() == first.metainfo.items()
        total = fanfold.AllToAll.required_bytes(num_ranks=comm.num_ranks, **said)
        assert total == first.workspace_bytes == second.workspace_bytes

    spawn_threads(2, fn)


def test_what_is_left_out_is_decided() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        config = fanfold.AllToAll(comm, **REQUIRED, extra_bytes_per_token=3).config
        assert config["strategy"] == "one_sided"
        assert config["dtype"] == config["combine_dtype"] == "bfloat16"
        assert config["dispatch_row_bytes"] == 2 * 8 + 3
        assert config["combine_row_bytes"] == 2 * 8
        assert config["check_ids"] == "raise"
        assert config["dispatch_wire"] is None
        assert config["max_recv_rows"] is None

    alone(fn)


# -- rules ---------------------------------------------------------------------------------------

FLAT = {"strategy": "one_sided", "layout": "flat"}
BY_EXPERT = {"strategy": "one_sided", "layout": "flat_by_expert"}
Invalid, Unsupported = fanfold.InvalidArgument, fanfold.Unsupported

RULES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("rows of a fixed layout", {"max_recv_rows": 3}, Invalid,
     "max_recv_rows: expected none.*got 3 with layout rank_major"),
    ("no rows", {**FLAT, "max_recv_rows": 0}, Invalid, r"max_recv_rows: .*\[1, .*got 0"),
    ("rows no number", {**FLAT, "max_recv_rows": "all"}, Invalid,
     "max_recv_rows: expected an integer.*got 'all'"),
    ("no alignment", {**BY_EXPERT, "expert_alignment": 0}, Invalid,
     r"expert_alignment: .*\[1, 65536\], got 0"),
    ("alignment too large", {**BY_EXPERT, "expert_alignment": 65537}, Invalid,
     "expert_alignment: .*got 65537"),
    ("alignment without groups", {**FLAT, "expert_alignment": 16}, Invalid,
     "expert_alignment: expected 1.*got 16 with layout flat"),
    ("weights of flat rows", {**FLAT, "weighting": "origin"}, Invalid,
     "weighting: layout flat expects applied, got origin"),
    ("local experts", {"max_local_experts": -1}, Invalid, r"max_local_experts: .*\[0, 4\], got -1"),
    ("more local experts than there are", {"max_local_experts": 5}, Invalid,
     "max_local_experts: .*got 5"),
    ("small channel", {"channel_bytes": 4095}, Invalid, r"channel_bytes: .*\[4096, .*got 4095"),
    ("large channel", {"channel_bytes": 2**30 + 1}, Invalid, "channel_bytes: .*got 1073741825"),
    ("wire's name", {**FP8, "dispatch_wire": "fp4"}, Invalid,
     "dispatch_wire: expected None or \"fp8_e4m3\", got 'fp4'"),
    ("wire no name", {**FP8, "combine_wire": 8}, Invalid, "combine_wire: expected a string, got 8"),
    ("scale's name", {**FP8, "wire_scale": "fp16"}, Invalid,
     'wire_scale: expected one of float32, ue8m0.*got "fp16"'),
    ("wire of another strategy", {"dispatch_wire": "fp8_e4m3"}, Unsupported,
     "dispatch_wire: strategy one_sided sends rows as they are.*got fp8_e4m3"),
    ("wire of sums per rank", {**FP8, "layout": "rank_major", "combine_wire": "fp8_e4m3"}, Invalid,
     "combine_wire: expected none.*got fp8_e4m3 with layout rank_major"),
    ("wire of integers", {**FP8, "dtype": "int32", "combine_dtype": "float32"}, Invalid,
     "dtype: expected float32, float16 or bfloat16.*got int32"),
    ("layout of batched", {"strategy": "batched", "layout": "gathered"}, Unsupported,
     "layout: strategy batched gives .*; got gathered"),
    ("layout of high_throughput", {"strategy": "high_throughput", "layout": "rank_major"},
     Unsupported,
     "layout: strategy high_throughput gives flat, flat_by_expert; got rank_major"),
    ("knob", {"test_knobs": {"fast": True}}, Invalid, "test_knobs: expected names of .*'fast'"),
    ("knob's type", {"test_knobs": {"min_worker_bytes": "1"}}, Invalid,
     "min_worker_bytes: expected an integer.*got '1'"),
    ("placement no table", {"placement": 3.5}, Invalid,
     "placement: expected linear, round_robin, a list of ranks or a Placement, got 3.5"),
    ("placement of words", {"placement": ["a"] * 4}, Invalid, "placement: expected .*'a'"),
    ("ranks no numbers", {"placement": fanfold.Placement([0.5] * 4)}, Invalid,  # type: ignore
     "placement.rank_of_expert: expected a list of ranks, got .*0.5"),
    ("short table", {"placement": fanfold.Placement([0, 1])}, Invalid,
     "placement: expected a table of 4 ranks.*got 2"),
    ("short replicas", {"placement": fanfold.Placement([0, 1, 0, 1], [0, 0, 1])}, Invalid,
     "placement.*3"),
    ("logical expert without a copy", {"placement": fanfold.Placement([0, 1, 0, 1], [0, 0, 2, 2])},
     Invalid, "placement.*1"),
    ("negative logical expert", {"placement": fanfold.Placement([0, 1, 0, 1], [0, 0, 1, -1])},
     Invalid, "placement.*-1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "text"), [pytest.param(*row[1:], id=row[0]) for row in RULES]
)
def test_rules(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(error, match=text):
            make(comm, **arguments)
        config = {**DEFAULTS, **arguments}
        with pytest.raises(error, match=text):
            fanfold.AllToAll.required_bytes(num_ranks=2, **config)
        works(make(comm), comm.rank)

    spawn_threads(2, fn)


DIFFERENT = [
    ("max_recv_rows", {**FLAT, "max_recv_rows": 5}, 6),
    ("expert_alignment", {**BY_EXPERT, "expert_alignment": 2}, 4),
    ("max_local_experts", {"max_local_experts": 2}, 3),
    ("dispatch_wire", FP8, None),
    ("combine_wire", {**FP8, "combine_wire": "fp8_e4m3"}, None),
    ("wire_scale", {**FP8, "wire_scale": "ue8m0"}, "float32"),
    ("channel_bytes", {"channel_bytes": 8192}, 4096),
]


@pytest.mark.parametrize(("field", "config", "other"), DIFFERENT, ids=[row[0] for row in DIFFERENT])
def test_a_difference_between_ranks_is_named(
    field: str, config: dict[str, Any], other: Any
) -> None:
    def fn(comm: fanfold.Communicator) -> None:
        mine = config if comm.rank == 0 else {**config, field: other}
        with pytest.raises(
            fanfold.InvalidArgument, match=rf"{field} differs between ranks: rank 0"
        ):
            make(comm, **{"dispatch_row_bytes": 4096, **mine})
        works(make(comm), comm.rank)

    spawn_threads(2, fn)
