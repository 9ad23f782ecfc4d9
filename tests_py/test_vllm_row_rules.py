# SPDX-License-Identifier: Apache-2.0
"""Which rows the drop-in for vLLM's capturer keeps, and which row counts it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest
from support.vllm_capture import Step, config, context, rows

import fanfold
from fanfold.compat.vllm.row_rules import RowRules, StepTokens
from fanfold.testing import spawn_threads


def test_without_counts_all_rows_are_kept() -> None:
    assert Step(context()).kept(3) == [0, 1, 2]
    step = Step(context(), tp_size=2, sequence_parallel=True)
    with pytest.raises(fanfold.InvalidArgument, match="expected DP metadata or a batch desc"):
        step.kept(3)


@pytest.mark.parametrize(
    ("counts", "dp_rank", "expected"),
    [
        ([2, 3], 0, [0, 1]),
        ([2, 3], 1, [2, 3, 4]),
        ([0, 4], 0, []),
        ([0, 4], 1, [0, 1, 2, 3]),
        ([4, 4], 0, [0, 1, 2, 3]),
        ([4, 4], 1, [4, 5, 6, 7]),
        ([1, 1, 1], 2, [2]),
    ],
)
def test_of_the_rows_of_all_ranks_the_own_span_is_kept(
    counts: list[int], dp_rank: int, expected: list[int]
) -> None:
    step = Step(context(counts), dp_rank=dp_rank, dp_size=len(counts))
    assert step.kept(sum(counts)) == expected


def test_own_rows_are_kept() -> None:
    assert Step(context([2, 3]), dp_rank=1).kept(3) == [0, 1, 2]
    assert Step(context([0, 4]), dp_rank=0).kept(0) == []
    assert Step(context([0, 4]), dp_rank=0, tp_size=2).kept(0) == [], "no gather of nothing"
    assert Step(context(num_tokens=3)).kept(3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("counts", "sizes", "dp_rank", "expected"),
    [
        ([3, 2], [2, 2, 1, 1], 0, [0, 1, 2]),
        ([3, 2], [2, 2, 1, 1], 1, [4, 5]),
        ([3, 4], [2, 2, 2, 2], 0, [0, 1, 2]),
        ([3, 4], [2, 2, 2, 2], 1, [4, 5, 6, 7]),
        ([0, 3], [1, 1, 2, 2], 1, [2, 3, 4]),
        ([0, 3], [1, 1, 2, 2], 0, []),
    ],
)
def test_of_gathered_shards_the_own_group_is_kept_without_padding(
    counts: list[int], sizes: list[int], dp_rank: int, expected: list[int]
) -> None:
    step = Step(context(counts, local_sizes=sizes), dp_rank=dp_rank, tp_size=2)
    assert step.kept(sum(sizes)) == expected


def test_shards_that_do_not_divide_among_the_ranks_are_refused() -> None:
    step = Step(context([3, 2], local_sizes=[2, 2, 2]), tp_size=2)
    with pytest.raises(ValueError, match=r"local_sizes: expected equally many .* got 3 shards"):
        step.kept(6)
    with pytest.raises(fanfold.InvalidArgument, match="room for 5 tokens of this rank, got 4"):
        Step(context([5, 2], local_sizes=[2, 2, 2, 2]), tp_size=2).kept(8)


@pytest.mark.parametrize("now", [context([2, 3]), context(num_tokens=3)], ids=["dp", "no dp"])
@pytest.mark.parametrize("tp_rank", [0, 1, None])
def test_a_shard_is_gathered_and_its_padding_cut_off(now: Any, tp_rank: int | None) -> None:
    whole = rows(4, 10)
    whole[3] = -1  # padding
    step = Step(now, dp_rank=1, tp_size=2, tp_rank=tp_rank, tp_all_gather=lambda _: whole)
    mine = tp_rank or 0
    step.capturer.capture(0, whole[mine * 2 : mine * 2 + 2])
    assert step.recorded() == [10, 11, 12]


def test_a_gather_that_gives_something_else_is_refused() -> None:
    step = Step(context([3]), tp_size=2, tp_all_gather=lambda ids: ids)
    with pytest.raises(fanfold.InvalidArgument, match=r"tp_all_gather: expected 4 rows .* got 2"):
        step.kept(2)
    step = Step(context([3]), tp_size=2, tp_rank=1, tp_all_gather=lambda _: rows(4))
    with pytest.raises(fanfold.InvalidArgument, match="expected the rows of tp_rank 1 in shard 1"):
        step.kept(2)


def test_a_communicator_gathers_shards() -> None:
    def fn(comm: fanfold.Communicator) -> list[int]:
        step = Step(context([3]), comm=comm, tp_all_gather=None)
        assert step.capturer.tp_size == 2
        step.capturer.capture(0, rows(2, 2 * comm.rank))
        return step.recorded()

    assert spawn_threads(2, fn) == [[0, 1, 2]] * 2


def test_a_communicator_of_other_ranks_is_refused() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.InvalidArgument, match=r"comm: expected rank 0 of 2 .* of 1"):
            Step(comm=comm, tp_size=2)

    spawn_threads(1, fn)


def test_a_communicator_does_not_go_before_the_config() -> None:
    def fn(comm: fanfold.Communicator) -> None:
        with pytest.raises(fanfold.InvalidArgument, match=r"comm: expected rank 0 of 4 .* of 1"):
            Step(comm=comm, vllm_config=config(tensor_parallel_size=4))

    spawn_threads(1, fn)


def test_of_padded_shards_without_dp_the_leading_rows_are_kept() -> None:
    assert Step(context(num_tokens=5), tp_size=4).kept(8) == [0, 1, 2, 3, 4]
    assert Step(context(num_tokens=4), tp_size=2).kept(4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("now", "values", "num_rows", "text"),
    [
        # 8 rows are two ranks padded to 4 each, which no rule knows.
        (
            context([0, 4]),
            {},
            8,
            r"4 \(the tokens of all .*\), 0 \(this rank's .*; got 8; .*\[0, 4",
        ),
        (context([3, 4]), {"dp_rank": 1}, 8, r"7 \(.*, 4 \(.*; got 8; .*dp_rank 1, tp_size 1"),
        (context([2, 3]), {"tp_size": 2}, 3, r"5 \(.*, 2 \(.*, 1 \(one of 2 shards.*; got 3"),
        # a floor split instead of a ceiling
        (context([5]), {"tp_size": 2}, 2, r"3 \(one of 2 shards .*; got 2"),
        (context(num_tokens=5), {"tp_size": 2}, 4, r"6 \(all 2 shards .*got 4; batch_descriptor"),
        (context([2, 3]), {"dp_size": 4}, 5, r"expected 4 entries \(dp_size\), got 2: \[2, 3\]"),
        (context([2, 3]), {"dp_rank": 2}, 5, "expected an entry for dp_rank 2, got 2 entries"),
        (context([]), {}, 0, "expected an entry for dp_rank 0, got 0 entries"),
    ],
)
def test_rows_that_no_rule_explains_are_refused(
    now: Any, values: dict[str, Any], num_rows: int, text: str
) -> None:
    step = Step(now, **values)
    with pytest.raises(fanfold.InvalidArgument, match=text):
        step.kept(num_rows)
    assert step.recorded() == []


# --- Row counts with several meanings -----------------------------------------------------------


@pytest.mark.parametrize(
    "now",
    [
        context([1]),
        context([1, 3]),
        context([1, 3], local_sizes=[1, 1, 2, 2]),
        context([1, 0]),
        context(num_tokens=1),
    ],
    ids=["dp 1", "dp 2", "dp 2 with sizes", "nobody else", "no dp"],
)
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_one_token_is_a_token_or_a_shard_so_it_is_refused(now: Any, tp_rank: int) -> None:
    step = Step(now, tp_size=2, tp_rank=tp_rank)
    with pytest.raises(fanfold.InvalidArgument) as caught:
        step.kept(1)
    for part in (
        "got 1, which may be",
        "this rank's tokens (keeps rows 0 to 1)",
        "or one of 2 shards of this rank's tokens (keeps rows 0 to 1 after a gather)",
        "tp_size 2",
        "sequence_parallel=True or False",
    ):
        assert part in str(caught.value)
    assert step.recorded() == []
    assert Step(now, tp_size=2, sequence_parallel=False).kept(1) == [0]
    whole = numpy.array([[5, 6], [-1, -1]])
    step = Step(now, tp_size=2, sequence_parallel=True, tp_all_gather=lambda _: whole)
    assert step.kept(1) == [5]


@pytest.mark.parametrize("now", [context([1, 3]), context(num_tokens=1)], ids=["dp", "no dp"])
def test_one_token_is_no_shard_where_the_config_has_none(now: Any) -> None:
    sure = config(tensor_parallel_size=2, use_sequence_parallel_moe=False)
    assert Step(now, vllm_config=sure).kept(1) == [0]
    for more in ({}, {"use_sequence_parallel_moe": True}):  # True is never inferred
        step = Step(now, vllm_config=config(tensor_parallel_size=2, **more))
        with pytest.raises(fanfold.InvalidArgument, match="got 1, which may be"):
            step.kept(1)
    whole = numpy.array([[5, 6], [-1, -1]])
    step = Step(now, vllm_config=sure, sequence_parallel=True, tp_all_gather=lambda _: whole)
    assert step.kept(1) == [5], "what is given goes before the config"


@pytest.mark.parametrize(
    ("counts", "sizes", "dp_rank", "expected"),
    [
        ([0, 4], [0, 0, 2, 2], 0, []),
        ([0, 4], [0, 0, 2, 2], 1, [0, 1, 2, 3]),
        ([4, 4], [2, 2, 2, 2], 0, [0, 1, 2, 3]),
        ([4, 4], [2, 2, 2, 2], 1, [4, 5, 6, 7]),
        ([4, 4], None, 1, [4, 5, 6, 7]),
    ],
)
def test_several_rules_that_keep_the_same_rows_are_no_doubt(
    counts: list[int], sizes: list[int] | None, dp_rank: int, expected: list[int]
) -> None:
    step = Step(context(counts, local_sizes=sizes), dp_rank=dp_rank, tp_size=2)
    assert step.kept(sum(counts)) == expected


def layouts_of(tokens: list[Any], dp_rank: int, tp_rank: int, tp_size: int) -> dict[str, Any]:
    """What one rank's router may see of each data-parallel rank's tokens."""
    shards = [
        [
            numpy.pad(part, (0, -(-len(own) // tp_size) - len(part)), constant_values=-1)
            for part in (fanfold.shard_of(own, tp_size, rank) for rank in range(tp_size))
        ]
        for own in tokens
    ]
    return {
        "own": tokens[dp_rank],
        "all": numpy.concatenate(tokens),
        "gathered": numpy.concatenate([part for group in shards for part in group]),
        "shard": shards[dp_rank][tp_rank],
        "group": numpy.concatenate(shards[dp_rank]),
    }


@pytest.mark.parametrize("with_sizes", [True, False])
@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_no_batch_is_ever_taken_for_another(dp_size: int, tp_size: int, with_sizes: bool) -> None:
    for counts in itertools.product(range(5), repeat=dp_size):
        tokens = [100 * rank + numpy.arange(count) for rank, count in enumerate(counts)]
        sizes = tuple(-(-count // tp_size) for count in counts for _ in range(tp_size))
        step = StepTokens(counts, True, sizes if with_sizes else None)
        for dp_rank, tp_rank in itertools.product(range(dp_size), range(tp_size)):
            rules = RowRules(dp_rank, tp_size, None)
            layouts = layouts_of(tokens, dp_rank, tp_rank, tp_size)
            group = layouts.pop("group")
            for name, seen in layouts.items():
                case = f"{name}: counts {counts}, dp_rank {dp_rank}, tp_rank {tp_rank}"
                try:
                    kept = rules.keep(len(seen), step)
                except fanfold.InvalidArgument:
                    is_single = tp_size > 1 and counts[dp_rank] == len(seen) == 1
                    assert is_single or (name == "gathered" and not with_sizes), case
                    continue
                whole = group if kept.gather else seen
                mine = whole[kept.first : kept.first + kept.count]
                assert mine.tolist() == tokens[dp_rank].tolist(), case


def test_gathered_shards_as_many_as_all_tokens_are_refused_where_rows_differ() -> None:
    now = context([1, 3], local_sizes=[2, 0, 1, 1])
    step = Step(now, dp_rank=1, tp_size=2)
    with pytest.raises(fanfold.InvalidArgument) as caught:
        step.kept(4)
    for part in (
        "the tokens of all data-parallel ranks (keeps rows 1 to 4)",
        "the gathered shards of all ranks (keeps rows 2 to 4)",
        "num_tokens_across_dp_cpu [1, 3], local_sizes [2, 0, 1, 1], dp_rank 1",
    ):
        assert part in str(caught.value)
    assert Step(now, dp_rank=1, tp_size=2, sequence_parallel=False).kept(4) == [1, 2, 3]


def test_gathered_shards_as_many_as_own_tokens_are_refused_where_rows_differ() -> None:
    step = Step(context([4, 1], local_sizes=[1, 1, 1, 1]), tp_size=2)
    with pytest.raises(fanfold.InvalidArgument, match=r"0 to 4\), or the gathered .* 0 to 2\)"):
        step.kept(4)
