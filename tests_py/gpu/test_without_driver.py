# SPDX-License-Identifier: Apache-2.0
"""A build for GPUs on a machine without a driver: PYTHONPATH=build/cuda/python (preset cuda)."""

from __future__ import annotations

import pytest
import torch

import fanfold
from fanfold.testing import spawn_processes, spawn_threads

if fanfold.build_info()["cuda"] in ("", "simulated"):
    pytest.skip("needs the build of preset cuda (tools/test --only sim)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("this machine has a GPU; one without runs this", allow_module_level=True)


def exchange(comm: fanfold.Communicator) -> float:
    ids = torch.tensor([[0, 3], [2, 2], [1, -1]], dtype=torch.int32)
    x = torch.ones(3, 8)
    with fanfold.AllToAll(
        comm, num_experts=4, top_k=2, max_tokens_per_rank=4, hidden=8, dtype=torch.float32
    ) as a2a:
        received = a2a.dispatch(ids, [x])
        y = received.combine_buffer()
        y.copy_(received.payloads[0])
        return float(received.combine(y).sum())


def test_all_of_the_cpu_works() -> None:
    expected = 8.0 * (2 + 1 + 1)  # the first token has experts on both ranks
    assert spawn_threads(2, exchange) == [expected, expected]
    assert spawn_processes(2, exchange) == [expected, expected]


def test_gpu_memory_is_one_clear_error_on_every_rank() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        for _ in range(2):  # the next call looks again
            with pytest.raises(
                fanfold.Unsupported,
                match=r"rank 0: GPU: expected the CUDA driver, which is not here: libcuda\.so\.1",
            ):
                fanfold.Allocator(comm, device="cuda")
        with pytest.raises(fanfold.Unsupported, match="expected the CUDA driver"):
            fanfold.FabricMemory(comm, 100, device="cuda:0")
        assert fanfold.Allocator(comm).allocate(100).num_bytes >= 100

    spawn_threads(2, fn)


def test_an_exchange_on_a_gpu_says_what_is_missing() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(
            fanfold.Unsupported,
            match=r"expected the CUDA driver, which is not here: libcuda\.so\.1",
        ):
            fanfold.AllToAll(
                comm, num_experts=4, top_k=2, max_tokens_per_rank=4, hidden=8, device="cuda"
            )
        needed = fanfold.AllToAll.required_bytes(
            num_ranks=2, num_experts=4, top_k=2, max_tokens_per_rank=4, hidden=8, device="cuda"
        )
        assert needed > 0

    spawn_threads(2, fn)
