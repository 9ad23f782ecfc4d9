# SPDX-License-Identifier: Apache-2.0
"""The conformance suite, one test per check: every strategy, layout and weighting, ranks as threads
and as processes, tensors of NumPy and of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from support.tensors import TorchTensors

import fanfold
from fanfold.testing import (
    CHECKS,
    Case,
    Check,
    Result,
    Setup,
    all_cases,
    checks_for,
    conformance,
    run_check,
    run_pairs_on_processes,
    spawn_threads,
)
from fanfold.testing.suite import is_two_phase
from fanfold.testing.trials import LAYOUTS_OF

# What a strategy lays out itself is tested in full. Its other layouts are made from these rows by
# code that all strategies share and that one_sided is tested with: what tells them apart suffices.
IN_FULL = [
    Case("one_sided", "rank_major", "applied"),
    Case("one_sided", "flat", "applied"),
    Case("one_sided", "expert_major", "carried"),
    Case("one_sided", "flat_by_expert", "origin"),
    Case("broadcast", "gathered", "applied"),
    Case("broadcast", "rank_major", "applied"),
    Case("gather_scatter", "gathered", "applied"),
    Case("batched", "expert_major", "carried"),
    Case("two_sided", "rank_major", "applied"),
    Case("two_sided", "flat", "applied"),
    Case("high_throughput", "flat", "applied"),
    Case("high_throughput", "flat_by_expert", "applied"),
    Case("low_latency", "expert_major", "origin"),
]
# Processes differ from threads in how memory is shared and how peers are waited for: one case of
# each strategy for all of it, the others for how their rows lie.
ON_PROCESSES = {
    "one_sided": Case("one_sided", "rank_major", "applied"),
    "broadcast": Case("broadcast", "rank_major", "applied"),
    "gather_scatter": Case("gather_scatter", "gathered", "applied"),
    "batched": Case("batched", "expert_major", "carried"),
    "two_sided": Case("two_sided", "flat", "applied"),
    "high_throughput": Case("high_throughput", "flat_by_expert", "applied"),
    "low_latency": Case("low_latency", "expert_major", "carried"),
}
PROCESS_CHECKS = (
    "masked_ranks_are_left_out",
    "reset_brings_all_ranks_back",
    "split_calls_give_the_same_round",
    "a_round_may_end_without_a_combine",
    "a_round_that_is_kept_may_be_combined_again",
)
LAYOUT_CHECKS = (
    "rows_keep_the_order_of_source_rank_and_token",
    "duplicate_experts_merge",
    "several_rounds_may_be_in_flight",
    "staged_rows_give_the_bits_of_zero_copy",
    "rows_past_the_limit_are_dropped_and_counted",
)


def pair(case: Case, check: Check) -> Any:
    return pytest.param(case, check.name, id=f"{case}-{check.name}")


THREAD_CHECKS = (
    *LAYOUT_CHECKS,
    "rounds_without_synchronisation_never_mix",
    "routing_serves_later_payloads",
    "sums_of_bfloat16_partials_equal_the_oracle",
)
THREAD_PAIRS = [
    pair(case, check)
    for case in all_cases()
    for check in (checks_for(case) if case in IN_FULL else checks_for(case, THREAD_CHECKS))
]


def checks_on_processes(case: Case) -> list[Check]:
    if case == ON_PROCESSES[case.strategy]:
        return [each for each in checks_for(case) if each.is_core or each.name in PROCESS_CHECKS]
    return checks_for(case, LAYOUT_CHECKS) if case.weighting in ("applied", "origin") else []


PROCESS_PAIRS = [pair(case, check) for case in all_cases() for check in checks_on_processes(case)]
# PyTorch tensors differ from NumPy's in what the border does only: a few checks suffice.
TORCH_CHECKS = (
    "every_id_type_gives_the_same_rows",
    "inputs_are_never_written",
    "several_payloads_travel_together",
    "sums_of_bfloat16_partials_equal_the_oracle",
    "a_result_is_made_when_none_is_given",
    "weights_and_payload_rows_may_be_strided",
)


def test_every_layout_that_the_library_gives_is_a_case() -> None:
    def fn(comm: fanfold.Communicator, strategy: str) -> list[str]:
        setup = Setup()
        case = Case(strategy, "flat", "applied")
        with fanfold.AllToAll(comm, **setup.keywords(case)) as a2a:
            assert a2a.capabilities.two_phase == is_two_phase(case)
            return list(a2a.capabilities.layouts)

    for strategy, layouts in LAYOUTS_OF.items():
        given = spawn_threads(1, fn, strategy)[0]
        assert sorted(given) == sorted(layouts), strategy


@pytest.mark.parametrize(("case", "name"), THREAD_PAIRS)
def test_threads(case: Case, name: str) -> None:
    spawn_threads(CHECKS[name].num_ranks, run_check, name, case)


@pytest.mark.parametrize("name", TORCH_CHECKS)
@pytest.mark.parametrize("case", IN_FULL, ids=str)
def test_torch_tensors(case: Case, name: str) -> None:
    spawn_threads(CHECKS[name].num_ranks, run_check, name, case, TorchTensors())


class ProcessRuns:
    """Runs all that is run of a strategy on one group of processes when the first is asked for."""

    def __init__(self) -> None:
        self._results: dict[str, dict[tuple[str, str], Result]] = {}

    def result(self, case: Case, name: str) -> Result:
        """Return how one check ended."""
        if case.strategy not in self._results:
            pairs = [
                (each, check.name)
                for each in all_cases([case.strategy])
                for check in checks_on_processes(each)
            ]
            results = run_pairs_on_processes(pairs)
            self._results[case.strategy] = {(each.case, each.check): each for each in results}
        return self._results[case.strategy][str(case), name]


@pytest.fixture(scope="module")
def process_runs() -> ProcessRuns:
    return ProcessRuns()


@pytest.mark.multiproc
@pytest.mark.parametrize(("case", "name"), PROCESS_PAIRS)
def test_processes(process_runs: ProcessRuns, case: Case, name: str) -> None:
    result = process_runs.result(case, name)
    assert not result.error, result.error


CHECK_NAMES = ["rows_keep_the_order_of_source_rank_and_token", "one_token_travels_alone"]


def test_conformance_reports_every_check() -> None:
    report = conformance(
        "threads", strategies=["one_sided"], layouts=["rank_major"], checks=CHECK_NAMES
    )
    assert [result.check for result in report.results] == CHECK_NAMES
    report.raise_failures()


def test_conformance_runs_on_the_communicator_of_the_user() -> None:
    def fn(comm: fanfold.Communicator) -> int:
        report = conformance(comm, layouts=["rank_major"], checks=CHECK_NAMES)
        report.raise_failures()
        return len(report.results)

    num_results = len(all_cases(layouts=["rank_major"])) * len(CHECK_NAMES)
    assert spawn_threads(4, fn) == [num_results] * 4


def test_conformance_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(harness: object) -> None:
        raise AssertionError("rows: expected 1, got 2")

    check = CHECKS[CHECK_NAMES[0]]
    monkeypatch.setitem(
        CHECKS, check.name, type(check)(check.name, broken, check.num_ranks, check.applies)
    )
    report = conformance(
        "threads", strategies=["one_sided"], layouts=["rank_major"], checks=CHECK_NAMES
    )
    assert [result.check for result in report.failures] == CHECK_NAMES[:1]
    with pytest.raises(AssertionError, match=r"(?s)1 failed.*expected 1, got 2"):
        report.raise_failures()


def test_conformance_refuses_an_unknown_place() -> None:
    with pytest.raises(fanfold.InvalidArgument, match=r"where: expected 'threads'.*got 'here'"):
        conformance("here")
