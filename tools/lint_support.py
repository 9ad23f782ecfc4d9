# SPDX-License-Identifier: Apache-2.0
"""What the check tools share: the list of files, findings, and where the linters are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Finding:
    """One breach of a rule. A warning is printed and does not fail."""

    path: PurePosixPath
    line: int
    message: str
    is_warning: bool = False

    def __str__(self) -> str:
        kind = "warning" if self.is_warning else "error"
        return f"{self.path}:{self.line}: {kind}: {self.message}"


class ToolMissing(RuntimeError):
    """A linter is not installed; the text says what to do."""


def report(findings: Iterable[Finding]) -> int:
    """Prints the findings; returns 1 if one of them is an error."""
    status = 0
    for finding in sorted(findings, key=lambda f: (f.is_warning, str(f.path), f.line)):
        print(finding)
        status |= not finding.is_warning
    return int(status)


def repository_files() -> list[PurePosixPath]:
    """Files of the repository, committed or new, without what .gitignore names."""
    git = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if git.returncode != 0:
        raise ToolMissing(f"git ls-files: {git.stderr.strip()}")
    paths = sorted({PurePosixPath(name) for name in git.stdout.split("\0") if name})
    return [path for path in paths if (ROOT / path).is_file()]


def tool(name: str) -> str:
    """Path of a command: from .venv first, so that its version is the pinned one."""
    own = ROOT / ".venv" / "bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise ToolMissing(f"{name} is not installed; run tools/setup --for test")
    return found


def venv_python() -> str:
    """The interpreter that has the package: of .venv, or the running one."""
    own = ROOT / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable
