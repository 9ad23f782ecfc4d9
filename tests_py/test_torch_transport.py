# SPDX-License-Identifier: Apache-2.0
"""torch.distributed groups as what carries the rows: messages, rounds, failures."""

from __future__ import annotations

import queue
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import transports
from support.transport_scenarios import NAMES

from fanfold import torch_transport
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
            assert seconds < 5
        assert reason == "its connection was closed"
        assert heard == last_word


@pytest.mark.parametrize("is_ragged", [False, True], ids=["together", "ragged"])
def test_a_process_ends_well_with_all_left_open(store: str, is_ragged: bool) -> None:
    assert spawn_processes(3, transports.leave_gloo_open, store, is_ragged) == ["left"] * 3


class Work:
    """An operation that ends when it is told to."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._end: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait(self, timeout: Any) -> None:
        failure = self._end.get()
        if failure:
            raise RuntimeError(failure)

    def end(self, failure: str = "", message: bytes = b"") -> None:
        """End, with a message that has come or with a failure."""
        head = struct.pack("<q", len(message) or -1)
        if not failure and len(self.tensor) > len(head):
            self.tensor[: len(head + message)] = torch.frombuffer(
                bytearray(head + message), dtype=torch.uint8
            )
        self._end.put(failure)


class Group:
    """Two ranks of a group; the test decides what becomes of the operations of rank 0."""

    group_name = "two"

    def __init__(self) -> None:
        self.sends: list[Work] = []
        self.receives: list[Work] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[Any], peer: int, tag: int) -> Work:
        self.sends.append(Work(tensors[0]))
        return self.sends[-1]

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Work:
        self.receives.append(Work(tensors[0]))
        return self.receives[-1]


def test_what_had_come_before_a_send_failed_is_received() -> None:
    group = Group()
    transport = torch_transport.TorchTransport(group, 0)
    transport.start(100)
    transport.send(1, bytearray(b"never arrives"))
    group.sends[0].end(failure="Connection closed by peer")
    assert transport.receive(0.1) is None
    assert transport.lost_reason(1) == ""
    transport.send(1, bytearray(b"not even tried"))
    assert len(group.sends) == 1
    group.receives[0].end(message=b"last word")
    received = transport.receive(5.0)
    assert received is not None
    assert (received[0], bytes(received[1])) == (1, b"last word")
    assert transport.lost_reason(1) == ""
    group.receives[1].end(failure="Connection closed by peer")
    assert transport.receive(0.1) is None
    assert transport.lost_reason(1) == "its connection was closed"
    transport.close(0.0)


def test_a_last_word_is_answered_at_once() -> None:
    group = Group()
    transport = torch_transport.TorchTransport(group, 0)
    transport.start(100)
    group.receives[0].end()
    assert transport.receive(0.1) is None
    assert transport.lost_reason(1) == "it has closed the communicator"
    (answer,) = group.sends
    assert answer.tensor.tolist() == list(struct.pack("<q", -1))
    answer.end()
    transport.close(5.0)
    assert len(group.sends) == 1


def test_a_group_is_broken_with_tensors_of_the_cpu() -> None:
    group = Group()
    transport = torch_transport.TorchTransport(group, 0)

    class Refused(Exception):
        pass

    def refuse(tensors: list[Any], peer: int, tag: int) -> Work:
        devices.append(tensors[0].device.type)
        raise Refused

    devices: list[str] = []
    group.recv = refuse  # type: ignore[method-assign]
    with torch.device("meta"):
        transport._break_group()
    assert devices == ["cpu"]
