# SPDX-License-Identifier: Apache-2.0
"""A picture for choosing: time of a round against tokens per rank, one line per strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fanfold_bench.cases import BEST, OURS

Point = tuple[int, float]
Series = dict[str, list[Point]]
Shape = tuple[int, int, int]  # ranks, hidden, top_k


def series_by_shape(results: Sequence[Mapping[str, Any]]) -> dict[Shape, Series]:
    """Medians of the round by tokens, for each shape and contender, in microseconds."""
    shapes: dict[Shape, Series] = {}
    for result in results:
        series = shapes.setdefault((result["ranks"], result["hidden"], result["top_k"]), {})
        for name, entry in result["baselines"].items():
            if (name.startswith(OURS) or name == BEST) and "skipped" not in entry:
                point = (result["tokens"], entry["round_us"]["p50"])
                series.setdefault(name, []).append(point)
    compared = {
        shape: series
        for shape, series in shapes.items()
        if any(name.startswith(OURS) for name in series)
    }
    # A shape with one number of tokens has no line to draw; kept only if there is no other.
    lines = {
        shape: series
        for shape, series in compared.items()
        if max(len(points) for points in series.values()) > 1
    }
    return lines or compared


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        ValueError: the document compares no strategies.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = series_by_shape(document["cases"])
    if not shapes:
        raise ValueError("--plot needs results of --against strategies")
    figure, grid = pyplot.subplots(
        1, len(shapes), figsize=(5 * len(shapes) + 3, 5), squeeze=False, layout="constrained"
    )
    names = sorted({name for series in shapes.values() for name in series})
    colours = {name: f"C{index % 10}" for index, name in enumerate(names)}
    lines = {}
    for axes, ((ranks, hidden, top_k), series) in zip(grid[0], sorted(shapes.items()), strict=True):
        for name, points in sorted(series.items()):
            tokens, times = zip(*sorted(points), strict=True)
            (lines[name],) = axes.plot(
                tokens,
                times,
                color="black" if name == BEST else colours[name],
                linestyle=":" if name == BEST else "-",
                marker="o",
                markersize=3,
            )
        axes.set_title(f"{ranks} ranks, hidden {hidden}, top-{top_k}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens per rank")
        axes.grid(visible=True, which="major", alpha=0.3)
    grid[0][0].set_ylabel("dispatch + combine, µs (median)")
    labels = {name: name.removeprefix(OURS).replace(".", ", ") for name in lines}
    figure.legend(lines.values(), labels.values(), loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
