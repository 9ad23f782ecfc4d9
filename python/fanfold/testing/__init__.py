# SPDX-License-Identifier: Apache-2.0
"""For tests of the library and of programs that use it; needs NumPy."""

from fanfold.testing.conformance import (
    Report,
    Result,
    checks_for,
    conformance,
    run_case_on_processes,
    run_case_on_threads,
    run_check,
    run_pairs_on_processes,
)
from fanfold.testing.harness import Harness, NumpyTensors, Tensors
from fanfold.testing.oracle import Expected, OracleRound, oracle
from fanfold.testing.simulated import SimulatedTensors
from fanfold.testing.spawn import (
    Outcome,
    RankEnded,
    process_outcomes,
    spawn_processes,
    spawn_threads,
    thread_outcomes,
)
from fanfold.testing.suite import CHECKS, Check
from fanfold.testing.trials import Case, PayloadKind, Setup, Trial, all_cases, draw_trial

__all__ = [
    "CHECKS",
    "Case",
    "Check",
    "Expected",
    "Harness",
    "NumpyTensors",
    "OracleRound",
    "Outcome",
    "PayloadKind",
    "RankEnded",
    "Report",
    "Result",
    "Setup",
    "SimulatedTensors",
    "Tensors",
    "Trial",
    "all_cases",
    "checks_for",
    "conformance",
    "draw_trial",
    "oracle",
    "process_outcomes",
    "run_case_on_processes",
    "run_case_on_threads",
    "run_check",
    "run_pairs_on_processes",
    "spawn_processes",
    "spawn_threads",
    "thread_outcomes",
]
