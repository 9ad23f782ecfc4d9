# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``flashinfer_nvlink_one_sided`` over Fanfold, as a plugin that must be asked for.

vLLM takes FlashInfer's backend ``nvlink_one_sided`` by name and expects a
``NVLinkOneSidedAlltoAll``. The plugin puts a subclass of it under that name, whose rows Fanfold
moves. vLLM loads every plugin that is installed, so this one does nothing unless its name is among
those of ``VLLM_PLUGINS``::

    VLLM_PLUGINS=fanfold_one_sided vllm serve ... --all2all-backend flashinfer_nvlink_one_sided

Tested against stand-ins of the versions below; not yet run within vLLM.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os

from fanfold.compat.flashinfer.moe_ep import implementation
from fanfold.errors import Unsupported

PLUGIN_NAME = "fanfold_one_sided"
REPLACED_NAME = "nvlink_one_sided"
TESTED_VERSIONS = {"vllm": ("0.33.0",), "flashinfer-python": ("0.7.2", "0.7.2.post1")}

_logger = logging.getLogger(__name__)


def load() -> None:
    """What vLLM calls in each of its processes: replace the backend if that was asked for.

    Raises:
        Unsupported: it was asked for, and vLLM or FlashInfer is of another version, or lacks what
            is replaced. Nothing was replaced.
    """
    if PLUGIN_NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        _logger.debug("%s: not named in VLLM_PLUGINS; nothing is replaced", PLUGIN_NAME)
        return
    replace()


def replace() -> type:
    """Put Fanfold under the name ``nvlink_one_sided`` of FlashInfer's registry, and log it.

    Returns:
        The class that is there now, a subclass of the one before.

    Raises:
        Unsupported: as ``load``.
    """
    versions = [_checked_version(package) for package in TESTED_VERSIONS]
    try:
        moe_ep = importlib.import_module("flashinfer.moe_ep")
        base, register = moe_ep.NVLinkOneSidedAlltoAll, moe_ep.register_communication
    except (ImportError, AttributeError) as error:
        raise Unsupported(
            f"flashinfer.moe_ep: expected NVLinkOneSidedAlltoAll and register_communication, got "
            f"{error}"
        ) from error
    made: type = implementation(moe_ep, base, REPLACED_NAME)
    register(REPLACED_NAME)(made)
    _logger.warning(
        "FlashInfer's communication backend %r (%s) is replaced by Fanfold in this process, as "
        "VLLM_PLUGINS asks; leave %r out of it to have FlashInfer's back",
        REPLACED_NAME,
        ", ".join(versions),
        PLUGIN_NAME,
    )
    return made


def _checked_version(package: str) -> str:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise Unsupported(f"{package}: expected it to be installed, got no such package") from error
    tested = TESTED_VERSIONS[package]
    # A local label, as of a build for one CUDA version, changes no interface.
    if found.split("+")[0] not in tested:
        raise Unsupported(
            f"{package}: expected version {' or '.join(tested)}, with which replacing "
            f"{REPLACED_NAME} was tested, got {found}; leave {PLUGIN_NAME} out of VLLM_PLUGINS"
        )
    return f"{package} {found}"
