# SPDX-License-Identifier: Apache-2.0
"""ReplayBook: recorded ids by layer and micro-batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy
import pytest
import torch

import fanfold
from fanfold import replay


def filled(num_layers: int = 2, num_micro_batches: int = 2) -> replay.ReplayBook:
    book = replay.ReplayBook()
    for micro_batch in range(num_micro_batches):
        for layer in range(num_layers):
            book.put(layer, micro_batch, numpy.full((3, 2), 10 * micro_batch + layer))
    return book


def test_a_schedule_may_ask_in_any_order_and_twice() -> None:
    book = filled(num_layers=2, num_micro_batches=3)
    # Forward of 0 and 1, then one backward per forward; a backward computes its layers again.
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 0), (0, 0), (0, 2), (1, 2), (1, 1), (0, 1)]
    seen: dict[tuple[int, int], Any] = {}
    for layer, micro_batch in order:
        ids = book.get(layer, micro_batch, num_tokens=3)
        assert (ids == 10 * micro_batch + layer).all()
        assert ids is seen.setdefault((layer, micro_batch), ids)
        assert not ids.flags.writeable
    assert book.consumed() == sorted(seen)
    book.assert_all_used()


def test_entries_are_copies_and_do_not_change() -> None:
    book = replay.ReplayBook()
    ids = torch.tensor([[1, 2], [3, 4]])
    book.put(0, 0, ids)
    ids[0, 0] = 7
    assert book.get(0, 0).tolist() == [[1, 2], [3, 4]]
    first = book.get(0, 0)
    for dtype in ("int64", "int32", "uint8", "uint64"):
        book.put(0, 0, numpy.array([[1, 2], [3, 4]], dtype))
    assert book.get(0, 0) is first and first.dtype == numpy.int64
    with pytest.raises(fanfold.InvalidState, match="put: expected the ids that layer 0 of micro"):
        book.put(0, 0, ids)
    assert book.get(0, 0).tolist() == [[1, 2], [3, 4]]
    for layer, micro_batch, value, text in (
        (0, 1, numpy.zeros(3, int), r"ids: expected integers \[tokens, top_k\], got int64 \[3\]"),
        (0, 1, numpy.zeros((3, 1)), "got float64"),
        (-1, 1, ids, "layer: expected 0 or more"),
        (0, -1, ids, "micro_batch: expected 0 or more"),
    ):
        with pytest.raises(fanfold.InvalidArgument, match=text):
            book.put(layer, micro_batch, value)


def test_what_is_not_there_is_named() -> None:
    book = filled(num_layers=3, num_micro_batches=2)
    with pytest.raises(fanfold.InvalidState, match="that micro-batch 1 has, 0 to 2, got 3"):
        book.get(3, 1)
    for call in (lambda: book.get(0, 2), lambda: book.drop(2), lambda: book.assert_all_used(2)):
        with pytest.raises(fanfold.InvalidState, match="micro-batch that was put, 0 to 1, got 2"):
            call()
    with pytest.raises(fanfold.InvalidState, match="was put, none, got 0"):
        replay.ReplayBook().get(0, 0)
    with pytest.raises(fanfold.InvalidArgument, match="num_tokens: expected 3, as layer 0 of"):
        book.get(0, 0, num_tokens=4)
    assert book.consumed() == []


def test_what_was_never_read_is_named() -> None:
    book = filled(num_layers=3, num_micro_batches=2)
    replay.ReplayBook().assert_all_used()
    for key in ((0, 0), (1, 0), (2, 0), (1, 1)):
        book.get(*key)
    book.assert_all_used(0)
    with pytest.raises(fanfold.InvalidState, match=r"never read: layers 0, 2 of micro-batch 1$"):
        book.assert_all_used()
    book.drop(1)
    book.assert_all_used()
    assert book.consumed() == [(0, 0), (1, 0), (2, 0)]
    book.put(0, 1, numpy.ones((1, 1), int))  # the next step's
    with pytest.raises(fanfold.InvalidState, match="layers 0 of micro-batch 1"):
        book.assert_all_used(1)


def test_threads_race_on_one_key_and_the_first_wins() -> None:
    num_threads = 4
    for _ in range(100):
        book = replay.ReplayBook()
        barrier = threading.Barrier(num_threads)
        got: dict[int, Any] = {}
        refused: list[int] = []

        def work(
            value: int,
            book: replay.ReplayBook = book,
            barrier: threading.Barrier = barrier,
            got: dict[int, Any] = got,
            refused: list[int] = refused,
        ) -> None:
            ids = numpy.full((2, 2), value // 2)  # two threads agree with each other
            barrier.wait(timeout=60)
            try:
                book.put(0, 0, ids)
            except fanfold.InvalidState:
                refused.append(value)
            got[value] = book.get(0, 0)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert len(got) == num_threads
        assert len({id(ids) for ids in got.values()}) == 1, "all get the same array"
        winner = int(got[0][0, 0])
        assert sorted(refused) == [value for value in range(num_threads) if value // 2 != winner]
        book.assert_all_used()


def test_threads_share_a_book() -> None:
    book = replay.ReplayBook()

    def work(micro_batch: int) -> None:
        for layer in range(50):
            book.put(layer, micro_batch, numpy.full((2, 2), layer))
            book.get(layer, micro_batch)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    book.assert_all_used()
    assert len(book.consumed()) == 200
