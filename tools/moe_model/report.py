# SPDX-License-Identifier: Apache-2.0
"""What the demo found: numbers gathered from the ranks, and the tables that show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from moe_model.evaluate import Evaluation
from moe_model.exchanges import ID_BYTES, PHASES, WEIGHT_BYTES, linear_placement
from moe_model.model import ModelConfig
from moe_model.ranks import RankReport

LOSS_TOLERANCE = 1e-4  # nats, mean over the text
ACCURACY_TOLERANCE = 0.0005  # share of the bytes; one byte is always allowed
SCHEMES = {"fanfold": "Fanfold", "gloo": "gloo all-to-all"}
BAR_WIDTH = 12
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Findings:
    """The whole result of one run."""

    single: Evaluation
    loss: float
    gloo_loss: float
    num_correct: int
    rows: numpy.ndarray  # [source, destination] rows of one pass
    load: numpy.ndarray  # [layers, experts] pairs of one pass
    median_us: dict[str, dict[str, float]]
    config: ModelConfig

    @property
    def num_ranks(self) -> int:
        """How many ranks ran."""
        return len(self.rows)

    @property
    def loss_difference(self) -> float:
        """Expert-parallel loss against the single process, absolute."""
        return abs(self.loss - self.single.loss)

    @property
    def allowed_bytes(self) -> int:
        """How many predictions may be right in one run and wrong in the other, net."""
        return max(1, int(self.single.num_tokens * ACCURACY_TOLERANCE))

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one row on its way out (state, ids, weights) and back (state)."""
        state = self.config.hidden * 4
        return state + self.config.top_k * (ID_BYTES + WEIGHT_BYTES), state

    @property
    def speed_up(self) -> float:
        """Median time of gloo's exchange over Fanfold's: dispatch and combine."""
        exchange = {
            name: phases["dispatch"] + phases["combine"] for name, phases in self.median_us.items()
        }
        return exchange["gloo"] / exchange["fanfold"]

    def faults(self) -> list[str]:
        """Return a sentence per agreement that does not hold."""
        found = []
        for name, loss in (("Fanfold", self.loss), ("gloo", self.gloo_loss)):
            difference = abs(loss - self.single.loss)
            if not difference <= LOSS_TOLERANCE:  # so that NaN is a fault
                found.append(
                    f"the loss through {name} is {loss:.6f} nats and {self.single.loss:.6f} in a "
                    f"single process: they differ by {difference:.2e}, and {LOSS_TOLERANCE:.0e} is "
                    "allowed"
                )
        missed = abs(self.num_correct - self.single.num_correct)
        if missed > self.allowed_bytes:
            found.append(
                f"{self.num_correct} next bytes are right through Fanfold and "
                f"{self.single.num_correct} in a single process, of {self.single.num_tokens}: "
                f"the counts differ by {missed}, {self.allowed_bytes} is allowed"
            )
        expected = self.single.num_tokens * self.config.top_k
        for layer, pairs in enumerate(self.load.sum(1).tolist()):
            if pairs != expected:
                found.append(
                    f"layer {layer} has {expected} (token, expert) pairs and its experts received "
                    f"{pairs}"
                )
        return found

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        single_load = self.single.expert_load.numpy()
        return {
            "num_ranks": self.num_ranks,
            "num_tokens": self.single.num_tokens,
            "loss": self.loss,
            "single_process_loss": self.single.loss,
            "gloo_loss": self.gloo_loss,
            "loss_difference": self.loss_difference,
            "loss_tolerance": LOSS_TOLERANCE,
            "accuracy": self.num_correct / max(self.single.num_tokens, 1),
            "single_process_accuracy": self.single.accuracy,
            "accuracy_tolerance": self.allowed_bytes / max(self.single.num_tokens, 1),
            "pairs_routed_differently": int(numpy.abs(self.load - single_load).sum()) // 2,
            "rows": self.rows.tolist(),
            "bytes_per_row": dict(zip(("dispatch", "combine"), self.row_bytes, strict=True)),
            "expert_load": self.load.tolist(),
            "median_us": self.median_us,
            "gloo_over_fanfold": self.speed_up,
            "faults": self.faults(),
        }


def gather(reports: list[RankReport], single: Evaluation, config: ModelConfig) -> Findings:
    """Put the reports of all ranks together."""
    load = numpy.zeros((config.num_layers, config.num_experts), dtype=numpy.int64)
    for report in reports:
        load += report.load
    medians = {
        name: {
            phase: float(
                numpy.median(numpy.concatenate([r.microseconds[name][phase] for r in reports]))
            )
            for phase in PHASES
        }
        for name in SCHEMES
    }
    return Findings(
        single=single,
        loss=float(numpy.concatenate([r.losses for r in reports]).mean(dtype=numpy.float64)),
        gloo_loss=float(
            numpy.concatenate([r.gloo_losses for r in reports]).mean(dtype=numpy.float64)
        ),
        num_correct=int(sum(r.correct.sum() for r in reports)),
        rows=numpy.stack([r.rows_from for r in reports], axis=1),
        load=load,
        median_us=medians,
        config=config,
    )


def agreement_table(found: Findings) -> Table:
    """Show loss and accuracy beside the single process."""
    single, total = found.single, max(found.single.num_tokens, 1)
    table = Table(title="The same answer as one process", title_justify="left")
    for heading in ("", "one process", count_ranks(found.num_ranks), "difference", "allowed", ""):
        table.add_column(heading, justify="right" if heading else "left")
    missed = abs(found.num_correct - single.num_correct)
    lines = (
        ("loss, nats per byte", f"{single.loss:.6f}", f"{found.loss:.6f}",
         found.loss_difference, LOSS_TOLERANCE),
        ("next byte right", f"{single.accuracy:.3%}", f"{found.num_correct / total:.3%}",
         missed / total, found.allowed_bytes / total),
    )  # fmt: skip
    for name, alone, spread, difference, allowed in lines:
        good = difference <= allowed
        mark = Text("agrees" if good else "DIFFERS", style="bold green" if good else "bold red")
        table.add_row(name, alone, spread, f"{difference:.1e}", f"{allowed:.0e}", mark)
    return table


def traffic_table(found: Findings) -> Table:
    """Show how many rows and bytes each rank sent to each, out and back."""
    both_ways = sum(found.row_bytes)
    out, back = found.row_bytes
    table = Table(
        title="Who sent to whom (rows, bytes there and back)",
        caption=f"a row is {out} bytes out (state, ids, weights) and {back} back; a token travels "
        "once per rank, however many of its experts are there; dim: stays on its rank",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("from \\ to", justify="right")
    for rank in range(found.num_ranks):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("to others", justify="right")
    for source, row in enumerate(found.rows.tolist()):
        others = sum(row) - row[source]
        cells = [
            Text(f"{count:,}\n{megabytes(count * both_ways)}", style="dim" if same else "")
            for count, same in ((count, source == to) for to, count in enumerate(row))
        ]
        total = Text(f"{others:,}\n{megabytes(others * both_ways)}", style="bold")
        table.add_row(f"rank {source}", *cells, total)
    return table


def count_ranks(num_ranks: int) -> str:
    """Write a number of ranks in words that fit it."""
    return f"{num_ranks} rank" + ("s" if num_ranks != 1 else "")


def megabytes(count: int) -> str:
    """Write a byte count in MB."""
    return f"{count / 1e6:.2f} MB"


def bar(share: float, full: float) -> Text:
    """Draw `share` of `full` as a bar with its value; crowded experts in warmer colours."""
    eighths = round(8 * BAR_WIDTH * share / max(full, 1e-9))
    drawn = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
    style = "red" if share >= 1.5 else "yellow" if share >= 1.1 else "cyan"
    return Text(f"{drawn:<{BAR_WIDTH}}", style=style) + Text(f" {share:4.2f}", style="default")


def load_table(found: Findings) -> Table:
    """Show the load of each expert per layer, over the layer's mean."""
    share = found.load / numpy.maximum(found.load.mean(1, keepdims=True), 1e-9)
    owners = linear_placement(found.config.num_experts, found.num_ranks)
    table = Table(
        title="How loaded each expert is, from captured routing (1.00 is the layer's mean)",
        title_justify="left",
    )
    table.add_column("rank", justify="right")
    table.add_column("expert", justify="right")
    for layer in range(found.config.num_layers):
        table.add_column(f"layer {layer}", no_wrap=True)
    for expert, rank in enumerate(owners):
        first = expert == 0 or owners[expert - 1] != rank
        last = expert + 1 == len(owners) or owners[expert + 1] != rank
        bars = [bar(value, share.max()) for value in share[:, expert].tolist()]
        table.add_row(str(rank) if first else "", str(expert), *bars, end_section=last)
    return table


def time_table(found: Findings) -> Table:
    """Show the median of each phase for Fanfold and for gloo."""
    table = Table(
        title="Time of one layer's exchange (median over rounds and ranks, µs)",
        title_justify="left",
    )
    for heading in ("", *PHASES, "dispatch + combine"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, phases in found.median_us.items():
        exchange = phases["dispatch"] + phases["combine"]
        cells = [f"{phases[phase]:,.0f}" for phase in PHASES]
        table.add_row(SCHEMES[name], *cells, f"{exchange:,.0f}", end_section=name == "gloo")
    ratios = [found.median_us["gloo"][p] / found.median_us["fanfold"][p] for p in PHASES]
    table.add_row(
        "gloo / Fanfold", *(f"{ratio:.2f}x" for ratio in ratios),
        Text(f"{found.speed_up:.2f}x", style="bold"),
    )  # fmt: skip
    return table


def show(console: Console, found: Findings) -> None:
    """Print every table."""
    tables = (agreement_table, traffic_table, load_table, time_table)
    console.print(Group(*(Group(make(found), Text()) for make in tables)))
