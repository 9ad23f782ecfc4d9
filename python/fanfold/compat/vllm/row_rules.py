# SPDX-License-Identifier: Apache-2.0
"""What the rows of a router's ids can be, judged by their number as vLLM's capturer does.

vLLM takes the first rule that fits. Here all rules are tried, and a number that fits rules which
keep different rows is an error: that is how routing of other tokens, or of padding, is recorded
without anybody noticing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fanfold.errors import InvalidArgument


@dataclass(frozen=True)
class StepTokens:
    """What a forward context says of the tokens of its step, or of its micro-batch.

    Args:
        counts: tokens of each data-parallel rank; one entry where only the batch descriptor says
            how many there are; empty where nothing does.
        has_dp_metadata: whether the counts are those of DP metadata.
        local_sizes: rows of each rank of the expert-parallel group, those of one data-parallel
            rank next to each other; None: not known.
    """

    counts: tuple[int, ...]
    has_dp_metadata: bool
    local_sizes: tuple[int, ...] | None = None

    @staticmethod
    def of_context(context: Any) -> StepTokens:
        """Read ``dp_metadata`` or else ``batch_descriptor`` of a forward context; both may lack."""
        metadata = getattr(context, "dp_metadata", None)
        if metadata is not None:
            sizes = getattr(metadata, "local_sizes", None)
            return StepTokens(
                counts=_ints(metadata.num_tokens_across_dp_cpu),
                has_dp_metadata=True,
                local_sizes=None if sizes is None else _ints(sizes),
            )
        descriptor = getattr(context, "batch_descriptor", None)
        counts = () if descriptor is None else (int(descriptor.num_tokens),)
        return StepTokens(counts=counts, has_dp_metadata=False)


@dataclass(frozen=True)
class Kept:
    """Rows that are this rank's tokens, in order, by one rule.

    Args:
        rule: what the rows are, in words.
        first: the first row that is kept, counted after the gather where there is one.
        count: how many are.
        gather: whether the rows of all tensor-parallel ranks are gathered before.
        is_shard: whether the rule is one of sequence parallelism.
    """

    rule: str
    first: int
    count: int
    gather: bool = False
    is_shard: bool = False

    @property
    def rows(self) -> tuple[int, int, bool]:
        """Equal for rules that keep the same rows; where none is kept, all are equal."""
        return (self.first, self.count, self.gather) if self.count else (0, 0, False)

    def __str__(self) -> str:
        where = " after a gather" if self.gather else ""
        return f"{self.rule} (keeps rows {self.first} to {self.first + self.count}{where})"


class RowRules:
    """The rules for one rank.

    Args:
        dp_rank: this rank among the data-parallel ones.
        tp_size: tensor-parallel ranks, over which shards of a sequence are spread.
        sequence_parallel: True: rows are shards or what was gathered from them; False: they are
            not; None: nobody knows.
    """

    def __init__(self, dp_rank: int, tp_size: int, sequence_parallel: bool | None) -> None:
        self._dp_rank = dp_rank
        self._tp_size = tp_size
        self._sequence_parallel = sequence_parallel

    def keep(self, num_rows: int, step: StepTokens) -> Kept:
        """Say which of ``num_rows`` rows are this rank's tokens.

        Returns:
            The first rule that fits, in vLLM's order.

        Raises:
            InvalidArgument: no rule fits, or several that keep different rows: names them and the
                counts; or shards that cannot be this rank's.
        """
        if not step.counts and not step.has_dp_metadata:
            if self._sequence_parallel:
                raise InvalidArgument(
                    "topk_ids: expected DP metadata or a batch descriptor, which say how many "
                    f"tokens the shards hold, got neither, and {num_rows} rows"
                )
            return Kept("all rows, as nothing says how many tokens there are", 0, num_rows)
        rules = self._rules(step)
        fitting = [kept for expected, kept in rules if expected == num_rows]
        if not fitting:
            known = ", ".join(f"{expected} ({kept.rule})" for expected, kept in rules)
            raise InvalidArgument(
                f"topk_ids: expected one of these row counts: {known}; got {num_rows}; "
                f"{self._known(step)}"
            )
        if len({kept.rows for kept in fitting}) > 1:
            raise InvalidArgument(
                f"topk_ids: expected a row count that has one meaning, got {num_rows}, which may "
                f"be {', or '.join(map(str, fitting))}; {self._known(step)}{self._advice(fitting)}"
            )
        kept = fitting[0]
        num_tokens = self._num_tokens(step)
        if kept.count != num_tokens:
            raise InvalidArgument(
                f"local_sizes: expected room for {num_tokens} tokens of this rank, got "
                f"{kept.count}; {self._known(step)}"
            )
        return kept

    def _num_tokens(self, step: StepTokens) -> int:
        if not step.has_dp_metadata:
            return step.counts[0]
        if not 0 <= self._dp_rank < len(step.counts):
            raise InvalidArgument(
                f"num_tokens_across_dp_cpu: expected an entry for dp_rank {self._dp_rank}, got "
                f"{len(step.counts)} entries: {list(step.counts)}"
            )
        return step.counts[self._dp_rank]

    def _rules(self, step: StepTokens) -> list[tuple[int, Kept]]:
        """All that may apply, in vLLM's order, each with the row count that it is for."""
        own, tp_size = self._num_tokens(step), self._tp_size
        rules = [(own, Kept("this rank's tokens", 0, own))]
        if step.has_dp_metadata:
            first = sum(step.counts[: self._dp_rank])
            everyone = Kept("the tokens of all data-parallel ranks", first, own)
            rules.insert(0, (sum(step.counts), everyone))
            if step.local_sizes is not None:
                rules.append((sum(step.local_sizes), self._own_group(step, step.local_sizes)))
        if tp_size > 1:
            shard = -(-own // tp_size)
            one = f"one of {tp_size} shards of this rank's tokens"
            rules.append((shard, Kept(one, 0, own, gather=True, is_shard=True)))
            if not step.has_dp_metadata:
                whole = f"all {tp_size} shards of this rank's tokens"
                rules.append((shard * tp_size, Kept(whole, 0, own, is_shard=True)))
        if self._sequence_parallel is None:
            return rules
        return [rule for rule in rules if rule[1].is_shard == self._sequence_parallel]

    def _own_group(self, step: StepTokens, sizes: tuple[int, ...]) -> Kept:
        """The part of gathered shards that is this data-parallel rank's, without its padding."""
        num_ranks = len(step.counts)
        if not sizes or len(sizes) % num_ranks != 0:
            raise InvalidArgument(
                f"local_sizes: expected equally many shards for each of {num_ranks} data-parallel "
                f"ranks, got {len(sizes)} shards; {self._known(step)}"
            )
        group = len(sizes) // num_ranks
        first = sum(sizes[: self._dp_rank * group])
        room = sum(sizes[self._dp_rank * group : (self._dp_rank + 1) * group])
        count = min(room, self._num_tokens(step))
        return Kept("the gathered shards of all ranks", first, count, is_shard=True)

    def _known(self, step: StepTokens) -> str:
        source = "num_tokens_across_dp_cpu" if step.has_dp_metadata else "batch_descriptor"
        sizes = None if step.local_sizes is None else list(step.local_sizes)
        return (
            f"{source} {list(step.counts)}, local_sizes {sizes}, dp_rank {self._dp_rank}, "
            f"tp_size {self._tp_size}"
        )

    def _advice(self, fitting: Iterable[Kept]) -> str:
        if {kept.is_shard for kept in fitting} != {True, False}:
            return ""
        return "; sequence_parallel=True or False in the constructor says which"


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
