# SPDX-License-Identifier: Apache-2.0
"""What nvcc made of a kernel is read rightly, and each missing instruction is reported."""

from dataclasses import replace
from pathlib import PurePosixPath

import check_device_code
import pytest
from check_device_code import Budget

SASS = """
	code for sm_90
		Function : _ZN7fanfold3gpu12_GLOBAL__N_13push_kernelENS_4exec6ParamsE
        /*0010*/                   ACQBULK ;                                          /* 0x0 */
                                                   /* 0x000e620000002100 */
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR8][R2.64] ;          /* 0x0 */
        /*0030*/              @!P0 STG.E.128 desc[UR8][R6.64], R4 ;                   /* 0x0 */
        /*0040*/                   MEMBAR.ALL.GPU ;                                   /* 0x0 */
        /*0050*/                   ERRBAR;                                            /* 0x0 */
        /*0060*/                   ATOMG.E.ADD.STRONG.GPU PT, R4, desc[UR8][R2.64], R7 ;  /* 0x0 */
        /*0070*/                   CCTL.IVALL ;                                       /* 0x0 */
{words}        /*0100*/                   MEMBAR.ALL.SYS ;                            /* 0x0 */
        /*0110*/                   ERRBAR;                                            /* 0x0 */
        /*0120*/                   CCTL.IVALL ;                                       /* 0x0 */
        /*0130*/                   STG.E.64.STRONG.SYS desc[UR8][R10.64], R20 ;       /* 0x0 */
        /*0140*/                   LDG.E.64.STRONG.SYS R14, desc[UR8][R30.64] ;       /* 0x0 */
        /*0150*/                   CCTL.IVALL ;                                       /* 0x0 */
        /*0160*/                   MEMBAR.ALL.SYS ;                                   /* 0x0 */
        /*0170*/                   STG.E.STRONG.SYS desc[UR8][R32.64], R37 ;          /* 0x0 */
        /*0180*/                   EXIT ;                                             /* 0x0 */
""".replace(
    "{words}",
    7 * "        /*0080*/    STG.E.64.STRONG.SYS desc[UR8][R10.64+0x8], R18 ;  /* 0x0 */\n",
)
USAGE = """
arch = sm_90
 Function _ZN7fanfold3gpu12_GLOBAL__N_13push_kernelENS_4exec6ParamsE:
  REG:40 STACK:0 SHARED:1032 LOCAL:0 CONSTANT[0]:704 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
BUDGET = Budget(
    64,
    system_fences=2,
    announces=True,
    awaits=True,
    counts=True,
    wide_loads=1,
    wide_stores=1,
)


@pytest.fixture(autouse=True)
def budgets(monkeypatch):
    monkeypatch.setattr(check_device_code, "BUDGETS", {"push_kernel": BUDGET})


def faults(sass, usage=USAGE):
    kernels = check_device_code.parse(sass, usage)
    return [str(finding) for finding in check_device_code.check(kernels, PurePosixPath("a.o"))]


def test_a_right_kernel_has_no_fault():
    kernels = check_device_code.parse(SASS, USAGE)
    assert [(k.name, k.arch, k.registers, k.shared_bytes) for k in kernels] == [
        ("push_kernel", 90, 40, 1032)
    ]
    assert "STG.E.128" in kernels[0].instructions, "a predicate belongs to no opcode"
    assert faults(SASS) == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("MEMBAR.ALL.SYS", "MEMBAR.ALL.GPU", "right before the STG.E.64.STRONG.SYS of an epoch"),
        ("MEMBAR.ALL.SYS", "NOP", "right before the STG.E.STRONG.SYS of a failure"),
        ("R10.64], R20", "R10.64], R20 ;\n /*0131*/ MEMBAR.ALL.SYS", "at most 2 fences"),
        ("STG.E.64.STRONG.SYS desc[UR8][R10.64+0x8]", "STG.E.64 [R1]", "at least 8 STG.E.64"),
        ("LDG.E.64.STRONG.SYS", "LDG.E.64", "right after the LDG.E.64.STRONG.SYS of an epoch"),
        ("ADD.STRONG.GPU", "ADD.STRONG.CTA", "right before the ATOMG.E.ADD.STRONG.GPU"),
        ("MEMBAR.ALL.GPU", "NOP", "right before the ATOMG.E.ADD.STRONG.GPU"),
        ("CCTL.IVALL", "NOP", "CCTL.IVALL right after the ATOMG.E.ADD.STRONG.GPU"),
        ("ACQBULK", "NOP", "ahead of all memory accesses"),
        ("LDG.E.128.CONSTANT", "LDG.E.64.CONSTANT", "at least 1 loads of 16 bytes, got 0"),
        ("STG.E.128", "STG.E", "at least 1 stores of 16 bytes, got 0"),
        ("push_kernel", "pull_kernel", "has no budget"),
    ],
)
def test_each_missing_instruction_is_reported(before, after, words):
    assert before in SASS
    changed = SASS.replace(before, after)
    assert any(words in fault for fault in faults(changed)), faults(changed)


@pytest.mark.parametrize(
    ("early", "allowed", "is_reported"),
    [
        ("LDG.E.64 R4, desc[UR8][R2.64] ;", 0, True),
        ("LDG.E.64 R4, desc[UR8][R2.64] ;", 1, False),
        ("LDG.E.STRONG.GPU R4, desc[UR8][R2.64] ;", 1, True),
        ("STG.E.64 desc[UR8][R2.64], R4 ;", 1, True),
    ],
)
def test_only_so_many_plain_loads_come_before_the_wait(monkeypatch, early, allowed, is_reported):
    budget = replace(BUDGET, early_loads=allowed)
    monkeypatch.setattr(check_device_code, "BUDGETS", {"push_kernel": budget})
    sass = SASS.replace("        /*0010*/", f"        /*0000*/ {early}\n        /*0010*/")
    assert any("ahead of all" in fault for fault in faults(sass)) == is_reported


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("REG:40", "REG:65", "at most 64 registers, got 65"),
        ("STACK:0", "STACK:16", "at most 0 bytes of stack, spills included, got 16"),
        ("LOCAL:0", "LOCAL:8", "at most 0 bytes of local memory, got 8"),
        ("SHARED:1032", "SHARED:50000", "at most 49152 bytes of shared memory, got 50000"),
    ],
)
def test_budgets_are_kept(before, after, words):
    assert any(words in fault for fault in faults(SASS, USAGE.replace(before, after)))


def test_a_kernel_that_is_not_there_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(check_device_code, "dump", lambda _: [])
    assert check_device_code.main(["a.o"]) == 1
    assert "push_kernel:0: error: expected this kernel, found none" in capsys.readouterr().out
