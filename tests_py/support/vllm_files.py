# SPDX-License-Identifier: Apache-2.0
"""Real files of vLLM, one by one, without the packages that vLLM needs."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def installed() -> Path | None:
    """Where vLLM lies, without importing it; None: it is not installed."""
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


def methods(path: Path) -> dict[str, dict[str, list[str]]]:
    """By class of a file, by method, the names of its parameters. Nothing is run."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: {
            function.name: [argument.arg for argument in function.args.args]
            for function in node.body
            if isinstance(function, ast.FunctionDef)
        }
        for node in module.body
        if isinstance(node, ast.ClassDef)
    }


class _Fake(types.ModuleType):
    """Has whatever is asked for, as a class that can be a base, called and subscripted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads chosen modules of ``vllm`` from their files, and fakes of all others."""

    def __init__(self, root: Path, chosen: Sequence[str]) -> None:
        self.root, self.chosen = root, set(chosen)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        del path, target
        if name in self.chosen:
            file = self.root.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Fake(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


@contextmanager
def loaded_alone(root: Path, chosen: Sequence[str]) -> Iterator[list[Any]]:
    """The chosen modules of ``vllm``; afterwards none is loaded."""
    finder = _Finder(root, chosen)
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(name) for name in chosen]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
