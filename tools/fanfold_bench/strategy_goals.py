# SPDX-License-Identifier: Apache-2.0
"""What the strategies must reach against each other and against the gloo schemes they replace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fanfold_bench.acceptance import FAIL, MISSING, NOISY, PASS, Line

DECODE: Final = 128  # tokens per rank up to which a shape counts as decode
Result = Mapping[str, Any]


@dataclass(frozen=True)
class StrategyGoal:
    """``measure(of, than)`` of two contenders' entries must be at least (or most) ``limit``.

    Of several contenders in ``of`` the fastest one counts.
    """

    of: str | tuple[str, ...]
    than: str
    what: str
    limit: float
    applies: Callable[[Result], bool]
    measure: Callable[[Result, Result], float]
    at_most: bool = False


def _times_faster(of: Result, than: Result) -> float:
    return float(than["round_us"]["p50"] / of["round_us"]["p50"])


def _rows_per_second(of: Result, than: Result) -> float:
    return of["rows"] / than["rows"] * _times_faster(of, than)


def _bytes_moved(of: Result, than: Result) -> float:
    return float(sum(of["wire_bytes"]) / sum(than["wire_bytes"]))


def _is_decode(result: Result) -> bool:
    return bool(result["tokens"] <= DECODE)


def _is_prefill(result: Result) -> bool:
    return not _is_decode(result)


def _is(tokens: int, hidden: int) -> Callable[[Result], bool]:
    return lambda result: (result["tokens"], result["hidden"]) == (tokens, hidden)


_RANK_MAJOR: Final = "fanfold_one_sided.rank_major"
_EXPERT_MAJOR: Final = "fanfold_one_sided.expert_major"
_EITHER: Final = (_EXPERT_MAJOR, "fanfold_low_latency.expert_major")
_PACKED: Final = "fanfold_low_latency.expert_major.fp8"
_FLAT: Final = "fanfold_high_throughput.flat"
_BY_EXPERT: Final = "fanfold_high_throughput.flat_by_expert"
_FASTER: Final = "times as fast as"
_ROWS: Final = "of the rows per second of"

GOALS: Final = (
    StrategyGoal(_EITHER, "gloo_batched", _FASTER, 40, _is(32, 2048), _times_faster),
    StrategyGoal(_EITHER, "gloo_batched", _FASTER, 12, _is_prefill, _times_faster),
    StrategyGoal(
        "fanfold_batched.expert_major", "gloo_batched", _FASTER, 10, lambda _: True, _times_faster
    ),
    StrategyGoal(
        "fanfold_gather_scatter.gathered", "gloo_agrs", _FASTER, 5, _is_decode, _times_faster
    ),
    StrategyGoal("fanfold_broadcast.gathered", "gloo_naive", _FASTER, 5, _is_decode, _times_faster),
    StrategyGoal(_FLAT, _RANK_MAJOR, _ROWS, 0.9, _is_prefill, _rows_per_second),
    StrategyGoal(_BY_EXPERT, _RANK_MAJOR, _ROWS, 0.6, _is_prefill, _rows_per_second),
    StrategyGoal(
        _PACKED, _EXPERT_MAJOR, "of the bytes of", 0.55, _is(128, 7168), _bytes_moved, at_most=True
    ),
    StrategyGoal(_PACKED, _EXPERT_MAJOR, _FASTER, 1.0, _is(128, 7168), _times_faster),
)


def judge(results: Sequence[Result], slack: float = 1.0) -> list[Line]:
    """Lines for every result and goal that fit; a noisy run passes nothing and fails nothing."""
    lines = []
    for result in results:
        entries = result["baselines"]
        for goal in GOALS:
            named = (goal.of,) if isinstance(goal.of, str) else goal.of
            there = [name for name in named if name in entries]
            if there and goal.applies(result):
                fastest = min(there, key=lambda name: _round_us(entries[name]))
                lines.append(_line(result, goal, fastest, slack))
    return lines


def _round_us(entry: Result) -> float:
    return float(entry["round_us"]["p50"]) if "rounds" in entry else math.inf


def _line(result: Result, goal: StrategyGoal, name: str, slack: float) -> Line:
    of, than = result["baselines"][name], result["baselines"].get(goal.than, {})
    what = f"{name.removeprefix('fanfold_')} {goal.what} {goal.than.removeprefix('fanfold_')}"
    limit = goal.limit * slack if goal.at_most else goal.limit / slack
    wanted = f"{'<=' if goal.at_most else '>='} {limit:.3g}"
    missing = [
        entry.get("skipped", "not measured") for entry in (of, than) if "rounds" not in entry
    ]
    if missing:
        return Line(result["case"], what, wanted, missing[0], MISSING)
    got = goal.measure(of, than)
    good = got <= limit if goal.at_most else got >= limit
    noisy = of["noisy"] or than["noisy"]
    verdict = NOISY if noisy else (PASS if good else FAIL)
    return Line(result["case"], what, wanted, f"{got:.3g}", verdict)
