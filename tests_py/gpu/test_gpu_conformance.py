# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on the simulated device, and rounds compared with those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import fanfold

if fanfold.build_info()["cuda"] != "simulated":
    pytest.skip("needs the build of preset sim (tools/test --only sim)", allow_module_level=True)

from fanfold import _core
from fanfold.testing import (
    CHECKS,
    Case,
    Harness,
    NumpyTensors,
    Setup,
    SimulatedTensors,
    all_cases,
    checks_for,
    conformance,
    run_check,
    spawn_threads,
)

# One case in full, the others for what tells them apart.
IN_FULL = Case("one_sided", "rank_major", "applied")
OTHERS = (
    "rows_keep_the_order_of_source_rank_and_token",
    "duplicate_experts_merge",
    "staged_rows_give_the_bits_of_zero_copy",
    "weights_may_be_given_to_combine",
    "rows_may_travel_as_fp8",
    "sums_may_travel_as_fp8",
)
# Hundreds of rounds, or large rows: minutes on simulated devices.
TOO_LONG = (
    "layers_and_steps_are_verified_at_the_end",
    "every_run_gives_the_same_bits",
    "any_hidden_size_works",
    "rounds_without_synchronisation_never_mix",
)


def configure(num_ranks: int, num_devices: int | None = None, resident_blocks: int = 1) -> None:
    """Give each rank a device; of one block, since simulated ones are slow."""
    _core.simulator.configure(
        devices=num_devices or num_ranks, host_threads=num_ranks, resident_blocks=resident_blocks
    )


def pairs() -> list[Any]:
    return [
        pytest.param(case, check.name, id=f"{case}-{check.name}")
        for case in all_cases(device="cuda")
        for check in checks_for(case, None if case == IN_FULL else OTHERS, "cuda")
        if check.name not in TOO_LONG
    ]


@pytest.mark.parametrize(("case", "name"), pairs())
def test_checks(case: Case, name: str) -> None:
    num_ranks = CHECKS[name].num_ranks
    configure(num_ranks)
    spawn_threads(num_ranks, run_check, name, case, SimulatedTensors(num_ranks))


def test_the_suite_knows_what_a_gpu_has() -> None:
    configure(4, num_devices=2, resident_blocks=3)  # two ranks share a device
    names = ["one_token_travels_alone", "token_counts_that_the_caller_knows_are_verified"]
    report = conformance(
        strategies=["one_sided", "broadcast"], checks=names, tensors=SimulatedTensors(2)
    )
    report.raise_failures()
    cases = [Case("one_sided", "rank_major", "applied")]
    cases += [Case("one_sided", "expert_major", w) for w in ("applied", "carried", "origin")]
    assert [(each.case, each.check) for each in report.results] == [
        (str(case), names[0]) for case in cases
    ]


WIRES: dict[str, dict[str, Any]] = {
    "": {},
    "-fp8": {"dispatch_wire": "fp8_e4m3", "combine_wire": "fp8_e4m3"},
    "-ue8m0": {"dispatch_wire": "fp8_e4m3", "combine_wire": "fp8_e4m3", "wire_scale": "ue8m0"},
}


def with_wires() -> list[Any]:
    return [
        pytest.param(case, wires, id=f"{case}{name}")
        for case in all_cases(device="cuda")
        for name, wires in WIRES.items()
        if not wires or (case.strategy, case.layout) == ("low_latency", "expert_major")
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("case", "wires"), with_wires())
def test_a_gpu_gives_the_bits_of_the_cpu(case: Case, wires: dict[str, Any], num_ranks: int) -> None:
    """The same rounds by both, on a device of its own for each rank; counts and sums."""
    setup = Setup(
        hidden=150, dtype="bfloat16", top_k=5, num_experts=7, placement="round_robin", **wires
    )

    def fn(comm: fanfold.Communicator) -> None:
        results = []
        for tensors in (NumpyTensors(), SimulatedTensors(num_ranks)):
            harness = Harness(comm, case, tensors)
            seen = []
            with harness.create(setup) as a2a:
                for seed in range(2):
                    trial = harness.trial(setup, seed)
                    recv = harness.dispatch(a2a, trial)
                    array = harness.tensors.to_array
                    counts = [int(n) for n in array(recv.rank_counts)]
                    y = harness.experts(a2a, recv.handle, trial, zero_copy=bool(seed % 2))
                    seen.append((counts, recv.host_counts().expert_counts))
                    out = a2a.combine(y, recv.handle, out=harness.out(trial, "bfloat16"))
                    harness.check_result(out, trial)
                    seen.append(array(out).tobytes())
            results.append(seen)
        assert results[0] == results[1]

    configure(num_ranks, resident_blocks=1 if num_ranks == 3 else 2)
    spawn_threads(num_ranks, fn)
