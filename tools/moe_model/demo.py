# SPDX-License-Identifier: Apache-2.0
"""Run the model on a text with its experts spread over ranks of this machine, and check it.

The tokens are split over the ranks, and so are the experts: every layer sends each token to the
ranks of its experts and folds the results back, through `fanfold.AllToAll`. The same exchange
over gloo runs beside it for comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from moe_model.evaluate import evaluate
from moe_model.exchanges import LAYOUT_OF
from moe_model.model import MoeModel, load_model
from moe_model.picture import draw
from moe_model.ranks import Job, Progress, RankReport, run_rank
from moe_model.report import count_ranks, gather, show

README = Path(__file__).resolve().parents[2] / "README.md"
SMOKE_TOKENS = 2048
LONG_TEXT = 100_000  # bytes from which on one timed pass is enough
START_S, STEP_S = 120.0, 2.0  # what a rank may take to start and per step, on a busy machine


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tools/demo", description=__doc__)
    parser.add_argument("--text", type=Path, default=README, help="a text file; default: README.md")
    parser.add_argument("--ranks", type=int, help="how many ranks; default: 4, with --smoke 2")
    parser.add_argument(
        "--strategy", choices=sorted(LAYOUT_OF), default="one_sided", help="default: one_sided"
    )
    parser.add_argument("--tokens", type=int, help="use at most this many bytes of the text")
    parser.add_argument("--png", type=Path, help="the picture; default: build/demo.png")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("--smoke", action="store_true", help="a short run, for tests")
    options = parser.parse_args(arguments)
    if options.ranks is None:
        options.ranks = 2 if options.smoke else 4
    if options.png is None and not options.smoke:
        options.png = README.parent / "build" / "demo.png"
    if options.tokens is None and options.smoke:
        options.tokens = SMOKE_TOKENS
    if options.ranks < 1:
        parser.error(f"--ranks must be at least 1, got {options.ranks}")
    if options.tokens is not None and options.tokens < 1:
        parser.error(f"--tokens must be at least 1, got {options.tokens}")
    return options


def read_text(path: Path, limit: int | None, context: int) -> numpy.ndarray:
    """Return the bytes to run on; one more than `limit`, since the last one is only predicted."""
    text = path.read_bytes()
    if limit is not None:
        text = text[: max(limit, context) + 1]
    if len(text) <= context:
        raise ValueError(f"{path} has {len(text)} bytes; the model needs at least {context + 1}")
    return numpy.frombuffer(text, dtype=numpy.uint8)


def run_ranks(console: Console, job: Job, model: MoeModel, num_ranks: int) -> list[RankReport]:
    """Run `run_rank` in `num_ranks` new processes and show how far they are."""
    import fanfold
    from fanfold.testing import spawn_processes

    counters = Progress(job.folder / "progress", num_ranks)
    steps = job.num_steps(model.config.context, num_ranks) * job.num_passes
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    finished = threading.Event()
    with ProgressBar(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"starting {count_ranks(num_ranks)}", total=steps * num_ranks)

        def follow() -> None:
            while not finished.wait(0.1):
                done = counters.done()
                if done:
                    name = f"{count_ranks(num_ranks)}, Fanfold and gloo in turn"
                    progress.update(task, completed=done, description=name)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            reports: list[RankReport] = spawn_processes(
                num_ranks, run_rank, job, timeout_s=START_S + STEP_S * steps
            )
        except fanfold.Error as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            finished.set()
            follower.join()
    return reports


def run(console: Console, options: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    torch.set_num_threads(1)  # more threads gain nothing at this size and suffer on busy cores
    model = load_model()
    text = read_text(options.text, options.tokens, model.config.context)
    with console.status("one process, all experts"):
        start = time.monotonic()
        single = evaluate(model, torch.from_numpy(text.copy()))
    console.print(
        f"{options.text.name}: {single.num_tokens:,} tokens (bytes) in one process: "
        f"{single.bits_per_byte:.3f} bits per byte, {time.monotonic() - start:.1f} s"
    )
    with tempfile.TemporaryDirectory(prefix="fanfold-demo-") as folder:
        job = Job(
            text=text,
            folder=Path(folder),
            windows_per_step=1 if options.smoke else 2,
            timed_passes=1 if options.smoke or len(text) > LONG_TEXT else 3,
            strategy=options.strategy,
        )
        start = time.monotonic()
        reports = run_ranks(console, job, model, options.ranks)
        console.print(
            f"{count_ranks(options.ranks)}, {job.num_passes} passes in "
            f"{time.monotonic() - start:.1f} s\n"
        )
    found = gather(reports, single, model.config)
    show(console, found)
    if options.json is not None:
        options.json.write_text(json.dumps(found.as_json(), indent=1) + "\n")
    if options.png is not None:
        options.png.parent.mkdir(parents=True, exist_ok=True)
        draw(found, options.png)
        console.print(f"picture: {options.png}")
    for fault in found.faults():
        print(f"demo: {fault}", file=sys.stderr)
    return 1 if found.faults() else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and turn what goes wrong into a sentence."""
    options = parse_arguments(arguments)
    try:
        return run(Console(), options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
