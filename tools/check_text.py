#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks what can be read off the text of a file: licence line, lengths, forbidden calls.

Usage: tools/check_text.py [FILE...]      (without files: the whole repository)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lint_support import ROOT, Finding, report, repository_files

FILE_WARN_LINES = 400
FILE_MAX_LINES = 600
FUNCTION_WARN_LINES = 60
ENV_FILE = PurePosixPath("cpp/src/base/env.cpp")

CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".in"}
SOURCE_SUFFIXES = CPP_SUFFIXES | {".py", ".pyi", ".cmake", ".sh"}
SOURCE_NAMES = {"CMakeLists.txt", "setup", "test", "bench", "demo", "run"}

# Pattern, where it is allowed, what to do instead. Applied to the code of C++ files.
FORBIDDEN = (
    (
        re.compile(r"\b(?:secure_)?getenv\s*\("),
        lambda path: path == ENV_FILE or path.parts[0] == "tests_cpp",
        f"the environment is read in {ENV_FILE} only",
    ),
    (
        re.compile(r"\batomic_thread_fence\b"),
        lambda path: False,
        "ThreadSanitizer does not know fences: release and acquire on the flag itself",
    ),
    (
        re.compile(
            r"(?:std::|(?<![\w:])::)(?:exit|_exit|_Exit|quick_exit|abort|terminate)\s*\("
            r"|(?<![\w:.>~])_?exit\s*\("
        ),
        lambda path: path.parts[:2] != ("cpp", "src"),
        "the library throws, it never ends the process",
    ),
    (
        re.compile(r"(?<!\w)(?:printf|puts|std::cout|std::cerr)\b"),
        lambda path: path.parts[:2] != ("cpp", "src"),
        "the library does not print",
    ),
)
_LINE_COMMENT = re.compile(r"//.*")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_FUNCTION_OPENS = re.compile(r"^[A-Za-z_~].*\)[^;]*\{\s*$|^\s+.*\).*\{\s*$")
_NOT_A_FUNCTION = re.compile(r"^\s*(namespace|class|struct|enum|union|extern)\b")


def is_source(path: PurePosixPath) -> bool:
    """Whether a file must carry the licence line."""
    return path.suffix in SOURCE_SUFFIXES or path.name in SOURCE_NAMES


def check_licence(path: PurePosixPath, lines: list[str]) -> Iterator[Finding]:
    if lines and not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
        yield Finding(path, 1, "SPDX-License-Identifier: Apache-2.0 is missing in the first lines")


def check_file_length(path: PurePosixPath, lines: list[str]) -> Iterator[Finding]:
    if path.suffix == ".pyi":  # generated, read by machines
        return
    if len(lines) > FILE_MAX_LINES:
        yield Finding(path, len(lines), f"{len(lines)} lines, at most {FILE_MAX_LINES}: split it")
    elif len(lines) > FILE_WARN_LINES:
        message = f"{len(lines)} lines, better under {FILE_WARN_LINES}"
        yield Finding(path, len(lines), message, is_warning=True)


def _long(path: PurePosixPath, line: int, name: str, length: int) -> Iterator[Finding]:
    if length > FUNCTION_WARN_LINES:
        message = f"{name}: {length} lines, better under {FUNCTION_WARN_LINES}"
        yield Finding(path, line, message, is_warning=True)


def check_cpp_functions(path: PurePosixPath, lines: list[str]) -> Iterator[Finding]:
    """Length of functions: clang-format closes a body at the indentation of its first line."""
    start = indent = None
    for number, line in enumerate(lines, 1):
        if start is None:
            if _FUNCTION_OPENS.match(line) and not _NOT_A_FUNCTION.match(line):
                start, indent = number, len(line) - len(line.lstrip())
        elif re.match(rf"^ {{{indent}}}\}}", line):
            yield from _long(path, start, lines[start - 1].strip()[:60], number - start + 1)
            start = None


def check_python_tree(path: PurePosixPath, text: str) -> Iterator[Finding]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield Finding(path, error.lineno or 1, f"does not parse: {error.msg}")
        return
    in_package = path.parts[0] == "python" and "testing" not in path.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            first = node.body[0]
            is_documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            begin = (first.end_lineno or first.lineno) if is_documented else node.lineno
            yield from _long(path, node.lineno, node.name, node.end_lineno - begin + 1)
        elif isinstance(node, ast.Assert) and in_package:
            yield Finding(path, node.lineno, "assert vanishes under -O: raise a typed error")


def check_forbidden(path: PurePosixPath, lines: list[str]) -> Iterator[Finding]:
    if path.parts[0] not in ("cpp", "bindings", "tests_cpp"):
        return
    for number, line in enumerate(lines, 1):
        code = _LINE_COMMENT.sub("", _STRING.sub('""', line))
        for pattern, is_allowed, message in FORBIDDEN:
            if pattern.search(code) and not is_allowed(path):
                yield Finding(path, number, message)


def check_file(path: PurePosixPath, text: str) -> Iterator[Finding]:
    """All breaches of one file; `path` is relative to the repository."""
    if not is_source(path):
        return
    lines = text.splitlines()
    yield from check_licence(path, lines)
    yield from check_file_length(path, lines)
    if path.suffix == ".py":
        yield from check_python_tree(path, text)
    elif path.suffix in CPP_SUFFIXES:
        yield from check_forbidden(path, lines)
        if path.parts[0] != "tests_cpp":
            yield from check_cpp_functions(path, lines)


def main(arguments: list[str]) -> int:
    paths = [PurePosixPath(Path(a).resolve().relative_to(ROOT).as_posix()) for a in arguments]
    findings = []
    for path in paths or repository_files():
        if is_source(path):
            findings += check_file(path, (ROOT / path).read_text(encoding="utf-8"))
    return report(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
