#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that kernel sources compile for a GPU and for the simulated device, and can be checked.

What nvcc takes and the simulator cannot see, or not judge, is reported: code that only one of the
two compilers knows, accesses outside the wrappers of gpu/device/device.cuh, variables that all
ranks of one process would share.

Usage: tools/check_kernels.py [FILE...]      (without files: the whole repository)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lint_support import ROOT, Finding, report, repository_files

GPU = PurePosixPath("cpp/src/gpu")
LITMUS = PurePosixPath("tests_cpp/sim/litmus")
DEVICE = GPU / "device" / "device.cuh"
LAUNCH = GPU / "device" / "launch.h"
KERNEL_SUFFIXES = {".cu", ".cuh"}
SUFFIXES = KERNEL_SUFFIXES | {".h", ".cpp"}

# Headers whose code, once inlined into a kernel's file, would be taken for the kernel's accesses.
FORBIDDEN_HEADERS = re.compile(
    r"algorithm|any|array|atomic|bitset|deque|filesystem|forward_list|fstream|functional|future"
    r"|condition_variable|iostream|iterator|list|map|memory|mutex|numeric|optional|queue|random"
    r"|set|shared_mutex|span|sstream|stack|string|string_view|thread|tuple|unordered_map"
    r"|unordered_set|valarray|variant|vector"
)


@dataclass(frozen=True)
class Rule:
    """A pattern of code, the files that may have it, and what to say about the others."""

    pattern: re.Pattern[str]
    is_allowed: Callable[[PurePosixPath], bool]
    message: str


def _is_kernel(path: PurePosixPath) -> bool:
    return path.suffix in KERNEL_SUFFIXES


def _is_litmus(path: PurePosixPath) -> bool:
    return LITMUS in path.parents


RULES = (
    Rule(
        re.compile(r"\b(?:asm|__asm|__asm__)\b"),
        lambda path: path == DEVICE,
        f"inline PTX stands in {DEVICE} only",
    ),
    Rule(
        re.compile(r"\b__CUDA_ARCH__\b"),
        lambda path: path == DEVICE,
        f"__CUDA_ARCH__ stands in {DEVICE} only",
    ),
    Rule(
        re.compile(r"\bFANFOLD_SIM\b"),
        lambda path: path in (DEVICE, LAUNCH),
        f"FANFOLD_SIM stands in {DEVICE} and {LAUNCH} only",
    ),
    Rule(
        re.compile(r"\bvolatile\b"),
        lambda path: path == DEVICE or not _is_kernel(path),
        "volatile orders nothing: use ld_* and st_* of device.cuh",
    ),
    Rule(re.compile(r"<<<"), lambda _: False, "launch kernels by fanfold::gpu::launch"),
    Rule(
        re.compile(r"\b__shared__\b"),
        lambda path: path == DEVICE,
        "__shared__ is FANFOLD_SHARED or FANFOLD_DYN_SHARED",
    ),
    Rule(
        re.compile(r"\b(?:__constant__|__managed__)"),
        lambda _: False,
        "a variable of the device is shared by all ranks of a process: pass it in the parameters",
    ),
    Rule(
        re.compile(r"\b__device__\b[^;({=\[#]*[;{=\[]"),
        lambda path: path == DEVICE,
        "a variable of the device is shared by all ranks of a process: pass it in the parameters",
    ),
    Rule(
        re.compile(r"(?<![\w.>])(?:__builtin_)?mem(?:cpy|set|move|cmp|chr)\s*\("),
        lambda path: not _is_kernel(path),
        "mem* calls escape the checks: use ld16 and st16, or a loop",
    ),
    Rule(
        re.compile(r"(?<!\w)printf\s*\("), lambda path: not _is_kernel(path), "kernels do not print"
    ),
    Rule(
        re.compile(r"\b__trap\s*\(|(?<![\w.>])(?:assert|abort)\s*\("),
        lambda path: not _is_kernel(path),
        "a trap takes the whole context down: write a status word",
    ),
    Rule(
        re.compile(r"\b(?:__threadfence\w*|atomic[A-Z]\w*)\s*\(|\bcuda::(?:std::)?atomic"),
        lambda path: path == DEVICE or _is_litmus(path),
        "atomics and fences are the wrappers of device.cuh, which name order and scope",
    ),
)

_INCLUDE = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)
_KERNEL = re.compile(r"\b__global__\b([^;{(]*?)(\w+)\s*\(([^()]*)\)")
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)")
_TEMPLATE_ARGUMENTS = re.compile(r"<[^<>]*>")
_ONE_STRUCT = re.compile(
    r"\s*(?:const\s+__grid_constant__|__grid_constant__\s+const)\s+[\w:]+\s+\w+\s*"
)
_TOKENS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'', re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    """Lines stay where they are, so that positions in the text remain right."""
    return re.sub(r"[^\n]", " ", match.group())


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def check_includes(path: PurePosixPath, code: str) -> Iterator[Finding]:
    for match in _INCLUDE.finditer(code):
        if FORBIDDEN_HEADERS.fullmatch(match.group(1)):
            message = f"<{match.group(1)}>: no containers or algorithms in kernel files"
            yield Finding(path, _line(code, match.start(1)), message)


def check_parameters(path: PurePosixPath, code: str) -> Iterator[Finding]:
    """A kernel takes one struct by value: what is pinned at the launch is all that it knows."""
    bare = _LAUNCH_BOUNDS.sub(_blank, code)
    for match in _KERNEL.finditer(bare):
        parameters = match.group(3)
        while _TEMPLATE_ARGUMENTS.search(parameters):
            parameters = _TEMPLATE_ARGUMENTS.sub("", parameters)
        if not _ONE_STRUCT.fullmatch(parameters):
            message = f"{match.group(2)}: expected one parameter, const __grid_constant__ XParams p"
            yield Finding(path, _line(bare, match.start(2)), message)


def check_file(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """All breaches of one file; `path` is relative to the repository."""
    is_ours = GPU in path.parents or _is_litmus(path)
    if not is_ours or path.suffix not in SUFFIXES or (_is_litmus(path) and not _is_kernel(path)):
        return
    code = _TOKENS.sub(_blank, text)
    for rule in RULES:
        if not rule.is_allowed(path):
            for match in rule.pattern.finditer(code):
                yield Finding(path, _line(code, match.start()), rule.message)
    if _is_kernel(path):
        yield from check_includes(path, code)
        if not _is_litmus(path):
            yield from check_parameters(path, code)


def main(arguments: list[str]) -> int:
    paths = [PurePosixPath(Path(a).resolve().relative_to(ROOT).as_posix()) for a in arguments]
    findings: list[Finding] = []
    for path in paths or repository_files():
        if path.suffix in SUFFIXES:
            findings += check_file(path, (ROOT / path).read_text(encoding="utf-8"))
    return report(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
