# SPDX-License-Identifier: Apache-2.0
"""Managers whose prepare/finalize classes move the rows: they find the exchanges for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fanfold.all_to_all import AllToAll
from fanfold.compat.vllm import vllm_values
from fanfold.compat.vllm.exchanges import value_of
from fanfold.compat.vllm.manager_base import All2AllManager
from fanfold.errors import InvalidArgument


class Handle:
    """What ``get_handle`` gives where vLLM's arguments do not say all that an AllToAll needs.

    Attributes:
        manager: whose it is.
        config: what is known, as arguments of ``fanfold.AllToAll``.
    """

    def __init__(self, manager: All2AllManager, config: Mapping[str, Any]) -> None:
        self.manager = manager
        self.config = dict(config)

    def exchange(self, **rest: Any) -> AllToAll:
        """The AllToAll with the rest of the arguments; equal ones are one object. Collective."""
        return self.manager.exchange({**self.config, **rest})


def manager_of(buffer: Any) -> All2AllManager:
    """The manager of a handle.

    Raises:
        InvalidArgument: it is no handle.
    """
    if not isinstance(buffer, Handle):
        raise InvalidArgument(
            "buffer: expected what get_handle of Fanfold's manager gave for vLLM's arguments, got "
            f"{type(buffer).__name__}"
        )
    return buffer.manager


class DeepEPManager(All2AllManager):
    """What both DeepEP managers share: handles that are found again by value."""

    def _set_up(self) -> None:
        self._handles: dict[Any, Handle] = {}

    def get_handle(self, kwargs: Mapping[str, Any]) -> Any:
        """The exchange of these arguments; equal arguments give the same object.

        Args:
            kwargs: vLLM's arguments of this manager, or arguments of ``fanfold.AllToAll``.

        Returns:
            With ``top_k`` among the arguments the AllToAll itself; without, as vLLM calls it, a
            ``Handle`` that makes it when the first tokens show the rest.

        Raises:
            InvalidArgument: the arguments contradict the group, or each other.
            InvalidState: after ``destroy``.
        """
        config = self.config_of(kwargs)
        if "top_k" in config:
            return self.exchange(config)
        self._exchanges.check_open()
        return self._handles.setdefault(value_of(config), Handle(self, config))

    def config_of(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's arguments as those of ``fanfold.AllToAll``."""
        return dict(kwargs)


class DeepEPHTAll2AllManager(DeepEPManager):
    """vLLM's manager of DeepEP's high-throughput kernels, over strategy ``high_throughput``.

    The surface of ``deep_ep.Buffer`` itself is not served; ``DeepEPHTPrepareAndFinalize`` takes
    what ``get_handle({})`` gives in its place.
    """

    strategy = "high_throughput"


class DeepEPLLAll2AllManager(DeepEPManager):
    """vLLM's manager of DeepEP's low-latency kernels, over strategy ``low_latency``.

    The surface of ``deep_ep.Buffer`` itself is not served; ``DeepEPLLPrepareAndFinalize`` takes
    what ``get_handle`` gives in its place. A rank is masked out by ``set_active_mask``.
    """

    strategy = "low_latency"
    _has_masks = True

    def _set_up(self) -> None:
        super()._set_up()
        # As vLLM's config asks; without one, nobody says that it shall not.
        self.support_fault_tolerance = vllm_values.enable_fault_tolerance() is not False

    def config_of(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's arguments as those of ``fanfold.AllToAll``.

        Args:
            kwargs: ``max_num_tokens_per_dp_rank``, ``token_hidden_size``, ``num_ep_ranks``,
                ``num_global_experts`` and ``num_local_experts``; any other is one of AllToAll.

        Raises:
            InvalidArgument: other ranks or local experts than there are.
        """
        config = dict(kwargs)
        for name, ours in (
            ("max_num_tokens_per_dp_rank", "max_tokens_per_rank"),
            ("token_hidden_size", "hidden"),
            ("num_global_experts", "num_experts"),
        ):
            if name in config:
                config[ours] = int(config.pop(name))
        num_ranks = config.pop("num_ep_ranks", self.world_size)
        if num_ranks != self.world_size:
            raise InvalidArgument(
                f"num_ep_ranks: expected the {self.world_size} ranks of cpu_group, got {num_ranks}"
            )
        num_local = config.pop("num_local_experts", None)
        if num_local is not None and "num_experts" in config:
            # Any placement whose ranks differ by at most one.
            even = config["num_experts"] / self.world_size
            if abs(num_local - even) >= 1:
                raise InvalidArgument(
                    f"num_local_experts: expected {config['num_experts']} experts spread evenly "
                    f"over {self.world_size} ranks, got {num_local} here"
                )
        return config

    def max_sms_used(self) -> int | None:
        """0, as vLLM's manager says: micro-batches leave nothing to it."""
        return 0


class FlashInferNVLinkOneSidedManager(All2AllManager):
    """vLLM's manager of FlashInfer's one-sided all-to-all, over strategy ``one_sided``.

    One exchange serves all layers: it grows to the union of what they ask for. A rank is masked
    out by ``set_active_mask``.
    """

    strategy = "one_sided"
    _has_masks = True

    def _set_up(self) -> None:
        self.initialized = False
        self.max_num_tokens = 0
        self.top_k = 0
        self.num_experts = 0
        self.hidden_size = 0
        self.extra_payload_bytes_per_token = 0

    def initialize(
        self,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        hidden_size: int,
        dispatch_format: Any = None,
        extra_payload_bytes_per_token: int = 0,
    ) -> None:
        """Say what a layer needs. Local: memory is taken by the first round.

        Args:
            max_num_tokens: the most tokens of a rank in a step.
            top_k, num_experts: equal for all layers.
            hidden_size: elements of a token.
            dispatch_format: FlashInfer's description of quantised rows; not used, as rows are
                bytes of any size.
            extra_payload_bytes_per_token: room beside the tokens, ids and weights.

        Raises:
            InvalidArgument: another top_k or num_experts than before.
        """
        del dispatch_format
        if self.initialized and (top_k, num_experts) != (self.top_k, self.num_experts):
            raise InvalidArgument(
                f"top_k, num_experts: expected {self.top_k} and {self.num_experts}, as the layers "
                f"before have them, got {top_k} and {num_experts}"
            )
        self.top_k, self.num_experts = top_k, num_experts
        self.max_num_tokens = max(self.max_num_tokens, max_num_tokens)
        self.hidden_size = max(self.hidden_size, hidden_size)
        self.extra_payload_bytes_per_token = max(
            self.extra_payload_bytes_per_token, extra_payload_bytes_per_token
        )
        self.initialized = True

    def get_handle(self, kwargs: Mapping[str, Any]) -> Any:
        """This manager, as vLLM calls it (without arguments); with arguments the AllToAll."""
        return self.exchange(kwargs) if kwargs else self

    def cleanup(self) -> None:
        """Give all exchanges back; the next round makes its own, of the same sizes. Collective."""
        super().cleanup()
        self.initialized = False


class FlashInferNVLinkTwoSidedManager(All2AllManager):
    """vLLM's manager of FlashInfer's two-sided all-to-all, over strategy ``two_sided``."""

    strategy = "two_sided"

    def _set_up(self) -> None:
        self.initialized = False
        self.gpus_per_node: Any = None

    def initialize(self, world_size: int, rank: int, gpus_per_node: Any) -> None:
        """Check who this rank is. Local: memory is taken by the first round.

        Args:
            world_size, rank: in the group of the experts.
            gpus_per_node: kept, not used; vLLM gives a function here.

        Raises:
            InvalidArgument: they are not those of ``cpu_group``.
        """
        if (world_size, rank) != (self.world_size, self.rank):
            raise InvalidArgument(
                f"world_size, rank: expected {self.world_size} and {self.rank}, those of "
                f"cpu_group, got {world_size} and {rank}"
            )
        self.gpus_per_node = gpus_per_node
        self.initialized = True

    def ensure_alltoall_workspace_initialized(self) -> bool:
        """``initialize``, where that was not done; False with a single rank, as in vLLM."""
        if self.world_size <= 1:
            return False
        if not self.initialized:
            self.initialize(self.world_size, self.rank, None)
        return self.initialized

    def get_handle(self, kwargs: Mapping[str, Any]) -> Any:
        """This manager, as vLLM calls it (without arguments); with arguments the AllToAll."""
        return self.exchange(kwargs) if kwargs else self

    def cleanup(self) -> None:
        """Give all exchanges back. Collective."""
        super().cleanup()
        self.initialized = False


class BatchedAll2AllManager(All2AllManager):
    """Finds the exchanges of ``AllToAllBatchedPrepareAndFinalize``; vLLM has no such class."""

    strategy = "batched"
