# SPDX-License-Identifier: Apache-2.0
"""What is measured: one case is a shape, a routing and the exchange that carries it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

DTYPES = ("bfloat16", "float32")
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
LAYOUTS = ("rank_major", "expert_major", "gathered", "flat", "flat_by_expert")
PER_EXPERT = ("expert_major", "flat_by_expert")
STRATEGIES = (
    "one_sided",
    "low_latency",
    "high_throughput",
    "two_sided",
    "batched",
    "gather_scatter",
    "broadcast",
)
ID_BYTES = 4
WEIGHT_BYTES = 4

GLOO_SCHEMES = ("gloo_batched", "gloo_agrs", "gloo_naive", "gloo_a2av", "gloo_a2av_dedup")
BEST_OF = tuple(name for name in GLOO_SCHEMES if name != "gloo_batched")
BEST = "gloo_best"
NONE = "none"
OURS = "fanfold_"
WIRE = "fp8"


@dataclass(frozen=True)
class Variant:
    """One way of Fanfold to carry a case; written ``fanfold_STRATEGY[.LAYOUT[.fp8]]``.

    ``fp8``: rows travel packed, both ways (low_latency).
    """

    strategy: str
    layout: str
    fp8: bool = False

    @property
    def name(self) -> str:
        """As the command line has it."""
        return f"{OURS}{self.strategy}.{self.layout}" + (f".{WIRE}" if self.fp8 else "")


def parse_variant(name: str, layout: str) -> Variant:
    """Read a variant; ``layout`` where the name gives none.

    Raises:
        ValueError: the name is not of this form; the text lists what is known.
    """
    strategy, *rest = name.removeprefix(OURS).split(".")
    variant = Variant(strategy, rest[0] if rest else layout, rest[1:] == [WIRE])
    known = strategy in STRATEGIES and variant.layout in LAYOUTS and len(rest) < 3
    if not known or (len(rest) == 2 and not variant.fp8):
        raise ValueError(
            f"--against knows {OURS}STRATEGY[.LAYOUT[.{WIRE}]] with strategies "
            f"{', '.join(STRATEGIES)} and layouts {', '.join(LAYOUTS)}; got {name}"
        )
    return variant


# Every strategy in the layout that it is for.
EVERY_STRATEGY = (
    "fanfold_one_sided.rank_major",
    "fanfold_one_sided.expert_major",
    "fanfold_low_latency.expert_major",
    "fanfold_low_latency.expert_major.fp8",
    "fanfold_high_throughput.flat",
    "fanfold_high_throughput.flat_by_expert",
    "fanfold_two_sided.rank_major",
    "fanfold_batched.expert_major",
    "fanfold_gather_scatter.gathered",
    "fanfold_broadcast.gathered",
)
EVERYTHING = "strategies"


@dataclass(frozen=True)
class Case:
    """One configuration; equal on all ranks.

    ``tokens`` counts per rank, ``experts`` over all ranks. ``strategy`` "none" measures only the
    floor and the baselines. ``routing`` is "uniform", "skewed" or the path of a recording.
    """

    ranks: int = 2
    tokens: int = 32
    hidden: int = 2048
    top_k: int = 8
    experts: int = 64
    strategy: str = "one_sided"
    layout: str = "rank_major"
    dtype: str = "bfloat16"
    routing: str = "uniform"
    seed: int = 1

    @property
    def name(self) -> str:
        """Short name for tables; the first part is the key of the acceptance table."""
        text = f"{self.tokens} x {self.hidden}, k{self.top_k}"
        return text if self.ranks == 2 else f"{self.ranks} ranks, {text}"

    @property
    def payload_bytes(self) -> int:
        """Bytes of one payload row."""
        return self.hidden * ELEMENT_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one dispatched row: payload, expert ids and weights."""
        return self.payload_bytes + self.top_k * (ID_BYTES + WEIGHT_BYTES)

    def problem(self) -> str | None:
        """A sentence that says why this case cannot be run, or None."""
        if min(self.ranks, self.hidden, self.top_k, self.experts) < 1 or self.tokens < 1:
            return "ranks, tokens, hidden, top-k and experts must be at least 1"
        if self.ranks > 64:
            return f"at most 64 ranks fit the clock page, got {self.ranks}"
        if self.top_k > self.experts:
            return f"top-k is {self.top_k}, but there are only {self.experts} experts"
        if self.dtype not in DTYPES:
            return f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}"
        if self.layout not in LAYOUTS:
            return f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout}"
        return None

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


def _shapes(rows: list[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    keys = ("tokens", "hidden", "top_k", "experts")
    return [dict(zip(keys, row, strict=True)) for row in rows]


_DECODE = [(t, h, 8, e) for h, e in ((2048, 64), (7168, 256)) for t in (1, 8, 32, 128)]
_PREFILL = [
    (1024, 2048, 8, 64),
    (4096, 2048, 8, 64),
    (1024, 4096, 8, 64),
    (1024, 4096, 2, 64),
    (4096, 4096, 2, 64),
]
_TABLE = [(1, 2048, 8, 64), (32, 2048, 8, 64), (32, 7168, 8, 256), (4096, 2048, 8, 64)]

PRESETS: dict[str, list[dict[str, Any]]] = {
    "decode": _shapes(_DECODE),
    "prefill": _shapes(_PREFILL),
    "table": [{"ranks": 2, **shape} for shape in _shapes(_TABLE)]
    + [{"ranks": 4, **shape} for shape in _shapes([(32, 2048, 8, 64)])],
    "strategies": [{"ranks": 2, **shape} for shape in [*_shapes(_DECODE), *_shapes(_PREFILL)]],
    "smoke": [{"ranks": 2, "tokens": 4, "hidden": 256, "top_k": 2, "experts": 8}],
}


def preset_cases(name: str, base: Case) -> list[Case]:
    """The cases of a preset; everything it leaves open is taken from ``base``."""
    return [replace(base, **shape) for shape in PRESETS[name]]


def expand_against(names: list[str]) -> tuple[list[str], list[str]]:
    """Resolve ``--against`` names.

    Returns:
        The names to report in the order given, and the schemes to run for them.

    Raises:
        ValueError: a name is unknown; the text lists those known.
    """
    wanted: list[str] = []
    for name in names:
        for part in filter(None, name.split(",")):
            if part.startswith(OURS):
                parse_variant(part, LAYOUTS[0])
            elif part not in (*GLOO_SCHEMES, BEST, NONE, EVERYTHING):
                choice = ", ".join((*GLOO_SCHEMES, BEST, NONE, EVERYTHING))
                raise ValueError(f"--against knows {choice} and {OURS}STRATEGY, got {part}")
            parts = EVERY_STRATEGY if part == EVERYTHING else (part,)
            wanted += [each for each in parts if each not in wanted]
    if NONE in wanted:
        if len(wanted) > 1:
            raise ValueError("--against none cannot be mixed with other names")
        return [], []
    run = [name for name in wanted if name != BEST]
    if BEST in wanted:
        run += [name for name in BEST_OF if name not in run]
    return wanted, run
