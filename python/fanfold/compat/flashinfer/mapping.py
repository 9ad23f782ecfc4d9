# SPDX-License-Identifier: Apache-2.0
"""Which rank is what in a job of pipeline, context, tensor and expert parallelism."""

from __future__ import annotations

from typing import Any

from fanfold.errors import InvalidArgument


class Mapping:
    """FlashInfer's description of a parallel job, as far as expert parallelism needs it.

    Ranks are numbered with tensor parallelism innermost, then context, then pipeline; the experts
    of a layer are spread over ``moe_tp_size * moe_cluster_size * moe_ep_size == tp_size`` ranks,
    expert parallelism innermost, then clusters. As in FlashInfer, both MoE sizes left out means
    ``moe_ep_size`` 1; the drop-ins then take the tensor-parallel ranks for the group.

    Unlike FlashInfer's, ``ep_experts`` gives out every expert, also where the division leaves a
    rest, as dispatch does: the first ranks then have one more.

    Args:
        world_size: all ranks.
        rank: this one.
        gpus_per_node: ranks of one machine, an int. vLLM 0.33.0 passes a function for it; as
            nothing here needs the number before ``is_multi_node``, it is called then.
        cp_size, tp_size, pp_size: sizes of context, tensor and pipeline parallelism.
        cp_config: kept as it is.
        moe_cluster_size, moe_tp_size, moe_ep_size: -1: worked out from the others.
        attn_tp_size, attn_cp_size: -1: worked out; both -1: ``tp_size * cp_size`` and 1.
        auto_parallel: the sizes are not known yet: they are not checked against each other.
        enable_attention_dp: kept as it is.

    Raises:
        InvalidArgument: sizes that do not multiply up, or a rank outside of the world.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: Any = 8,
        *,
        cp_size: int = 1,
        cp_config: dict[str, Any] | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> None:
        clusters = 1 if moe_cluster_size == -1 else moe_cluster_size
        moe_tp_size, moe_ep_size = _moe_sizes(tp_size // clusters, moe_tp_size, moe_ep_size)
        if not auto_parallel:
            _check_product(
                "world_size", world_size, pp_size=pp_size, cp_size=cp_size, tp_size=tp_size
            )
            _check_product(
                "tp_size",
                tp_size,
                moe_cluster_size=clusters,
                moe_tp_size=moe_tp_size,
                moe_ep_size=moe_ep_size,
            )
        if not 0 <= rank < world_size:
            raise InvalidArgument(f"rank: expected 0 to {world_size - 1}, got {rank}")
        self.world_size = world_size
        self.rank = rank
        self.gpus_per_node = gpus_per_node
        self.cp_size = cp_size
        self.cp_config = {} if cp_config is None else cp_config
        self.tp_size = tp_size
        self.pp_size = pp_size
        self.moe_cluster_size = clusters
        self.moe_tp_size = moe_tp_size
        self.moe_ep_size = moe_ep_size
        if attn_cp_size == -1:
            attn_cp_size = 1 if attn_tp_size == -1 else tp_size * cp_size // max(attn_tp_size, 1)
        if attn_tp_size == -1:
            attn_tp_size = tp_size * cp_size // max(attn_cp_size, 1)
        self.attn_tp_size = attn_tp_size
        self.attn_cp_size = attn_cp_size
        self.auto_parallel = auto_parallel
        self.enable_attention_dp = enable_attention_dp

    @property
    def tp_rank(self) -> int:
        """This rank among the tensor-parallel ranks."""
        return self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        """This rank's place in context parallelism."""
        return self.rank // self.tp_size % self.cp_size

    @property
    def pp_rank(self) -> int:
        """This rank's stage of the pipeline."""
        return self.rank // (self.tp_size * self.cp_size)

    @property
    def moe_ep_rank(self) -> int:
        """This rank among those that share a layer's experts."""
        return self.tp_rank % self.moe_ep_size

    @property
    def moe_tp_rank(self) -> int:
        """Which part of its experts this rank has."""
        return self.tp_rank // (self.moe_ep_size * self.moe_cluster_size)

    @property
    def moe_cluster_rank(self) -> int:
        """This rank's cluster."""
        return self.tp_rank // self.moe_ep_size % self.moe_cluster_size

    @property
    def tp_group(self) -> list[int]:
        """The tensor-parallel ranks of this one's, as numbers of the world."""
        return self._alike("pp_rank", "cp_rank")

    @property
    def cp_group(self) -> list[int]:
        """The context-parallel ranks."""
        return self._alike("pp_rank", "tp_rank")

    @property
    def pp_group(self) -> list[int]:
        """The stages of the pipeline."""
        return self._alike("cp_rank", "tp_rank")

    @property
    def moe_ep_group(self) -> list[int]:
        """The ranks that share a layer's experts."""
        return self._alike("pp_rank", "cp_rank", "moe_tp_rank", "moe_cluster_rank")

    @property
    def moe_tp_group(self) -> list[int]:
        """The ranks that have parts of the same experts."""
        return self._alike("pp_rank", "cp_rank", "moe_ep_rank", "moe_cluster_rank")

    @property
    def moe_cluster_group(self) -> list[int]:
        """The ranks that have the same parts of all experts."""
        return self._alike("pp_rank", "cp_rank", "moe_tp_rank")

    @property
    def local_rank(self) -> int:
        """This rank on its machine."""
        return self.rank % self._num_gpus()

    @property
    def node_rank(self) -> int:
        """This rank's machine."""
        return self.rank // self._num_gpus()

    def get_local_rank(self, rank: int) -> int:
        """A rank of the world on its machine."""
        return rank % self._num_gpus()

    def get_node_rank(self, rank: int) -> int:
        """The machine of a rank of the world."""
        return rank // self._num_gpus()

    def is_multi_node(self) -> bool:
        """Whether the job spans machines."""
        return self.world_size > self._num_gpus()

    def has_tp(self) -> bool:
        """Whether there is tensor parallelism."""
        return self.tp_size > 1

    def has_cp(self) -> bool:
        """Whether there is context parallelism."""
        return self.cp_size > 1

    def has_pp(self) -> bool:
        """Whether there is a pipeline."""
        return self.pp_size > 1

    def is_first_pp_rank(self) -> bool:
        """Whether this is the first stage."""
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        """Whether this is the last stage."""
        return self.pp_rank == self.pp_size - 1

    def is_second_last_pp_rank(self) -> bool:
        """Whether this is the stage before the last."""
        return self.pp_rank == self.pp_size - 2

    def prev_pp_rank(self) -> int:
        """The rank of the stage before, the last one's for the first."""
        return (self.rank - self.tp_size * self.cp_size) % self.world_size

    def next_pp_rank(self) -> int:
        """The rank of the next stage, the first one's for the last."""
        return (self.rank + self.tp_size * self.cp_size) % self.world_size

    def pp_layers(self, num_layers: int) -> list[int]:
        """The layers of this stage; the first ``num_layers mod pp_size`` stages have one more."""
        return _share(num_layers, self.pp_size, self.pp_rank)

    def has_moe_cluster(self) -> bool:
        """Whether there are clusters."""
        return self.moe_cluster_size > 1

    def has_moe_ep(self) -> bool:
        """Whether experts are spread over ranks."""
        return self.moe_ep_size > 1

    def has_moe_tp(self) -> bool:
        """Whether each expert is spread over ranks."""
        return self.moe_tp_size > 1

    def ep_experts(self, num_experts: int) -> list[int]:
        """The ids of this rank's experts."""
        return _share(num_experts, self.moe_ep_size, self.moe_ep_rank)

    def to_dict(self) -> dict[str, Any]:
        """What the constructor takes to make an equal one."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, mapping: dict[str, Any]) -> Mapping:
        """The mapping of which ``to_dict`` told."""
        return cls(**mapping)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.world_size, self.rank, self.tp_size, self.pp_size, self.moe_ep_size))

    def _alike(self, *places: str) -> list[int]:
        """The ranks that have these places in common with this one."""
        others = [Mapping(**{**vars(self), "rank": rank}) for rank in range(self.world_size)]
        mine = [getattr(self, place) for place in places]
        return [each.rank for each in others if [getattr(each, place) for place in places] == mine]

    def _num_gpus(self) -> int:
        given = self.gpus_per_node
        number = given() if callable(given) else given
        if not isinstance(number, int) or number < 1:
            raise InvalidArgument(f"gpus_per_node: expected an int of at least 1, got {number!r}")
        return number


def _share(count: int, num_parts: int, part: int) -> list[int]:
    each, more = divmod(count, num_parts)
    first = part * each + min(part, more)
    return list(range(first, first + each + (part < more)))


def _moe_sizes(ranks: int, moe_tp_size: int, moe_ep_size: int) -> tuple[int, int]:
    if moe_tp_size == -1 and moe_ep_size == -1:
        return ranks, 1
    if moe_tp_size == -1:
        return ranks // max(moe_ep_size, 1), moe_ep_size
    if moe_ep_size == -1:
        return moe_tp_size, ranks // max(moe_tp_size, 1)
    return moe_tp_size, moe_ep_size


def _check_product(name: str, expected: int, **factors: int) -> None:
    product = 1
    for factor in factors.values():
        product *= factor
    if product != expected or any(factor < 1 for factor in factors.values()):
        formula = " * ".join(f"{factor} ({of})" for of, factor in factors.items())
        raise InvalidArgument(f"{name}: expected {formula}, got {expected}")
