# SPDX-License-Identifier: Apache-2.0
"""What the simulated device found in a test is that test's failure."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fanfold import _core


@pytest.fixture(autouse=True)
def nothing_is_reported() -> Iterator[None]:
    simulator = getattr(_core, "simulator", None)
    if simulator is not None:
        simulator.configure()
        simulator.clear_reports()
    yield
    gc.collect()
    if simulator is not None:
        found = simulator.reports()
        simulator.clear_reports()
        assert not found, "\n".join(f"[{kind}] {text}" for kind, text in found)
