# SPDX-License-Identifier: Apache-2.0
"""Builds and loads floor.cpp: compiled where it runs, for the processor it runs on."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from fanfold_bench.machine import ROOT, describe

SOURCE: Final = Path(__file__).with_name("floor.cpp")
HEADER: Final = Path(__file__).with_name("moves.h")
BUILD: Final = ROOT / "build" / "bench"
FLAGS: Final = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")


class FloorPlan(ctypes.Structure):
    """Mirror of ``FloorPlan`` in floor.cpp."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("crowded", ctypes.c_int32),
        ("is_float32", ctypes.c_int32),
        ("tokens", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("inbox", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("control", ctypes.c_void_p),
        ("last_start", ctypes.c_int64),
        ("epoch", ctypes.c_int64),
        ("meetings", ctypes.c_int64),
    )


def compiler() -> str:
    """The C++ compiler to use.

    Raises:
        RuntimeError: none is installed.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise RuntimeError("the floor needs a C++ compiler: install g++ or clang++, or set CXX")


def build() -> Path:
    """Compile unless the library for this source, compiler and processor exists already.

    Raises:
        RuntimeError: the compiler failed; the text carries what it said.
    """
    command = [compiler(), *FLAGS]
    key = hashlib.sha256(SOURCE.read_bytes() + HEADER.read_bytes())
    key.update(" ".join([*command, str(describe()["cpu"])]).encode())
    library = BUILD / f"floor-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    scratch = library.with_suffix(f".{os.getpid()}.tmp")
    done = subprocess.run(
        [*command, str(SOURCE), "-o", str(scratch)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        scratch.unlink(missing_ok=True)
        raise RuntimeError(f"building the floor failed:\n{done.stderr.strip()}")
    scratch.replace(library)
    return library


def load(library: Path) -> Any:
    """Load the library and declare its functions."""
    lib = ctypes.CDLL(str(library))
    i32, i64, ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "floor_control_bytes": (i64, []),
        "floor_map": (ptr, [ctypes.c_int, i64]),
        "floor_huge_pages": (i32, [ptr, i64]),
        "floor_run": (i32, [ctypes.POINTER(FloorPlan), i64, i32, i64, ptr, ptr]),
        "floor_flag_latency": (ctypes.c_double, [ptr, i32, i64, i64, i64]),
        "floor_copy_seconds": (ctypes.c_double, [ptr, ptr, i64, i64, i32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib
