# SPDX-License-Identifier: Apache-2.0
"""Sizes of the floor's shared memory; needs neither torch nor a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fanfold_bench.cases import Case

CONTROL: Final = 2 << 20
PAGE: Final = 4096


def page_aligned(count: int) -> int:
    """``count`` rounded up to whole pages."""
    return -(-count // PAGE) * PAGE


def inbox_bytes(case: Case) -> int:
    """Room for the dispatched rows of one (destination, source) pair."""
    return page_aligned(case.tokens * case.row_bytes)


def partial_bytes(case: Case) -> int:
    """Room for the results of one (owner, source) pair."""
    return page_aligned(case.tokens * case.payload_bytes)


def window_bytes(cases: Sequence[Case]) -> int:
    """Control area and room for the largest of ``cases``, in whole huge pages."""
    largest = max(case.ranks**2 * (inbox_bytes(case) + partial_bytes(case)) for case in cases)
    return CONTROL + -(-largest // CONTROL) * CONTROL
