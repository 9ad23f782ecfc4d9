# SPDX-License-Identifier: Apache-2.0
"""Each rule of the check tools reports its breach, and leaves right code alone."""

from pathlib import Path, PurePosixPath

import check_layers
import check_text
import lint
import pytest
import tidy


def layer_messages(path, text):
    return [finding.message for finding in check_layers.check_file(PurePosixPath(path), text)]


def text_findings(path, text):
    licence = "# SPDX-License-Identifier: Apache-2.0\n"
    return list(check_text.check_file(PurePosixPath(path), licence + text))


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("cpp/src/base/format.h", '"fanfold/dtype.h"'),
        ("cpp/src/memory/host.cpp", '"comm/group.h"'),
        ("cpp/src/exec/backend.h", '"memory/block.h"'),
        ("cpp/src/cpu/backend.cpp", '"exec/backend.h"'),
        ("cpp/src/exchange/one_sided.cpp", '"exec/backend.h"'),
        ("cpp/src/capture/capture.cpp", '"plan/layout.h"'),
        ("cpp/src/api/all_to_all.cpp", '"gpu/backend.h"'),
        ("cpp/src/gpu/dispatch_send.cu", '"gpu/device/sync.cuh"'),
        ("cpp/src/gpu/device/sync.cuh", "<cuda/atomic>"),
        ("cpp/src/gpu/device/sync.cuh", '"plan/layout.h"'),
        ("cpp/include/fanfold/dtype.h", "<cstdint>"),
        ("bindings/module.cpp", "<nanobind/nanobind.h>"),
        ("bindings/module.cpp", '"bind.h"'),
        ("tests_cpp/plan/layout_test.cpp", '"plan/layout.h"'),
        ("cpp/examples/four_ranks.cpp", "<fanfold/communicator.h>"),
        ("cpp/examples/mpi_ranks.cpp", "<mpi.h>"),
        ("cpp/include/fanfold/mpi.h", "<mpi.h>"),
        ("cpp/src/mpi/mpi_transport.h", "<mpi.h>"),
        ("cpp/src/mpi/mpi_transport.cpp", '"base/format.h"'),
    ],
)
def test_an_include_down_the_layers_is_allowed(path, include):
    assert layer_messages(path, f"#include {include}\n") == []


@pytest.mark.parametrize(
    ("path", "include", "words"),
    [
        ("cpp/src/base/format.h", '"plan/layout.h"', "base may include include"),
        ("cpp/src/plan/layout.h", '"comm/group.h"', "is of comm"),
        ("cpp/src/comm/group.cpp", '"memory/block.h"', "is of memory"),
        ("cpp/src/cpu/backend.cpp", '"gpu/backend.h"', "is of gpu"),
        ("cpp/src/exchange/one_sided.cpp", '"cpu/backend.h"', "is of cpu"),
        ("cpp/src/capture/capture.cpp", '"exchange/round.h"', "is of exchange"),
        ("cpp/src/api/all_to_all.cpp", '"gpu/device/sync.cuh"', "device code"),
        ("cpp/src/base/format.cpp", '"format.h"', "from its module on"),
        ("cpp/src/base/format.cpp", "<fanfold/dtype.h>", "with quotes"),
        ("cpp/src/base/format.cpp", '"nowhere/format.h"', "belongs to no module"),
        ("cpp/src/exec/backend.h", "<cuda_runtime.h>", "in cpp/src/gpu only"),
        ("cpp/src/api/all_to_all.cpp", "<torch/torch.h>", "no torch"),
        ("cpp/src/api/all_to_all.cpp", "<Python.h>", "in bindings/ only"),
        ("cpp/src/plan/layout.cpp", "<mutex>", "pure functions"),
        ("cpp/include/fanfold/dtype.h", "<unistd.h>", "standard library"),
        ("cpp/include/fanfold/dtype.h", '"base/format.h"', "is of base"),
        ("cpp/src/gpu/device/sync.cuh", '"base/format.h"', "plan and itself only"),
        ("cpp/src/other/x.cpp", "<vector>", "no module of cpp/src"),
        ("bindings/module.cpp", '"base/format.h"', '"fanfold/*.h" only'),
        ("cpp/examples/four_ranks.cpp", '"base/format.h"', '"fanfold/*.h" only'),
        ("cpp/src/mpi/from_mpi.cpp", '"comm/group.h"', "is of comm"),
        ("cpp/src/api/all_to_all.cpp", '"mpi/mpi_transport.h"', "is of mpi"),
        ("cpp/src/comm/group.cpp", "<mpi.h>", "in cpp/src/mpi only"),
        ("cpp/include/fanfold/communicator.h", "<mpi.h>", "in cpp/src/mpi only"),
    ],
)
def test_an_include_up_or_across_the_layers_is_reported(path, include, words):
    (message,) = layer_messages(path, f"#include {include}\n")
    assert words in message


def test_a_finding_names_its_line():
    text = '#include <vector>\n#include "api/x.h"\n'
    (finding,) = check_layers.check_file(PurePosixPath("cpp/src/base/x.cpp"), text)
    assert str(finding).startswith("cpp/src/base/x.cpp:2: error: ")


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("python/fanfold/all_to_all.py", "import torch\n", "torch_transport.py only"),
        ("python/fanfold/a.py", "def f():\n    from torch import nn\n", "torch_transport.py only"),
        ("python/fanfold/a.py", "import ctypes\n", "fanfold._core only"),
        ("python/fanfold/a.py", "from _core import X\n", "fanfold._core only"),
        ("python/fanfold/a.py", "from fanfold import interop_torch\n", "inside the function"),
        ("python/fanfold/a.py", "from fanfold.interop_torch import x\n", "inside the function"),
        ("python/fanfold/a.py", "if x:\n    import fanfold.interop_torch\n", "inside the function"),
    ],
)
def test_a_forbidden_python_import_is_reported(path, text, words):
    (message,) = layer_messages(path, text)
    assert words in message


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("python/fanfold/interop_torch.py", "import torch\n"),
        ("python/fanfold/torch_ops.py", "import torch\n"),
        ("python/fanfold/a.py", "from fanfold import _core\n"),
        ("python/fanfold/a.py", "def f():\n    from fanfold import interop_torch\n"),
        ("tests_py/test_a.py", "import torch\n"),
    ],
)
def test_an_allowed_python_import_is_left_alone(path, text):
    assert layer_messages(path, text) == []


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("cpp/src/comm/x.cpp", 'auto* v = std::getenv("RANK");\n', "cpp/src/base/env.cpp only"),
        ("bindings/x.cpp", 'getenv("RANK");\n', "cpp/src/base/env.cpp only"),
        ("cpp/src/comm/x.cpp", "std::atomic_thread_fence(o);\n", "release and acquire"),
        ("tests_cpp/comm/x.cpp", "std::atomic_thread_fence(o);\n", "release and acquire"),
        ("cpp/src/comm/x.cpp", "std::abort();\n", "never ends the process"),
        ("cpp/src/comm/x.cpp", "exit(1);\n", "never ends the process"),
        ("cpp/src/comm/x.cpp", "std::cout << 1;\n", "does not print"),
        ("python/fanfold/x.py", "assert x > 0\n", "vanishes under -O"),
    ],
)
def test_a_forbidden_call_is_reported(path, text, words):
    (finding,) = text_findings(path, text)
    assert words in finding.message
    assert not finding.is_warning


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cpp/src/base/env.cpp", 'std::getenv("FANFOLD_LOG");\n'),
        ("cpp/src/comm/x.cpp", "// std::atomic_thread_fence would be wrong here\n"),
        ("cpp/src/comm/x.cpp", 'throw InvalidState("call exit() first");\n'),
        ("cpp/src/api/x.cpp", "void AllToAll::abort(int reason) { impl_->abort(reason); }\n"),
        ("tests_py/test_x.py", "assert x > 0\n"),
    ],
)
def test_right_text_is_left_alone(path, text):
    assert text_findings(path, text) == []


@pytest.mark.parametrize("path", ["cpp/src/base/x.cpp", "python/fanfold/x.py", "tools/setup"])
def test_a_missing_licence_line_is_reported(path):
    (finding,) = check_text.check_file(PurePosixPath(path), "x = 1\n")
    assert "SPDX" in finding.message


@pytest.mark.parametrize(
    ("num_lines", "expected"), [(400, []), (401, [True]), (600, [True]), (601, [False])]
)
def test_a_file_is_warned_about_at_400_lines_and_refused_at_600(num_lines, expected):
    found = text_findings("cpp/src/base/x.h", "\n" * (num_lines - 1))
    assert [finding.is_warning for finding in found] == expected


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("cpp/src/base/x.cpp", "int f(int a) {\n" + "  ++a;\n" * 60 + "}\n", "int f(int a) {"),
        ("python/fanfold/x.py", "def f(a):\n" + "    a += 1\n" * 61, "f"),
    ],
)
def test_a_long_function_is_warned_about(path, text, name):
    (finding,) = text_findings(path, text)
    assert finding.is_warning
    assert finding.message.startswith(f"{name}: 6")


def test_a_source_that_no_cmake_list_names_is_reported():
    nobody = PurePosixPath("cpp/src/base/compiled_by_nobody.cpp")
    listed = PurePosixPath("cpp/src/base/format.cpp")
    assert [f.path for f in lint.unlisted_sources([nobody, listed])] == [nobody]


def test_clang_tidy_runs_again_when_a_header_two_includes_away_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(tidy, "ROOT", tmp_path)
    source, header, far = (tmp_path / name for name in ("a.cpp", "b.h", "c.h"))
    source.write_text('#include "b.h"\n')
    header.write_text('#include "c.h"\n')
    far.write_text("int x;\n")
    unit = tidy.Unit(Path(source), f"c++ -I{tmp_path} -c a.cpp", tmp_path)
    before = tidy.key(unit, b"")
    assert tidy.key(unit, b"") == before
    far.write_text("int y;\n")
    tidy.read.cache_clear()
    assert tidy.key(unit, b"") != before
    assert tidy.closure(unit) == [source, header, far]
