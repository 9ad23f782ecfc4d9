# SPDX-License-Identifier: Apache-2.0
"""The training text: Python's documentation and standard library, from Debian packages."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DOC_PACKAGE = "python3.11-doc"
CODE_PACKAGES = ("libpython3.11-minimal", "libpython3.11-stdlib")
DOC_SUFFIX = ".rst.txt"
# Tables of numbers and a second copy of the documentation: neither is code.
CODE_EXCLUDED = ("/encodings/", "/pydoc_data/", "/_sysconfigdata")
HELD_OUT_PERCENT = 4
SAMPLES = Path(__file__).with_name("samples")
# Held-out files that are kept as samples, so that tests need no Debian package.
SAMPLE_FILES = {
    "documentation": ("library/graphlib.rst.txt", "library/wave.rst.txt"),
    "code": ("asyncio/queues.py", "multiprocessing/queues.py"),
}


class MissingPackageError(RuntimeError):
    """A Debian package with training text is not installed."""


@dataclass(frozen=True)
class Corpus:
    """The files of one kind of text, split by file."""

    kind: str
    train: list[Path]
    held_out: list[Path]


def package_files(package: str) -> list[Path]:
    """Return the installed files of a Debian package, sorted."""
    if shutil.which("dpkg") is None:
        raise MissingPackageError(
            f"the training text comes from the Debian package {package}, and this system has "
            "no dpkg"
        )
    listing = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        raise MissingPackageError(
            f"the Debian package {package} is not installed, and its text is needed for "
            f"training; run: apt-get install {package}"
        )
    return sorted(Path(line) for line in listing.stdout.splitlines() if line.startswith("/"))


def is_held_out(path: Path) -> bool:
    """Say whether a file is kept from training: by a hash of its name, so it never changes."""
    digest = hashlib.sha256(path.name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def split(kind: str, files: list[Path]) -> Corpus:
    """Split files into training and held-out ones."""
    return Corpus(
        kind,
        [path for path in files if not is_held_out(path)],
        [path for path in files if is_held_out(path)],
    )


def load_corpora() -> list[Corpus]:
    """Return the documentation and the code, in this order."""
    docs = [path for path in package_files(DOC_PACKAGE) if path.name.endswith(DOC_SUFFIX)]
    code = [
        path
        for package in CODE_PACKAGES
        for path in package_files(package)
        if path.suffix == ".py" and not any(part in str(path) for part in CODE_EXCLUDED)
    ]
    corpora = [split("documentation", docs), split("code", code)]
    for corpus in corpora:
        if not corpus.train or not corpus.held_out:
            raise MissingPackageError(
                f"the installed packages hold no {corpus.kind}; run: apt-get install --reinstall "
                + " ".join((DOC_PACKAGE, *CODE_PACKAGES))
            )
    return corpora


def read_bytes(paths: list[Path]) -> Tensor:
    """Return the bytes of all files, one after the other, as uint8."""
    joined = bytearray(b"".join(path.read_bytes() for path in paths))
    return torch.frombuffer(joined, dtype=torch.uint8)


def sample(kind: str) -> Tensor:
    """Return the kept sample of held-out text of one kind, as uint8."""
    return read_bytes([SAMPLES / f"{kind}.txt"])


def write_samples() -> None:
    """Write the kept samples again, from the installed packages."""
    for corpus in load_corpora():
        names = SAMPLE_FILES[corpus.kind]
        paths = [path for name in names for path in corpus.held_out if str(path).endswith(name)]
        if len(paths) != len(names):
            raise MissingPackageError(f"not every sample of {corpus.kind} is installed: {names}")
        SAMPLES.mkdir(exist_ok=True)
        text = b"".join(path.read_bytes() for path in paths)
        (SAMPLES / f"{corpus.kind}.txt").write_bytes(text)


if __name__ == "__main__":
    write_samples()
