# SPDX-License-Identifier: Apache-2.0
"""Between torch and Fanfold; imported when it is needed."""

from __future__ import annotations

from typing import Any

from fanfold import _core
from fanfold.errors import InvalidArgument, InvalidState, Unsupported

_TRANSPORTS = ("auto", "shared_memory", "group")
_next_number: dict[str, int] = {}  # of the transports on a group of that name


def torch_module() -> Any:
    """The module torch, for code that must not import it when it is imported itself."""
    import torch

    return torch


def from_torch(
    group: Any = None, *, transport: str = "auto", timeout_s: float = 60.0
) -> _core.Communicator:
    """Make a communicator of the ranks of a torch.distributed group; collective.

    If all ranks are on one host, the group only serves to meet, and rows travel through shared
    memory. Else the group carries them, and it must have gloo for CPU tensors ("gloo", or
    "cpu:gloo,cuda:nccl"). It stays usable for anything else, also in between. Ranks must call this
    equally often on a group; after a call that failed on some of them, take a new group. A group
    without gloo meets in its object collectives, which have its own deadline.

    Args:
        group: any ``ProcessGroup``; None means the default group, which must be initialised.
        transport: "auto" as above; "shared_memory" refuses ranks on different hosts; "group" lets
            the group carry the rows on one host, too.
        timeout_s: deadline for joining and default of every call.

    Returns:
        A communicator whose rank is this process's rank in ``group``.

    Raises:
        InvalidArgument: this process is no member of the group, or an unknown transport, or another
            than that of another rank.
        InvalidState: torch.distributed is not initialised.
        PeerTimeout: a rank did not call it in time.
        Unsupported: the ranks are on different hosts, and the group has no gloo or "shared_memory"
            was asked for; or "group", and the group has no gloo.
    """
    from fanfold.torch_transport import gloo_group

    if transport not in _TRANSPORTS:
        raise InvalidArgument(
            f"transport: expected 'auto', 'shared_memory' or 'group', got {transport!r}"
        )
    gloo = gloo_group(group)
    if gloo is not None:
        return _from_gloo(gloo, transport, timeout_s)
    import torch.distributed as dist

    lacking = (
        f"from_torch: expected a group with gloo for CPU tensors, such as 'cpu:gloo,cuda:nccl', "
        f"got '{dist.get_backend_config(group)}'"
    )
    if transport == "group":
        raise Unsupported(lacking)
    try:
        return _from_collectives(group, timeout_s)
    except Unsupported as error:
        raise Unsupported(f"{error}; {lacking}") from error


def _from_gloo(gloo: Any, transport: str, timeout_s: float) -> _core.Communicator:
    """Meet in messages of gloo; the group carries the rows where memory cannot, or is not to."""
    from fanfold.torch_transport import Meeting, TorchTransport

    if not timeout_s >= 0:
        raise InvalidArgument(f"timeout_s: expected 0 or more, got {timeout_s!r}")
    with Meeting(gloo, timeout_s) as meeting:
        # Ranks may have used different numbers: one of them joined a group of that name later.
        name = str(gloo.group_name)
        own = f"{_next_number.get(name, 0)} {transport}"
        told = [text.decode().split(" ", 1) for text in meeting.all_gather(own.encode())]
        number = max(int(each[0]) for each in told)
        _next_number[name] = number + 1
        for rank, (_, theirs) in enumerate(told):
            if theirs != told[0][1]:
                raise InvalidArgument(
                    f"transport: expected the same on every rank, got {told[0][1]!r} on rank 0 "
                    f"and {theirs!r} on rank {rank}"
                )
        if transport != "group":
            try:
                return _core.Communicator.from_callbacks(
                    rank=gloo.rank(),
                    num_ranks=gloo.size(),
                    all_gather=meeting.all_gather,
                    barrier=lambda: meeting.all_gather(b""),
                    timeout_s=timeout_s,
                )
            except Unsupported:  # several hosts, which all ranks find
                if transport == "shared_memory":
                    raise
    return _core.Communicator.from_transport(
        TorchTransport(gloo, number), use="always", timeout_s=timeout_s
    )


def _from_collectives(group: Any, timeout_s: float) -> _core.Communicator:
    """Meet in the object collectives of a group of any backend."""
    import torch.distributed as dist

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


def nccl_handle(group: Any = None, device: Any = "cuda") -> int:
    """Return the address of the ncclComm_t of a torch.distributed group, which stays torch's.

    For ``Communicator.from_nccl(..., handle=)``. torch makes it in the group's first collective on
    the device, or at once if ``init_process_group`` was given a ``device_id``.

    Args:
        group: a group with the NCCL backend; None means the default group.
        device: "cuda:1" or a torch.device.

    Raises:
        InvalidState: torch.distributed is not initialised, or NCCL's communicator not made yet.
        Unsupported: this torch does not tell it, or the group has no NCCL backend.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise InvalidState(
            "nccl_handle: torch.distributed is not initialised; call init_process_group first"
        )
    chosen = dist.group.WORLD if group is None else group
    try:
        backend: Any = chosen._get_backend(torch.device(device))
    except RuntimeError as error:
        raise Unsupported(
            f"nccl_handle: expected a group with the NCCL backend: {error}"
        ) from error
    comm_ptr = getattr(backend, "_comm_ptr", None)
    if comm_ptr is None:
        raise Unsupported(
            f"nccl_handle: expected a backend that tells its communicator, got "
            f"{type(backend).__name__} of torch {torch.__version__}"
        )
    handle = int(comm_ptr())
    if handle == 0:
        raise InvalidState(
            "nccl_handle: torch has not made the communicator yet; run a collective on the group "
            "first, or give init_process_group a device_id"
        )
    return handle


class CudaTensors:
    """CUDA tensors for `fanfold.testing`; rank r works on device r mod the number of devices.

    Not yet run on a GPU.
    """

    name = "torch cuda"

    def __init__(self, index: int = 0) -> None:
        import torch

        self._torch = torch
        self.device = f"cuda:{index}"
        self.stream: Any = torch.cuda.Stream(self.device)

    def for_rank(self, rank: int) -> CudaTensors:
        """Return tensors of the rank's device with a new stream."""
        return CudaTensors(rank % self._torch.cuda.device_count())

    def to_tensor(self, stored: Any, dtype: str) -> Any:
        """Return a copy on the device; bfloat16 is stored as uint16."""
        torch = self._torch
        with torch.cuda.stream(self.stream):
            tensor = torch.from_numpy(stored.copy()).to(self.device)
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor

    def to_array(self, tensor: Any) -> Any:
        """Return a copy of the stored values, bfloat16 as uint16, FP8 as uint8."""
        torch = self._torch
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        elif tensor.element_size() == 1 and tensor.dtype.is_floating_point:
            tensor = tensor.view(torch.uint8)
        with torch.cuda.stream(self.stream):
            return tensor.cpu().numpy()

    def write(self, tensor: Any, stored: Any) -> None:
        """Write stored values, once the stream has ended."""
        rows = self.to_tensor(stored, str(tensor.dtype).rpartition(".")[2])
        with self._torch.cuda.stream(self.stream):
            tensor.copy_(rows)
        self.wait()

    def wait(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()


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
