#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks what nvcc made of the kernels: their memory-ordering instructions, registers and spills.

The simulated device proves the kernels as they are written; this proves that a GPU is asked for
the same: a fence of the whole system between rows and flag, an acquire where a flag is read, one
fence and not one for each peer, accesses of 16 bytes where rows move.

Usage: tools/check_device_code.py FILE...      (objects or libraries with code for sm_80 and later)
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from lint_support import ROOT, Finding, ToolMissing, report

# Both come from the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
TOOLS = ROOT / ".venv/lib"


@dataclass(frozen=True)
class Budget:
    """What a kernel may use, and what it must do. Registers of 256 threads: 64 leave four blocks
    on a multiprocessor, 128 leave two, which is what grids are made for."""

    registers: int
    stack_bytes: int = 0
    shared_bytes: int = 48 * 1024
    system_fences: int = 0  # at most
    announces: bool = False
    awaits: bool = False
    counts: bool = False  # blocks, to find the last
    early_loads: int = 0  # at most, ahead of the wait for the kernel before
    wide_loads: int = 0  # at least, of 16 bytes
    wide_stores: int = 0


_EARLY = 5  # `begin` of flags.cuh: a window, its mask and three words of the host
# Two-way kernels.
_PAIR = Budget(96, system_fences=6, announces=True, awaits=True, counts=True, early_loads=_EARLY)
BUDGETS = {
    "signal_kernel": replace(_PAIR, registers=64, counts=False),
    "dispatch_send_kernel": replace(_PAIR, system_fences=8, wide_loads=4, wide_stores=4),
    "arrange_kernel": Budget(
        96, system_fences=2, counts=True, early_loads=_EARLY, wide_loads=4, wide_stores=4
    ),
    "compact_rows_kernel": Budget(
        96, system_fences=2, counts=True, early_loads=_EARLY, wide_loads=4, wide_stores=4
    ),
    "describe_rows_kernel": Budget(64, early_loads=_EARLY),
    "combine_send_kernel": replace(_PAIR, registers=128, wide_loads=4, wide_stores=1),
    "sum_rows_kernel": replace(_PAIR, registers=128, wide_loads=4, wide_stores=1),
    # Rows of FP8 lie on 4 bytes.
    "sum_rows_kernel of FP8": replace(_PAIR, registers=128),
    "pack_rows_kernel": Budget(128, wide_loads=1),
    "sanitize_kernel": Budget(64),
    "begin_step_kernel": Budget(32, wide_stores=1),
    "record_ids_kernel": Budget(96, system_fences=1, counts=True, wide_loads=4, wide_stores=2),
    "copy_snapshot_kernel": Budget(64, wide_loads=1, wide_stores=1),
}


@dataclass
class Kernel:
    """One kernel of one architecture."""

    name: str
    arch: int
    instructions: list[str] = field(default_factory=list)
    registers: int = 0
    stack_bytes: int = 0
    local_bytes: int = 0
    shared_bytes: int = 0


_ARCH = re.compile(r"^\s*code for sm_(\d+)")
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_USAGE_ARCH = re.compile(r"^arch = sm_(\d+)")
_USAGE_NAME = re.compile(r"^\s*Function (\S+):")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


_FP8 = 9  # DType::kFloat8E4M3


def short_name(symbol: str) -> str:
    """The kernel's own name in a mangled symbol."""
    for name in sorted(BUDGETS, key=len, reverse=True):
        if f"{len(name)}{name}" in symbol:
            return f"{name} of FP8" if f"{name}ILNS_5DTypeE{_FP8}E" in symbol else name
    match = re.search(r"\d([a-z_]+_kernel)", symbol)
    return match.group(1) if match else symbol


def parse(sass: str, usage: str) -> list[Kernel]:
    """Kernels from what `cuobjdump --dump-sass` and `--dump-resource-usage` say."""
    kernels: dict[tuple[int, str], Kernel] = {}
    arch = 0
    current: Kernel | None = None
    for line in sass.splitlines():
        if match := _ARCH.match(line):
            arch = int(match.group(1))
        elif match := _FUNCTION.match(line):
            symbol = match.group(1)
            current = Kernel(short_name(symbol), arch)
            kernels[arch, symbol] = current
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.instructions.append(match.group(1))
    symbol = ""
    for line in usage.splitlines():
        if match := _USAGE_ARCH.match(line):
            arch = int(match.group(1))
        elif match := _USAGE_NAME.match(line):
            symbol = match.group(1)
        if (match := _USAGE.search(line)) and (arch, symbol) in kernels:
            kernel = kernels[arch, symbol]
            numbers = [int(number) for number in match.groups()]
            kernel.registers, kernel.stack_bytes, kernel.shared_bytes, kernel.local_bytes = numbers
    return list(kernels.values())


_ORDERS = re.compile(r"^(MEMBAR|CCTL\.IVALL|STG|LDG|LD\.|ST\.|ATOM|RED)")
_SYSTEM_FENCE = re.compile(r"^MEMBAR\.(ALL|SC)\.SYS$")
_DEVICE_FENCE = re.compile(r"^MEMBAR\.(ALL|SC)\.GPU$")
_FLAG_STORE = re.compile(r"^STG\.E\.64\.STRONG\.SYS$")
_FLAG_LOAD = re.compile(r"^LDG\.E\.64\.STRONG\.SYS$")
_REPORT_STORE = re.compile(r"^STG\.E\.STRONG\.SYS$")
_COUNTER = re.compile(r"^ATOMG?\.E\.ADD\.STRONG\.GPU$")
_EARLY_LOAD = re.compile(r"^LDG\.E(\.64|\.128)?(\.CONSTANT)?$")
_INVALIDATE = "CCTL.IVALL"
_FLAG_WORDS = 8


def _follows(memory: Sequence[str], before: re.Pattern[str], store: re.Pattern[str]) -> bool:
    """Whether some `store` has `before` as the memory instruction ahead of it, whose own
    invalidation does not count."""
    last = ""
    for instruction in memory:
        if store.match(instruction) and before.match(last):
            return True
        if instruction != _INVALIDATE:
            last = instruction
    return False


def _acquires(memory: Sequence[str], load: re.Pattern[str]) -> bool:
    """Whether some `load` is followed at once by the invalidation of the first-level cache."""
    pairs = itertools.pairwise(memory)
    return any(load.match(first) and second == _INVALIDATE for first, second in pairs)


def _order_faults(kernel: Kernel, budget: Budget) -> Iterator[str]:
    memory = [i for i in kernel.instructions if _ORDERS.match(i)]
    fences = sum(1 for i in memory if _SYSTEM_FENCE.match(i))
    if fences > budget.system_fences:
        yield f"expected at most {budget.system_fences} fences of the system, got {fences}"
    if budget.announces:
        if not _follows(memory, _SYSTEM_FENCE, _FLAG_STORE):
            yield "expected MEMBAR.ALL.SYS right before the STG.E.64.STRONG.SYS of an epoch"
        stores = sum(1 for i in memory if _FLAG_STORE.match(i))
        if stores < _FLAG_WORDS:
            yield f"expected at least {_FLAG_WORDS} STG.E.64.STRONG.SYS of a line, got {stores}"
    if budget.awaits:
        if not _acquires(memory, _FLAG_LOAD):
            yield "expected CCTL.IVALL right after the LDG.E.64.STRONG.SYS of an epoch"
        if not _follows(memory, _SYSTEM_FENCE, _REPORT_STORE):
            yield "expected MEMBAR.ALL.SYS right before the STG.E.STRONG.SYS of a failure"
    if budget.counts:
        if not _follows(memory, _DEVICE_FENCE, _COUNTER):
            yield "expected MEMBAR.ALL.GPU right before the ATOMG.E.ADD.STRONG.GPU of a block"
        if not _acquires(memory, _COUNTER):
            yield "expected CCTL.IVALL right after the ATOMG.E.ADD.STRONG.GPU of a block"
    if kernel.arch >= 90:
        early = list(itertools.takewhile(lambda i: i != "ACQBULK", kernel.instructions))
        accesses = [i for i in early if _ORDERS.match(i)]
        loads = [i for i in accesses if _EARLY_LOAD.match(i)]
        if early == kernel.instructions or loads != accesses or len(loads) > budget.early_loads:
            yield (
                "expected ACQBULK (the wait for the kernel before) ahead of all memory accesses, "
                f"but for {budget.early_loads} plain loads"
            )


def _size_faults(kernel: Kernel, budget: Budget) -> Iterator[str]:
    for what, most, got in (
        ("registers", budget.registers, kernel.registers),
        ("bytes of stack, spills included", budget.stack_bytes, kernel.stack_bytes),
        ("bytes of local memory", 0, kernel.local_bytes),
        ("bytes of shared memory", budget.shared_bytes, kernel.shared_bytes),
    ):
        if got > most:
            yield f"expected at most {most} {what}, got {got}"
    for what, least, prefix in (
        ("loads", budget.wide_loads, "LDG"),
        ("stores", budget.wide_stores, "STG"),
    ):
        got = sum(1 for i in kernel.instructions if i.startswith(prefix) and ".128" in i)
        if got < least:
            yield f"expected at least {least} {what} of 16 bytes, got {got}"


def check(kernels: Sequence[Kernel], path: PurePosixPath) -> Iterator[Finding]:
    """All that is wrong with kernels of one file."""
    for kernel in kernels:
        budget = BUDGETS.get(kernel.name)
        where = f"{kernel.name} for sm_{kernel.arch}"
        if budget is None:
            yield Finding(path, 0, f"{where}: has no budget in tools/check_device_code.py")
            continue
        for fault in (*_order_faults(kernel, budget), *_size_faults(kernel, budget)):
            yield Finding(path, 0, f"{where}: {fault}")


def dump(file: Path) -> list[Kernel]:
    """The kernels of an object or a library."""
    found = sorted(TOOLS.glob("python3*/site-packages/nvidia/cu13/bin/cuobjdump"))
    if not found:
        raise ToolMissing("cuobjdump is not installed; run tools/setup --for test")
    texts = []
    for what in ("--dump-sass", "--dump-resource-usage"):
        command = [str(found[0]), what, str(file)]
        # It starts nvdisasm, which lies beside it.
        env = {"PATH": f"{found[0].parent}:/usr/bin:/bin"}
        texts.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True))
    return parse(texts[0].stdout, texts[1].stdout)


def main(arguments: list[str]) -> int:
    """Check the files given, and say what each kernel takes."""
    findings: list[Finding] = []
    seen = set()
    for argument in arguments:
        kernels = dump(Path(argument))
        findings += check(kernels, PurePosixPath(argument))
        for kernel in sorted(kernels, key=lambda k: (k.arch, k.name)):
            seen.add(kernel.name)
            print(
                f"sm_{kernel.arch} {kernel.name}: {kernel.registers} registers, "
                f"{kernel.stack_bytes} bytes of stack, {kernel.shared_bytes} of shared memory"
            )
    for name in sorted(set(BUDGETS) - seen):
        findings.append(Finding(PurePosixPath(name), 0, "expected this kernel, found none"))
    return report(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
