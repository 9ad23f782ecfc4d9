# SPDX-License-Identifier: Apache-2.0
"""What all drop-ins for vLLM's all2all managers share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fanfold.all_to_all import AllToAll
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.compat.vllm import vllm_values
from fanfold.compat.vllm.exchanges import Exchanges
from fanfold.compat.vllm.groups import Groups, Members
from fanfold.errors import InvalidArgument, Unsupported

_logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 8192


class All2AllManager:
    """The surface of vLLM 0.33.0's ``All2AllManagerBase``, over Fanfold's exchanges.

    One object per rank. Making and destroying one is collective over the ranks of ``cpu_group``,
    and so is the first use of a configuration. One call at a time; the threads of micro-batches
    take turns.

    Args:
        cpu_group: the ranks that hold experts: a ``torch.distributed`` group, a stateless group of
            vLLM, or a ``fanfold.Communicator``. On different machines over a group with gloo or a
            communicator of several hosts, for the managers that gather and the batched one; the
            exchanges of the others refuse it.
        tcp_store_group: kept as an attribute; nothing needs it.
        dp_group, tp_group: the data- and tensor-parallel groups of this rank, objects with
            ``world_size``, ``rank_in_group`` and ``ranks``, whose numbers are those of
            ``cpu_group`` or of the world, alike on all ranks. None: vLLM's, and where vLLM has made
            none, every rank is a data-parallel one.
        forward_context: gives the forward context of the running step. None: vLLM's, if it runs.
        max_tokens_per_rank: the most tokens of a rank in a step, where no argument of a call says
            so. None: vLLM's ``max_num_batched_tokens``, if there is a config, else 8192.
        timeout_s: how long a rank may be late in any call.

    Raises:
        InvalidArgument: the groups contradict each other.
        Unsupported: the ranks are on different machines, and the group is a stateless one.

    Attributes:
        rank, world_size: in ``cpu_group``.
        dp_rank, dp_world_size: in ``dp_group``.
        internode: whether ranks are on different machines.
        support_fault_tolerance: whether vLLM shall watch the mask.
        device: where tensors lie in this manager's own tensors, such as the mask.
    """

    strategy = ""
    # Whether tokens are gathered over the second communicator.
    _gathers = False
    # Whether the strategy can leave ranks out.
    _has_masks = False
    support_fault_tolerance = False

    def __init__(
        self,
        cpu_group: Any,
        tcp_store_group: Any = None,
        *,
        dp_group: Any = None,
        tp_group: Any = None,
        forward_context: Callable[[], Any] | None = None,
        max_tokens_per_rank: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.cpu_group = cpu_group
        self.tcp_store_group = tcp_store_group
        self._groups = Groups(cpu_group, dp_group, tp_group, splits=self._gathers)
        self.dp_group, self.tp_group = self._groups.dp, self._groups.tp
        dp = Members.of(self.dp_group)
        self.dp_rank, self.dp_world_size = dp.rank_in_group, dp.world_size
        self.rank: int = self._groups.ep.rank
        self.world_size: int = self._groups.ep.num_ranks
        self.internode = len(set(self._groups.ep.hosts)) > 1
        self.max_tokens_per_rank = (
            max_tokens_per_rank or vllm_values.max_num_batched_tokens() or DEFAULT_MAX_TOKENS
        )
        self.timeout_s = timeout_s
        self.device: Any = "cpu"
        self._forward_context = forward_context or vllm_values.context_if_any
        self._exchanges = Exchanges()
        self._last_mask: Any = None
        self._has_warned = False
        self._set_up()

    def _set_up(self) -> None:
        """What a class has beside this, made when all of this is there."""

    def local_sizes(self) -> list[int] | None:
        """Rows of each rank in the running step, by rank; None where no DP metadata says so."""
        return vllm_values.local_sizes(self._forward_context())

    # --- Exchanges ------------------------------------------------------------------------------

    def get_handle(self, kwargs: Mapping[str, Any]) -> Any:
        """The AllToAll of these arguments; equal arguments give the same object.

        Args:
            kwargs: arguments of ``fanfold.AllToAll``; ``strategy`` and ``timeout_s`` are this
                manager's unless given.

        Raises:
            InvalidArgument, Unsupported: as making an AllToAll.
            InvalidState: after ``destroy``.
        """
        return self.exchange(kwargs)

    def exchange(self, config: Mapping[str, Any]) -> AllToAll:
        """``get_handle`` of arguments of ``fanfold.AllToAll``. Collective where it is made."""
        return self._exchanges.get(self._groups.ep, self._complete(config))

    def grown_exchange(self, config: Mapping[str, Any], room: Mapping[str, int]) -> AllToAll:
        """The exchange of this configuration that grows to the room all ranks ask for."""
        return self._exchanges.grow(self._groups.ep, self._complete(config), room)

    def _complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"strategy": self.strategy, "timeout_s": self.timeout_s, **config}

    # --- What only some managers do -------------------------------------------------------------

    def dispatch_router_logits(
        self,
        hidden_states: Any,
        router_logits: Any,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Any] | None = None,
    ) -> Any:
        """Only managers that gather have it; see ``GatherManager``."""
        raise self._moves_nothing("dispatch_router_logits")

    def dispatch(
        self,
        hidden_states: Any,
        topk_weights: Any,
        topk_ids: Any,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Any] | None = None,
    ) -> Any:
        """Only managers that gather have it; see ``GatherManager``."""
        raise self._moves_nothing("dispatch")

    def combine(self, hidden_states: Any, is_sequence_parallel: bool = False) -> Any:
        """Only managers that gather have it; see ``GatherManager``."""
        raise self._moves_nothing("combine")

    def allocate_combine_input(
        self, shape: Any, dtype: Any, device: Any, is_sequence_parallel: bool = False
    ) -> Any:
        """Where experts may write what ``combine`` takes; None: anywhere."""
        return None

    def combine_into_output(
        self, hidden_states: Any, output: Any, is_sequence_parallel: bool = False
    ) -> None:
        """``combine`` into ``output``, which is overwritten."""
        output.copy_(self.combine(hidden_states, is_sequence_parallel))

    def _moves_nothing(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__}.{method}: rows are moved by this manager's prepare/finalize "
            "class, not by the manager"
        )

    # --- Masks ----------------------------------------------------------------------------------

    def query_active_mask(self) -> Any:
        """``[world_size]`` int32 on ``device``: 0: the rank is live, 1: it is masked out.

        That is vLLM's polarity, in spite of the name; ``AllToAll.active_mask`` has the other one.

        Raises:
            NotImplementedError: the strategy has no rank mask.
        """
        self._needs_masks("query_active_mask")
        active = self._exchanges.active_mask or [True] * self.world_size
        masked = [int(not is_active) for is_active in active]
        return torch().tensor(masked, dtype=torch().int32, device=self.device)

    def query_fault(self) -> Any:
        """One bool on ``device``: whether the mask has changed since ``clean_buffers``.

        Raises:
            NotImplementedError: the strategy has no rank mask.
        """
        current = self.query_active_mask()
        last = torch().zeros_like(current) if self._last_mask is None else self._last_mask
        return (current != last).any()

    def set_active_mask(self, active: Sequence[bool]) -> None:
        """Leave ranks out, True: takes part. Not in vLLM's class, whose kernels mask by themselves.

        All active ranks call it alike, between rounds. It holds for all exchanges.

        Raises:
            NotImplementedError: the strategy has no rank mask.
            InvalidArgument: another length, or this rank is masked out.
            InvalidState: a round is open.
        """
        self._needs_masks("set_active_mask")
        if len(active) != self.world_size or not active[self.rank]:
            raise InvalidArgument(
                f"active: expected {self.world_size} values, with True for this rank "
                f"{self.rank}, got {list(active)}"
            )
        self._exchanges.set_active_mask(active)

    def clean_buffers(self) -> None:
        """Take the mask as it is for what ``query_fault`` compares with. No buffer needs it."""
        self._last_mask = self.query_active_mask()

    @contextlib.contextmanager
    def mask_remote_ranks(self) -> Iterator[None]:
        """Nothing, as in vLLM's base class."""
        yield

    def _needs_masks(self, method: str) -> None:
        if not self._has_masks:
            raise NotImplementedError(
                f"{type(self).__name__}.{method}: strategy {self.strategy} has no rank mask"
            )

    # --- Life -----------------------------------------------------------------------------------

    def set_num_sms(self, num_sms: int) -> None:
        """Move rows of large rounds with so many threads, at least 1. No effect on a GPU."""
        self._exchanges.set_num_workers(max(1, int(num_sms)))

    def max_sms_used(self) -> int | None:
        """Multiprocessors that communication takes at most; None: not known."""
        return None

    def checkpoint_prepare(self) -> None:
        """Warn, once, that nothing of a checkpoint is served."""
        self._warn_of_checkpoints()

    def checkpoint_restore(self) -> None:
        """Warn, once, that nothing of a checkpoint is served."""
        self._warn_of_checkpoints()

    def stage_ep_size(self, *args: Any, **kwargs: Any) -> None:
        """Nothing, as in vLLM's base class; the number of ranks is fixed."""

    def commit_ep_size(self, *args: Any, **kwargs: Any) -> None:
        """Nothing, as in vLLM's base class; the number of ranks is fixed."""

    def cleanup(self) -> None:
        """Give all exchanges back; the next round makes its own. Collective.

        Also the way on after PeerTimeout or PeerAborted, on every rank.
        """
        self._exchanges.drop()

    def destroy(self) -> None:
        """Give everything back. Collective; idempotent; ranks that are gone are not waited for."""
        self._exchanges.close()
        self._groups.close()

    def _warn_of_checkpoints(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s keeps its memory and its connections in a process checkpoint",
                type(self).__name__,
            )

    def check_device(self, tensor: Any, *, has_gpu_form: bool) -> str:
        """The device of a tensor by name, as an AllToAll takes it; keeps it for own tensors.

        Raises:
            Unsupported: a GPU, and the strategy runs on the CPU only.
        """
        if tensor.device.type != "cpu" and not has_gpu_form:
            raise Unsupported(
                f"{type(self).__name__}: expected tensors on the CPU, as strategy {self.strategy} "
                f"has no GPU form (one_sided and low_latency have one), got {tensor.device}"
            )
        self.device = tensor.device
        return str(tensor.device)
