# SPDX-License-Identifier: Apache-2.0
"""The JSON that a run leaves: what it holds and how it is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fanfold_bench.cases import BEST, BEST_OF, NONE, Case
from fanfold_bench.stats import Record, Timing, regime

if TYPE_CHECKING:
    from fanfold_bench.measure import FloorRecord

SCHEMA: Final = 1
PHASES: Final = ("dispatch_us", "combine_us", "round_us")
QUANTILES: Final = ("p10", "p50", "p90")
Json = dict[str, Any]


def _phases(timing: Timing) -> Json:
    return {
        "dispatch_us": timing.dispatch.to_json(),
        "combine_us": timing.combine.to_json(),
        "round_us": timing.round.to_json(),
    }


def baseline_result(
    record: Record, wire_bytes: tuple[int, int], flags: Sequence[float] = ()
) -> Json:
    """What one contender took.

    ``wire_bytes`` is for one rank, dispatch and combine; ``flags`` are latencies before and after.
    """
    timing = record.timing()
    return {
        **_phases(timing),
        "rounds": timing.rounds,
        "rounds_all": timing.rounds_all,
        "wire_bytes": list(wire_bytes),
        "foreign_load": round(timing.foreign, 3),
        "noisy": timing.noisy,
        "flag_ns": [round(flag, 1) for flag in flags],
        "regime": regime(flags),
    }


def floor_result(record: FloorRecord, ours: Mapping[str, Any] | None) -> Json:
    """The floor with the kind of store whose dispatch is fastest, and Fanfold's share of it.

    ``contiguous`` is the same without the kind that goes round the destinations in small pieces:
    one copy per destination, which is what the goals are stated in.
    """
    timings = {kind: part.timing() for kind, part in record.by_kind.items()}
    by_speed = sorted(timings, key=lambda kind: timings[kind].dispatch.p50)
    best = by_speed[0]
    contiguous = next(kind for kind in by_speed if kind != "interleaved")
    return {
        **_phases(timings[best]),
        "store": best,
        "fractions": _fractions(_phases(timings[best]), ours),
        "contiguous": {
            "store": contiguous,
            "fractions": _fractions(_phases(timings[contiguous]), ours),
        },
        "huge_pages": record.huge_pages,
        "rounds": timings[best].rounds,
        "by_store": {kind: _phases(timing) for kind, timing in timings.items()},
    }


def _fractions(floor: Json, ours: Mapping[str, Any] | None) -> Json:
    """Floor / Fanfold by phase, of medians; None without Fanfold."""
    shares: Json = {}
    for phase in PHASES:
        name = phase.removesuffix("_us")
        shares[name] = None
        if ours is not None:
            shares[name] = round(floor[phase]["p50"] / max(ours[phase]["p50"], 1e-9), 4)
    return shares


def case_result(
    case: Case,
    bytes_moved: Mapping[str, int],
    ours: Record,
    floors: FloorRecord,
    baselines: Mapping[str, Json],
) -> Json:
    """One case, without what :func:`finish` adds."""
    measured = baseline_result(ours, (0, 0)) if ours.blocks else None
    reference = next(iter(floors.by_kind.values())).timing()
    floor = floor_result(floors, measured)
    phases: Json = {phase: measured[phase] if measured else None for phase in PHASES}
    flags = floors.flags
    return {
        "case": case.name,
        **case.to_json(),
        **phases,
        "rounds": measured["rounds"] if measured else 0,
        "rounds_all": measured["rounds_all"] if measured else 0,
        "bytes": bytes_moved["dispatch"] + bytes_moved["combine"],
        "bytes_by_phase": dict(bytes_moved),
        "floor_us": floor["round_us"]["p50"],
        "floor_fraction": floor["fractions"]["round"],
        "floor": floor,
        "flag_ns": {
            "before": round(flags[0], 1) if flags else None,
            "after": round(flags[-1], 1) if flags else None,
            "all": [round(flag, 1) for flag in flags],
        },
        "regime": regime(flags),
        "foreign_load": round(reference.foreign, 3),
        "noisy": bool(measured["noisy"] if measured else reference.noisy),
        "baselines": dict(baselines),
    }


def finish(result: Json, against: Sequence[str]) -> Json:
    """Add ratios: baseline round / Fanfold round, of medians.

    ``against`` names what is reported; its first entry gives the case's own ``ratio``.
    ``gloo_best`` becomes a copy of the fastest of the schemes it stands for.
    """
    baselines: Json = result["baselines"]
    ours = result["round_us"]
    for entry in baselines.values():
        ran = "skipped" not in entry and ours is not None
        entry["ratio"] = round(entry["round_us"]["p50"] / ours["p50"], 3) if ran else None
    if BEST in against:
        ran_names = [n for n in BEST_OF if n in baselines and "skipped" not in baselines[n]]
        if ran_names:
            best = min(ran_names, key=lambda name: baselines[name]["round_us"]["p50"])
            baselines[BEST] = {**baselines[best], "of": best}
        else:
            baselines[BEST] = {"skipped": "none of the schemes ran", "ratio": None}
    first = against[0] if against else NONE
    result["against"] = first
    result["ratio"] = baselines[first]["ratio"] if first in baselines else None
    return result


def document(run: Mapping[str, Any], cases: Sequence[Json]) -> Json:
    """The whole file: facts of the run and its cases; a single case also lies at the top."""
    doc: Json = {"schema": SCHEMA, **run, "cases": list(cases)}
    if len(cases) == 1:
        doc.update({key: value for key, value in cases[0].items() if key not in doc})
    return doc


def problems(doc: Mapping[str, Any]) -> list[str]:
    """What is wrong with a document; empty when it is as described here."""
    wrong = [
        f"{key} is missing"
        for key in ("machine", "commit", "command", "date", "notes")
        if key not in doc
    ]
    if doc.get("schema") != SCHEMA:
        wrong.append(f"schema must be {SCHEMA}, got {doc.get('schema')}")
    cases = doc.get("cases")
    if not isinstance(cases, list) or not cases:
        return [*wrong, "cases must be a non-empty list"]
    for index, case in enumerate(cases):
        wrong += [f"cases[{index}]: {text}" for text in _case_problems(case)]
    if len(cases) == 1:
        wrong += [f"top: {key} is missing" for key in cases[0] if key not in doc]
    return wrong


def _case_problems(case: Mapping[str, Any]) -> list[str]:
    wrong = []
    measured = case.get("strategy") != NONE
    for phase in PHASES:
        value = case.get(phase)
        if value is None and not measured:
            continue
        wrong += _quantile_problems(phase, value)
    numbers = ("bytes", "floor_us", "foreign_load", *(("floor_fraction",) if measured else ()))
    for key in numbers:
        if not isinstance(case.get(key), int | float):
            wrong.append(f"{key} must be a number, got {case.get(key)!r}")
    for key in ("against", "ratio", "regime", "noisy", "flag_ns", "sched"):
        if key not in case:
            wrong.append(f"{key} is missing")
    for name, entry in case.get("baselines", {}).items():
        if "skipped" not in entry:
            for phase in PHASES:
                wrong += _quantile_problems(f"{name}.{phase}", entry.get(phase))
    return wrong


def _quantile_problems(name: str, value: object) -> list[str]:
    if not isinstance(value, dict) or any(q not in value for q in QUANTILES):
        return [f"{name} must have {', '.join(QUANTILES)}, got {value!r}"]
    low, middle, high = (value[q] for q in QUANTILES)
    return [] if 0 < low <= middle <= high else [f"{name} is not in order: {value}"]
