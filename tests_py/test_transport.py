# SPDX-License-Identifier: Apache-2.0
"""Transports written in Python: what the library calls, and what it makes of what they do."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from support.gil_waits import assert_scenario_ends
from support.queues import Queues
from support.rounds import make, works

import fanfold


class Lazy(Queues):
    """One whose messages leave while it receives, one at a time."""

    def __init__(self, rank: int, inboxes: list[queue.SimpleQueue[tuple[int, bytes]]]) -> None:
        super().__init__(rank, inboxes)
        self.waiting: list[tuple[int, bytearray]] = []

    def send(self, peer: int, data: bytearray) -> None:
        self.waiting.append((peer, data))

    def receive(self, max_wait_s: float) -> tuple[int, bytes] | None:
        if self.waiting:
            super().send(*self.waiting.pop(0))
        return super().receive(min(max_wait_s, 1e-4))

    def has_unsent(self, peer: int) -> bool:
        return any(to == peer for to, _ in self.waiting)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        while self.waiting:
            super().send(*self.waiting.pop(0))


def check_protocol(transport: fanfold.Transport) -> fanfold.Transport:
    """Let the type checker compare the class with the protocol."""
    return transport


def on_threads(
    num_ranks: int, fn: Callable[[Any], Any], cls: type[Queues] = Queues
) -> list[tuple[Any, Queues]]:
    """Call ``fn(transport)`` for every rank, each on a thread; errors are what it returns."""
    inboxes: list[queue.SimpleQueue[tuple[int, bytes]]] = [
        queue.SimpleQueue() for _ in range(num_ranks)
    ]
    transports = [cls(rank, inboxes) for rank in range(num_ranks)]
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = fn(check_protocol(transports[rank]))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(zip(results, transports, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rounds_work_over_a_transport_of_the_user(num_ranks: int) -> None:
    def fn(transport: Any) -> int:
        comm = fanfold.Communicator.from_transport(transport, use="always", timeout_s=20)
        assert (comm.kind, comm.rank, comm.num_ranks) == ("queues", transport.rank, num_ranks)
        assert comm.hosts == [0] * num_ranks
        assert not comm.shares_memory
        for strategy in ("broadcast", "gather_scatter", "batched"):
            with make(comm, strategy=strategy) as a2a:
                works(a2a, comm.rank)
        comm.close()
        return threading.get_ident()

    for thread, transport in on_threads(num_ranks, fn):
        if not isinstance(thread, int):
            raise thread
        assert transport.threads <= {thread}  # never one of the library's own
        assert transport.num_closed == 1


def test_ranks_of_one_process_on_one_host_meet_and_use_memory() -> None:
    def fn(transport: Any) -> str:
        with fanfold.Communicator.from_transport(transport, timeout_s=20) as comm:
            assert comm.shares_memory
            comm.barrier()
            return comm.kind

    for kind, transport in on_threads(2, fn):
        assert kind == "processes"
        assert transport.num_closed == 1


def test_hosts_are_told_apart_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    first = threading.Event()

    def fn(transport: Any) -> Any:
        # Read once, on entry: one rank after the other names its host.
        if transport.rank == 1:
            first.wait(10)
        monkeypatch.setenv("FANFOLD_HOST_ID", f"host {transport.rank}")
        receive = transport.receive

        def received(max_wait_s: float) -> Any:
            first.set()
            return receive(max_wait_s)

        transport.receive = received
        with fanfold.Communicator.from_transport(transport, timeout_s=20) as comm:
            with pytest.raises(fanfold.Unsupported, match="host"):
                make(comm, strategy="one_sided")
            return comm.hosts, comm.kind

    for told, _ in on_threads(2, fn):
        assert told == ([0, 1], "queues")


class Broken(Queues):
    """Fails when it is told to."""

    fails: str = ""

    def send(self, peer: int, data: bytearray) -> None:
        if self.fails == "send":
            raise KeyError("the cable")
        super().send(peer, data)

    def receive(self, max_wait_s: float) -> Any:
        if self.fails == "receive":
            raise OSError(5, "the card")
        if self.fails == "nonsense":
            return "a message"
        if self.fails == "stranger":
            return 7, b"hello"
        return super().receive(max_wait_s)

    def lost_reason(self, peer: int) -> Any:
        return 3 if self.fails == "reason" else super().lost_reason(peer)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        if self.fails == "close":
            raise RuntimeError("no end")


@pytest.mark.parametrize(
    ("fails", "error", "text"),
    [
        ("send", KeyError, "the cable"),
        ("receive", OSError, "the card"),
        (
            "nonsense",
            fanfold.InvalidArgument,
            r"transport\.receive: expected None or .*'a message'",
        ),
        ("stranger", fanfold.InvalidArgument, r"transport\.receive: expected None or .*\(7, b'"),
        ("reason", fanfold.InvalidArgument, r"transport\.lost_reason: expected a str, got 3"),
    ],
)
def test_what_a_transport_raises_reaches_the_caller(
    fails: str, error: type[Exception], text: str
) -> None:
    done = threading.Event()

    def fn(transport: Any) -> None:
        comm = fanfold.Communicator.from_transport(transport, use="always", timeout_s=2)
        comm.barrier()
        if transport.rank == 1:
            done.wait(20)
        else:
            transport.fails = fails
            with pytest.raises(error, match=text) as caught:
                comm.all_gather_bytes(b"x")
            transport.fails = ""
            done.set()
            if fails == "send" and hasattr(caught.value, "__notes__"):
                assert "raise KeyError" in caught.value.__notes__[0]  # where it was raised

    for result, _ in on_threads(2, fn, Broken):
        if result is not None:
            raise result


def test_a_lost_peer_is_told_in_the_words_of_the_transport() -> None:
    done = threading.Event()

    def fn(transport: Any) -> Any:
        comm = fanfold.Communicator.from_transport(transport, use="always", timeout_s=20)
        comm.barrier()
        if transport.rank == 1:
            done.wait(20)
        else:
            transport.lost = "the dog ate the cable"
            with pytest.raises(fanfold.PeerLost, match="rank 1 is gone: the dog ate the cable"):
                comm.barrier()
            done.set()
        return "told"

    assert [result for result, _ in on_threads(2, fn)] == ["told"] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_close_raises_is_not_the_callers() -> None:
    def fn(transport: Any) -> str:
        comm = fanfold.Communicator.from_transport(transport, use="always", timeout_s=20)
        transport.fails = "close"
        comm.close()
        return "closed"

    for result, transport in on_threads(2, fn, Broken):
        assert result == "closed"
        assert transport.num_closed == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("rank", "0", "transport.rank: expected an int, got '0'"),
        ("num_ranks", 1.0, "transport.num_ranks: expected an int, got 1.0"),
        ("kind", b"mpi", "transport.kind: expected a str, got b'mpi'"),
        ("is_thread_bound", "no", "transport.is_thread_bound: expected a bool, got 'no'"),
    ],
)
def test_attributes_of_another_type_are_refused(name: str, value: Any, text: str) -> None:
    transport = Queues(0, [queue.SimpleQueue()])
    setattr(transport, name, value)
    with pytest.raises(fanfold.InvalidArgument, match=text):
        fanfold.Communicator.from_transport(transport)


def test_arguments_are_checked() -> None:
    transport = Queues(0, [queue.SimpleQueue()])
    with pytest.raises(
        fanfold.InvalidArgument, match="use: expected 'auto', 'shared_memory' or 'always'"
    ):
        fanfold.Communicator.from_transport(transport, use="never")
    with pytest.raises(AttributeError, match="rank"):
        fanfold.Communicator.from_transport(object())  # type: ignore[arg-type]
    with pytest.raises(fanfold.InvalidArgument, match="timeout"):
        fanfold.Communicator.from_transport(transport, timeout_s=-1.0)


def test_a_bound_transport_is_called_on_its_thread_only() -> None:
    done = threading.Event()

    class Bound(Queues):
        is_thread_bound = True

    def fn(transport: Any) -> list[str]:
        comm = fanfold.Communicator.from_transport(transport, use="always", timeout_s=20)
        told = []

        def elsewhere() -> None:
            try:
                comm.broadcast(numpy.zeros(3, numpy.float32), 0)
            except fanfold.InvalidState as error:
                told.append(str(error))

        if transport.rank == 0:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            done.set()
        done.wait(20)
        comm.close()
        assert transport.threads == {threading.get_ident()}
        return told

    (told, _), (nothing, _) = on_threads(2, fn, Bound)
    assert len(told) == 1
    assert "thread that made the communicator" in told[0]
    assert nothing == []


def test_adapters_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, fanfold; fanfold.Communicator.threads(1);"
        "print([name for name in ('torch', 'mpi4py', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_call_returns_when_what_it_sent_has_left() -> None:
    def run(transport: Any) -> list[int]:
        comm = fanfold.Communicator.from_transport(transport, use="always")
        left = []
        for step in range(5):
            comm.all_gather_bytes(bytes(1000 * step))
            left.append(len(transport.waiting))
        comm.close()
        return left

    for left, _ in on_threads(3, run, Lazy):
        assert left == [0] * 5


@pytest.mark.parametrize("scenario", ["abort_while_a_round_is_left", "garbage_of_a_mover"])
def test_nobody_waits_with_the_lock_of_the_interpreter(scenario: str) -> None:
    """In a process of its own: one that hangs so cannot even be timed."""
    if scenario == "garbage_of_a_mover":
        pytest.importorskip("mpi4py")
    assert_scenario_ends(scenario)
