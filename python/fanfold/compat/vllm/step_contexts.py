# SPDX-License-Identifier: Apache-2.0
"""Which forward context a step belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class StepContexts:
    """Remembers the forward context of the running step, by identity.

    By a weak reference where the object allows it, so that no step's tensors are kept alive. A
    context that is gone is none that is given later, even at the same address.
    """

    def __init__(self) -> None:
        """Begin without a context."""
        self._last: Callable[[], Any] | None = None

    def forget(self) -> None:
        """Be without a context again."""
        self._last = None

    def is_other(self, context: Any) -> bool:
        """Say whether this is a context, and not the one that is remembered, if one is."""
        return context is not None and self._last is not None and self._last() is not context

    def keep(self, context: Any) -> None:
        """Remember a context; None changes nothing."""
        if context is None:
            return
        try:
            self._last = weakref.ref(context)
        except TypeError:
            self._last = lambda: context
