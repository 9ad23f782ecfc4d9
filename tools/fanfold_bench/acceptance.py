# SPDX-License-Identifier: Apache-2.0
"""The goals that Fanfold must reach on a CPU, and the verdict on a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fanfold_bench.cases import BEST

BATCHED: Final = "gloo_batched"
PASS, FAIL, NOISY, MISSING = "pass", "FAIL", "noisy", "missing"

# A wait that sleeps past its wake-up lasts a scheduler tick, 4 ms at 250 Hz.
TICK_FREE_US: Final = 2000.0


@dataclass(frozen=True)
class Goal:
    """What one case must reach; fields left None are not judged.

    ``floor_dispatch`` and ``floor_combine`` are fractions of the floor of the same run, made of
    one contiguous copy per destination; ``floor_combine_far`` holds where the two cores do not
    share a cache.
    """

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    over_batched: float
    over_best: float
    round_us: float | None = None
    p90_us: float | None = None
    floor_dispatch: float | None = None
    floor_combine: float | None = None
    floor_combine_far: float | None = None


GOALS: Final = (
    Goal(2, 1, 2048, 8, over_batched=80, over_best=45, round_us=12),
    Goal(2, 32, 2048, 8, 100, 25, 30, None, 0.80, 0.80, 0.50),
    Goal(2, 32, 7168, 8, 200, 20, 70, None, 0.80, 0.80, 0.50),
    Goal(2, 4096, 2048, 8, 150, 6, None, None, 0.85, 0.85, 0.85),
    Goal(4, 32, 2048, 8, 50, 15, p90_us=TICK_FREE_US),
)


@dataclass(frozen=True)
class Line:
    """One goal of one case against what was measured."""

    case: str
    what: str
    goal: str
    got: str
    verdict: str


def find_goal(result: Mapping[str, Any]) -> Goal | None:
    """The goal that a result is judged by; only one_sided, rank_major, bfloat16 has goals."""
    kind = (result["strategy"], result["layout"], result["dtype"])
    if kind != ("one_sided", "rank_major", "bfloat16"):
        return None
    shape = tuple(result[key] for key in ("ranks", "tokens", "hidden", "top_k"))
    return next((g for g in GOALS if (g.ranks, g.tokens, g.hidden, g.top_k) == shape), None)


def judge(result: Mapping[str, Any], slack: float = 1.0) -> list[Line]:
    """Lines for one result; empty when it has no goal.

    ``slack`` loosens every goal by this factor. A noisy run passes nothing and fails nothing.
    """
    goal = find_goal(result)
    if goal is None:
        return []
    lines = [
        _ratio(result, BATCHED, goal.over_batched / slack),
        _ratio(result, BEST, goal.over_best / slack),
    ]
    if goal.round_us is not None:
        lines.append(_time(result, "round p50", result["round_us"]["p50"], goal.round_us * slack))
    if goal.p90_us is not None:
        for phase in ("dispatch", "combine"):
            took = result[f"{phase}_us"]["p90"]
            lines.append(_time(result, f"{phase} p90", took, goal.p90_us))
    far = result["regime"] in ("FAR", "MIXED")
    combine = goal.floor_combine_far if far else goal.floor_combine
    for phase, wanted in (("dispatch", goal.floor_dispatch), ("combine", combine)):
        if wanted is not None:
            got = result["floor"]["contiguous"]["fractions"][phase]
            name = (
                f"{phase}, of contiguous copies"
                if phase == "dispatch"
                else f"{phase}, of floor" + (f" ({result['regime']})" if far else "")
            )
            lines.append(_fraction(result, name, got, wanted / slack))
    return lines


def _verdict(result: Mapping[str, Any], good: bool, noisy: bool = False) -> str:
    if result["noisy"] or noisy:
        return NOISY
    return PASS if good else FAIL


def _ratio(result: Mapping[str, Any], name: str, wanted: float) -> Line:
    entry = result["baselines"].get(name, {})
    goal = f">= {wanted:.3g}x"
    if entry.get("ratio") is None:
        return Line(result["case"], f"against {name}", goal, entry.get("skipped", "-"), MISSING)
    verdict = _verdict(result, entry["ratio"] >= wanted, entry["noisy"])
    return Line(result["case"], f"against {name}", goal, f"{entry['ratio']:.1f}x", verdict)


def _time(result: Mapping[str, Any], what: str, took: float, limit: float) -> Line:
    verdict = _verdict(result, took <= limit)
    return Line(result["case"], what, f"<= {limit:.4g} us", f"{took:.1f} us", verdict)


def _fraction(result: Mapping[str, Any], what: str, got: float, wanted: float) -> Line:
    verdict = _verdict(result, got >= wanted)
    return Line(result["case"], what, f">= {wanted:.0%}", f"{got:.0%}", verdict)


def judge_all(results: Sequence[Mapping[str, Any]], slack: float = 1.0) -> list[Line]:
    """Lines for every result that has a goal."""
    return [line for result in results for line in judge(result, slack)]


def exit_status(lines: Sequence[Line]) -> int:
    """0 when all goals are met, 1 when one is missed, 3 when no verdict is possible."""
    verdicts = {line.verdict for line in lines}
    if FAIL in verdicts:
        return 1
    return 0 if verdicts == {PASS} else 3
