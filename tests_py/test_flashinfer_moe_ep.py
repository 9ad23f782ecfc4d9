# SPDX-License-Identifier: Apache-2.0
"""Fanfold in the registry of ``flashinfer.moe_ep``, and in place of the backend that vLLM takes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import flashinfer_standin as standin
from support import vllm_files
from support.flashinfer_rounds import (
    BF16,
    check_rows,
    combined,
    draw_ids,
    noise,
    run_experts,
    same_bits,
)

import fanfold
from fanfold.compat import flashinfer
from fanfold.compat.flashinfer import exchanges
from fanfold.compat.flashinfer.moe_ep import FanfoldConfig
from fanfold.compat.vllm import one_sided
from fanfold.testing import spawn_threads


@pytest.fixture(autouse=True)
def moe_ep(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, installed."""
    monkeypatch.setattr(exchanges, "TIMEOUT_S", 20.0)
    return standin.install(monkeypatch)


def create(comm: fanfold.Communicator, params: Any, backend: Any = "fanfold", **more: Any) -> Any:
    """What a program does."""
    bootstrap = standin.BootstrapConfig(world_size=comm.num_ranks, rank=comm.rank)
    if isinstance(backend, str):
        more["comm_backend"] = flashinfer.CommunicatorBackend(comm)
    else:
        backend.comm_backend = flashinfer.CommunicatorBackend(comm)
    return standin.create_communication(bootstrap, params, backend, **more)


def run_rounds(comm: fanfold.Communicator, made: Any, params: Any) -> None:
    """Rounds of several sizes, zero copy or not, weights and scales travelling."""
    world, me, hidden = comm.num_ranks, comm.rank, params.hidden_size

    def ids_of(rank: int, tokens: int) -> Any:
        return draw_ids(rank, tokens, params.top_k, params.num_experts)

    for number, limit in enumerate((5, 1, 8, 8)):
        counts = [(rank + number) % (limit + 1) for rank in range(world)]
        ids, x = ids_of(me, counts[me]), noise(me, (counts[me], hidden), BF16)

        def inputs(rank: int, counts: list[int] = counts) -> list[Any]:
            return [
                noise(rank, (counts[rank], hidden), BF16),
                ids_of(rank, counts[rank]),
                noise(rank, (counts[rank], params.top_k), torch.float32),
                noise(rank, (counts[rank], 3), torch.uint8),
            ]

        result = made.dispatch(
            x,
            ids.long() if number % 2 else ids,
            inputs(me)[2],
            hidden_states_scale=inputs(me)[3],
            max_tokens_per_rank=None if limit == 8 else limit,
        )
        assert isinstance(result, standin.MoEEpDispatchResult)
        assert result.tokens_per_rank == limit
        rows = [
            each.unflatten(0, (world, limit))
            for each in (
                result.hidden_states,
                result.topk_ids,
                result.topk_weights,
                result.hidden_states_scale,
            )
        ]
        received = check_rows(
            rows,
            me,
            lambda rank, counts=counts: ids_of(rank, counts[rank]),
            inputs,
            params.num_experts,
        )
        for source, count in enumerate(received):
            assert (rows[1][source, count:] == params.invalid_expert_id).all()
        y = run_experts(rows[0], rows[1], me, params.num_experts).flatten(0, 1)
        out = None
        if number % 2:
            y = made.get_combine_input_buffer(BF16).copy_(y)
            out = torch.empty((counts[me], hidden), dtype=BF16)
        got = made.combine(y, output=out)
        assert out is None or got is out
        assert same_bits(got, combined(x, ids, params.num_experts, world))


@pytest.mark.parametrize(("world", "num_experts"), [(1, 4), (2, 8), (3, 7)])
def test_programs_pick_fanfold_by_name(moe_ep: Any, world: int, num_experts: int) -> None:
    made = flashinfer.register()
    assert issubclass(made, moe_ep.MoEEpCommunication)
    assert (made.backend_name, made.supports_cuda_graph) == ("fanfold", True)  # type: ignore[attr-defined]
    assert "fanfold" in moe_ep.available_communication_backends()
    params = moe_ep.MoEEpCommParams(num_experts, 3, 8, 40, invalid_expert_id=num_experts)

    def one(comm: fanfold.Communicator) -> None:
        communication = create(comm, params)
        assert isinstance(communication, made)
        assert communication.params is params
        run_rounds(comm, communication, params)
        slots = [slot for each in communication._exchanges._slots.values() for slot in each]
        communication.destroy()
        assert slots
        assert all(slot.exchange.is_closed for slot in slots)

    spawn_threads(world, one)


def test_a_config_object_names_the_backend_and_its_options(moe_ep: Any) -> None:
    flashinfer.register()
    params = moe_ep.MoEEpCommParams(4, 1, 4, 16)

    def one(comm: fanfold.Communicator) -> None:
        config = FanfoldConfig(eplb_stats_num_experts=4, enable_rank_mask=True)
        made = create(comm, params, config)
        ids = torch.full((1, 1), 2 * comm.rank, dtype=torch.int32)
        x = noise(comm.rank, (1, 16), BF16)
        stats = torch.tensor([comm.rank, 7], dtype=torch.int32)
        everyone = made.active_rank_mask([0, 1])
        result = made.dispatch(x, ids, eplb_local_stats=stats, active_rank_mask=everyone)
        assert result.topk_weights is None
        assert result.hidden_states_scale is None
        assert result.eplb_gathered_stats.tolist() == [[0, 7], [1, 7]]
        assert same_bits(made.combine(result.hidden_states, active_rank_mask=everyone), x)
        if comm.rank == 0:
            alone = made.active_rank_mask([0])
            result = made.dispatch(x, ids, active_rank_mask=alone)
            assert result.topk_ids.flatten().tolist() == [0, *[-1] * 7]
            with pytest.raises(ValueError, match="the mask of the dispatch"):
                made.combine(result.hidden_states, active_rank_mask=everyone)
            assert same_bits(made.combine(result.hidden_states), x)

    spawn_threads(2, one)


def test_wrong_calls_are_named(moe_ep: Any) -> None:
    flashinfer.register()
    params = moe_ep.MoEEpCommParams(2, 1, 4, 16)
    comm = fanfold.Communicator.threads(1)[0]
    made = create(comm, params)
    x, ids = torch.ones((2, 16), dtype=BF16), torch.zeros((2, 1), dtype=torch.int32)
    with pytest.raises(AssertionError, match="combine called before dispatch"):
        made.combine(x)
    with pytest.raises(RuntimeError, match="called before dispatch"):
        made.get_combine_input_buffer(BF16)
    with pytest.raises(ValueError, match=r"topk_ids: expected \[2, 1\], got \[1, 1\]"):
        made.dispatch(x, ids[:1])
    with pytest.raises(ValueError, match="runtime_max_tokens_per_rank: expected 1 to 4"):
        made.dispatch(x, ids, max_tokens_per_rank=5)
    with pytest.raises(ValueError, match=r"runtime_max_tokens_per_rank: expected 1 to 4.*got 0"):
        made.dispatch(x, ids, max_tokens_per_rank=0)
    with pytest.raises(ValueError, match="requires enable_rank_mask=True"):
        made.dispatch(x, ids, active_rank_mask=made.active_rank_mask([0]))
    made.dispatch(x, ids)
    with pytest.raises(AssertionError, match="dispatch called twice without combine"):
        made.dispatch(x, ids)
    with pytest.raises(AssertionError, match="destroy called between"):
        made.destroy()
    with pytest.raises(ValueError, match=r"payload: expected \[1, 4, hidden\]"):
        made.combine(x)
    assert made.combine(torch.ones((4, 16))).tolist() == [[1.0] * 16] * 2
    bootstrap = moe_ep.BootstrapConfig(2, 1)
    backend = flashinfer.CommunicatorBackend(comm)
    with pytest.raises(fanfold.InvalidArgument, match="bootstrap: expected rank 0 of 1"):
        moe_ep.create_communication(bootstrap, params, "fanfold", comm_backend=backend)
    with pytest.raises(TypeError, match=r"options: expected comm_backend.*got \['lamport'\]"):
        create(comm, params, lamport=True)
    with pytest.raises(fanfold.InvalidArgument, match="extra_payload_bytes_per_token: expected at"):
        create(comm, params, extra_payload_bytes_per_token=-1)


@pytest.mark.parametrize("form", ["FlashInfer's config", "Fanfold's config", "keywords"])
def test_options_of_flashinfers_own_backend_are_taken(moe_ep: Any, form: str) -> None:
    flashinfer.register()
    params = moe_ep.MoEEpCommParams(2, 1, 4, 16)
    comm = fanfold.Communicator.threads(1)[0]
    options: dict[str, Any] = {
        "use_low_precision_combine": True,
        "extra_payload_bytes_per_token": 12,
        "enable_rank_mask": True,
    }
    if form == "keywords":
        rounding = create(comm, params, **options)
    elif form == "Fanfold's config":
        rounding = create(comm, params, FanfoldConfig(**options))
    else:
        config = moe_ep.NVLinkOneSidedConfig(backend_name="fanfold", **options)
        rounding = create(comm, params, config)
    ((made,),) = rounding._exchanges._slots.values()
    assert made.config["dispatch_row_bytes"] == 2 * 16 + 12, "before the first round"
    x, ids = torch.ones((2, 16), dtype=BF16), torch.zeros((2, 1), dtype=torch.int32)
    scales = torch.ones((2, 3))
    result = rounding.dispatch(x, ids, hidden_states_scale=scales)
    y = torch.full_like(result.hidden_states, 1.0625)
    assert rounding.combine(y).tolist() == [[1.0] * 16] * 2
    assert list(rounding._exchanges._slots.values()) == [[made]], "nothing grew"


def test_without_flashinfer_registering_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "flashinfer.moe_ep")
    with pytest.raises(fanfold.Unsupported, match=r"flashinfer\.moe_ep: expected flashinfer 0"):
        flashinfer.register()
    with pytest.raises(fanfold.Unsupported, match="vllm: expected it to be installed"):
        one_sided.replace()


def test_a_flashinfer_without_a_registry_is_refused(
    moe_ep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(moe_ep, "register_communication")
    with pytest.raises(fanfold.Unsupported, match="expected register_communication, as in"):
        flashinfer.register()


def test_the_real_registry_takes_fanfold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.delitem(sys.modules, "flashinfer.moe_ep")
    root = vllm_files.installed("flashinfer")
    if root is None:
        pytest.skip("flashinfer is not installed: only its stand-in was registered with")
    names = ["flashinfer.moe_ep.core.comm.communication", "flashinfer.moe_ep.config"]
    with vllm_files.loaded_alone(root, names) as (real, config):
        # The package itself needs compilers and drivers; it exports what these files have.
        for name in ("register_communication", "MoEEpCommunication", "MoEEpDispatchResult"):
            setattr(sys.modules["flashinfer.moe_ep"], name, getattr(real, name))
        made = flashinfer.register()
        assert issubclass(made, real.MoEEpCommunication)
        assert "fanfold" in real.available_communication_backends()
        for name in ("dispatch", "combine"):
            theirs = inspect.signature(getattr(real.MoEEpCommunication, name)).parameters
            assert set(theirs) <= set(inspect.signature(getattr(made, name)).parameters)
        params = real.MoEEpCommParams(num_experts=2, top_k=1, max_tokens_per_rank=2, hidden_size=8)
        comm = fanfold.Communicator.threads(1)[0]
        backend = flashinfer.CommunicatorBackend(comm)
        bootstrap = config.BootstrapConfig(world_size=1, rank=0)
        one = real.create_communication(bootstrap, params, "fanfold", comm_backend=backend)
        x = torch.ones((2, 8), dtype=BF16)
        result = one.dispatch(x, torch.zeros((2, 1), dtype=torch.int32))
        assert isinstance(result, real.MoEEpDispatchResult)
        assert same_bits(one.combine(result.hidden_states), x)
        one.destroy()


# --- In place of the backend that vLLM takes ----------------------------------------------------

VERSIONS = {"vllm": "0.33.0", "flashinfer-python": "0.7.2.post1"}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, as the plugin sees it."""
    installed = dict(VERSIONS)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: installed[package])
    return installed


def test_the_plugin_does_nothing_unless_it_is_named(
    moe_ep: Any, versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions["vllm"] = "unknown"  # not even looked at
    for value in (None, "", "others", "fanfold"):
        if value is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", value)
        one_sided.load()
        assert moe_ep._registry["nvlink_one_sided"] is moe_ep.NVLinkOneSidedAlltoAll


def test_the_plugin_replaces_what_vllm_takes_and_logs_it(
    moe_ep: Any,
    versions: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    versions["vllm"] = "0.33.0+cu130"
    monkeypatch.setenv("VLLM_PLUGINS", "others,fanfold_one_sided")
    with caplog.at_level(logging.WARNING):
        one_sided.load()
    assert "is replaced by Fanfold" in caplog.text
    assert "flashinfer-python 0.7.2.post1" in caplog.text
    params = moe_ep.MoEEpCommParams(6, 2, 8, 24)

    def one(comm: fanfold.Communicator) -> None:
        made = create(comm, params, moe_ep.NVLinkOneSidedConfig())
        assert isinstance(made, moe_ep.NVLinkOneSidedAlltoAll)  # as vLLM's manager asserts
        assert made.backend_name == "nvlink_one_sided"
        run_rounds(comm, made, params)
        made.destroy()

    spawn_threads(2, one)


@pytest.mark.parametrize(
    ("package", "version"), [("vllm", "0.34.0"), ("flashinfer-python", "0.8.0")]
)
def test_other_versions_are_refused(
    moe_ep: Any,
    versions: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    version: str,
) -> None:
    versions[package] = version
    monkeypatch.setenv("VLLM_PLUGINS", "fanfold_one_sided")
    with pytest.raises(fanfold.Unsupported, match=f"{package}: expected version .*got {version}"):
        one_sided.load()
    assert moe_ep._registry["nvlink_one_sided"] is moe_ep.NVLinkOneSidedAlltoAll


def test_a_flashinfer_without_the_class_is_refused(
    moe_ep: Any, versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del versions
    monkeypatch.delattr(moe_ep, "NVLinkOneSidedAlltoAll")
    with pytest.raises(fanfold.Unsupported, match="expected NVLinkOneSidedAlltoAll"):
        one_sided.replace()


def test_the_package_declares_the_plugin() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    assert section.startswith(
        f'{one_sided.PLUGIN_NAME} = "{one_sided.__name__}:{one_sided.load.__name__}"\n'
    )
