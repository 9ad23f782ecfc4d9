# SPDX-License-Identifier: Apache-2.0
"""Runs the conformance suite: one list of checks for every strategy, layout and kind of group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import fanfold
from fanfold.testing import checks_dispatch, checks_layouts, checks_rounds, checks_sums
from fanfold.testing.harness import Harness, NumpyTensors, Tensors, expect
from fanfold.testing.spawn import describe_error, process_outcomes, spawn_threads
from fanfold.testing.suite import CHECKS, Check
from fanfold.testing.trials import Case, all_cases

MODULES = (
    checks_dispatch,
    checks_layouts,
    checks_sums,
    checks_rounds,
)  # importing them fills CHECKS
NUM_RANKS = 4
MAX_FAILURES = 8  # on processes; each costs seconds
Pair = tuple[Case, str]  # a case and the name of a check


@dataclass(frozen=True)
class Result:
    """How one check of one case ended: `error` is empty if it holds."""

    check: str
    case: str
    error: str = ""


@dataclass
class Report:
    """All results, in the order in which they ran."""

    results: list[Result] = field(default_factory=list)

    @property
    def failures(self) -> list[Result]:
        """The results that have an error."""
        return [result for result in self.results if result.error]

    def __str__(self) -> str:
        lines = [f"{len(self.results)} checks, {len(self.failures)} failed"]
        lines += [f"{each.case}: {each.check}\n{each.error}" for each in self.failures]
        return "\n".join(lines)

    def raise_failures(self) -> None:
        """Raise AssertionError with the text of every failure, if there is one."""
        expect(not self.failures, str(self))


def checks_for(case: Case, names: Iterable[str] | None = None, device: str = "cpu") -> list[Check]:
    """Return the checks that apply to a case on a device."""
    wanted = CHECKS if names is None else {name: CHECKS[name] for name in names}
    return [
        check
        for check in wanted.values()
        if check.applies(case) and (check.on_gpu or device == "cpu")
    ]


def run_check(
    comm: fanfold.Communicator, name: str, case: Case, tensors: Tensors | None = None, seed: int = 0
) -> None:
    """Run one check on this rank, as every rank of `comm` does; raises if it does not hold."""
    CHECKS[name].run(Harness(comm, case, tensors or NumpyTensors(), seed))


def run_pairs(
    comm: fanfold.Communicator,
    pairs: Sequence[Pair],
    tensors: Tensors | None = None,
    seed: int = 0,
) -> list[Result]:
    """Run checks in a row on this rank of a larger group, up to the first that fails.

    A check that wants fewer ranks than there are runs on the first ones.
    """
    results = []
    for case, name in pairs:
        wanted = min(CHECKS[name].num_ranks, comm.num_ranks)
        group: fanfold.Communicator | None = comm
        try:
            if wanted < comm.num_ranks:
                group = comm.split(0 if comm.rank < wanted else -1, comm.rank)
            if group is not None:
                run_check(group, name, case, tensors, seed)
            if group is not None and group is not comm:
                group.close()
        except Exception as error:
            text = f"rank {comm.rank}: {describe_error(error)}"
            if isinstance(error, fanfold.PeerLost):
                text = f"(rank {comm.rank} lost a peer: {error})"
            results.append(Result(name, str(case), text))
            break
        results.append(Result(name, str(case)))
    return results


def _merge(results_of_ranks: Sequence[Sequence[Result]], pairs: Sequence[Pair]) -> list[Result]:
    """Join the ranks' results; what a rank that saw the cause says comes first."""
    merged: list[Result] = []
    for index, (case, name) in enumerate(pairs):
        of_check = [results[index] for results in results_of_ranks if index < len(results)]
        if not of_check:
            break
        errors = sorted((r.error for r in of_check if r.error), key=lambda text: text[0] == "(")
        merged.append(Result(name, str(case), "\n".join(errors)))
        if errors:
            break
    return merged


def run_case_on_threads(
    case: Case, names: Sequence[str], tensors: Tensors | None = None, seed: int = 0
) -> list[Result]:
    """Run checks of one case, each on new threads."""
    results = []
    for name in names:
        error = ""
        try:
            spawn_threads(CHECKS[name].num_ranks, run_check, name, case, tensors, seed)
        except Exception as failure:
            error = describe_error(failure)
        results.append(Result(name, str(case), error))
    return results


def run_pairs_on_processes(
    pairs: Sequence[Pair], tensors: Tensors | None = None, seed: int = 0
) -> list[Result]:
    """Run checks in a row on a group of processes; a failure costs a new group."""
    results: list[Result] = []
    remaining = list(pairs)
    while remaining:
        if sum(bool(result.error) for result in results) >= MAX_FAILURES:
            text = f"not run: {MAX_FAILURES} checks failed before"
            return results + [Result(name, str(case), text) for case, name in remaining]
        outcomes = process_outcomes(NUM_RANKS, run_pairs, remaining, tensors, seed, timeout_s=300.0)
        merged = _merge([outcome.value or [] for outcome in outcomes], remaining)
        died = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
        if died:
            if merged and merged[-1].error:
                merged.pop()
            case, name = remaining[len(merged)]
            merged.append(Result(name, str(case), "\n".join(died)))
        results += merged
        remaining = remaining[len(merged) :]
    return results


def run_case_on_processes(
    case: Case, names: Sequence[str], tensors: Tensors | None = None, seed: int = 0
) -> list[Result]:
    """Run checks of one case on a group of processes."""
    return run_pairs_on_processes([(case, name) for name in names], tensors, seed)


def conformance(
    where: str | fanfold.Communicator = "threads",
    *,
    strategies: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    tensors: Tensors | None = None,
    seed: int = 0,
) -> Report:
    """Run the suite and return what held and what did not.

    Args:
        where: "threads" or "processes" start the ranks here. A `Communicator` runs this rank's
            side on it; then every rank of it calls this with equal arguments, and a failure ends
            the run, since the ranks are no longer in step.
        strategies, layouts, checks: which ones; default all. `fanfold.testing.CHECKS` lists them.
        tensors: how tensors are made, and so on which device rows move; default NumPy, on the CPU.
            For a GPU: `fanfold.interop_torch.CudaTensors`; `SimulatedTensors` for the simulated
            device. Left out there are strategies and layouts that a GPU has not, and the checks
            `token_counts_that_the_caller_knows_are_verified` (not an argument there) and
            `a_result_is_made_when_none_is_given` (made for torch tensors only).
        seed: of all random inputs; equal on all ranks.

    Returns:
        A report; `report.raise_failures()` raises AssertionError if a check failed.
    """
    report = Report()
    device = "cpu" if tensors is None else tensors.device
    for case in all_cases(strategies, layouts, device):
        names = [check.name for check in checks_for(case, checks, device)]
        if where == "threads":
            report.results += run_case_on_threads(case, names, tensors, seed)
        elif where == "processes":
            report.results += run_case_on_processes(case, names, tensors, seed)
        elif isinstance(where, fanfold.Communicator):
            report.results += run_pairs(where, [(case, name) for name in names], tensors, seed)
            if report.failures:
                break
        else:
            raise fanfold.InvalidArgument(
                f"where: expected 'threads', 'processes' or a Communicator, got {where!r}"
            )
    return report
