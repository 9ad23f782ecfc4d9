# SPDX-License-Identifier: Apache-2.0
"""The torch of these drop-ins, imported when a tensor is first needed."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def torch() -> Any:
    """The module."""
    from fanfold.interop_torch import torch_module

    return torch_module()
