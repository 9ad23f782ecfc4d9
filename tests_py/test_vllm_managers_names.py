# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for vLLM's managers have vLLM's names, and need no vLLM."""

from __future__ import annotations

import abc
import enum
import inspect
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import vllm_files
from support.vllm_managers import BY_EXPERT, BY_ROW, Batch, layer_output, manager
from support.vllm_names import (
    ABSTRACT_MODULAR,
    BASE_ATTRIBUTES,
    BASE_FILE,
    BASE_MANAGER,
    KERNEL_FILE,
    MANAGERS,
    OPTIONAL_PREPARE,
    PREPARE_FOLDER,
    PREPARES,
)

import fanfold
from fanfold.compat import vllm
from fanfold.compat.vllm.vllm_types import MODULAR_KERNEL
from fanfold.testing import spawn_threads

PROPERTIES = {"activation_format"}
# Beyond this many arguments vLLM's callers rely on defaults.
DEFAULTS = {
    "is_sequence_parallel": False,
    "extra_tensors": None,
    "tcp_store_group": None,
    "defer_input_quant": False,
    "use_fp8_dispatch": False,
    "global_to_physical": None,
    "physical_to_global": None,
    "local_expert_global_ids": None,
    "dispatch_format": None,
    "extra_payload_bytes_per_token": 0,
}


def check_parameters(cls: Any, name: str, expected: list[str]) -> None:
    function = getattr(cls, name)
    where = f"{cls.__name__}.{name}"
    if name in PROPERTIES:
        assert isinstance(function, property), where
        return
    parameters = list(inspect.signature(function).parameters.values())
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert [each.name for each in positional][: len(expected)] == expected, where
    for more in positional[len(expected) :]:
        assert more.default is None, where  # such as tcp_store_group of the base
    rest = [each for each in parameters if each not in positional]
    for more in rest:
        assert more.kind is more.KEYWORD_ONLY, where
        assert more.default is not more.empty, where
    for each in positional:
        if each.name in DEFAULTS and name != "naive_multicast":
            assert each.default == DEFAULTS[each.name], f"{where}: {each.name}"


@pytest.mark.parametrize("name", MANAGERS)
def test_managers_have_the_methods_of_vllm(name: str) -> None:
    cls = getattr(vllm, name)
    for method, expected in {**BASE_MANAGER, **MANAGERS[name][1]}.items():
        check_parameters(cls, method, expected)


@pytest.mark.parametrize("name", PREPARES)
def test_prepare_finalize_classes_have_the_methods_of_vllm(name: str) -> None:
    cls = getattr(vllm, name)
    for method, expected in {**OPTIONAL_PREPARE, **PREPARES[name][1]}.items():
        check_parameters(cls, method, expected)


def test_managers_have_the_attributes_of_vllm() -> None:
    for name in MANAGERS:
        made = manager(getattr(vllm, name), fanfold.Communicator.threads(1)[0], Batch([1]))
        for attribute in BASE_ATTRIBUTES:
            assert hasattr(made, attribute), (name, attribute)
        assert (made.rank, made.world_size, made.dp_rank, made.dp_world_size) == (0, 1, 0, 1)
        assert made.internode is False
        assert made.support_fault_tolerance is (name == "DeepEPLLAll2AllManager")
        made.destroy()


def drift(root: Path) -> list[str]:
    """Where the files of a vLLM differ from the table."""
    tables = [
        (root / BASE_FILE, "All2AllManagerBase", BASE_MANAGER),
        *((root / file, name, table) for name, (file, table) in MANAGERS.items() if file),
        *(
            (root / PREPARE_FOLDER / file, name, table)
            for name, (file, table) in PREPARES.items()
            if file
        ),
    ]
    found = []
    for path, name, table in tables:
        real = vllm_files.methods(path).get(name)
        if real is None:
            found.append(f"{path.name} has no {name}")
            continue
        for method, expected in table.items():
            if real.get(method, expected) != expected:
                found.append(f"{name}.{method}: {real[method]}")
    return found


def test_the_table_is_that_of_an_installed_vllm() -> None:
    root = vllm_files.installed()
    if root is None:
        pytest.skip("vllm is not installed: the table was not compared with its real files")
    assert drift(root) == []


def test_an_installed_vllm_asks_for_nothing_that_is_missing() -> None:
    root = vllm_files.installed()
    if root is None:
        pytest.skip("vllm is not installed: its real base classes were not loaded")
    with vllm_files.loaded_alone(root, [MODULAR_KERNEL]) as (kernel,):
        assert Path(kernel.__file__) == root / KERNEL_FILE
        for name in PREPARES:
            made = vllm.for_vllm(getattr(vllm, name))
            kind = "Monolithic" if name.endswith("Monolithic") else "Modular"
            base = getattr(kernel, f"FusedMoEPrepareAndFinalize{kind}")
            assert base.__module__ == MODULAR_KERNEL  # the real one, no fake
            assert issubclass(made, base)


# --- That drift would be seen -------------------------------------------------------------------


def write_stand_in(root: Path) -> None:
    """A tree of files like vLLM's with the classes of the table, and nothing in them."""

    def write(path: Path, classes: dict[str, dict[str, list[str]]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        for name, table in classes.items():
            text += f"class {name}:\n"
            for method, parameters in table.items():
                text += f"    def {method}({', '.join(parameters)}): pass\n"
            text += "    pass\n"
        path.write_text(text)

    write(root / BASE_FILE, {"All2AllManagerBase": BASE_MANAGER})
    for name, (file, table) in MANAGERS.items():
        if file:
            write(root / file, {name: table})
    for name, (file, table) in PREPARES.items():
        if file:
            write(root / PREPARE_FOLDER / file, {name: table})
    abstract = "".join(
        f"    @abc.abstractmethod\n    def {name}(self): ...\n" for name in sorted(ABSTRACT_MODULAR)
    )
    kernel = root / KERNEL_FILE
    kernel.write_text(
        "import abc\nfrom vllm.somewhere import Helper, Other\nfrom vllm.a.b import c\n"
        f"class FusedMoEPrepareAndFinalizeModular(abc.ABC):\n{abstract}"
        f"class FusedMoEPrepareAndFinalizeMonolithic(abc.ABC):\n{abstract}"
    )


def test_drift_of_vllm_is_seen(tmp_path: Path) -> None:
    write_stand_in(tmp_path)
    assert drift(tmp_path) == []
    file = tmp_path / PREPARE_FOLDER / "deepep_ll.py"
    file.write_text(file.read_text().replace("a1, ", "a1, new, ", 1))
    base = tmp_path / BASE_FILE
    base.write_text(base.read_text().replace("All2AllManagerBase", "Renamed"))
    found = drift(tmp_path)
    assert any("has no All2AllManagerBase" in each for each in found)
    assert any("DeepEPLLPrepareAndFinalize.prepare" in each for each in found)


def test_single_files_load_without_what_they_import(tmp_path: Path) -> None:
    write_stand_in(tmp_path)
    with vllm_files.loaded_alone(tmp_path, [MODULAR_KERNEL]) as (kernel,):
        for name in PREPARES:
            made = vllm.for_vllm(getattr(vllm, name))
            assert not made.__abstractmethods__
        text = (tmp_path / KERNEL_FILE).read_text()
    assert kernel.Helper.__name__ == "Helper"
    (tmp_path / KERNEL_FILE).write_text(text.replace("def prepare(", "def something_new("))
    with (
        vllm_files.loaded_alone(tmp_path, [MODULAR_KERNEL]),
        pytest.raises(fanfold.InvalidArgument, match="without something_new"),
    ):
        vllm.for_vllm(vllm.DeepEPLLPrepareAndFinalize)
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]


# --- Within vLLM's kernels ----------------------------------------------------------------------


class Formats(enum.Enum):
    Standard = "standard"
    BatchedExperts = "batched_experts"


@pytest.fixture
def kernel_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for vLLM's modular_kernel, loaded."""
    module: Any = types.ModuleType(MODULAR_KERNEL)
    members = {name: abc.abstractmethod(lambda self: None) for name in ABSTRACT_MODULAR}
    for kind in ("Modular", "Monolithic"):
        name = f"FusedMoEPrepareAndFinalize{kind}"
        setattr(module, name, abc.ABCMeta(name, (abc.ABC,), dict(members)))
    module.FusedMoEActivationFormat = Formats
    module.ExpertTokensMetadata = type(
        "ExpertTokensMetadata", (SimpleNamespace,), {"is_of_vllm": True}
    )
    monkeypatch.setitem(sys.modules, MODULAR_KERNEL, module)
    return module


def test_a_class_becomes_one_that_kernels_accept(kernel_module: Any) -> None:
    for name in PREPARES:
        cls = getattr(vllm, name)
        made = vllm.for_vllm(cls)
        kind = "Monolithic" if name.endswith("Monolithic") else "Modular"
        assert issubclass(made, getattr(kernel_module, f"FusedMoEPrepareAndFinalize{kind}"))
        assert issubclass(made, cls)
        assert made.__name__ == name


def test_formats_and_metadata_are_those_of_vllm_where_it_runs(kernel_module: Any) -> None:
    del kernel_module
    batch = Batch([2])

    def rank(comm: fanfold.Communicator) -> None:
        layer = BY_EXPERT["batched"](comm, batch)
        assert layer.activation_format is Formats.BatchedExperts
        x, weights, ids = batch.of(0)
        _, _, tokens, _, _ = layer.prepare(x, weights, ids, 6, None, False, None)
        assert tokens.is_of_vllm
        standard = BY_ROW["one_sided"](comm, batch)
        assert standard.activation_format is Formats.Standard
        output = layer_output(standard, batch, 0, 1)
        assert torch.equal(output, batch.dense(0))

    spawn_threads(1, rank)


def test_kernels_need_vllm_and_a_class_of_ours() -> None:
    with pytest.raises(fanfold.InvalidState, match="to be loaded"):
        vllm.for_vllm(vllm.DeepEPLLPrepareAndFinalize)
    with pytest.raises(fanfold.InvalidArgument, match="expected a prepare/finalize class"):
        vllm.for_vllm(vllm.AgRsAll2AllManager)


def test_importing_all_of_them_loads_neither_vllm_nor_torch() -> None:
    program = (
        "import sys; from fanfold.compat import vllm;"
        "[getattr(vllm, name) for name in vllm.__all__];"
        "print({'torch', 'vllm', 'flashinfer', 'deep_ep'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"
