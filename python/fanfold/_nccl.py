# SPDX-License-Identifier: Apache-2.0
"""Where this environment keeps NCCL."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def wheel_library() -> str:
    """Return the path of libnccl.so.2 of an installed wheel, or an empty string.

    Looks at the installed files only: imports neither torch nor the library.
    """
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # not even the package around it
        return ""
    if spec is None or spec.submodule_search_locations is None:
        return ""
    for folder in spec.submodule_search_locations:
        file = Path(folder) / "lib" / "libnccl.so.2"
        if file.is_file():
            return str(file)
    return ""
