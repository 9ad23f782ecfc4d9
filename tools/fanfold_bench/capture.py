# SPDX-License-Identifier: Apache-2.0
"""What recording costs: ``RoutingCapture.record`` of one layer against a copy of the ids it reads.

Both take turns in one process on one thread, each on another of many layers, so that neither finds
its input in a near cache. The copy reads and writes as many bytes as ``record`` reads; ``record``
writes fewer where cells are narrower than ids. Of both the call from Python is timed, and apart
from that what the call alone takes: that of a single row.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table

from fanfold import RoutingCapture
from fanfold_bench.acceptance import FAIL, PASS, Line
from fanfold_bench.machine import commit, describe
from fanfold_bench.report import GOALS, microseconds, spread
from fanfold_bench.stats import Nanoseconds, quantiles

GOAL: Final = 1.10  # times as long as the copy, by the median
EXPERTS: Final = 128
KINDS: Final = (
    ("int32", "auto"),
    ("int64", "auto"),
    ("int16", "auto"),
    ("int32", "int32"),
    ("int16", "int16"),
)  # ids and cells; there are no cells of 8 bytes


@dataclass(frozen=True)
class Shape:
    """``layers`` layers of ``tokens`` x ``top_k`` ids, recorded ``steps`` times."""

    tokens: int = 4096
    top_k: int = 8
    layers: int = 48
    steps: int = 40


COLUMNS: Final = (
    "case",
    "KiB read",
    "record us",
    "copy us",
    "call us",
    "of copy",
    "ratio",
    "of turns",
    "without calls",
)
SMOKE: Final = Shape(tokens=64, layers=4, steps=3)


def measure_kind(ids: str, cells: str, shape: Shape) -> dict[str, Any]:
    """Time both for one type of ids and of cells."""
    generator = np.random.default_rng(1)
    size = (shape.layers, shape.tokens, shape.top_k)
    layers = generator.integers(0, EXPERTS, size).astype(ids)
    capture = RoutingCapture(
        num_layers=shape.layers,
        num_experts=EXPERTS,
        top_k=shape.top_k,
        max_tokens=shape.tokens,
        dtype=cells,
    )
    record_call, copy_call = _take_turns(capture, layers[:, :1], shape.steps)
    recorded, copied = _take_turns(capture, layers, shape.steps)
    with capture.snapshot(shape.tokens) as snapshot:
        if not np.array_equal(snapshot.array, layers.transpose(1, 0, 2)):
            raise RuntimeError(f"{ids} ids: what was recorded is not what was given")
        stored = str(snapshot.dtype)
    record_us, copy_us = quantiles(recorded), quantiles(copied)
    record_call_us, copy_call_us = quantiles(record_call).p50, quantiles(copy_call).p50
    work_us = record_us.p50 - record_call_us, copy_us.p50 - copy_call_us
    return {
        "case": f"{shape.tokens} x {shape.top_k} {ids} into {stored}",
        "bytes_read": layers[0].nbytes,
        "record_us": record_us.to_json(),
        "copy_us": copy_us.to_json(),
        "record_call_us": round(record_call_us, 3),
        "copy_call_us": round(copy_call_us, 3),
        "ratio": round(record_us.p50 / copy_us.p50, 3),
        "ratio_of_turns": round(float(np.median(recorded / copied)), 3),
        "ratio_without_calls": round(work_us[0] / work_us[1], 3) if min(work_us) > 0 else None,
    }


def _take_turns(
    capture: RoutingCapture, layers: npt.NDArray[Any], steps: int
) -> tuple[Nanoseconds, Nanoseconds]:
    """The times of every record, and of the copy after it."""
    copies = np.zeros_like(layers)
    half = len(layers) // 2
    now, record, copy = time.perf_counter_ns, capture.record, np.copyto
    recorded, copied = [], []
    for step in range(steps + 1):
        capture.begin_step(step)
        for layer, (source, target) in enumerate(zip(layers, copies, strict=True)):
            other = layers[layer - half]  # which record has not just brought near
            began = now()
            record(layer, source)
            between = now()
            copy(target, other)
            ended = now()
            if step > 0:  # the first one touches memory for the first time
                recorded.append(between - began)
                copied.append(ended - between)
    return np.array(recorded), np.array(copied)


def measure(command: str, shape: Shape) -> dict[str, Any]:
    """Time all kinds and return the document."""
    return {
        "machine": describe(),
        "commit": commit(),
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "captures": [measure_kind(ids, cells, shape) for ids, cells in KINDS],
    }


def judge(results: Sequence[Mapping[str, Any]], slack: float) -> list[Line]:
    """The goal for each kind."""
    limit = GOAL * slack
    return [
        Line(
            each["case"],
            "record, of a copy",
            f"<= {limit:.2f}",
            f"{each['ratio']:.2f}",
            PASS if each["ratio"] <= limit else FAIL,
        )
        for each in results
    ]


def show(console: Console, results: Sequence[Mapping[str, Any]], lines: Sequence[Line]) -> None:
    """Print the figures, and the verdicts where there are some."""
    table = Table(*COLUMNS, box=box.SIMPLE)
    for each in results:
        times = spread(each["record_us"]), spread(each["copy_us"])
        read = f"{each['bytes_read'] / 1024:.0f}"
        calls = microseconds(each["record_call_us"]), microseconds(each["copy_call_us"])
        ratios = each["ratio"], each["ratio_of_turns"], each["ratio_without_calls"]
        table.add_row(each["case"], read, *times, *calls, *map(str, ratios))
    console.print(table)
    if lines:
        verdicts = Table(*GOALS, box=box.SIMPLE)
        for line in lines:
            verdicts.add_row(line.case, line.what, line.goal, line.got, line.verdict)
        console.print(verdicts)
