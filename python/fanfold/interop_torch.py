# SPDX-License-Identifier: Apache-2.0
"""The only module that touches torch; imported when it is needed."""

from __future__ import annotations

from typing import Any

from fanfold import _core
from fanfold.errors import InvalidState


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
