# SPDX-License-Identifier: Apache-2.0
"""torch.distributed groups as what carries the rows: messages, rounds, failures."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import transports
from support.transport_scenarios import NAMES

from fanfold.testing import RankEnded, process_outcomes, spawn_processes

pytestmark = pytest.mark.multiproc


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file in which the ranks of a group meet."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return str(tmp_path / "store")


class Scenarios:
    """Runs all on one group when the first is asked for."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._results: list[dict[str, str]] = []

    def errors(self, name: str) -> list[str]:
        """What each rank raised in one of them."""
        if not self._results:
            self._results = spawn_processes(4, transports.scenarios_over_gloo, self._store)
        return [errors.get(name, "not run: one before failed") for errors in self._results]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield Scenarios(str(tmp_path_factory.mktemp("gloo") / "store"))


@pytest.mark.parametrize("name", NAMES)
def test_scenario(scenarios: Scenarios, name: str) -> None:
    assert scenarios.errors(name) == [""] * 4


def test_a_killed_rank_is_lost_to_its_peers(store: str) -> None:
    strategies = ["broadcast", "gather_scatter", "batched"]
    outcomes = process_outcomes(3, transports.a_gloo_rank_dies, store, strategies)
    assert isinstance(outcomes[1].error, RankEnded)
    assert outcomes[1].error.signal == signal.SIGKILL
    for survivor, last_word in ((0, "last word"), (2, "")):
        assert outcomes[survivor].error is None, outcomes[survivor].text
        told, reason, heard = outcomes[survivor].value
        assert len(told) == len(strategies)
        for rank, seconds, text in told:
            assert rank == 1, text
            assert "rank 1 is gone: its connection was closed" in text
            assert seconds < 2
        assert reason == "its connection was closed"
        assert heard == last_word


@pytest.mark.parametrize("is_ragged", [False, True], ids=["together", "ragged"])
def test_a_process_ends_well_with_all_left_open(store: str, is_ragged: bool) -> None:
    assert spawn_processes(3, transports.leave_gloo_open, store, is_ragged) == ["left"] * 3
