# SPDX-License-Identifier: Apache-2.0
"""Errors that are both Fanfold's and of the type that FlashInfer raises in their place."""

from __future__ import annotations

from fanfold.errors import CapacityExceeded, InvalidArgument, InvalidState


class CallOrder(InvalidState, AssertionError):
    """Dispatch and combine do not alternate. State: unchanged."""


class CalledTooEarly(InvalidState, RuntimeError):
    """A call that needs an open round, memory or a group that is not there. State: unchanged."""


class WorkspaceTooSmall(CapacityExceeded, RuntimeError):
    """A round needs more bytes than the workspace was sized for. State: unchanged."""


class Refused(InvalidArgument, RuntimeError):
    """What FlashInfer's native part refuses. State: unchanged, nothing was sent."""
