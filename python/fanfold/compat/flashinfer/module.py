# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer's compiled module offers, for code that asks for it by ``get_...module``."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from fanfold.compat.flashinfer import functions, sizes
from fanfold.compat.flashinfer.workspaces import WORKSPACES


def get_moe_alltoall_module(backend: str = "trtllm") -> SimpleNamespace:
    """The operations under the functions; nothing is compiled.

    ``moe_a2a_dispatch`` gives five values: where the bytes of each received payload begin, from the
    start of the workspace; how many they are; the combine offset and that of the gathered
    statistics (or -1), from the start of this rank's row; and how many statistics a rank has.
    ``moe_a2a_wrap_payload_tensor_in_workspace`` makes views of them. The last
    argument of ``moe_a2a_combine_into`` is the output; it gives nothing.

    Raises:
        NotImplementedError: ``backend`` is "cake".
    """
    sizes.check_backend(backend)
    return SimpleNamespace(
        moe_a2a_initialize=functions.moe_a2a_initialize,
        moe_a2a_dispatch=_dispatch,
        moe_a2a_combine=_combine,
        moe_a2a_combine_into=_combine_into,
        moe_a2a_sanitize_expert_ids=functions.moe_a2a_sanitize_expert_ids,
        moe_a2a_get_metainfo_index_pairs=sizes.metainfo_index_pairs,
        moe_a2a_get_aux_data_size=sizes.aux_data_size,
    )


def _dispatch(
    token_selected_experts: Any,
    input_payloads: Any,
    workspace: Any,
    metainfo: Any,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    *more: Any,
    **named: Any,
) -> tuple[list[int], list[int], int, int, int]:
    _, combine_offset, stats = functions.moe_a2a_dispatch(
        token_selected_experts,
        input_payloads,
        workspace,
        metainfo,
        runtime_max_tokens_per_rank,
        ep_rank,
        *more,
        **named,
    )
    kept = WORKSPACES.find(workspace, ep_rank)
    first = ep_rank * int(workspace.stride(0))
    starts = [first + region.offset for region in kept.regions()]
    lengths = [region.num_bytes for region in kept.regions()]
    if stats is None:
        return starts, lengths, combine_offset, -1, 0
    return starts, lengths, combine_offset, kept.offsets[8], int(stats.shape[1])


def _combine(*arguments: Any, **named: Any) -> Any:
    """``moe_a2a_combine`` with the output as its last argument."""
    if len(arguments) > len(_COMBINE_ARGUMENTS):
        raise TypeError(
            f"moe_a2a_combine: expected at most {len(_COMBINE_ARGUMENTS)} arguments, got "
            f"{len(arguments)}"
        )
    given = dict(zip(_COMBINE_ARGUMENTS, arguments, strict=False))
    return functions.moe_a2a_combine(**given, **named)


def _combine_into(*arguments: Any, **named: Any) -> None:
    """As ``_combine``, whose last argument must be given."""
    if len(arguments) < len(_COMBINE_ARGUMENTS) and named.get("output") is None:
        raise TypeError("moe_a2a_combine_into: expected an output as its last argument, got none")
    _combine(*arguments, **named)


_COMBINE_ARGUMENTS = [
    *(
        name
        for name in inspect.signature(functions.moe_a2a_combine).parameters
        if name not in ("output", "backend")
    ),
    "output",
]
