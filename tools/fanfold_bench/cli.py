# SPDX-License-Identifier: Apache-2.0
"""The command line of ``tools/bench``."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fanfold_bench import acceptance, capture, report, strategy_goals
from fanfold_bench.cases import DTYPES, LAYOUTS, PRESETS, Case, expand_against, preset_cases
from fanfold_bench.launch import RunFailed, run_group
from fanfold_bench.machine import CLASSES, choose_class, commit, describe
from fanfold_bench.results import document, finish, problems
from fanfold_bench.routing import load_recording, recorded

USAGE_ERROR = 2
PIPE_WIDTH = 136
CAPTURE = "capture"
DESCRIPTION = """\
Measure one exchange (dispatch + combine) of Fanfold from Python, the schemes in use today over
gloo, and the floor of this machine, in one run and with one clock. Ranks are processes."""
EPILOG = """\
exit status: 0 done, 1 a goal was missed or a rank failed, 2 wrong arguments, 3 no verdict"""


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(prog="tools/bench", description=DESCRIPTION, epilog=EPILOG)
    shape = p.add_argument_group("what is exchanged")
    shape.add_argument("--ranks", type=int, help="default 2")
    shape.add_argument("--tokens", type=int, help="per rank; default 32")
    shape.add_argument("--hidden", type=int, help="default 2048")
    shape.add_argument("--top-k", type=int, help="default 8, or that of a recording")
    shape.add_argument("--experts", type=int, help="over all ranks; default 64, or the recording's")
    shape.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    shape.add_argument(
        "--routing",
        default="uniform",
        metavar="uniform|skewed|FILE.npz",
        help="generated, or recorded from a model: an integer array [layers, tokens, top_k]",
    )
    shape.add_argument("--seed", type=int, default=1)
    shape.add_argument(
        "--preset",
        choices=sorted([*PRESETS, CAPTURE]),
        help="a set of shapes; capture: no exchange, but what recording costs beside a copy",
    )
    how = p.add_argument_group("how")
    how.add_argument("--strategy", default="one_sided", help="or none: floor and baselines only")
    how.add_argument("--layout", choices=LAYOUTS, default="rank_major")
    how.add_argument(
        "--against",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="gloo_batched, gloo_agrs, gloo_naive, gloo_a2av, gloo_a2av_dedup, gloo_best (the "
        "fastest of the last four), fanfold_STRATEGY[.LAYOUT[.fp8]], strategies (each of them in "
        "the layout that it is for), or none; the first gives the ratio",
    )
    how.add_argument(
        "--sched",
        choices=("auto", *CLASSES),
        default="auto",
        help="scheduling class of all ranks; auto: fifo while each has a core, else batch",
    )
    how.add_argument("--rounds", type=int, default=4000, help="quiet rounds that suffice")
    how.add_argument("--budget", type=float, default=2.0, help="quiet seconds that suffice")
    how.add_argument("--patience", type=float, default=8.0, help="seconds to wait for quiet ones")
    how.add_argument("--smoke", action="store_true", help="tiny and quick: proves that all works")
    out = p.add_argument_group("what comes out")
    out.add_argument("--json", type=Path, metavar="FILE")
    out.add_argument("--markdown", type=Path, metavar="FILE")
    out.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="PNG: time against tokens per rank of every strategy in the results",
    )
    out.add_argument(
        "--check", action="store_true", help="judge by the goals; without a shape: preset table"
    )
    out.add_argument("--slack", type=float, default=1.0, help="loosen every goal by this factor")
    out.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="take results from this JSON instead of measuring",
    )
    return p


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def build_cases(args: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for.

    Raises:
        ValueError: they do not fit together; the text says how.
    """
    top_k, experts = args.top_k, args.experts
    generated = args.routing in ("uniform", "skewed")
    recording = None if generated else load_recording(args.routing)
    if recording is not None:
        top_k = _or(top_k, recording.top_k)
        experts = _or(experts, recording.num_experts)
    base = Case(
        ranks=_or(args.ranks, 2),
        tokens=_or(args.tokens, 32),
        hidden=_or(args.hidden, 2048),
        top_k=_or(top_k, 8),
        experts=_or(experts, 64),
        strategy=args.strategy,
        layout=args.layout,
        dtype=args.dtype,
        routing=args.routing if generated else str(Path(args.routing).resolve()),
        seed=args.seed,
    )
    cases = preset_cases(args.preset, base) if args.preset else [base]
    if recording is not None:
        cases = [replace(case, top_k=base.top_k, experts=base.experts) for case in cases]
    for case in cases:
        problem = case.problem()
        if problem:
            raise ValueError(problem)
        if recording is not None:
            recorded(recording, case)
    return cases


def apply_shortcuts(args: argparse.Namespace) -> None:
    """Let --smoke and --check choose what was left open."""
    if args.smoke:
        args.preset = args.preset or "smoke"
        args.rounds, args.budget, args.patience = 40, min(args.budget, 0.1), 0.3
        args.against = args.against or ["gloo_batched", "gloo_best"]
    if args.preset == "strategies":
        args.against = args.against or ["gloo_batched", "gloo_best", "strategies"]
    if args.check:
        shape = (args.ranks, args.tokens, args.hidden, args.top_k, args.experts)
        if not any(shape):
            args.preset = args.preset or "table"
        args.against = args.against or ["gloo_batched", "gloo_best"]
    args.against = args.against or (
        ["gloo_batched", "gloo_best"] if args.preset else ["gloo_batched"]
    )


def measure(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Run everything and return the document.

    Raises:
        ValueError: wrong arguments.
        PermissionError: a scheduling class is refused.
        RunFailed: a rank failed.
    """
    against, schemes = expand_against(args.against)
    cases = build_cases(args)
    notes: list[str] = []
    machine = describe()
    results: list[dict[str, Any]] = []
    for ranks in dict.fromkeys(case.ranks for case in cases):
        sched, note = choose_class(args.sched, ranks)
        if note and note not in notes:
            notes.append(note)
        group = [case for case in cases if case.ranks == ranks]
        print(f"{ranks} ranks, scheduling class {sched}", file=sys.stderr, flush=True)
        results += run_group(group, schemes, sched, args.rounds, args.budget, args.patience)
    for result in results:
        finish(result, against)
        if not args.routing.startswith(("uniform", "skewed")):
            result["routing"] = Path(args.routing).name
    run = {
        "machine": machine,
        "commit": commit(),
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "smoke": bool(args.smoke),
        "notes": notes,
    }
    return document(run, results)


def load_document(path: Path) -> dict[str, Any]:
    """Read an earlier result.

    Raises:
        ValueError: the file is no result of this program.
    """
    try:
        doc = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read results from {path}: {error}") from error
    wrong = problems(doc) if isinstance(doc, dict) else ["it is no object"]
    if wrong:
        raise ValueError(f"{path} holds no results of this program: {wrong[0]}")
    return dict(doc)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def run_capture(args: argparse.Namespace, command: str) -> int:
    """Measure what recording costs, then write and print it.

    Raises:
        ValueError: options of exchanges were given.
    """
    if args.source or args.markdown or args.plot:
        raise ValueError(f"--preset {CAPTURE} gives --json only, and has no --from")
    doc = capture.measure(command, capture.SMOKE if args.smoke else capture.Shape())
    lines = capture.judge(doc["captures"], args.slack) if args.check else []
    capture.show(_console(), doc["captures"], lines)
    if args.json:
        _write(args.json, json.dumps(doc, indent=1) + "\n")
    return acceptance.exit_status(lines) if args.check else 0


def run(args: argparse.Namespace, command: str) -> int:
    """Measure or load, then write and print what was asked for."""
    if args.preset == CAPTURE:
        return run_capture(args, command)
    doc = load_document(args.source) if args.source else measure(args, command)
    wrong = problems(doc)
    lines = acceptance.judge_all(doc["cases"], args.slack) if args.check else []
    if args.check:
        lines += strategy_goals.judge(doc["cases"], args.slack)
    report.show(_console(), doc, lines)
    if args.json:
        _write(args.json, json.dumps(doc, indent=1) + "\n")
    if args.markdown:
        _write(args.markdown, report.markdown(doc, lines))
    if args.plot:
        from fanfold_bench.plot import draw

        draw(doc, args.plot)
    if wrong:
        print(f"bench: the results are incomplete: {wrong[0]}", file=sys.stderr)
        return 1
    return acceptance.exit_status(lines) if args.check else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry; errors end as one sentence."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    apply_shortcuts(args)
    try:
        return run(args, shlex.join(["./tools/bench", *arguments]))
    except (ValueError, PermissionError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (RunFailed, RuntimeError, MemoryError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
