# SPDX-License-Identifier: Apache-2.0
"""What the library raises. A message says what was wrong, what was expected and what was got."""


class Error(Exception):
    """Base of every error of this library."""


class InvalidArgument(Error, ValueError):
    """A value, shape, dtype or device does not fit.

    State: unchanged, nothing was sent; from a receiving call: the ranks' calls differ, reset().
    """


class InvalidState(Error):
    """Wrong order of calls, or use after close, reset or fork. State: unchanged."""


class Unsupported(Error):
    """Built without it, or the strategy or machine lacks it. State: unchanged."""


class SystemFailure(Error, OSError):
    """A call of the operating system failed; ``errno`` says why. State: the object is unusable."""


class CudaFailure(Error):
    """A call of the CUDA driver or runtime failed. State: the object is unusable."""

    code: int
    """What the call returned."""


class CapacityExceeded(Error):
    """More rows than the caller gave room for. State: unchanged, on every rank."""


class PeerTimeout(Error, TimeoutError):
    """A rank is late. State: failed until ``reset()`` on every rank."""

    rank: int
    """The late rank, in the communicator of the call."""


class PeerAborted(Error):
    """A rank called ``abort`` or ``reset``. State: failed until ``reset()`` on every rank."""

    rank: int
    """The rank that aborted."""
    reason: str
    """What it gave as its reason."""


class PeerLost(Error, ConnectionError):
    """A rank is gone. State: the communicator is broken; close it."""

    rank: int
    """The rank that is gone."""
