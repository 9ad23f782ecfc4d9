#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy as presets cpu and sim compile the sources, skipping what has not changed.

A file is checked again when it, a header of ours that it includes (directly or not), its compile
command, .clang-tidy or the version of clang-tidy changed. Results are kept in build/lint-cache.

Usage: tools/tidy.py [--jobs N] [FILE...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lint_support import ROOT, tool

# Presets and where their compile commands go. A file that several compile is checked as the first
# does.
BUILDS = {"cpu": ROOT / "build" / "tidy", "sim": ROOT / "build" / "tidy-sim"}
CACHE = ROOT / "build" / "lint-cache" / "tidy"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """One translation unit: its source and how it is compiled."""

    source: Path
    command: str
    build: Path

    def include_dirs(self) -> list[Path]:
        words = shlex.split(self.command)
        dirs = [word[2:] for word in words if word.startswith("-I") and len(word) > 2]
        return [path for path in map(Path, dirs) if path.is_relative_to(ROOT)]


def configure() -> None:
    """Brings the compile commands up to date, each file by itself; nothing is compiled."""
    for preset, build in BUILDS.items():
        command = ["cmake", "--preset", preset, "-B", str(build)]
        command += ["-DCMAKE_UNITY_BUILD=OFF", "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON"]
        command += ["-DFANFOLD_BUILD_PYTHON=OFF"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def units() -> list[Unit]:
    """Our own translation units, generated ones left out."""
    found: dict[Path, Unit] = {}
    for build in BUILDS.values():
        entries = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
        for entry in entries:
            source = Path(entry["file"])
            if source.is_relative_to(ROOT) and not source.is_relative_to(ROOT / "build"):
                found.setdefault(source, Unit(source, entry["command"], build))
    return [found[source] for source in sorted(found)]


@cache
def read(path: Path) -> bytes:
    return path.read_bytes()


@cache
def _resolve(name: str, folder: Path, dirs: tuple[Path, ...]) -> Path | None:
    return next((d / name for d in (folder, *dirs) if (d / name).is_file()), None)


def closure(unit: Unit) -> list[Path]:
    """The source and every header of ours that it reaches through quoted includes."""
    dirs = tuple(unit.include_dirs())
    seen: set[Path] = set()
    pending = [unit.source]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _INCLUDE.findall(read(path).decode("utf-8")):
            found = _resolve(name, path.parent, dirs)
            if found:
                pending.append(found.resolve())
    return sorted(seen)


def key(unit: Unit, salt: bytes) -> str:
    """Names everything that the result of a unit depends on."""
    digest = hashlib.sha256(salt)
    digest.update(unit.command.encode())
    for path in closure(unit):
        digest.update(hashlib.sha256(read(path)).digest())
    return digest.hexdigest()


def salt() -> bytes:
    """The version and the settings of clang-tidy, in one hash."""
    version = subprocess.run(
        [tool("clang-tidy"), "--version"], capture_output=True, text=True, check=True
    )
    digest = hashlib.sha256(version.stdout.encode())
    for path in sorted([ROOT / ".clang-tidy", *ROOT.glob("*/**/.clang-tidy")]):
        if not path.is_relative_to(ROOT / ".venv"):
            digest.update(path.read_bytes())
    return digest.digest()


def check(unit: Unit, stamp: Path) -> str:
    """Runs clang-tidy on one unit; returns its complaints and leaves a stamp if there are none."""
    done = subprocess.run(
        [tool("clang-tidy"), "--quiet", "-p", str(unit.build), str(unit.source)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        stamp.touch()
        return ""
    return done.stdout.replace(f"{ROOT}/", "") or done.stderr


def run(only: list[Path], jobs: int) -> int:
    """Checks all units (or those of `only`) that changed since they last passed."""
    configure()
    CACHE.mkdir(parents=True, exist_ok=True)
    common = salt()
    wanted = {path.resolve() for path in only}
    todo = []
    for unit in units():
        stamp = CACHE / key(unit, common)
        if (not wanted or unit.source in wanted) and not stamp.exists():
            todo.append((unit, stamp))
    status = 0
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        results = pool.map(lambda item: (item[0], check(*item)), todo)
        for number, (unit, output) in enumerate(results, 1):
            name = unit.source.relative_to(ROOT)
            print(f"  clang-tidy [{number}/{len(todo)}] {name}", flush=True)
            if output:
                print(output, flush=True)
                status = 1
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    return run(arguments.files, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
