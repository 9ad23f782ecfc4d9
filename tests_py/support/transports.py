# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of transports. Torch and MPI are imported where they are used."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

import fanfold
from support.rounds import make, works
from support.transport_scenarios import raises, run_all

MAX_BYTES = 1 << 16


# -- messages --------------------------------------------------------------------------------------


def _message(source: int, target: int, number: int) -> bytes:
    rng = random.Random(f"{source} {target} {number}")
    size = rng.choice([0, 1, 63, rng.randrange(5000), MAX_BYTES])
    return rng.randbytes(size)


def exchange_messages(transport: Any, count: int, between: Any = None) -> None:
    """Send ``count`` messages to every other rank, and check those that come: all, in order."""
    me, peers = transport.rank, [r for r in range(transport.num_ranks) if r != transport.rank]
    rng = random.Random(me)
    to_send = [peer for peer in peers for _ in range(count)]
    rng.shuffle(to_send)
    num_sent = dict.fromkeys(peers, 0)
    num_received = dict.fromkeys(peers, 0)
    deadline = time.monotonic() + 40
    while to_send or sum(num_received.values()) < count * len(peers):
        assert time.monotonic() < deadline, (num_sent, num_received)
        if to_send and rng.random() < 0.5:
            peer = to_send.pop()
            transport.send(peer, bytearray(_message(me, peer, num_sent[peer])))
            num_sent[peer] += 1
        received = transport.receive(rng.choice([0.0, 0.001]) if to_send else 0.05)
        if received is not None:
            source, data = received
            assert bytes(data) == _message(source, me, num_received[source]), (source, me)
            num_received[source] += 1
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.002)
        for peer in peers:  # who has all it wants may close
            assert not transport.lost_reason(peer) or num_received[peer] == count
    assert transport.receive(0.0) is None


def our_threads() -> list[str]:
    """Names of the threads that transports have started and that still run, after a while."""
    from fanfold import torch_transport

    deadline = time.monotonic() + 10
    while True:
        torch_transport._wind_up()  # as the next communicator does
        names = [each.name for each in threading.enumerate()]
        ours = [name for name in names if name.startswith("fanfold gloo")]
        if not ours or time.monotonic() > deadline:
            return ours
        time.sleep(0.01)


# -- gloo ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gloo(rank: int, num_ranks: int, store: str) -> Iterator[Any]:
    """The default group over gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    yield dist
    dist.destroy_process_group()


def over_gloo(group: Any = None, **options: Any) -> fanfold.Communicator:
    """A communicator whose data goes through a group, on one host, too."""
    options = {"transport": "group", "timeout_s": 20.0, **options}
    return fanfold.Communicator.from_torch(group, **options)


def _messages(dist: Any) -> None:
    """Messages on two transports of one group, while the group works for its user."""
    import torch

    from fanfold.torch_transport import TorchTransport

    group = dist.group.WORLD
    opened = [TorchTransport(group, number) for number in (1000, 1001)]
    for transport in opened:
        transport.start(MAX_BYTES)
    for transport in opened:
        exchange_messages(transport, 60)
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total[0] == dist.get_world_size()
    for transport in opened:
        transport.close(20.0)
    peers = [r for r in range(opened[0].num_ranks) if r != opened[0].rank]
    assert all(transport.lost_reason(peer) for transport in opened for peer in peers)


def _ways_to_make_one(dist: Any, comm: fanfold.Communicator) -> None:
    """Subgroups, groups with a second backend, the group's own work in between, wrong arguments."""
    import torch
    import torch.testing._internal.distributed.fake_pg  # backend "fake"

    from fanfold import interop_torch

    for transport in ("auto", "shared_memory"):
        with (
            unittest.mock.patch("fanfold.torch_transport.TorchTransport", "is not made"),
            fanfold.Communicator.from_torch(transport=transport) as made,
        ):
            assert made.kind == "processes"
            assert made.shares_memory
    with unittest.mock.patch.dict(os.environ, FANFOLD_HOST_ID=f"host {comm.rank // 2}"):
        with raises(fanfold.Unsupported, "host 0.*host 1"):
            fanfold.Communicator.from_torch(transport="shared_memory")
        with fanfold.Communicator.from_torch() as made:
            assert made.kind == "gloo"
            assert made.hosts == [0, 0, 1, 1]
    with raises(fanfold.InvalidArgument, "'group' on rank 0 and 'auto' on rank 3"):
        fanfold.Communicator.from_torch(transport="auto" if comm.rank == 3 else "group")
    with raises(fanfold.InvalidArgument, "timeout_s: expected 0 or more, got -1"):
        fanfold.Communicator.from_torch(timeout_s=-1)
    with unittest.mock.patch("fanfold.torch_transport.gloo_group", lambda group: None):
        with fanfold.Communicator.from_torch() as made:  # as over NCCL alone
            assert made.kind == "processes"
            made.barrier()
        with raises(fanfold.Unsupported, "expected a group with gloo"):
            over_gloo()
    with raises(fanfold.InvalidArgument, "transport: expected 'auto'.*got 'mpi'"):
        fanfold.Communicator.from_torch(transport="mpi")
    elsewhere = dist.new_group(backend="fake")
    with raises(fanfold.Unsupported, "cpu:gloo,cuda:nccl.*got .*fake"):
        over_gloo(elsewhere)
    mixed = dist.new_group(backend="cpu:gloo,cuda:fake")
    odd = dist.new_group([1, 3])
    if comm.rank % 2 == 0:
        with raises(fanfold.InvalidArgument, "member"):
            over_gloo(odd)
    if comm.rank == 1:  # it has more behind it than the others
        interop_torch._next_number[dist.group.WORLD.group_name] += 5
    with over_gloo() as whole, over_gloo() as again, over_gloo(mixed) as other:
        groups = [whole, again, other]
        if comm.rank % 2 == 1:
            groups.append(over_gloo(odd))
            assert (groups[-1].rank, groups[-1].num_ranks) == (comm.rank // 2, 2)
        exchanges = [make(each, strategy="batched") for each in groups]
        for step in range(5):
            for a2a in exchanges:
                works(a2a, a2a.rank, num_rounds=1)
                if a2a.num_ranks == comm.num_ranks:
                    total = torch.full((3,), step)
                    dist.all_reduce(total)
                    assert total.tolist() == [step * comm.num_ranks] * 3
        if comm.rank % 2 == 1:
            groups[-1].close()


def _managers_across_hosts(dist: Any, comm: fanfold.Communicator) -> None:
    """vLLM's managers over a group whose ranks are on two hosts."""
    import torch

    from fanfold.compat import vllm
    from support.vllm_managers import Batch

    world = dist.group.WORLD
    with unittest.mock.patch.dict(os.environ, FANFOLD_HOST_ID=f"host {comm.rank // 2}"):
        for cls in (vllm.AgRsAll2AllManager, vllm.NaiveAll2AllManager):
            own = cls(world, forward_context=Batch([2] * comm.num_ranks).context)
            assert own.internode
            x = torch.full((2, 3), float(comm.rank))
            ids = torch.full((2, 1), comm.rank)
            hidden, _, all_ids = own.dispatch(x, x[:, :1], ids, is_sequence_parallel=True)
            assert all_ids.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
            assert torch.equal(hidden[:, 0], all_ids.flatten().float())
            out = own.combine(hidden * (comm.rank + 1), is_sequence_parallel=True)
            assert torch.equal(out, x * 10)
            own.destroy()
        one_sided = vllm.FlashInferNVLinkOneSidedManager(world, forward_context=lambda: None)
        assert one_sided.internode
        with raises(fanfold.Unsupported, "host"):
            one_sided.get_handle(
                {"num_experts": 8, "top_k": 2, "max_tokens_per_rank": 8, "hidden": 16}
            )
        one_sided.destroy()


def scenarios_over_gloo(comm: fanfold.Communicator, store: str) -> dict[str, str]:
    """All of what a communicator must do, and what one over a group must, on one group."""
    with gloo(comm.rank, comm.num_ranks, store) as dist:
        _messages(dist)
        _ways_to_make_one(dist, comm)
        _managers_across_hosts(dist, comm)
        assert our_threads() == []
        errors = run_all(over_gloo, "gloo")
        assert our_threads() == [] or any(errors.values())
        return errors


def a_gloo_rank_dies(
    comm: fanfold.Communicator, store: str, strategies: list[str]
) -> tuple[list[tuple[int, float, str]], str, str]:
    """Rounds of several exchanges; rank 1 kills itself in the middle.

    Returns for each exchange who was lost, how fast and in which words, then the same of a bare
    transport, with the last message that came over it.
    """
    with gloo(comm.rank, comm.num_ranks, store) as dist:
        from fanfold.torch_transport import TorchTransport

        transport = TorchTransport(dist.group.WORLD, 1000)
        transport.start(MAX_BYTES)
        exchange_messages(transport, 3)
        exchanges = [make(over_gloo(), strategy=strategy) for strategy in strategies]
        for a2a in exchanges:
            works(a2a, comm.rank, num_rounds=1)
        dist.barrier()
        if comm.rank == 1:
            transport.send(0, bytearray(b"last word"))
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        told = []
        for a2a in exchanges:
            try:
                while True:
                    works(a2a, comm.rank, num_rounds=1)
            except fanfold.PeerLost as error:
                told.append((error.rank, time.monotonic() - begin, str(error)))
        heard = b""
        while not transport.lost_reason(1) and time.monotonic() < begin + 20:
            received = transport.receive(0.05)
            if received is not None:
                heard += bytes(received[1])
        transport.send(1, bytearray(b"nobody reads this"))
        time.sleep(0.5)  # the other one finds out, too, before this one leaves
        transport.close(10.0)
        return told, transport.lost_reason(1), heard.decode()


def leave_gloo_open(comm: fanfold.Communicator, store: str, is_ragged: bool) -> str:
    """End with a communicator, an exchange and a transport open; ragged: at different times."""
    with gloo(comm.rank, comm.num_ranks, store) as dist:
        from fanfold.torch_transport import TorchTransport

        transport = TorchTransport(dist.group.WORLD, 1000)
        transport.start(MAX_BYTES)
        made = over_gloo()
        a2a = make(made, strategy="batched")
        works(a2a, comm.rank)
        spare = dist.new_group()
        if comm.rank != 1:
            with raises(fanfold.PeerTimeout, "rank 1 has not come .* within 0.3 s") as caught:
                fanfold.Communicator.from_torch(spare, timeout_s=0.3)
            assert caught[0].rank == 1
        dist.barrier(spare)  # and it has not closed its connections
        sys.modules["kept"] = (made, a2a)  # type: ignore[assignment]  # until the interpreter ends
        if is_ragged:
            for _ in range(5):
                transport.send((comm.rank + 1) % comm.num_ranks, bytearray(MAX_BYTES))
            if comm.rank == 1:
                time.sleep(3.5)
        return "left"
