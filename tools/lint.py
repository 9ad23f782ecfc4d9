#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every check of the house, or mends what can be mended.

Usage: tools/lint.py --check | --fix [--only NAME[,NAME...]]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

import check_kernels
import check_layers
import check_text
import tidy
from lint_support import ROOT, Finding, ToolMissing, report, repository_files, tool, venv_python

CPP = (".h", ".cpp", ".cu", ".cuh")
CMAKE = (".cmake", ".cmake.in")


@dataclass(frozen=True)
class Check:
    """One check: returns 0 when all is well, and prints what is not."""

    name: str
    check: Callable[[], int]
    fix: Callable[[], int] | None = None


def _files(*endings: str) -> list[str]:
    return [str(path) for path in repository_files() if path.name.endswith(endings)]


def _run(command: list[str], files: list[str] | None = None) -> int:
    """Runs a command in the repository; an empty list of files is no work."""
    if files is not None and not files:
        return 0
    return subprocess.run([*command, *(files or [])], cwd=ROOT, check=False).returncode


def _cmake_files() -> list[str]:
    return [*_files("CMakeLists.txt"), *_files(*CMAKE)]


def check_rules() -> int:
    """Layers, licence lines, lengths, forbidden calls, and sources that nobody compiles."""
    findings: list[Finding] = []
    for path in repository_files():
        if check_text.is_source(path):
            text = (ROOT / path).read_text(encoding="utf-8")
            findings += check_text.check_file(path, text)
            findings += check_layers.check_file(path, text)
            findings += check_kernels.check_file(path, text)
    findings += unlisted_sources(repository_files())
    return report(findings)


def unlisted_sources(paths: list[PurePosixPath]) -> list[Finding]:
    """C++ sources and public headers that no CMakeLists.txt above them names."""
    findings = []
    for path in paths:
        is_compiled = path.suffix in (".cpp", ".cu") and path.parts[0] in ("bindings", "tests_cpp")
        is_library = path.parts[:2] in (("cpp", "src"), ("cpp", "include"))
        is_listed = is_compiled or (
            is_library and (path.suffix in (".cpp", ".cu") or path.parts[1] == "include")
        )
        if not is_listed or path.parts[:2] == ("tests_cpp", "consumer"):
            continue
        lists = [ROOT / parent / "CMakeLists.txt" for parent in path.parents]
        text = "\n".join(f.read_text(encoding="utf-8") for f in lists if f.exists())
        if path.name not in text:
            findings.append(Finding(path, 1, "no CMakeLists.txt names this file"))
    return findings


def clang_format() -> int:
    """Names the files that clang-format would change; the rest of its output helps nobody."""
    files = _files(*CPP)
    if not files:
        return 0
    command = [tool("clang-format"), "--dry-run", "-Werror", "--ferror-limit=1", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    for line in done.stderr.splitlines():
        if "code should be clang-formatted" in line:
            print(f"{line.split(': ', 1)[0]}: not formatted; tools/lint.py --fix does it")
    return done.returncode


def mypy() -> int:
    # From another folder mypy would take the installed package instead of python/fanfold.
    return _run([venv_python(), "-m", "mypy", "--no-error-summary"])


def stub() -> int:
    return _run([venv_python(), str(ROOT / "tools" / "gen_stub.py"), "--check"])


def write_stub() -> int:
    return _run([venv_python(), str(ROOT / "tools" / "gen_stub.py")])


CHECKS = (
    Check("rules", check_rules),
    Check(
        "clang-format",
        clang_format,
        lambda: _run([tool("clang-format"), "-i"], _files(*CPP)),
    ),
    Check(
        "ruff-check",
        lambda: _run([tool("ruff"), "check", "--quiet"], _files(".py")),
        lambda: _run([tool("ruff"), "check", "--quiet", "--fix"], _files(".py")),
    ),
    Check(
        "ruff-format",
        lambda: _run([tool("ruff"), "format", "--quiet", "--diff"], _files(".py")),
        lambda: _run([tool("ruff"), "format", "--quiet"], _files(".py")),
    ),
    Check(
        "gersemi",
        lambda: _run([tool("gersemi"), "--check", "--diff", "--quiet"], _cmake_files()),
        lambda: _run([tool("gersemi"), "--in-place", "--quiet"], _cmake_files()),
    ),
    Check("codespell", lambda: _run([tool("codespell")], _files(""))),
    Check("mypy", mypy),
    Check("stub", stub, write_stub),
    Check("clang-tidy", lambda: tidy.run([], os.cpu_count() or 1)),
)


def run_check(check: Check, is_fix: bool) -> bool:
    """Runs one check (after its fix, if there is one) and prints one line about it."""
    begin = time.monotonic()
    try:
        if is_fix and check.fix is not None:
            check.fix()
        is_good = check.check() == 0
    except (ToolMissing, RuntimeError) as error:
        print(f"{check.name}: {error}")
        is_good = False
    verdict = "ok" if is_good else "FAILED"
    print(f"lint: {check.name:<13}{verdict:<7}{time.monotonic() - begin:6.1f} s", flush=True)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="report, change nothing")
    mode.add_argument("--fix", action="store_true", help="mend what a tool can mend, then report")
    names = ", ".join(check.name for check in CHECKS)
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated, of: {names}")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else [check.name for check in CHECKS]
    unknown = sorted(set(wanted) - {check.name for check in CHECKS})
    if unknown:
        parser.error(f"--only: expected {names}, got {', '.join(unknown)}")
    results = [run_check(check, arguments.fix) for check in CHECKS if check.name in wanted]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
