# SPDX-License-Identifier: Apache-2.0
"""PyTorch custom ops: an exchange inside ``torch.compile(fullgraph=True)``.

Two ops, ``fanfold::dispatch`` and ``fanfold::combine``. Received rows are views of memory that the
exchange owns, so they cannot be results of an op: the compiler would take a result for a buffer of
its own and write over it. They go *in*, as arguments that dispatch changes. A small state tensor
that both ops change keeps them in order and keeps the compiler from dropping a call whose result
nobody reads, for which the other ranks would wait. Each call checks that it was handed the very
views and the very state, not copies, before anything is sent.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fanfold.all_to_all import AllToAll
from fanfold.errors import InvalidArgument, InvalidState, Unsupported

_exchanges: weakref.WeakValueDictionary[str, TorchExchange] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
_LAYOUTS = ("rank_major", "expert_major", "flat", "flat_by_expert")


class TorchReceived(NamedTuple):
    """What `TorchExchange.dispatch` returns: the same tensors in every call, with new contents."""

    payloads: list[torch.Tensor]  #: in the layout
    rank_counts: torch.Tensor  #: ``[R]`` int32
    expert_counts: torch.Tensor  #: ``[L]`` int32
    offsets: torch.Tensor  #: ``[L+1]`` int32
    topk_ids: torch.Tensor | None  #: ``[.., K]`` int32; None for layouts per expert
    topk_weights: torch.Tensor | None  #: float32; None without weights
    scales: torch.Tensor | None  #: of payload 0, with a dispatch_wire
    num_tokens: int  #: T of this rank


class TorchExchange:
    """An AllToAll that compiled code can call, in rounds of one fixed shape.

    Making one is collective: it runs an empty round to learn where received rows will lie. From
    then on every round has ``round_max_tokens`` rows per source and payloads of these dtypes and
    row shapes; the number of tokens may differ from call to call (up to ``round_max_tokens``).

    The tensors that ``dispatch`` returns are valid until the ``combine``, as those of a Received.
    They are the same tensors in every round: read after the next dispatch, they show its rows. No
    gradients flow through the ops.

    Args:
        a2a: of max_in_flight 1 and a layout whose tensors have a fixed shape: rank_major,
            expert_major, or with max_recv_rows flat or flat_by_expert. Kept alive by this object.
        payloads: one tensor per payload, ``[any, ...]``; only dtype and row shape are used.
        has_weights: whether dispatches bring ``topk_weights``.
        round_max_tokens: m of every round; default max_tokens_per_rank.

    Raises:
        Unsupported: more than one round in flight, or a layout without a fixed shape.

    Example::

        exchange = TorchExchange(a2a, [torch.empty(0, hidden, dtype=torch.bfloat16)])

        @torch.compile(fullgraph=True)
        def layer(x, topk_ids, topk_weights):
            recv = exchange.dispatch(topk_ids, [x], topk_weights)
            return exchange.combine(experts(recv), recv)
    """

    def __init__(
        self,
        a2a: AllToAll,
        payloads: Sequence[torch.Tensor],
        *,
        has_weights: bool = True,
        round_max_tokens: int | None = None,
    ) -> None:
        config: Any = a2a.config
        if config["max_in_flight"] != 1:
            raise Unsupported(
                "TorchExchange: expected an AllToAll with max_in_flight 1 (its rows always lie at "
                f"one place), got max_in_flight {config['max_in_flight']}"
            )
        layout = config["layout"]
        fixed = layout not in ("flat", "flat_by_expert") or config["max_recv_rows"] is not None
        if layout not in _LAYOUTS or not fixed:
            raise Unsupported(
                "TorchExchange: expected a layout of fixed shape (rank_major, expert_major, or "
                f"with max_recv_rows flat or flat_by_expert), got {layout}"
            )
        if not payloads:
            raise InvalidArgument("payloads: expected 1 to 16 tensors, got 0")
        self._a2a = a2a
        self._max_tokens = round_max_tokens
        self._top_k: int = config["top_k"]
        self._out_dtype: torch.dtype = getattr(torch, config["combine_dtype"])
        self._has_weights = has_weights
        self._has_ids = layout not in ("expert_major", "flat_by_expert")
        self._has_scales = config["dispatch_wire"] is not None
        self._open: Any = None
        self._state = torch.zeros(1, dtype=torch.int64)
        self._kinds = [(payload.dtype, payload.shape[1:]) for payload in payloads]
        self._views = self._learn_views(payloads)
        self._pointers = [view.data_ptr() for view in self._views]
        self._num_payloads = len(payloads)
        #: Names this exchange in the ops. Text, since the compiler may make a number symbolic.
        self.key = f"exchange {next(_keys)}"
        _exchanges[self.key] = self

    def _learn_views(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        empty = [payload.detach().new_empty((0, *payload.shape[1:])) for payload in payloads]
        weights = torch.empty((0, self._top_k)) if self._has_weights else None
        recv = self._a2a.dispatch(
            torch.empty((0, self._top_k), dtype=torch.int32),
            empty,
            topk_weights=weights,
            round_max_tokens=self._max_tokens,
        )
        views = self._views_of(recv)
        recv.release()
        return views

    @staticmethod
    def _views_of(recv: Any) -> list[torch.Tensor]:
        views = [*recv.payloads, recv.rank_counts, recv.expert_counts, recv.offsets]
        views += [recv.topk_ids] if recv.topk_ids is not None else []
        views += [recv.topk_weights] if recv.topk_weights is not None else []
        views += [recv.scales] if recv.scales is not None else []
        return views

    # -- what compiled code calls ----------------------------------------------------------------

    def dispatch(
        self,
        topk_ids: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        topk_weights: torch.Tensor | None = None,
    ) -> TorchReceived:
        """Send each token to the ranks of its experts, and receive; see AllToAll.dispatch.

        Args:
            topk_ids: ``[T, K]`` int16, int32, int64 or uint32.
            payloads: ``[T, ...]`` each, dtypes and row shapes as at construction.
            topk_weights: ``[T, K]`` float32, if ``has_weights``.

        Raises:
            InvalidState: the compiler passed a copy of the views; nothing was sent.
            Also what AllToAll.dispatch raises.
        """
        torch.ops.fanfold.dispatch(
            self.key, topk_ids, list(payloads), topk_weights, self._views, self._state
        )
        first = self._num_payloads
        optional = iter(self._views[first + 3 :])
        return TorchReceived(
            self._views[:first],
            self._views[first],
            self._views[first + 1],
            self._views[first + 2],
            next(optional) if self._has_ids else None,
            next(optional) if self._has_weights else None,
            next(optional) if self._has_scales else None,
            topk_ids.shape[0],
        )

    def combine(self, y: torch.Tensor, received: TorchReceived) -> torch.Tensor:
        """Add each token's rows; see AllToAll.combine.

        Args:
            y: the experts' rows in the layout, ``[..., H]``.
            received: of the last dispatch.

        Returns:
            ``[T, H]`` of the exchange's combine dtype.
        """
        result: torch.Tensor = torch.ops.fanfold.combine(
            self.key, y, received.num_tokens, self._state
        )
        return result

    # -- what the ops do -------------------------------------------------------------------------

    def _check_state(self, state: torch.Tensor, call: str) -> None:
        if state.data_ptr() != self._state.data_ptr():
            raise InvalidState(
                f"fanfold::{call}: expected the state tensor of this exchange, got a copy of it "
                "(this backend of torch.compile copies what an op changes; inductor does not); "
                "nothing was sent"
            )

    def _run_dispatch(
        self,
        topk_ids: torch.Tensor,
        payloads: list[torch.Tensor],
        topk_weights: torch.Tensor | None,
        views: list[torch.Tensor],
        state: torch.Tensor,
    ) -> None:
        self._check_state(state, "dispatch")
        for index, (view, pointer) in enumerate(zip(views, self._pointers, strict=True)):
            if view.data_ptr() != pointer:
                raise InvalidState(
                    f"fanfold::dispatch: expected view {index} of the workspace itself, got other "
                    "memory (compiled code still reads the rows of the round before, so the "
                    "compiler made a copy); nothing was sent"
                )
        if (topk_weights is not None) != self._has_weights:
            raise InvalidArgument(
                f"topk_weights: expected {'a tensor' if self._has_weights else 'none'} "
                f"(has_weights is {self._has_weights}), got "
                f"{'none' if topk_weights is None else 'a tensor'}"
            )
        kinds = [(payload.dtype, payload.shape[1:]) for payload in payloads]
        if kinds != self._kinds:
            raise InvalidArgument(
                "payloads: expected dtypes and row shapes as at construction "
                f"({self._kinds}), got {kinds}"
            )
        recv = self._a2a.dispatch(
            topk_ids, payloads, topk_weights=topk_weights, round_max_tokens=self._max_tokens
        )
        if [view.data_ptr() for view in self._views_of(recv)] != self._pointers:  # also fills them
            self._a2a.abort("received rows moved under a TorchExchange")
            raise InvalidState("fanfold::dispatch: received rows lie elsewhere than before")
        self._open = recv
        state += 1

    def _run_combine(self, y: torch.Tensor, num_tokens: int, state: torch.Tensor) -> torch.Tensor:
        self._check_state(state, "combine")
        if self._open is None:
            raise InvalidState("fanfold::combine: no round is open; call dispatch first")
        out = torch.empty((num_tokens, y.shape[-1]), dtype=self._out_dtype)
        # Identity experts: the received rows themselves may not be the results.
        results = y.clone() if y.data_ptr() in self._pointers else y.contiguous()
        self._open.combine(results, out)
        self._open = None  # an argument that does not fit leaves the round open
        state += 1
        return out


def _exchange(key: str) -> TorchExchange:
    exchange = _exchanges.get(key)
    if exchange is None:
        raise InvalidState(f"fanfold ops: the TorchExchange named {key!r} is gone")
    return exchange


def _dispatch(
    key: str,
    topk_ids: torch.Tensor,
    payloads: list[torch.Tensor],
    topk_weights: torch.Tensor | None,
    views: list[torch.Tensor],
    state: torch.Tensor,
) -> None:
    _exchange(key)._run_dispatch(topk_ids, payloads, topk_weights, views, state)


def _dispatch_shapes(
    key: str,
    topk_ids: torch.Tensor,
    payloads: list[torch.Tensor],
    topk_weights: torch.Tensor | None,
    views: list[torch.Tensor],
    state: torch.Tensor,
) -> None:
    del key, topk_ids, payloads, topk_weights, views, state


def _combine(key: str, y: torch.Tensor, num_tokens: int, state: torch.Tensor) -> torch.Tensor:
    return _exchange(key)._run_combine(y, num_tokens, state)


def _combine_shapes(
    key: str, y: torch.Tensor, num_tokens: int, state: torch.Tensor
) -> torch.Tensor:
    del state
    return y.new_empty((num_tokens, y.shape[-1]), dtype=_exchange(key)._out_dtype)


torch.library.custom_op(
    "fanfold::dispatch", _dispatch, mutates_args=("views", "state")
).register_fake(_dispatch_shapes)
torch.library.custom_op("fanfold::combine", _combine, mutates_args=("state",)).register_fake(
    _combine_shapes
)
