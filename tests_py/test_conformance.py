# SPDX-License-Identifier: Apache-2.0
"""The conformance suite, one test per check: every strategy, layout and weighting, ranks as threads
and as processes, tensors of NumPy and of PyTorch."""

from __future__ import annotations

import pytest
from support.tensors import TorchTensors

import fanfold
from fanfold.testing import (
    CHECKS,
    Case,
    Result,
    all_cases,
    checks_for,
    conformance,
    run_case_on_processes,
    run_check,
    spawn_threads,
)

PAIRS = [
    pytest.param(case, check.name, id=f"{case}-{check.name}")
    for case in all_cases()
    for check in checks_for(case)
]
# PyTorch tensors differ from NumPy's in what the border does only: a few checks suffice.
TORCH_CHECKS = (
    "every_id_type_gives_the_same_rows",
    "inputs_are_never_written",
    "several_payloads_travel_together",
    "sums_of_bfloat16_partials_equal_the_oracle",
    "a_result_is_made_when_none_is_given",
    "weights_and_payload_rows_may_be_strided",
)


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_threads(case: Case, name: str) -> None:
    spawn_threads(CHECKS[name].num_ranks, run_check, name, case)


@pytest.mark.parametrize("name", TORCH_CHECKS)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_torch_tensors(case: Case, name: str) -> None:
    spawn_threads(CHECKS[name].num_ranks, run_check, name, case, TorchTensors())


class ProcessRuns:
    """Runs all checks of a case on one group of processes when the first of them is asked for."""

    def __init__(self) -> None:
        self._results: dict[Case, dict[str, Result]] = {}

    def result(self, case: Case, name: str) -> Result:
        """Return how one check ended."""
        if case not in self._results:
            names = [check.name for check in checks_for(case)]
            results = run_case_on_processes(case, names)
            self._results[case] = {result.check: result for result in results}
        return self._results[case][name]


@pytest.fixture(scope="module")
def process_runs() -> ProcessRuns:
    return ProcessRuns()


@pytest.mark.multiproc
@pytest.mark.parametrize(("case", "name"), PAIRS)
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

    assert spawn_threads(4, fn) == [4] * 4


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
