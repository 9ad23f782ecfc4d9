# SPDX-License-Identifier: Apache-2.0
"""The configuration of an AllToAll: fields, defaults, and what the native part is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from fanfold.errors import InvalidArgument
from fanfold.placement import Placement

_TEST_KNOBS = frozenset(
    {
        "delay_seed",
        "first_epoch",
        "isa",
        "kill_at_step",
        "max_store_bytes",
        "min_worker_bytes",
        "min_pull_bytes",
        "row_guard_bytes",
        "stop_at_step",
        "streaming_stores",
    }
)


class _Required(TypedDict):
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden: int


class AllToAllConfig(_Required, total=False):
    """The keyword arguments that describe an AllToAll; see there for what they mean.

    A dict of this type can be given to ``AllToAll(comm, **config)`` and to
    ``AllToAll.required_bytes(num_ranks=R, **config)``.
    """

    dtype: object
    extra_bytes_per_token: int
    dispatch_row_bytes: int | None
    combine_row_bytes: int | None
    strategy: str
    layout: str
    weighting: str
    placement: str | Sequence[int] | Placement
    combine_dtype: object
    max_recv_rows: int | None
    expert_alignment: int
    max_local_experts: int
    dispatch_wire: str | None
    combine_wire: str | None
    wire_scale: str
    channel_bytes: int
    max_in_flight: int
    deterministic: bool
    check_ids: str | None
    timeout_s: float
    device: object
    name: str | None
    debug_poison: bool
    test_knobs: Mapping[str, Any] | None


# Of all fields that may be left out.
_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "extra_bytes_per_token": 0,
    "dispatch_row_bytes": None,
    "combine_row_bytes": None,
    "strategy": "auto",
    "layout": "rank_major",
    "weighting": "applied",
    "placement": "linear",
    "combine_dtype": None,
    "max_recv_rows": None,
    "expert_alignment": 1,
    "max_local_experts": 0,
    "dispatch_wire": None,
    "combine_wire": None,
    "wire_scale": "float32",
    "channel_bytes": 262144,
    "max_in_flight": 1,
    "deterministic": True,
    "check_ids": None,
    "timeout_s": 60.0,
    "device": "cpu",
    "name": None,
    "debug_poison": False,
    "test_knobs": None,
}


def _parameters() -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_DEFAULTS.get(name, inspect.Parameter.empty),
            annotation=getattr(annotation, "__forward_arg__", annotation),
        )
        for name, annotation in AllToAllConfig.__annotations__.items()
    ]


_SIGNATURE = inspect.Signature(_parameters())
_Function = TypeVar("_Function", bound=Callable[..., Any])


def shows_config(function: _Function) -> _Function:
    """Let help() show the fields of AllToAllConfig in place of ``**config``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown: Any = function
    shown.__signature__ = signature.replace(parameters=[*own, *_SIGNATURE.parameters.values()])
    return function


def native_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields by the names of the native part, which checks their types and values.

    Raises:
        TypeError: a field is missing, or there is none of that name.
        InvalidArgument: a test knob of no known name.
    """
    bound = _SIGNATURE.bind(**config)
    bound.apply_defaults()
    fields = bound.arguments
    for knob, value in (fields.pop("test_knobs") or {}).items():
        if knob not in _TEST_KNOBS:
            raise InvalidArgument(
                f"test_knobs: expected names of {', '.join(sorted(_TEST_KNOBS))}; got {knob!r}"
            )
        fields[knob] = value
    # Where None stands for a name that the native part spells out.
    for field, meaning in (("check_ids", "auto"), ("name", "")):
        if fields[field] is None:
            fields[field] = meaning
    if fields["combine_dtype"] is None:
        del fields["combine_dtype"]
    return fields
