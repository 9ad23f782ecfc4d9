# SPDX-License-Identifier: Apache-2.0
"""Results for people: tables in the terminal and a Markdown file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fanfold_bench.acceptance import FAIL, PASS, Line
from fanfold_bench.cases import NONE

Result = Mapping[str, Any]
Rows = list[list[str]]

OURS = ["case", "phase", "us", "floor us", "of floor", "MB", "flag ns", "foreign"]
THEIRS = [
    "case",
    "compared with",
    "dispatch us",
    "combine us",
    "round us",
    "ratio",
    "sent MB",
    "held MB",
    "cores",
    "foreign",
]
GOALS = ["case", "goal", "wanted", "measured", "verdict"]
LEFT = ("case", "phase", "compared with", "goal")
PHASES = ("dispatch", "combine", "round")
NOISY_TEXT = "noisy: too few rounds during which others left the cores alone; no verdict is given"


def microseconds(value: float) -> str:
    """Three significant digits; thousands unabbreviated."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(quantiles: Mapping[str, float] | None) -> str:
    """p50 with p10 and p90 behind it."""
    if quantiles is None:
        return "-"
    p10, p50, p90 = (microseconds(quantiles[q]) for q in ("p10", "p50", "p90"))
    return f"{p50} ({p10}..{p90})"


def _subject(results: Sequence[Result]) -> str:
    """What was measured; strategy and layout are the same in all cases of a run."""
    first = results[0]
    if first["strategy"] == NONE:
        return "The floor of this machine"
    return f"Fanfold {first['strategy']}, {first['layout']}, and the floor of this machine"


def _flags(result: Result) -> str:
    flag = result["flag_ns"]
    if flag["before"] is None:
        return "-"
    return f"{flag['before']:.0f} / {flag['after']:.0f} {result['regime']}"


def our_rows(results: Sequence[Result]) -> Rows:
    """Three rows per case: Fanfold and the floor by phase, and the round with its conditions."""
    rows = []
    for result in results:
        floor, moved = result["floor"], result["bytes_by_phase"]
        load = f"{result['foreign_load']:.2f}" + (" noisy" if result["noisy"] else "")
        size = {**moved, "round": result["bytes"]}
        for phase in PHASES:
            fraction = floor["fractions"][phase]
            last = phase == "round"
            rows.append(
                [
                    result["case"],
                    phase,
                    spread(result[f"{phase}_us"]),
                    spread(floor[f"{phase}_us"]),
                    "-" if fraction is None else f"{fraction:.0%}",
                    f"{size[phase] / 1e6:.3g}",
                    _flags(result) if last else "",
                    load if last else "",
                ]
            )
    return rows


def their_rows(results: Sequence[Result]) -> Rows:
    """One row per case and baseline."""
    rows = []
    for result in results:
        for name, entry in result["baselines"].items():
            head = [result["case"], f"{name} = {entry['of']}" if "of" in entry else name]
            if "skipped" in entry:
                rows.append([*head, "-", "-", f"skipped: {entry['skipped']}", *["-"] * 5])
                continue
            noisy = " noisy" if entry["noisy"] else ""
            rows.append(
                [
                    *head,
                    microseconds(entry["dispatch_us"]["p50"]),
                    microseconds(entry["combine_us"]["p50"]),
                    spread(entry["round_us"]),
                    "-" if entry["ratio"] is None else f"{entry['ratio']:.1f}x",
                    f"{sum(entry['wire_bytes']) / 1e6:.3g}",
                    f"{entry['memory_bytes'] / 1e6:.3g}" if "memory_bytes" in entry else "-",
                    entry["regime"],
                    f"{entry['foreign_load']:.2f}{noisy}",
                ]
            )
    return rows


def _goal_rows(lines: Sequence[Line]) -> Rows:
    return [[line.case, line.what, line.goal, line.got, line.verdict] for line in lines]


def _without_repeats(rows: Rows) -> Rows:
    """The case is named once, at its first row."""
    return [["", *row[1:]] if i and row[0] == rows[i - 1][0] else row for i, row in enumerate(rows)]


def _table(title: str, head: list[str], rows: Rows) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in head:
        table.add_column(name, justify="left" if name in LEFT else "right")
    for row in _without_repeats(rows):
        table.add_row(*row)
    return table


def show(console: Console, document: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Print everything a reader needs to judge the run."""
    machine = document["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"torch {machine['torch']}, commit {document['commit']}, {document['date']}",
        highlight=False,
    )
    for note in document["notes"]:
        console.print(f"note: {note}", highlight=False)
    results = document["cases"]
    console.print(_table(f"{_subject(results)}, p50 (p10..p90)", OURS, our_rows(results)))
    others = their_rows(results)
    if others:
        console.print(_table("Compared with", THEIRS, others))
    doubtful = [r["noisy"] or any(b.get("noisy") for b in r["baselines"].values()) for r in results]
    if any(doubtful):
        console.print(NOISY_TEXT, style="yellow")
    if lines:
        table = _table("Goals", GOALS, [])
        style = {PASS: "green", FAIL: "red"}
        for row in _without_repeats(_goal_rows(lines)):
            table.add_row(*row, style=style.get(row[-1], "yellow"))
        console.print(table)


def markdown(document: Mapping[str, Any], lines: Sequence[Line]) -> str:
    """The same as a Markdown file."""
    machine = document["machine"]
    text = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Written by tools/bench with the option markdown; do not edit. -->",
        "# Measured results",
        "",
        "A phase lasts from a start agreed by all ranks until the last rank is done; the expert",
        "step between dispatch and combine is not timed. Times are microseconds: median and, in",
        "brackets, tenth to ninetieth percentile. The floor copies equal bytes contiguously, lets",
        "all ranks meet and sums contiguous rows, in the same processes and the same minutes. NEAR",
        "and FAR say whether the two cores share a cache, judged by the latency of a flag.",
        "",
        f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, torch {machine['torch']}",
        f"- commit: `{document['commit']}`",
        f"- command: `{document['command']}`",
        f"- date: {document['date']}",
        *(f"- note: {note}" for note in document["notes"]),
        "",
        f"## {_subject(document['cases'])}",
        "",
        *_markdown_table(OURS, _without_repeats(our_rows(document["cases"]))),
    ]
    others = their_rows(document["cases"])
    if others:
        text += ["", "## Compared with", "", *_markdown_table(THEIRS, _without_repeats(others))]
    if lines:
        rows = _without_repeats(_goal_rows(lines))
        text += ["", "## Goals", "", *_markdown_table(GOALS, rows)]
    return "\n".join(text) + "\n"


def _markdown_table(head: list[str], rows: Rows) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
