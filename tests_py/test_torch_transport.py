# SPDX-License-Identifier: Apache-2.0
"""torch.distributed groups as what carries the rows: messages, rounds, failures."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support import transports

from fanfold.testing import RankEnded, process_outcomes, spawn_processes

pytestmark = pytest.mark.multiproc


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file in which the ranks of a group meet."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return str(tmp_path / "store")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_messages_arrive_complete_and_in_order(store: str, num_ranks: int) -> None:
    assert spawn_processes(num_ranks, transports.messages_over_gloo, store, 60) == [[]] * num_ranks


def test_a_killed_rank_is_lost_after_its_last_message(store: str) -> None:
    outcomes = process_outcomes(3, transports.a_gloo_rank_dies, store)
    assert isinstance(outcomes[1].error, RankEnded)
    assert outcomes[1].error.signal == signal.SIGKILL
    for survivor, wanted in ((0, "last word"), (2, "")):
        assert outcomes[survivor].error is None, outcomes[survivor].text
        seconds, reason, heard = outcomes[survivor].value
        assert seconds < 2
        assert reason == "its connection was closed"
        assert heard == wanted


@pytest.mark.parametrize("way", ["together", "a late rank", "unread messages"])
def test_a_process_ends_well_with_an_open_transport(store: str, way: str) -> None:
    assert spawn_processes(3, transports.leave_gloo_open, store, way) == [None] * 3
