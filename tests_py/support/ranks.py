# SPDX-License-Identifier: Apache-2.0
"""What ranks that are processes run in the tests. No torch: the children must not need it."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fanfold
from fanfold.testing import Case, Harness, Setup
from support.rounds import STRATEGIES, make, random_ids, tokens, works


def about_me(comm: fanfold.Communicator, argument: Any) -> dict[str, Any]:
    """Tell who this is."""
    return {
        "rank": comm.rank,
        "num_ranks": comm.num_ranks,
        "argument": argument,
        "pid": os.getpid(),
        "has_torch": "torch" in sys.modules,
        "kind": comm.kind,
    }


def fail_on_rank_one(comm: fanfold.Communicator) -> None:
    """Raise on rank 1; the others wait for it."""
    if comm.rank == 1:
        raise KeyError("the cause")
    comm.barrier()


def die_on_rank_one(comm: fanfold.Communicator, number: int) -> None:
    """End by a signal on rank 1; the others wait for it."""
    if comm.rank == 1:
        os.kill(os.getpid(), number)
    comm.barrier()


def exit_on_rank_one(comm: fanfold.Communicator, status: int) -> None:
    """Exit on rank 1 in a way that no handler sees."""
    if comm.rank == 1:
        os._exit(status)


def lose_rank_one(comm: fanfold.Communicator) -> None:
    """Let rank 1 die, and the others find out."""
    die_on_rank_one(comm, signal.SIGKILL)


def return_a_lock(comm: fanfold.Communicator) -> Any:
    """Return what pickle refuses."""
    del comm
    return threading.Lock()


def _note_pid(path: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")


def stop_on_rank_one(comm: fanfold.Communicator, path: str) -> None:
    """Stop rank 1 for good."""
    _note_pid(path)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def sleep_long(comm: fanfold.Communicator, path: str) -> None:
    """Note this process and sleep."""
    del comm
    _note_pid(path)
    time.sleep(120)


# -- ranks that die or freeze in the middle of a round -------------------------------------------


def rounds_until_a_peer_dies(
    comm: fanfold.Communicator, strategy: str, step: int
) -> tuple[int, float, str]:
    """Run rounds, rank 1 killing itself at a protocol step; returns who was lost, and how fast."""
    knobs = {"kill_at_step": step} if comm.rank == 1 else {}
    a2a = make(comm, strategy=strategy, test_knobs=knobs)
    start = time.monotonic()
    try:
        for _ in range(100):
            start = time.monotonic()
            works(a2a, comm.rank, num_rounds=1)
    except fanfold.PeerLost as error:
        return error.rank, time.monotonic() - start, str(error)
    raise AssertionError("nobody died")


def rounds_with_a_frozen_rank(
    comm: fanfold.Communicator, strategy: str, steps: list[int], frozen: int
) -> list[tuple[str, int]]:
    """For each step: freeze a rank there, let the others time out and reset, thaw it, go on.

    Returns for each step the error of this rank, and the rank that it names.
    """
    pids = [int(each) for each in comm.all_gather_bytes(str(os.getpid()).encode())]
    ends = []
    for step in steps:
        knobs = {"stop_at_step": step} if comm.rank == frozen else {}
        a2a = make(comm, strategy=strategy, test_knobs=knobs)
        ends.append(_round_until_reset_is_due(a2a, comm.rank))
        thaw = threading.Timer(0.1, os.kill, (pids[frozen], signal.SIGCONT))
        if comm.rank != frozen:
            thaw.start()
        a2a.reset()
        thaw.cancel()
        works(a2a, comm.rank, num_rounds=3)
        a2a.close()
    return ends


def _round_until_reset_is_due(a2a: fanfold.AllToAll, rank: int) -> tuple[str, int]:
    try:
        for _ in range(100):
            recv = a2a.dispatch(random_ids(rank, 2), [tokens(2, rank=rank)], timeout_s=0.15)
            recv.combine(recv.combine_buffer(), timeout_s=0.15)
    except (fanfold.PeerTimeout, fanfold.PeerAborted) as error:
        return type(error).__name__, error.rank
    raise AssertionError("nobody froze")


def leave_early(comm: fanfold.Communicator, strategy: str) -> str:
    """Return at once on rank 1; the others are in the middle of a round."""
    a2a = make(comm, strategy=strategy)
    works(a2a, comm.rank)
    if comm.rank == 1:
        return "left"
    start = time.monotonic()
    try:
        works(a2a, comm.rank)
    except fanfold.PeerLost as error:
        assert error.rank == 1
        assert time.monotonic() - start < 5
        return "lost"
    return "worked"


# -- results that must not depend on the kind of rank --------------------------------------------


def result_bits(comm: fanfold.Communicator, strategy: str, isa: str) -> str:
    """Return a digest of everything that a few rounds deliver on this rank."""
    digest = hashlib.sha256()
    for layout, weighting in (("rank_major", "applied"), ("expert_major", "carried")):
        case = Case(strategy, layout, weighting)
        harness = Harness(comm, case)
        for dtype in ("float32", "float16"):
            setup = Setup(hidden=45, dtype=dtype, knobs={"isa": isa}, top_k=6, num_experts=9)
            with harness.create(setup) as a2a:
                for seed in range(4):
                    trial = harness.trial(setup, seed)
                    recv = harness.dispatch(a2a, trial)
                    y = harness.experts(a2a, recv.handle, trial, zero_copy=bool(seed % 2))
                    out = a2a.combine(y, recv.handle, out=harness.out(trial, dtype))
                    harness.check_result(out, trial)
                    digest.update(harness.tensors.to_array(out).tobytes())
    return digest.hexdigest()


# -- ways to make a group ------------------------------------------------------------------------


def use_from_env(comm: fanfold.Communicator, run_id: str) -> int:
    """Make a second group from the environment as torchrun sets it."""
    os.environ.update(
        RANK=str(comm.rank),
        LOCAL_RANK=str(comm.rank),
        WORLD_SIZE=str(comm.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID=run_id,
        TORCHELASTIC_RESTART_COUNT="0",
    )
    before = dict(os.environ)
    with fanfold.Communicator.from_env(timeout_s=20) as made:
        assert (made.rank, made.num_ranks) == (comm.rank, comm.num_ranks)
        works(make(made), made.rank)
    assert dict(os.environ) == before
    for name, value, text in (
        ("RANK", None, "RANK"),
        ("RANK", "one", "RANK.*one"),
        ("RANK", "7", "7"),
        ("WORLD_SIZE", "0", "WORLD_SIZE|num_ranks"),
    ):
        os.environ.update(before)
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
        try:
            fanfold.Communicator.from_env(timeout_s=1)
        except fanfold.InvalidArgument as error:
            assert re.search(text, str(error)), error
        else:
            raise AssertionError(f"{name}={value} was accepted")
    return int(comm.rank)


def use_from_torch(comm: fanfold.Communicator, store: str) -> tuple[int, int]:
    """Make a group from torch.distributed over gloo, and one from a subgroup of it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.num_ranks
    )
    with fanfold.Communicator.from_torch() as made:
        assert (made.rank, made.num_ranks) == (comm.rank, comm.num_ranks)
        a2a = make(made)
        works(a2a, made.rank)
        recv = a2a.dispatch(torch.tensor([[0, 3]]), [torch.ones((1, 8))])
        assert recv.combine(torch.ones((comm.num_ranks, 4, 8))).tolist() == [[2.0] * 8]
        a2a.close()
    evens = dist.new_group([r for r in range(comm.num_ranks) if r % 2 == 0])
    inner = (-1, -1)
    if comm.rank % 2 == 0:
        with fanfold.Communicator.from_torch(evens) as made:
            works(make(made), made.rank)
            inner = (made.rank, made.num_ranks)
    dist.destroy_process_group()
    return inner


def use_in_a_forked_child(comm: fanfold.Communicator, strategy: str) -> int:
    """Fork, and use everything in the child: InvalidState, and the parent is not disturbed."""
    a2a = make(comm, strategy=strategy)
    works(a2a, comm.rank)
    pid = os.fork()
    if pid == 0:
        status = 0
        for call in (
            comm.barrier,
            lambda: a2a.dispatch(random_ids(0, 1), [tokens(1)]),
            lambda: a2a.abort("from the child"),
            lambda: make(comm, strategy=strategy),
        ):
            try:
                call()
                status = 1
            except fanfold.InvalidState as error:
                status |= 0 if "fork" in str(error) else 2
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    works(a2a, comm.rank)
    a2a.close()
    return status


def count_open_files(comm: fanfold.Communicator, num_objects: int) -> tuple[int, int]:
    """Make and close exchanges; returns the number of open files before and after."""

    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    make(comm).close()
    before = num_open()
    for i in range(num_objects):
        a2a = make(comm, strategy=STRATEGIES[i % 2])
        works(a2a, comm.rank)
        a2a.close()
    return before, num_open()


def join_alone(path: str, rank: int, num_ranks: int) -> str:
    """Join a group that nobody else joins."""
    try:
        fanfold.Communicator.processes(
            rank=rank, num_ranks=num_ranks, rendezvous=path, timeout_s=0.5
        )
    except fanfold.PeerTimeout as error:
        return str(error)
    return "joined"
