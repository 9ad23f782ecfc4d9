# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: who sent to whom, and how loaded each expert was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from moe_model.exchanges import linear_placement
from moe_model.report import Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

INK = "#22262e"
MUTED = "#6b7280"


def label_cells(axes: Axes, image: AxesImage, texts: list[list[str]]) -> None:
    """Write a text into every cell, light on dark cells and dark on light ones."""
    colours = image.to_rgba(numpy.asarray(image.get_array()))
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            light = float(numpy.dot(colours[row, column, :3], (0.299, 0.587, 0.114)))
            ink = INK if light > 0.55 else "white"
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)


def clean(axes: Axes, shape: tuple[int, ...]) -> None:
    """Take the frame away and separate the cells by white lines."""
    axes.tick_params(length=0, labelsize=9, colors=MUTED, which="both")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xticks(numpy.arange(shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(numpy.arange(shape[0] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)


def draw_traffic(axes: Axes, found: Findings) -> None:
    """Draw the rows that went from rank to rank."""
    rows, both_ways = found.rows, sum(found.row_bytes)
    image = axes.imshow(rows, cmap="BuPu", vmin=0, vmax=rows.max() * 1.15, aspect="equal")
    texts = [[f"{n:,}\n{n * both_ways / 1e6:.1f} MB" for n in line] for line in rows.tolist()]
    label_cells(axes, image, texts)
    axes.set_xticks(range(found.num_ranks), [f"rank {r}" for r in range(found.num_ranks)])
    axes.set_yticks(range(found.num_ranks), [f"rank {r}" for r in range(found.num_ranks)])
    axes.set_xlabel("to the rank of the experts", color=INK)
    axes.set_ylabel("from the rank of the tokens", color=INK)
    axes.set_title(
        "Rows and bytes sent, there and back, all layers",
        loc="left", color=INK, fontsize=11, pad=12,
    )  # fmt: skip
    clean(axes, rows.shape)


def draw_load(axes: Axes, found: Findings) -> None:
    """Draw the load of every expert of every layer over the layer's mean."""
    share = found.load / numpy.maximum(found.load.mean(1, keepdims=True), 1e-9)
    image = axes.imshow(share, cmap="RdBu_r", vmin=0.0, vmax=2.0, aspect="auto")
    label_cells(axes, image, [[f"{value:.2f}" for value in line] for line in share.tolist()])
    owners = linear_placement(found.config.num_experts, found.num_ranks)
    axes.set_xticks(range(len(owners)), [str(expert) for expert in range(len(owners))])
    axes.set_yticks(range(len(share)), [f"layer {layer}" for layer in range(len(share))])
    axes.set_title(
        "Load of each expert (1.00 is the layer's mean)",
        loc="left", color=INK, fontsize=11, pad=12,
    )  # fmt: skip
    clean(axes, share.shape)
    for rank in sorted(set(owners)):
        first, count = owners.index(rank), owners.count(rank)
        middle = first + (count - 1) / 2
        axes.annotate(
            f"rank {rank}",
            (middle, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -30),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=INK,
        )
        if first:
            axes.axvline(first - 0.5, color=INK, linewidth=1.5)
    axes.set_xlabel("expert, by the rank that holds it", color=INK, labelpad=24)


def draw(found: Findings, path: Path) -> None:
    """Write the picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.5, 4.8), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.1)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.4))
    draw_traffic(left, found)
    draw_load(right, found)
    figure.suptitle(
        f"{found.single.num_tokens:,} tokens, {found.config.num_layers} layers, "
        f"{found.config.num_experts} experts over {found.num_ranks} ranks, "
        f"top {found.config.top_k}",
        x=0.01,
        ha="left",
        color=INK,
        fontsize=13,
        fontweight="bold",
    )
    figure.savefig(path, format="png")
