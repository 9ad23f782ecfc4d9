# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_rank() -> None:
    """Ranks share few cores: torch must not start threads of its own."""
    torch.set_num_threads(1)
