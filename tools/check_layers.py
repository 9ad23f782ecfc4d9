#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks every #include and Python import against the layer rule of cpp/README.md.

    include/fanfold <- base <- { plan | comm <- memory } <- exec <- { cpu | gpu }
    exchange: exec and below, never a backend; capture: plan and exec; api: everything
    mpi: include and base; MPI's header there and in fanfold/mpi.h only

Usage: tools/check_layers.py [FILE...]      (without files: the whole repository)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lint_support import ROOT, Finding, report, repository_files

_BELOW_EXEC = {"include", "base", "plan", "comm", "memory"}
# What a module of cpp/src may include besides itself.
MODULES: dict[str, set[str]] = {
    "include": set(),
    "base": {"include"},
    "plan": {"include", "base"},
    "comm": {"include", "base"},
    "memory": {"include", "base", "comm"},
    "exec": _BELOW_EXEC,
    "cpu": _BELOW_EXEC | {"exec"},
    "gpu": _BELOW_EXEC | {"exec"},
    "exchange": _BELOW_EXEC | {"exec"},
    "capture": {"include", "base", "plan", "exec"},
}
MODULES["api"] = set(MODULES)
# A library of its own, which sees of the other no more than its users do, and templates of base.
MODULES["mpi"] = {"include", "base"}

# Headers in angle brackets (or of third parties) and the places that may include them.
# Built for the simulated device only: it steers that device, for tests.
SIMULATOR = "bindings/simulator.cpp"
STEERS = re.compile(r"^(cuda_runtime_api\.h|cudasim/control\.h)$")
CUDA = re.compile(r"^(cuda(\.h|_.*|/.*)?|cooperative_groups(/.*|\.h)|nccl(_device)?\.h|cub/.*)$")
PYTHON = re.compile(r"^(Python\.h|nanobind/.*|pybind11/.*)$")
MPI = re.compile(r"^mpi\.h$")
MPI_HEADER = "cpp/include/fanfold/mpi.h"
TORCH = re.compile(r"^(torch|ATen|c10)/.*$")
STANDARD = re.compile(r"^[a-z0-9_]+$")  # <vector>; <unistd.h> is the system's
EFFECTS = re.compile(
    r"^(thread|mutex|shared_mutex|condition_variable|future|fstream|iostream|filesystem|"
    r"fcntl\.h|unistd\.h|pthread\.h|sys/.*|linux/.*)$"
)
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".in"}


def cpp_place(path: PurePosixPath) -> str:
    """The place of a C++ file: a module, gpu/device, bindings, tests, user, or "" for no rule."""
    parts = path.parts
    if parts[:2] == ("cpp", "include"):
        return "include"
    if parts[:2] == ("cpp", "examples") or parts[:2] == ("tests_cpp", "consumer"):
        return "user"
    if parts[:2] == ("cpp", "src"):
        return "gpu/device" if parts[2:4] == ("gpu", "device") else parts[2]
    return {"bindings": "bindings", "tests_cpp": "tests"}.get(parts[0], "")


def check_project_include(place: str, target: str) -> str | None:
    """Says what is wrong with `#include "target"` in `place`, or None."""
    head = target.split("/", 1)[0]
    module = "include" if head == "fanfold" else head
    if place in ("user", "bindings"):
        if module == "include" or (place == "bindings" and "/" not in target):
            return None
        return f'{place} may include "fanfold/*.h" only, got "{target}"'
    if place == "tests":
        return None
    if "/" not in target or target.startswith("."):
        return f'write the path from its module on, as in "base/{PurePosixPath(target).name}"'
    if place == "gpu/device":
        if module == "plan" or target.startswith("gpu/device/"):
            return None
        return f'gpu/device may include plan and itself only, got "{target}"'
    if module not in MODULES:
        return f'"{target}" belongs to no module'
    if place != module and module not in MODULES[place]:
        allowed = ", ".join(sorted(MODULES[place])) or "nothing"
        return f'{place} may include {allowed}; "{target}" is of {module}'
    if module == "gpu" and target.startswith("gpu/device/") and place != "gpu":
        return f'"{target}" is device code, for gpu only'
    return None


def check_foreign_include(place: str, target: str) -> str | None:
    """Says what is wrong with `#include <target>` in `place`, or None."""
    if TORCH.match(target):
        return f"<{target}>: no torch in C++"
    if PYTHON.match(target):
        return None if place == "bindings" else f"<{target}>: Python headers in bindings/ only"
    if CUDA.match(target):
        allowed = ("gpu", "gpu/device", "tests")
        return None if place in allowed else f"<{target}>: CUDA headers in cpp/src/gpu only"
    if MPI.match(target):
        return None if place in ("mpi", "tests", "user") else f"<{target}>: MPI in cpp/src/mpi only"
    if place == "include" and not STANDARD.match(target):
        return f"<{target}>: public headers include the standard library and themselves only"
    if place == "plan" and EFFECTS.match(target):
        return f"<{target}>: plan is pure functions, without I/O or threads"
    return None


def check_cpp(path: PurePosixPath, text: str) -> Iterator[Finding]:
    place = cpp_place(path)
    if not place:
        return
    if place not in MODULES and place not in ("gpu/device", "bindings", "tests", "user"):
        yield Finding(path, 1, f"{place} is no module of cpp/src")
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quoted, angled = match.groups()
        if path.as_posix() == SIMULATOR and STEERS.match(quoted or angled):
            continue
        if path.as_posix() == MPI_HEADER and MPI.match(angled or ""):
            continue
        if quoted and not (CUDA.match(quoted) or PYTHON.match(quoted) or TORCH.match(quoted)):
            problem = check_project_include(place, quoted)
        elif angled and angled.startswith("fanfold/") and place != "user":
            problem = f'write "{angled}" with quotes'
        else:
            problem = check_foreign_include(place, quoted or angled)
        if problem:
            yield Finding(path, number, problem)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """All (line, absolute module name) that a file imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def _runs_at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, classes and branches included."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending.extend(c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt))


# The modules of the package that may import torch; the others may import them when they run only.
TORCH_MODULES = ("interop_torch", "torch_ops", "torch_transport")
TORCH_FILES = ", ".join(f"fanfold/{name}.py" for name in TORCH_MODULES)


def check_python(path: PurePosixPath, text: str) -> Iterator[Finding]:
    if path.parts[:2] != ("python", "fanfold"):
        return
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield Finding(path, error.lineno or 1, f"does not parse: {error.msg}")
        return
    adapter = path.parent.name == "fanfold" and path.stem in TORCH_MODULES
    for line, name in _imports(tree):
        top = name.split(".", 1)[0]
        if top == "torch" and not adapter:
            yield Finding(path, line, f"torch is imported in {TORCH_FILES} only")
        elif top in ("ctypes", "cffi") or top == "_core":
            yield Finding(path, line, f"{top}: native symbols come from fanfold._core only")
    for node in _runs_at_import(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        for name in names:
            if name.split(".")[-1] in TORCH_MODULES:
                yield Finding(path, node.lineno, f"import {name} inside the function that needs it")


def check_file(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """All breaches of one file; `path` is relative to the repository."""
    if path.suffix in CPP_SUFFIXES:
        yield from check_cpp(path, text)
    elif path.suffix == ".py":
        yield from check_python(path, text)


def main(arguments: list[str]) -> int:
    paths = [PurePosixPath(Path(a).resolve().relative_to(ROOT).as_posix()) for a in arguments]
    findings = []
    for path in paths or repository_files():
        if path.suffix in CPP_SUFFIXES | {".py"}:
            findings += check_file(path, (ROOT / path).read_text(encoding="utf-8"))
    return report(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
