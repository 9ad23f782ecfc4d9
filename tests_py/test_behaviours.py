# SPDX-License-Identifier: Apache-2.0
"""Faults that other systems have shown in public, and what this library does instead.

Each known fault has an id by kind (P padding and ids, Z zero tokens and capacity, D duplicates and
numerics, T types and shapes, S protocol state, C routing capture) and ends as a test whose name
says the behaviour. The table below is of all of them; D is in `test_behaviours_sums.py`, T in
`test_behaviours_types.py`, S in `test_behaviours_protocol.py`, C in `test_behaviours_capture.py`.
Faults of CUDA, streams and graphs (S3, S5, S6) have no test here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.rounds import (
    ALL_STRATEGIES,
    PADDED_STRATEGIES,
    counts_for_sanitize,
    echo,
    identity_experts,
    ids,
    make,
    tokens,
    weights,
    works,
)

import fanfold
from fanfold.testing import spawn_threads
from fanfold.testing.trials import LAYOUTS_OF

TESTS = {  # id of the row -> its tests, in the five files
    "P1": ["test_a_negative_id_never_looks_into_a_table"],
    "P2": ["test_the_invalid_id_is_chosen_per_consumer"],
    "P3": ["test_padding_rows_are_not_counted_and_come_back_as_zeros"],
    "P5": ["test_a_batch_of_padding_only_is_a_legal_round"],
    "P6": ["test_inputs_are_never_written"],
    "P9": ["test_ids_are_checked_against_all_experts_also_shared_ones"],
    "P10": ["test_rows_past_the_count_have_no_stale_ids"],
    "P11": [
        "test_an_id_out_of_range_is_an_error_in_checked_mode",
        "test_an_id_out_of_range_is_dropped_and_counted_in_drop_mode",
    ],
    "P12": ["test_int16_ids_follow_the_same_rules"],
    "Z1": ["test_a_rank_without_tokens_is_a_full_participant"],
    "Z3": ["test_a_null_pointer_is_legal_without_tokens"],
    "Z5": ["test_an_expert_rank_that_receives_nothing_gets_empty_views"],
    "Z6": ["test_no_valid_token_in_a_padded_batch_is_a_legal_round"],
    "Z7": ["test_no_dummy_token_is_needed"],
    "Z8": ["test_all_tokens_of_all_ranks_may_go_to_one_expert"],
    "Z9": ["test_too_many_tokens_is_a_local_error_and_a_corrected_call_continues"],
    "Z12": ["test_the_token_capacity_is_per_rank"],
    "Z14": ["test_a_rank_may_own_no_expert"],
    "D1": ["test_duplicate_experts_add_their_weights"],
    "D2": ["test_no_probability_mass_is_lost_by_duplicates"],
    "D3": ["test_slots_suffice_with_duplicates"],
    "D5": ["test_experts_need_not_divide_evenly"],
    "D6": ["test_weights_are_applied_exactly_once"],
    "D7": ["test_payloads_arrive_unscaled_and_inputs_stay"],
    "D9": ["test_the_error_of_a_sum_is_bounded"],
    "D10": ["test_a_hundred_runs_give_the_same_bits"],
    "D12": ["test_each_row_tells_its_expert_and_its_token"],
    "D14": ["test_one_rank_combines_like_many"],
    "T1": ["test_every_id_type_gives_the_same_result"],
    "T4": ["test_any_hidden_size"],
    "T5": ["test_misaligned_bases_and_rows"],
    "T6": ["test_rows_of_24_bytes_take_any_path_with_the_same_bits"],
    "T7": ["test_any_top_k_up_to_the_limit"],
    "T8": ["test_linear_placement_gives_the_first_ranks_one_more"],
    "T10": ["test_tensors_without_elements"],
    "T11": ["test_offsets_are_64_bit"],
    "T12": ["test_more_than_128_ranks"],
    "T13": ["test_payloads_of_any_bytes_and_a_scalar_for_all_tokens"],
    "S1": ["test_a_round_that_was_given_up_is_cleared_by_reset"],
    "S2": ["test_a_different_round_max_tokens_is_an_error_on_both_sides"],
    "S9": ["test_wrong_orders_have_their_own_errors"],
    "S10": [
        "test_ranks_may_close_in_any_order_and_twice",
        "test_dropping_everything_without_close_is_harmless",
        "test_an_interpreter_may_exit_with_everything_open",
    ],
    "S11": ["test_a_collective_against_another_one_ends_in_an_error"],
    "S13": ["test_mismatched_splits_are_an_error_on_both_sides"],
    "S14": ["test_different_configurations_are_an_error_on_every_rank"],
    "S16": ["test_a_closed_object_raises"],
    "S17": ["test_many_layers_without_synchronisation"],
    "S18": ["test_every_strategy_has_the_same_methods"],
    "S19": ["test_signatures_are_stable"],
    "S20": [
        "test_a_masked_rank_leaves_the_sum_of_the_others",
        "test_a_mask_that_cannot_be_is_refused_and_the_group_goes_on",
    ],
    "C1": ["test_a_layer_that_never_records_is_reported_and_holds_no_expert"],
    "C2": ["test_what_an_earlier_step_recorded_is_missing_in_the_next"],
    "C3": ["test_a_draft_model_cannot_write_into_layers_of_the_target"],
    "C4": ["test_replicas_come_back_as_the_logical_expert"],
    "C6": ["test_eight_rows_are_what_the_layout_says"],
    "C8": ["test_no_width_of_ids_takes_one_for_another"],
    "C10": ["test_rows_with_a_fused_shared_expert_have_a_stride_of_their_own"],
    "C11": ["test_a_prompt_without_new_tokens_has_a_row_for_each"],
    "C14": [
        "test_a_length_that_is_off_by_one_is_said",
        "test_a_router_that_is_bound_twice_is_one_layer",
    ],
    "C15": ["test_a_known_prefix_is_not_sent_again"],
    "C16": ["test_a_snapshot_keeps_what_is_recorded_over_later"],
    "C18": ["test_a_model_without_experts_is_refused_up_front"],
    "C19": ["test_dense_layers_before_the_first_router_take_no_slot"],
    "C21": ["test_stages_and_parts_of_a_request_join_again"],
}


@pytest.fixture(params=ALL_STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PADDED_STRATEGIES)
def padded_strategy(request: pytest.FixtureRequest) -> str:
    """Those whose tensors have rows without a token."""
    return str(request.param)


each_layout = pytest.mark.parametrize(
    ("strategy", "layout"),
    [(name, layout) for name, layouts in LAYOUTS_OF.items() for layout in layouts],
)


def test_every_row_of_the_table_has_its_tests() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_behaviours*.py"))
    for row, names in TESTS.items():
        for name in names:
            start = text.find(f"def {name}(")
            assert start >= 0, name
            assert f"# {row}" in text[start : text.index("\n    ", text.index(":  #", start))], row


# -- 1 Sentinels, padding, invalid ids ---------------------------------------------------------


def test_a_negative_id_never_looks_into_a_table(strategy: str) -> None:  # P1
    def alone(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, placement=[0, 0, 0, 0])
        recv = a2a.dispatch(ids([-1, 1]), [tokens(1)])
        assert recv.expert_counts.tolist() == [0, 1, 0, 0]
        local = a2a.sanitize(recv.topk_ids, counts_for_sanitize(recv), policy="to_local")
        assert numpy.asarray(local).reshape(-1, 2)[0].tolist() == [-1, 1]
        recv.release()

    def last_expert_elsewhere(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        recv = a2a.dispatch(ids([-1, 1], [-4, -3]), [tokens(2)])
        assert recv.rank_counts.tolist() == ([1, 1] if comm.rank == 0 else [0, 0])
        recv.release()

    spawn_threads(1, alone)
    spawn_threads(2, last_expert_elsewhere)


@pytest.mark.parametrize("invalid", [-1, 4, 3])  # no expert, one past the last, one of rank 1
def test_the_invalid_id_is_chosen_per_consumer(padded_strategy: str, invalid: int) -> None:  # P2
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=padded_strategy)
        mine = [ids([0, 2]), ids([0, 1], [3, 1], [2, 2])][comm.rank]
        recv = a2a.dispatch(
            mine, [tokens(len(mine))], round_max_tokens=3, invalid_expert_id=invalid
        )
        got = numpy.array(recv.topk_ids)
        counts = recv.rank_counts.tolist()
        for source in (0, 1):
            assert (got[source, counts[source] :] == invalid).all()
            assert (got[source, : counts[source]] >= 0).all()
        for policy in ("padding", "padding_and_non_local", "to_local"):
            out = a2a.sanitize(recv.topk_ids, recv.rank_counts, invalid, policy)
            for place in numpy.ndindex(got.shape):
                wanted = _sanitized(int(got[place]), place[1] < counts[place[0]], policy, a2a)
                assert out[place] == (invalid if wanted is None else wanted), (policy, place)
        numpy.testing.assert_array_equal(recv.topk_ids, got)
        recv.release()

    spawn_threads(2, fn)


def _sanitized(id_: int, has_token: bool, policy: str, a2a: fanfold.AllToAll) -> int | None:
    local = list(a2a.local_experts)
    if not has_token:
        return None
    if policy == "padding":
        return id_
    if id_ not in local:
        return None
    return local.index(id_) if policy == "to_local" else id_


def test_padding_rows_are_not_counted_and_come_back_as_zeros(strategy: str) -> None:  # P3
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, max_tokens_per_rank=8)
        padded = numpy.full((8, 2), -1, numpy.int32)
        padded[:3] = [[0, 1], [2, 3], [1, 2]]
        recv = a2a.dispatch(padded, [tokens(8)])
        assert recv.expert_counts.sum() == 6  # three of each rank's tokens name both its experts
        out = numpy.asarray(recv.combine(identity_experts(recv, a2a)))
        numpy.testing.assert_array_equal(out[:3], tokens(8)[:3] * 2)
        assert not out[3:].any()

    spawn_threads(2, fn)


def test_a_batch_of_padding_only_is_a_legal_round(strategy: str) -> None:  # P5
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, max_tokens_per_rank=8)
        recv = a2a.dispatch(numpy.full((8, 2), -1, numpy.int32), [tokens(8)])
        assert not recv.rank_counts.any()
        assert not recv.expert_counts.any()
        assert recv.num_rows.tolist() == [0]
        out = recv.combine(identity_experts(recv, a2a), out=numpy.ones((8, 8), numpy.float32))
        assert not numpy.asarray(out).any()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_inputs_are_never_written(strategy: str) -> None:  # P6
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, check_ids="drop")
        topk_ids = ids([-1, 3], [9, 0], [2, 2])
        x, w = tokens(3), weights([0.5, 0.25], [1, 2], [3, 4])
        for array in (topk_ids, x, w):
            array.flags.writeable = False  # and a write would be a fault
        before = [array.tobytes() for array in (topk_ids, x, w)]
        recv = a2a.dispatch(topk_ids, [x], topk_weights=w)
        y = identity_experts(recv, a2a)
        y_before = y.tobytes()
        recv.combine(y)
        assert [array.tobytes() for array in (topk_ids, x, w)] == before
        assert y.tobytes() == y_before

    spawn_threads(2, fn)


def test_ids_are_checked_against_all_experts_also_shared_ones(strategy: str) -> None:  # P9
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, num_experts=5)  # four and a fused shared one
        numpy.testing.assert_array_equal(echo(a2a, ids([0, 4]), tokens(1)), 2 * tokens(1))
        with pytest.raises(fanfold.InvalidArgument, match="row 0, column 1"):
            a2a.dispatch(ids([0, 5]), [tokens(1)])
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_rows_past_the_count_have_no_stale_ids(padded_strategy: str) -> None:  # P10
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=padded_strategy)
        for _ in range(3):  # fills every slot with the valid id 0
            a2a.dispatch(numpy.zeros((4, 2), numpy.int32), [tokens(4)]).release()
            recv = a2a.dispatch(ids([0, 2]), [tokens(1)])
            got = numpy.asarray(recv.topk_ids)
            assert (got[:, 1:] == -1).all()
            recv.release()

    spawn_threads(2, fn)


@pytest.mark.parametrize("bad", [4, 2**31 - 1])
def test_an_id_out_of_range_is_an_error_in_checked_mode(strategy: str, bad: int) -> None:  # P11
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        with pytest.raises(fanfold.InvalidArgument, match=rf"topk_ids.*{bad}.*row 1, column 0"):
            a2a.dispatch(ids([0, 1], [bad, 2]), [tokens(2)])
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_an_id_out_of_range_is_dropped_and_counted_in_drop_mode(strategy: str) -> None:  # P11
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, check_ids="drop")
        out = echo(a2a, ids([4, 1], [2**31 - 1, 9], [-2, 0]), tokens(3))
        numpy.testing.assert_array_equal(out, tokens(3) * [[1], [0], [1]])
        assert a2a.num_dropped_ids == 3

    spawn_threads(2, fn)


def test_int16_ids_follow_the_same_rules(strategy: str) -> None:  # P12
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        out = echo(a2a, ids([-1, 3], [0, 3], dtype="int16"), tokens(2))
        numpy.testing.assert_array_equal(out, tokens(2) * [[1], [2]])
        with pytest.raises(fanfold.InvalidArgument, match="row 0, column 1"):
            a2a.dispatch(ids([0, 4], dtype="int16"), [tokens(1)])
        works(a2a, comm.rank)

    spawn_threads(2, fn)


# -- 2 Zero tokens, imbalance, capacity --------------------------------------------------------


def test_a_rank_without_tokens_is_a_full_participant(strategy: str) -> None:  # Z1
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        for step in range(100):
            num_tokens = 4 if step % 2 == comm.rank else 0
            x = tokens(num_tokens, rank=step)
            topk_ids = numpy.tile(numpy.int32([[step % 4, (step + 1) % 4]]), (num_tokens, 1))
            numpy.testing.assert_array_equal(echo(a2a, topk_ids, x), 2 * x)

    spawn_threads(2, fn)


def test_a_null_pointer_is_legal_without_tokens(strategy: str) -> None:  # Z3
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        x = torch.empty((0, 8))
        assert x.data_ptr() == 0
        topk_ids = torch.empty((0, 2), dtype=torch.int32)
        recv = a2a.dispatch(topk_ids, [x], topk_weights=torch.empty((0, 2)))
        assert recv.combine(recv.combine_buffer(), out=torch.empty((0, 8))).shape == (0, 8)
        works(a2a, comm.rank)

    spawn_threads(2, fn)


@each_layout
def test_an_expert_rank_that_receives_nothing_gets_empty_views(
    strategy: str, layout: str
) -> None:  # Z5
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout=layout)
        recv = a2a.dispatch(numpy.zeros((4, 2), numpy.int32), [tokens(4)])
        total = 8 if comm.rank == 0 else 0
        wanted = {
            "rank_major": (2, 4, 8),
            "expert_major": (2, 8, 8),
            "gathered": (8, 8),  # of every rank, routed here or not
            "flat": (total, 8),
            "flat_by_expert": (total, 8),
        }
        assert tuple(recv.payloads[0].shape) == wanted[layout]
        assert recv.num_rows.tolist() == [8 if layout == "gathered" else total]
        assert recv.expert_counts.tolist() == [total, 0]
        recv.release()

    spawn_threads(2, fn)


def test_no_valid_token_in_a_padded_batch_is_a_legal_round(strategy: str) -> None:  # Z6
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, max_tokens_per_rank=8)
        given = numpy.zeros((8, 2), numpy.int32)  # valid ids, in rows that are no tokens
        recv = a2a.dispatch(given, [tokens(8)], num_tokens=numpy.zeros(1, numpy.int32))
        assert not recv.rank_counts.any()
        assert not recv.expert_counts.any()
        recv.release()
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_no_dummy_token_is_needed(strategy: str) -> None:  # Z7
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, top_k=8, num_experts=8)
        none = numpy.zeros((0, 8), numpy.int32)
        for _ in range(3):
            assert echo(a2a, none, tokens(0)).shape == (0, 8)
        works(a2a, comm.rank)

    spawn_threads(2, fn)


@each_layout
def test_all_tokens_of_all_ranks_may_go_to_one_expert(strategy: str, layout: str) -> None:  # Z8
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, layout=layout, num_experts=8, max_tokens_per_rank=8)
        topk_ids = numpy.tile(numpy.int32([[5, -1]]), (8, 1))
        recv = a2a.dispatch(topk_ids, [tokens(8, rank=comm.rank)])
        assert recv.expert_counts.sum() == (32 if comm.rank == 2 else 0)
        out = recv.combine(identity_experts(recv, a2a))
        numpy.testing.assert_array_equal(out, tokens(8, rank=comm.rank))

    spawn_threads(4, fn)


def test_too_many_tokens_is_a_local_error_and_a_corrected_call_continues(
    strategy: str,
) -> None:  # Z9
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy)
        if comm.rank == 0:
            with pytest.raises(fanfold.InvalidArgument, match=r"at most 4 tokens.*got 5"):
                a2a.dispatch(numpy.zeros((5, 2), numpy.int32), [tokens(5)])
            assert not a2a.is_failed
        numpy.testing.assert_array_equal(echo(a2a, ids([0, 3]), tokens(1)), 2 * tokens(1))
        works(a2a, comm.rank)

    spawn_threads(2, fn)


def test_the_token_capacity_is_per_rank() -> None:  # Z12
    config: dict[str, Any] = {
        "num_experts": 8, "top_k": 2, "hidden": 1024, "dtype": "float32", "strategy": "one_sided",
    }  # fmt: skip

    def bytes_of(num_ranks: int, max_tokens: int) -> int:
        return fanfold.AllToAll.required_bytes(
            num_ranks=num_ranks, max_tokens_per_rank=max_tokens, **config
        )

    # Rows of 4 KiB come from 8 ranks with 256 tokens each, and as many partials go back.
    rows = 8 * 256
    assert 2 * rows * 4096 <= bytes_of(8, 256) <= 2.05 * rows * 4096
    assert bytes_of(8, 512) == pytest.approx(2 * bytes_of(8, 256), rel=0.01)
    assert bytes_of(16, 256) == pytest.approx(2 * bytes_of(8, 256), rel=0.01)

    def fn(comm: fanfold.Communicator) -> int:
        a2a = fanfold.AllToAll(comm, max_tokens_per_rank=16, **config)
        recv = a2a.dispatch(numpy.zeros((16, 2), numpy.int32), [tokens(16, hidden=1024)])
        recv.release()
        return int(a2a.workspace_bytes)

    assert spawn_threads(2, fn) == [bytes_of(2, 16)] * 2


def test_a_rank_may_own_no_expert(strategy: str) -> None:  # Z14
    def fn(comm: fanfold.Communicator) -> None:
        a2a = make(comm, strategy=strategy, num_experts=2)
        assert list(a2a.local_experts) == [[0], [1], []][comm.rank]
        recv = a2a.dispatch(ids([0, 1], [1, -1]), [tokens(2, rank=comm.rank)])
        assert recv.expert_counts.shape == (1 if comm.rank < 2 else 0,)
        assert recv.num_rows.tolist() == [[3, 6, 0][comm.rank]]
        out = recv.combine(identity_experts(recv, a2a))
        numpy.testing.assert_array_equal(out, tokens(2, rank=comm.rank) * [[2], [1]])

    spawn_threads(3, fn)
