# SPDX-License-Identifier: Apache-2.0
"""Recorded routing under the keys by which a training step asks for it."""

from __future__ import annotations

import threading
from typing import Any

import numpy

from fanfold._replay_rows import Array, as_array, check_count, names_of
from fanfold.errors import InvalidArgument, InvalidState


class ReplayBook:
    """Ids of each (layer, micro-batch), for routers that replay them.

    Nothing depends on the order of calls: a pipeline schedule may mix micro-batches, and a layer
    that is computed again, as under activation checkpointing, gets the same answer again. Any
    thread may call it.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._ids: dict[int, dict[int, Array]] = {}  # by micro-batch, then layer
        self._read: set[tuple[int, int]] = set()
        self._lock = threading.Lock()  # guards both

    def put(self, layer: int, micro_batch: int, ids: Any) -> None:
        """Keep a copy of a layer's ids for a micro-batch.

        Args:
            layer: 0 or more; the same number that `get` is asked for.
            micro_batch: 0 or more.
            ids: ``[tokens, top_k]`` integers on the CPU.

        Raises:
            InvalidArgument: another shape or type, or a negative number.
            InvalidState: there are other ids under this key; equal ones change nothing, also of
                another dtype.
        """
        check_count("layer", layer, 0)
        check_count("micro_batch", micro_batch, 0)
        copy = numpy.array(as_array("ids", ids), order="C")
        if copy.ndim != 2 or copy.dtype.kind not in "iu":
            raise InvalidArgument(
                f"ids: expected integers [tokens, top_k], got {copy.dtype} {list(copy.shape)}"
            )
        copy.flags.writeable = False
        with self._lock:
            layers = self._ids.setdefault(micro_batch, {})
            kept = layers.setdefault(layer, copy)
        if not numpy.array_equal(kept, copy):
            raise InvalidState(
                f"put: expected the ids that layer {layer} of micro-batch {micro_batch} has, "
                "got others: drop the micro-batch first"
            )

    def get(self, layer: int, micro_batch: int, num_tokens: int | None = None) -> Array:
        """Give the ids of a layer for a micro-batch, as often as they are asked for.

        Args:
            layer: as put.
            micro_batch: as put.
            num_tokens: that the router has, if given: there must be as many.

        Returns:
            ``[tokens, top_k]``, read-only, the same array each time; ``torch.tensor(ids)`` copies
            it.

        Raises:
            InvalidState: nothing was put under this key; says what was.
            InvalidArgument: another number of tokens.
        """
        with self._lock:
            layers = self._layers("get", micro_batch)
            if layer not in layers:
                raise InvalidState(
                    f"get: expected a layer that micro-batch {micro_batch} has, "
                    f"{names_of(layers)}, got {layer}"
                )
            ids = layers[layer]
            if num_tokens not in (None, len(ids)):
                raise InvalidArgument(
                    f"num_tokens: expected {len(ids)}, as layer {layer} of micro-batch "
                    f"{micro_batch} has, got {num_tokens}"
                )
            self._read.add((layer, micro_batch))
            return ids

    def consumed(self) -> list[tuple[int, int]]:
        """Give the keys (layer, micro-batch) that were read, ascending."""
        with self._lock:
            return sorted(self._read)

    def assert_all_used(self, micro_batch: int | None = None) -> None:
        """Check that every entry was read at least once.

        Args:
            micro_batch: look at this one only; None: at all.

        Raises:
            InvalidState: names what was not read, or there is no such micro-batch.
        """
        with self._lock:
            if micro_batch is not None:
                self._layers("assert_all_used", micro_batch)
            wanted = sorted(self._ids) if micro_batch is None else [micro_batch]
            unread = {
                batch: [layer for layer in self._ids[batch] if (layer, batch) not in self._read]
                for batch in wanted
            }
        words = "; ".join(
            f"layers {names_of(layers)} of micro-batch {batch}"
            for batch, layers in unread.items()
            if layers
        )
        if words:
            raise InvalidState(
                f"assert_all_used: expected every entry to be read, never read: {words}"
            )

    def drop(self, micro_batch: int) -> None:
        """Forget a micro-batch, also what was read of it.

        Args:
            micro_batch: as put.

        Raises:
            InvalidState: there is no such micro-batch; says which there are.
        """
        with self._lock:
            self._layers("drop", micro_batch)
            del self._ids[micro_batch]
            self._read = {key for key in self._read if key[1] != micro_batch}

    def _layers(self, call: str, micro_batch: int) -> dict[int, Array]:
        if micro_batch not in self._ids:
            raise InvalidState(
                f"{call}: expected a micro-batch that was put, {names_of(self._ids)}, "
                f"got {micro_batch}"
            )
        return self._ids[micro_batch]
