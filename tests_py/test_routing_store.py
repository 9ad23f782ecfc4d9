# SPDX-License-Identifier: Apache-2.0
"""RoutingStore: any sequence of calls against a plain Python model."""

from __future__ import annotations

from typing import Any

import hypothesis.stateful as stateful
import numpy
import pytest
from hypothesis import settings
from hypothesis import strategies as st

import fanfold

BLOCK = 3
LAYERS, TOP_K = 2, 1
BLOCK_BYTES = BLOCK * LAYERS * TOP_K * 2


def make_store(**more: Any) -> Any:
    values = {"num_layers": LAYERS, "num_experts": 1000, "top_k": TOP_K, "block_tokens": BLOCK}
    return fanfold.RoutingStore(**{**values, **more})


def rows_of(ids: list[int]) -> numpy.ndarray:
    """One token per id: the id in the first layer, 999 less it in the second."""
    return numpy.array([[[i], [999 - i]] for i in ids], numpy.int16).reshape(-1, LAYERS, TOP_K)


def ids_of(rows: Any) -> list[int]:
    """The ids behind such rows, -1 where they are missing."""
    array = rows.array
    for first, second in array[:, :, 0].tolist():
        assert (first, second) == (-1, -1) or first + second == 999
    return array[:, 0, 0].tolist()


def key(number: int) -> bytes:
    return b"%016d" % number


class StoreModel(stateful.RuleBasedStateMachine):
    """Requests are lists of ids from a first position on; keys are lists of BLOCK ids.

    Eight blocks fit, so that blocks are evicted; which ones, the test asks the store.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(max_bytes=8 * BLOCK_BYTES)
        self.requests: dict[str, tuple[int, list[int]]] = {}
        self.keys: dict[int, list[int]] = {}
        self.generation = 0
        self.next_id = 0

    names = st.sampled_from(["a", "b", "c"])

    def expected(self, name: str, position: int) -> int:
        first, ids = self.requests[name]
        return ids[position - first] if first <= position < first + len(ids) else -1

    @stateful.rule(name=names, first=st.integers(0, 7))
    def begin(self, name: str, first: int) -> None:
        if name in self.requests:
            with pytest.raises(fanfold.InvalidState):
                self.store.begin(name, first)
            return
        self.store.begin(name, first)
        self.requests[name] = (first, [])

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data(), count=st.integers(0, 8), shift=st.sampled_from([0, 0, 0, 1, -1]))
    def append(self, data: Any, count: int, shift: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        first, ids = self.requests[name]
        new = [(self.next_id + i) % 1000 for i in range(count)]
        self.next_id += count
        position = first + len(ids) + shift
        if shift != 0:
            with pytest.raises(fanfold.InvalidArgument, match="position: expected"):
                self.store.append(name, position, rows_of(new))
            return
        rows: Any = rows_of(new)
        if count % 2:
            rows = fanfold.RoutingRows(rows, num_experts=1000)
        before = self.store.stats
        try:
            self.store.append(name, position, rows)
        except fanfold.CapacityExceeded:
            # Even without a block that only keys have, there is too little room.
            assert self.store.stats.num_keys == len(self.keys)
            assert self.blocks_of_requests(name, count) > 8
            return
        self.requests[name] = (first, ids + new)
        self.forget_evicted(before)

    def blocks_of_requests(self, name: str, count: int) -> int:
        """Blocks that requests would hold at most, once `name` had `count` more rows."""
        total = 1  # forks share the block that is then copied
        for other, (first, ids) in self.requests.items():
            last = first + len(ids) + (count if other == name else 0)
            total += (last - 1) // BLOCK - first // BLOCK + 1 if last > first else 0
        return total

    def forget_evicted(self, before: Any) -> None:
        after = self.store.stats
        gone = [number for number in self.keys if not self.store.has_key(key(number))]
        assert (after.num_evictions > before.num_evictions) == bool(gone)
        assert len(gone) >= after.num_evictions - before.num_evictions
        for number in gone:
            del self.keys[number]

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data())
    def truncate(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        first, ids = self.requests[name]
        keep = data.draw(st.integers(0, len(ids)))
        self.store.truncate(name, first + keep)
        self.requests[name] = (first, ids[:keep])

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data(), new=names)
    def fork(self, data: Any, new: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if new in self.requests:
            with pytest.raises(fanfold.InvalidState):
                self.store.fork(name, new)
            return
        self.store.fork(name, new)
        first, ids = self.requests[name]
        self.requests[new] = (first, list(ids))

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data())
    def finish(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.store.finish(name)
        del self.requests[name]

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data(), block=st.integers(0, 5), number=st.integers(0, 5))
    def publish(self, data: Any, block: int, number: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        ids = [self.expected(name, block * BLOCK + i) for i in range(BLOCK)]
        if -1 in ids:
            with pytest.raises(fanfold.InvalidArgument, match="full block"):
                self.store.publish(name, block * BLOCK, key(number))
            return
        is_new = self.store.publish(name, block * BLOCK, key(number), generation=self.generation)
        assert is_new == (number not in self.keys)
        self.keys.setdefault(number, ids)

    @stateful.rule()
    def reset(self) -> None:
        self.generation += 1
        assert self.store.reset() == self.generation
        self.keys.clear()

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data(), first=st.integers(0, 12), count=st.integers(0, 12))
    def assemble(self, data: Any, first: int, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        got = self.store.assemble(name, first, first + count)
        expected = [self.expected(name, position) for position in range(first, first + count)]
        self.compare(got, first, expected)

    @stateful.rule(data=st.data(), numbers=st.lists(st.integers(0, 5), max_size=4))
    def assemble_keys(self, data: Any, numbers: list[int]) -> None:
        tail = data.draw(st.sampled_from(["", *sorted(self.requests)]))
        got = self.store.assemble_keys([key(n) for n in numbers], tail=tail)
        last = BLOCK * len(numbers)
        if tail:
            first, ids = self.requests[tail]
            last = max(last, first + len(ids))
        expected = [self.expected(tail, position) if tail else -1 for position in range(last)]
        for i, number in enumerate(numbers):
            if number in self.keys:
                expected[i * BLOCK : (i + 1) * BLOCK] = self.keys[number]
        assert got.missing_keys == [i for i, n in enumerate(numbers) if n not in self.keys]
        self.compare(got, 0, expected)

    def compare(self, got: Any, first: int, expected: list[int]) -> None:
        assert ids_of(got.rows) == expected
        assert got.rows.first_position == first
        missing = [first + i for i, wanted in enumerate(expected) if wanted < 0]
        assert [p for begin, end in got.missing for p in range(begin, end)] == missing
        assert got.is_complete == (not missing)

    @stateful.invariant()
    def counts_agree(self) -> None:
        stats = self.store.stats
        assert stats.num_requests == len(self.requests)
        assert stats.num_keys == len(self.keys)
        assert stats.num_bytes <= stats.max_bytes
        for name, (first, ids) in self.requests.items():
            assert self.store.range(name) == (first, first + len(ids))
            assert name in self.store


StoreModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
test_any_sequence_of_calls_agrees_with_the_model = StoreModel.TestCase


def test_the_least_recently_used_block_makes_room_and_requests_keep_theirs() -> None:
    row_bytes = LAYERS * TOP_K * 2
    store = make_store(max_bytes=2 * BLOCK * row_bytes)
    for number in range(2):
        store.begin("a")
        store.append("a", 0, rows_of([number, 1, 2]))
        store.publish("a", 0, key(number))
        store.finish("a")
    assert store.assemble_keys([key(0)]).is_complete
    store.begin("b")
    store.append("b", 0, rows_of([7, 8]))
    assert [store.has_key(key(number)) for number in range(2)] == [True, False]
    store.append("b", 2, rows_of([9, 10]))
    assert not store.has_key(key(0))
    with pytest.raises(fanfold.CapacityExceeded, match=r"max_bytes.*in use"):
        store.append("b", 4, rows_of([1, 2, 3]))
    assert ids_of(store.assemble("b", 0, 4).rows) == [7, 8, 9, 10]
    assert store.stats.num_evictions == 2
    assert store.stats.num_bytes == store.stats.max_bytes


def test_rows_of_a_snapshot_go_to_the_store_and_back() -> None:
    capture = fanfold.RoutingCapture(num_layers=LAYERS, num_experts=1000, top_k=TOP_K, max_tokens=8)
    capture.begin_step(0)
    for layer in range(LAYERS):
        capture.record(layer, numpy.arange(5, dtype=numpy.int64).reshape(5, 1))
    store = make_store()
    store.begin("a", 4)
    with capture.snapshot(5) as snapshot:
        # Tokens 0 and 1 belong to another request.
        store.append("a", 4, snapshot.rows(2, 3))
    got = store.assemble("a", 4, 7)
    assert got.is_complete
    assert got.rows.array[:, 1, 0].tolist() == [2, 3, 4]
    assert (got.rows.dtype, got.rows.first_position) == ("int16", 4)


def test_rows_of_another_shape_or_type_are_refused() -> None:
    store = make_store()
    store.begin("a")
    for rows in (
        numpy.zeros((1, LAYERS, 2), numpy.int16),
        numpy.zeros((1, LAYERS), numpy.int16),
        numpy.zeros((1, LAYERS, TOP_K), numpy.int32),
    ):
        with pytest.raises(fanfold.InvalidArgument, match=r"rows: expected int16 \[tokens, 2, 1\]"):
            store.append("a", 0, rows)
    with pytest.raises(fanfold.InvalidArgument, match="16 to 32 bytes, got 3"):
        store.publish("a", 0, b"abc")
    with pytest.raises(fanfold.InvalidArgument, match="one that has begun"):
        store.append("b", 0, rows_of([1]))


def test_a_block_under_two_keys_makes_room() -> None:
    store = make_store(max_bytes=BLOCK_BYTES)
    store.begin("a")
    store.append("a", 0, rows_of([1, 2, 3]))
    store.publish("a", 0, key(0))
    store.publish("a", 0, key(1))
    store.finish("a")
    store.begin("b")
    store.append("b", 0, rows_of([4]))
    assert [store.has_key(key(number)) for number in range(2)] == [False, False]
    assert (store.stats.num_evictions, store.stats.num_keys) == (1, 0)


def test_rows_that_were_not_recorded_do_not_become_recorded_ones() -> None:
    capture = fanfold.RoutingCapture(num_layers=LAYERS, num_experts=1000, top_k=TOP_K, max_tokens=8)
    capture.begin_step(0)
    capture.record(0, numpy.array([[1], [-1]]))
    store = make_store()
    store.begin("a", 4)
    snapshot = capture.snapshot(2)
    with pytest.raises(fanfold.InvalidState, match=r"allow_unrouted.* position 4, layer 1"):
        store.append("a", 4, snapshot.array)
    with pytest.raises(fanfold.InvalidState, match="layers 1"):
        store.append("a", 4, snapshot.rows(0, 2))
    capture.record(1, numpy.array([[5], [6]]))
    complete = capture.snapshot(2)
    store.append("a", 4, complete.rows(0, 2))
    with pytest.raises(fanfold.InvalidState, match="position 7, layer 0"):
        store.append("a", 6, complete.array)
    store.append("a", 6, complete.array, allow_unrouted=True)
    assert store.assemble("a", 4, 8).rows.array[:, 0, 0].tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("wrong", [1000, -2])
def test_ids_that_are_no_experts_are_refused(wrong: int) -> None:
    store = make_store()
    store.begin("a")
    array = numpy.array([[[1], [wrong]]], numpy.int16)
    with pytest.raises(fanfold.InvalidArgument, match=f"got {wrong} at token 0, layer 1, column 0"):
        store.append("a", 0, array)
    assert store.range("a") == (0, 0)
