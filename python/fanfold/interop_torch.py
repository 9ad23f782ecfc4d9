# SPDX-License-Identifier: Apache-2.0
"""The only module that touches torch; imported when it is needed."""

from __future__ import annotations

from typing import Any

from fanfold import _core
from fanfold.errors import InvalidArgument, InvalidState


def torch_module() -> Any:
    """The module torch, for code that must not import it when it is imported itself."""
    import torch

    return torch


def from_torch(group: Any = None, *, timeout_s: float = 60.0) -> _core.Communicator:
    """Make a communicator of the ranks of a torch.distributed group.

    The group only bootstraps: its object collectives are called on this thread before this
    returns. All ranks must be processes of one machine.

    Args:
        group: any ``ProcessGroup``; None means the default group, which must be initialised.
        timeout_s: deadline for joining and default of every call.

    Returns:
        A communicator whose rank is this process's rank in ``group``.

    Raises:
        InvalidState: torch.distributed is not initialised.
        Unsupported: the ranks are on different machines.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise InvalidState(
            "from_torch: torch.distributed is not initialised; call init_process_group first"
        )

    def all_gather(data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, data, group=group)
        return gathered

    def barrier() -> None:
        all_gather(b"")  # dist.barrier may pick a device; this never does

    return _core.Communicator.from_callbacks(
        rank=dist.get_rank(group),
        num_ranks=dist.get_world_size(group),
        all_gather=all_gather,
        barrier=barrier,
        timeout_s=timeout_s,
    )


class TorchMemoryPool:
    """A ``torch.cuda.MemPool`` whose tensors lie in symmetric GPU memory. Not yet run on a GPU.

    Tensors that all ranks allocate alike have equal offsets in their windows, so that each rank's
    peers can be reached: ``memory.tensor(rank, dtype, shape, offset_bytes=pool.offset_of(mine))``.
    torch takes whole segments, of 2 MiB for small tensors and 20 MiB or more for others: give the
    block room for them. Equal offsets need equal calls, freeing included; what ``record_stream``
    holds back depends on time. Allocate with the block's device current; on another one torch runs
    out of memory. Use it in a ``with``, or call ``close``: torch can use eight pools at a time.

    Args:
        memory: a block of an ``Allocator(comm, device="cuda")``; nothing else may use this rank's
            window of it.
        rank: this rank.

    Raises:
        InvalidArgument: the block lies in host memory.
        InvalidState: torch uses eight pools already.
    """

    def __init__(self, memory: _core.SymmetricMemory, rank: int) -> None:
        import torch

        if not memory.memory.device.startswith("cuda"):
            raise InvalidArgument("memory: expected a block of GPU memory, got one on the CPU")
        self._parts = _core.MemoryPool(memory, rank)
        allocate, free = self._parts.give_to_torch()
        self._is_attached = True
        try:
            # The caching allocator frees through these functions when the MemPool goes.
            functions = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, allocate, free)
            self._pool: Any = torch.cuda.MemPool(functions.allocator())
        except BaseException:
            self._parts.take_from_torch()
            raise
        self._functions = functions

    @property
    def pool(self) -> Any:
        """The ``torch.cuda.MemPool``, for ``torch.cuda.use_mem_pool``; keep no reference to it."""
        if self._pool is None:
            raise InvalidState("pool: the memory pool is closed")
        return self._pool

    @property
    def bytes_in_use(self) -> int:
        """What torch holds of the window; its caching allocator keeps what tensors gave back."""
        return self._parts.bytes_in_use

    def offset_of(self, tensor: Any) -> int:
        """Where a tensor of the pool begins in the window, in bytes; the same in every window."""
        return self._parts.offset_of(tensor)

    def close(self) -> None:
        """Take the window back from torch; also what its caching allocator holds unused.

        Raises:
            InvalidState: a tensor of the pool still lives; call again when it is gone.
        """
        import torch

        self._pool = None
        torch.cuda.empty_cache()
        if self._is_attached:
            self._parts.take_from_torch()
            self._is_attached = False

    def __enter__(self) -> TorchMemoryPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
