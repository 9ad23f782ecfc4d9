# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for a thread which itself wants the interpreter's lock; run as a program."""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fanfold
from support.queues import Queues
from support.rounds import make, random_ids, tokens

LIMIT_S = 40.0


def assert_scenario_ends(name: str) -> None:
    """Run a scenario in a process of its own; fails with its stacks where it hangs."""
    where = [Path(fanfold.__file__).parents[1], Path(__file__).parents[1]]
    done = subprocess.run(
        [sys.executable, "-m", "support.gil_waits", name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, where))},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _on_threads(body: Callable[[fanfold.Communicator], None], kind: type[Queues] = Queues) -> None:
    boxes: list[queue.SimpleQueue[tuple[int, bytes]]] = [queue.SimpleQueue() for _ in range(2)]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            transport = kind(rank, boxes)
            body(fanfold.Communicator.from_transport(transport, use="always", timeout_s=20))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def abort_while_a_round_is_left() -> None:
    """A watchdog aborts, and waits within a send; the round is left by an exception meanwhile."""
    is_sending, is_left = threading.Event(), threading.Event()
    is_slow = False

    class Slow(Queues):
        def send(self, peer: int, data: bytearray) -> None:
            if is_slow:
                is_sending.set()
                is_left.wait(0.3)
            super().send(peer, data)

    def body(comm: fanfold.Communicator) -> None:
        nonlocal is_slow
        a2a = make(comm, strategy="gather_scatter", timeout_s=10)
        ids = random_ids(comm.rank, 3, a2a.config["top_k"], a2a.config["num_experts"])
        received = a2a.dispatch(ids, [tokens(3, rank=comm.rank)])
        comm.barrier()
        if comm.rank == 1:
            return
        watchdog = threading.Thread(target=a2a.abort, args=("watchdog",), daemon=True)
        try:
            with received:
                is_slow = True
                watchdog.start()
                is_sending.wait()
                raise KeyError
        except KeyError:
            is_left.set()
        watchdog.join()
        is_slow = False

    _on_threads(body, Slow)


def garbage_of_a_mover() -> None:
    """What the collector ends on mpi4py's thread sends, and closes, in the middle of its look."""
    from mpi4py import MPI  # noqa: F401

    from fanfold import interop_mpi

    sent: list[bytes] = []

    class Request:
        def Test(self) -> bool:
            if threading.current_thread().name.startswith("fanfold mpi"):
                gc.collect()
            return bool(ended.is_set())

    class Comm:
        def Set_errhandler(self, handler: Any) -> None:
            pass

        def Get_rank(self) -> int:
            return 0

        def Get_size(self) -> int:
            return 2

        def Isend(self, data: Any, dest: int, tag: int) -> Request:
            sent.append(bytes(data[0]))
            return Request()

        def Improbe(self, *where: Any) -> None:
            return None

        def Idup(self) -> tuple[Comm, Any]:
            return Comm(), type("Done", (), {"Test": lambda self: True})()

    class Garbage:
        def __del__(self) -> None:
            assert threading.current_thread().name.startswith("fanfold mpi")
            transport.send(1, bytearray(b"last word"))
            assert transport.receive(1.0) is None
            ended.set()

    ended = threading.Event()
    transport = interop_mpi.MpiTransport(Comm(), 1.0)
    transport.start(100)
    gc.disable()
    garbage: Any = Garbage()
    garbage.me = garbage
    del garbage
    transport.send(1, bytearray(b"first"))
    assert ended.wait(10)
    assert transport.receive(0.1) is None
    assert sent == [b"first", b"last word"]
    transport.close(1.0)


def combine_buffer_beside_another_communicator() -> None:
    """One thread is inside the transport most of the time; calls of another ask it who is lost."""
    from fanfold import _core
    from support.gpu import Rank, over_nccl

    _core.simulator.configure(devices=2, resident_blocks=2, host_threads=2)

    def body(comm: fanfold.Communicator) -> None:
        second = comm.split(0, comm.rank)
        assert second is not None
        rank = Rank(comm, 2)
        rank.comm = over_nccl(comm, rank.device)
        a2a = rank.make(strategy="batched", timeout_s=20)
        rank.works(a2a, 1)
        is_over = False

        def barriers() -> None:
            while not second.all_gather_bytes(b"1" if is_over else b"0").count(b"1"):
                pass

        other = threading.Thread(target=barriers, daemon=True)
        other.start()
        ids = random_ids(rank.rank, 3, a2a.config["top_k"], a2a.config["num_experts"])
        x = tokens(3, rank=rank.rank)
        for _ in range(4):
            if rank.rank == 1:
                time.sleep(0.05)
            received = rank.dispatch(a2a, ids, x)
            for _ in range(20):
                a2a.combine_buffer(received.handle)
            rank.finish(a2a, received, x)
            rank.wait()
        is_over = True
        other.join()

    _on_threads(body)


def a_monitor_asks_for_failures() -> None:
    """While the caller waits for counts, and looks after its peers meanwhile."""
    from fanfold import _core
    from support.gpu import Rank, over_nccl

    _core.simulator.configure(devices=2, resident_blocks=2, host_threads=2)

    def body(comm: fanfold.Communicator) -> None:
        rank = Rank(comm, 2)
        rank.comm = over_nccl(comm, rank.device)
        a2a = rank.make(strategy="batched", timeout_s=20)
        rank.works(a2a, 1)
        is_over = threading.Event()

        def monitor() -> None:
            while not a2a.is_failed and not is_over.is_set():
                time.sleep(0.0002)

        threading.Thread(target=monitor, daemon=True).start()
        ids = random_ids(rank.rank, 3, a2a.config["top_k"], a2a.config["num_experts"])
        x = tokens(3, rank=rank.rank)
        if rank.rank == 1:
            time.sleep(1)
        received = rank.dispatch(a2a, ids, x)
        received.host_counts()
        rank.finish(a2a, received, x)
        rank.wait()
        is_over.set()

    _on_threads(body)


def main() -> None:
    """Run the scenario that the command line names."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    globals()[sys.argv[1]]()
    os._exit(0)  # whatever is still open


if __name__ == "__main__":
    main()
