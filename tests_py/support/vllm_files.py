# SPDX-License-Identifier: Apache-2.0
"""Real files of vLLM and FlashInfer, one by one, without the packages that these need."""

from __future__ import annotations

import abc
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


def installed(package: str = "vllm") -> Path | None:
    """Where a package lies, without importing it; None: it is not installed."""
    found = importlib.util.find_spec(package)
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


class _AnyType(abc.ABCMeta):
    """A class that has any attribute, such as the values of an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Anything()


class _Anything(metaclass=_AnyType):
    """A base class, a decorator, an object: what fakes of names can be used as."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        del kwargs
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Anything()

    def __class_getitem__(cls, item: Any) -> Any:
        del item
        return cls


class _Fake(types.ModuleType):
    """Has whatever is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyType(name, (_Anything,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads chosen modules of a package from their files, and fakes of all others."""

    def __init__(self, root: Path, chosen: Sequence[str]) -> None:
        self.root, self.chosen = root, set(chosen)
        self.package = chosen[0].split(".")[0]

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        del path, target
        if name in self.chosen:
            file = self.root.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Fake(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


@contextmanager
def loaded_alone(root: Path, chosen: Sequence[str]) -> Iterator[list[Any]]:
    """The chosen modules of a package; afterwards none is loaded."""
    finder = _Finder(root, chosen)
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(name) for name in chosen]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == finder.package]:
            del sys.modules[name]
