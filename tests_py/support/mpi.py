# SPDX-License-Identifier: Apache-2.0
"""Runs functions of this module as ranks under mpirun, and what the ranks do."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fanfold
from support import transports
from support.rounds import make, works
from support.transport_scenarios import raises, run_all

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from support import mpi; mpi.main(*sys.argv[2:])"
)
OPTIONS = ("--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1")


def reason_to_skip() -> str:
    """What is missing to run ranks under mpirun; empty if nothing is."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed (tools/setup --for test)"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (tools/setup --for test)"
    return ""


@dataclass
class Job:
    """How a job ended: what each rank returned (None: nothing) and what mpirun did."""

    values: list[Any]
    status: int
    text: str


def mpirun(
    folder: Path,
    num_ranks: int,
    name: str,
    *args: Any,
    options: Sequence[str] = (),
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Job:
    """Run a function of this module, which must return what JSON can hold, on every rank."""
    command = [
        *prefix,
        *("mpirun", *OPTIONS, *options, "-n", str(num_ranks)),
        *(sys.executable, "-c", BOOT, json.dumps(sys.path), name, str(folder), json.dumps(args)),
    ]
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        text, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        job.terminate()  # mpirun ends the ranks
        try:
            text, _ = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            text, _ = job.communicate()
        raise AssertionError(f"{name} did not end within {timeout_s} s:\n{text}") from None
    files = [folder / f"{rank}.json" for rank in range(num_ranks)]
    values = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return Job(values, job.returncode, text)


def main(name: str, folder: str, args: str) -> None:
    """Run one rank's function."""
    if name in MAY_NOT_END:
        end = threading.Timer(50, os._exit, (9,))
        end.daemon = True
        end.start()
    value, rank = FUNCTIONS[name](*json.loads(args))
    file = Path(folder) / f"{rank}.json"
    file.write_text(json.dumps(value))
    if name in MAY_NOT_END:
        os._exit(0)


def create() -> fanfold.Communicator:
    return fanfold.Communicator.from_mpi(transport="mpi", timeout_s=20.0)


def messages(count: int) -> tuple[Any, int]:
    """Messages on two transports, while the communicator works for its user."""
    from mpi4py import MPI

    from fanfold.interop_mpi import MpiTransport

    comm = MPI.COMM_WORLD
    opened = [MpiTransport(comm, 20.0), MpiTransport(comm, 20.0)]
    for transport in opened:
        transport.start(transports.MAX_BYTES)
    for transport in opened:
        transports.exchange_messages(transport, count)
        assert comm.allreduce(1) == comm.size
    for transport in opened:
        transport.close(20.0)
    assert not [each for each in threading.enumerate() if each.name.startswith("fanfold mpi")]
    return all(opened[0].lost_reason(r) for r in range(comm.size) if r != comm.rank), comm.rank


def a_long_message() -> tuple[Any, int]:
    """Rank 0 sends one and makes no further call for a while; when rank 1 has it."""
    from mpi4py import MPI

    from fanfold.interop_mpi import MpiTransport

    comm = MPI.COMM_WORLD
    transport = MpiTransport(comm, 20.0)
    transport.start(1 << 24)
    comm.Barrier()
    begin = time.monotonic()
    if comm.rank == 0:
        transport.send(1, bytearray(1 << 24))
        time.sleep(2.0)
    else:
        while transport.receive(0.1) is None:
            assert time.monotonic() < begin + 20
    seconds = time.monotonic() - begin
    comm.Barrier()
    transport.close(10.0)
    return seconds, comm.rank


class Failing:
    """A communicator on which probes of some sources fail."""

    def __init__(self, comm: Any, sources: Sequence[int]) -> None:
        self._comm = comm
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Improbe(self, source: int, tag: int, status: Any) -> Any:
        from mpi4py import MPI

        if source in self._sources:
            raise MPI.Exception(MPI.ERR_OTHER)
        return self._comm.Improbe(source, tag, status)


def mishaps() -> tuple[Any, int]:
    """A rank that is late to meet, probes that fail, and calls after MPI has ended."""
    from mpi4py import MPI

    from fanfold.interop_mpi import MpiTransport

    world = MPI.COMM_WORLD
    rank = world.rank
    if rank != 1:
        with raises(fanfold.PeerTimeout, "from_mpi: .* within 0.2 s, got none") as caught:
            fanfold.Communicator.from_mpi(timeout_s=0.2)
        assert caught[0].rank == -1
    world.Barrier()
    if rank == 1:
        made, request = world.Idup()  # so that no rank's is left when MPI ends
        request.Wait()
        made.Free()
    world.Barrier()

    transport = MpiTransport(world, 20.0)
    transport.start(100)
    if rank == 0:
        whole = transport._comm
        transport._comm = Failing(whole, [MPI.ANY_SOURCE])
        with raises(MPI.Exception):
            transport.receive(0.0)
        transport._comm = Failing(whole, [MPI.ANY_SOURCE, 1])
        for _ in range(2):
            received = transport.receive(20.0)
            assert received == (2, b"hello"), received
        assert "MPI reports" in transport.lost_reason(1)
        assert transport.lost_reason(2) == ""
        transport._comm = whole
    else:
        for _ in range(2):
            transport.send(0, bytearray(b"hello"))
    world.Barrier()
    transport.close(10.0)

    opened = MpiTransport(world, 20.0)
    opened.start(100)
    comm = create()
    comm.barrier()
    world.Barrier()
    MPI.Finalize()
    for call in (
        comm.barrier,
        lambda: opened.send((rank + 1) % 3, bytearray(1)),
        lambda: opened.receive(0.0),
        create,
    ):
        with raises(fanfold.InvalidState, "MPI"):
            call()
    opened.close(1.0)
    with contextlib.suppress(fanfold.InvalidState):  # may tell what could not be sent
        comm.close()
    return "works", rank


def scenarios() -> tuple[Any, int]:
    """All of what a communicator must do."""
    from mpi4py import MPI

    return run_all(create, "mpi"), MPI.COMM_WORLD.rank


def ways_to_make_one() -> tuple[Any, int]:
    """Arguments of from_mpi; two communicators and the user's own at the same time."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with raises(fanfold.InvalidArgument, "transport: expected 'auto'.*got 'gloo'"):
        fanfold.Communicator.from_mpi(transport="gloo")
    with raises(fanfold.InvalidArgument, "comm: expected an mpi4py intracommunicator"):
        fanfold.Communicator.from_mpi(MPI.COMM_NULL)
    with raises(fanfold.InvalidArgument, "comm: expected an mpi4py intracommunicator"):
        fanfold.Communicator.from_mpi("COMM_WORLD")
    for transport in ("auto", "shared_memory"):
        with fanfold.Communicator.from_mpi(transport=transport) as made:
            assert (made.rank, made.num_ranks) == (comm.rank, comm.size)
            assert made.kind == "processes"
            assert made.shares_memory
            with make(made) as a2a:
                works(a2a, made.rank)
    half = comm.Split(comm.rank % 2, -comm.rank)
    with create() as whole, fanfold.Communicator.from_mpi(half, transport="mpi") as part:
        assert (part.rank, part.num_ranks) == (half.rank, half.size)
        with make(whole, strategy="batched") as one, make(part, strategy="batched") as other:
            for _ in range(5):
                works(one, whole.rank, num_rounds=1)
                assert comm.allgather(comm.rank) == list(range(comm.size))
                works(other, part.rank, num_rounds=1)
    half.Free()
    return "works", comm.rank


def leave_open() -> tuple[Any, int]:
    """End without closing anything."""
    from mpi4py import MPI

    comm = create()
    works(make(comm, strategy="batched"), comm.rank)
    if comm.rank == 0:
        FUNCTIONS["keep"] = comm  # alive when the interpreter ends
    return "left", MPI.COMM_WORLD.rank


def leave_to_mpi() -> tuple[Any, int]:
    """End while MPI still uses something, which would say so if it was freed."""
    from mpi4py import MPI

    from fanfold import interop_mpi

    class Used:
        def __del__(self, write: Any = os.write) -> None:
            write(2, b"freed too early")

    for _ in range(2):
        interop_mpi._leave_to_mpi(Used())
    return "left", MPI.COMM_WORLD.rank


def a_thread_of_its_own() -> tuple[Any, int]:
    """MPI that only the main thread may call."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_FUNNELED
    told: list[str] = []

    def elsewhere() -> None:
        for call in (comm.barrier, create):
            try:
                call()
            except fanfold.InvalidState as error:
                told.append(str(error))

    with create() as comm:
        comm.barrier()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        comm.barrier()
    return told, MPI.COMM_WORLD.rank


def rounds_until_a_rank_dies(strategy: str) -> tuple[Any, int]:
    """Rounds; rank 1 kills itself in the middle. Returns what the others are told, and when."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    comm = create()
    a2a = make(comm, strategy=strategy, timeout_s=2.0)
    works(a2a, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 20:
            works(a2a, rank, num_rounds=1)
    except (fanfold.PeerLost, fanfold.PeerTimeout) as error:
        seconds = time.monotonic() - begin
        time.sleep(1.5)  # the other one finds out, too, before this one leaves
        return [type(error).__name__, error.rank, seconds, str(error)], rank
    return "nothing was noticed", rank


FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (
        messages,
        a_long_message,
        mishaps,
        scenarios,
        ways_to_make_one,
        leave_open,
        leave_to_mpi,
        a_thread_of_its_own,
        rounds_until_a_rank_dies,
    )
}
MAY_NOT_END = ("rounds_until_a_rank_dies",)  # MPI_Finalize would wait for the dead
