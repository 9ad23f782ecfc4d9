# SPDX-License-Identifier: Apache-2.0
"""The list of conformance checks and how one is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fanfold.testing.harness import Harness
from fanfold.testing.trials import Case

Body = Callable[[Harness], None]


@dataclass(frozen=True)
class Check:
    """One guarantee: a function that every rank runs, and that raises if it does not hold.

    `is_core`: it tells layouts and strategies apart; the others look at what these share.
    `on_gpu`: a GPU gives this guarantee, too, for tensors of every framework.
    """

    name: str
    run: Body
    num_ranks: int
    applies: Callable[[Case], bool]
    is_core: bool = False
    on_gpu: bool = True

    def __str__(self) -> str:
        return self.name


CHECKS: dict[str, Check] = {}


def check(
    num_ranks: int = 4,
    applies: Callable[[Case], bool] | None = None,
    core: bool = False,
    on_gpu: bool = True,
) -> Callable[[Body], Body]:
    """Add a function to the suite; its name is the check's, a sentence."""

    def add(body: Body) -> Body:
        CHECKS[body.__name__] = Check(
            body.__name__, body, num_ranks, applies or (lambda case: True), core, on_gpu
        )
        return body

    return add


def is_two_phase(case: Case) -> bool:
    """Say whether dispatch and combine of the case have two halves."""
    return case.strategy in ("one_sided", "low_latency")
