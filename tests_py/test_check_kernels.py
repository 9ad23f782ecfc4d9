# SPDX-License-Identifier: Apache-2.0
"""Each rule for kernel sources reports its breach, and leaves right code alone."""

from pathlib import PurePosixPath

import check_kernels
import pytest
from lint_support import ROOT

KERNEL = "cpp/src/gpu/dispatch_send.cu"
HEADER = "cpp/src/gpu/dispatch_send.h"
DEVICE = "cpp/src/gpu/device/device.cuh"
LITMUS = "tests_cpp/sim/litmus/message_passing.cu"


def findings(path, text):
    return list(check_kernels.check_file(PurePosixPath(path), text))


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        (KERNEL, 'asm("trap;");', "inline PTX"),
        (HEADER, "#if __CUDA_ARCH__ >= 900", "__CUDA_ARCH__ stands in"),
        (KERNEL, "#if defined(FANFOLD_SIM)", "FANFOLD_SIM stands in"),
        ("cpp/src/gpu/fabric.cpp", "#ifdef FANFOLD_SIM", "FANFOLD_SIM stands in"),
        (LITMUS, "#if defined(FANFOLD_SIM)", "FANFOLD_SIM stands in"),
        (KERNEL, "while (*(volatile int*)flag) {}", "volatile orders nothing"),
        (KERNEL, "dispatch<<<1, 32>>>(p);", "fanfold::gpu::launch"),
        (KERNEL, "__shared__ int counts[8];", "FANFOLD_SHARED"),
        (KERNEL, "__constant__ int table[8];", "pass it in"),
        (KERNEL, "__device__ unsigned counter;", "pass it in"),
        (KERNEL, "static __device__ int counter = 0;", "pass it in"),
        (KERNEL, "__device__ int\n    table[4];", "pass it in"),
        (KERNEL, "memcpy(to, from, 16);", "escape the checks"),
        (KERNEL, "std::memset(to, 0, 16);", "escape the checks"),
        (KERNEL, 'printf("here");', "do not print"),
        (KERNEL, "__trap();", "status word"),
        (KERNEL, "assert(n > 0);", "status word"),
        (KERNEL, "#include <vector>", "no containers"),
        (KERNEL, "#include <algorithm>", "no containers"),
        (LITMUS, "#include <string>", "no containers"),
        (KERNEL, "atomicAdd(p.count, 1);", "name order and scope"),
        (KERNEL, "__threadfence_system();", "name order and scope"),
        ("cpp/src/gpu/device/rows.cuh", "__threadfence();", "name order and scope"),
        (KERNEL, "cuda::atomic_ref<int> count(*p);", "name order and scope"),
        (KERNEL, "__global__ void f(int* a) {", "f: expected one parameter"),
        (KERNEL, "__global__ void f(const __grid_constant__ P p, int n) {", "expected one"),
        (KERNEL, "__global__ void f(const __grid_constant__ P* p) {", "expected one"),
        (KERNEL, "__global__ void __launch_bounds__(128) f(P p) {", "f: expected one parameter"),
    ],
)
def test_a_breach_is_reported(path, code, words):
    (finding,) = findings(path, f"// SPDX\n{code}\n")
    assert words in finding.message
    assert finding.line == 2


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (DEVICE, 'asm volatile("barrier.sync 1, 64;" ::: "memory");'),
        (DEVICE, "#if __CUDA_ARCH__ >= 900\n#if defined(FANFOLD_SIM)"),
        (DEVICE, "extern __shared__ unsigned char memory[];"),
        ("cpp/src/gpu/device/launch.h", "#if defined(FANFOLD_SIM)\n#include <utility>"),
        (KERNEL, "// no asm, no volatile, no <<<, no atomicAdd(x) here"),
        (KERNEL, "/* __shared__\n   printf(x) */ int x;"),
        (KERNEL, 'const char* text = "memcpy(a, b, c)";'),
        (KERNEL, "__device__ inline int f(int n = 3) { return n; }"),
        (KERNEL, "__device__ __forceinline__ uint4\nload(const uint4* p) { return ld16(p); }"),
        (KERNEL, "constexpr int kTable[] = {1, 2};"),
        (KERNEL, "static_assert(sizeof(int) == 4);"),
        (KERNEL, "cudaMemcpyAsync(to, from, n, kind, stream);"),
        (KERNEL, "#include <cstdint>\n#include <cuda_bf16.h>"),
        (KERNEL, "__global__ void f(const __grid_constant__ exec::DispatchParams p) {"),
        (
            KERNEL,
            "__global__ __launch_bounds__(kMax(1), 2) void f(__grid_constant__ const P p)",
        ),
        (KERNEL, "template <class T>\n__global__ void f(const __grid_constant__ P<T, 2> p) {"),
        (LITMUS, "__global__ void f(Words w, int who) { atomicAdd(w.flag, 1); __threadfence(); }"),
        ("cpp/src/gpu/fabric.cpp", "#include <vector>\nstd::memcpy(a, b, 64);"),
        ("tests_cpp/sim/litmus/litmus.cpp", "#include <vector>\nprintf(x);"),
        ("cpp/src/cpu/rows.cpp", "volatile int x; memcpy(a, b, c);"),
    ],
)
def test_right_code_and_other_files_pass(path, code):
    assert findings(path, code) == []


def test_a_finding_names_its_line():
    text = "/* two\n   lines */\nint x;\n__shared__ int y;\n"
    assert [finding.line for finding in findings(KERNEL, text)] == [4]


def test_the_repository_keeps_the_rules():
    files = [*(ROOT / "cpp/src/gpu").rglob("*"), *(ROOT / "tests_cpp/sim/litmus").rglob("*")]
    for file in files:
        if file.is_file():
            path = PurePosixPath(file.relative_to(ROOT).as_posix())
            assert findings(path, file.read_text(encoding="utf-8")) == []
