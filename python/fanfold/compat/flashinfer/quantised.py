# SPDX-License-Identifier: Apache-2.0
"""Results of combine as blocks of FP8 or FP4 numbers with a scale each: MXFP8, MXFP4, NVFP4.

A block is a run of 32 (MX) or 16 (NV) numbers of a row; a row's last block may be short. Its scale
is the largest magnitude over that of the number type, rounded up to a power of two (MX: UE8M0, so
that nothing saturates) or to the nearest E4M3 (NV, times ``output_scalar_scale``). Numbers are
divided by it and rounded to the nearest, ties to even. Two FP4 numbers share a byte, the first in
its low half.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from fanfold.compat.flashinfer.errors import Refused
from fanfold.compat.flashinfer.with_torch import torch
from fanfold.errors import InvalidArgument

_logger = logging.getLogger(__name__)

_LARGEST_E4M3 = 448.0
_LARGEST_E2M1 = 6.0


class Scaling(NamedTuple):
    """What a caller says of scales: where they go, NVFP4's factor, and their order in memory."""

    scales: Any = None
    scalar: float = 1.0
    layout: Any = None


@dataclass(frozen=True)
class Mode:
    """One way to quantise; ``largest`` is the largest number that a block's divided values have."""

    name: str
    block: int
    largest: float
    is_packed: bool


_MXFP8 = Mode("MXFP8", 32, _LARGEST_E4M3, is_packed=False)
_MXFP4 = Mode("MXFP4", 32, _LARGEST_E2M1, is_packed=True)
_NVFP4 = Mode("NVFP4", 16, _LARGEST_E2M1, is_packed=True)

# FlashInfer's SfLayout by number: rows and columns of a tile of scales; None: as rows lie.
_TILES: dict[int, tuple[int, int] | None] = {0: (128, 4), 1: (8, 4), 2: None}


class Quantiser:
    """Checks what a caller wants, before anything is sent, and makes it of the sums afterwards."""

    def __init__(self, mode: Mode, scaling: Scaling, num_rows: int, hidden: int) -> None:
        self._mode = mode
        self._scaling = scaling
        self._num_rows = num_rows
        self._columns = -(-hidden // mode.block)
        layout = (
            2 if scaling.layout is None else int(getattr(scaling.layout, "value", scaling.layout))
        )
        if layout not in _TILES:
            raise Refused(f"sf_layout: expected 0 (128x4), 1 (8x4) or 2 (linear), got {layout}")
        if mode.is_packed and hidden % 2:
            raise Refused(
                f"payload: {mode.name} packs two numbers a byte: expected an even hidden "
                f"size, got {hidden}"
            )
        if mode is not _NVFP4 and scaling.scalar != 1.0:
            _logger.warning(
                "output_scalar_scale: %s has none; %s is ignored", mode.name, scaling.scalar
            )
        self._tile = _TILES[layout]
        expected = self._scale_places()
        found = scaling.scales
        if found.numel() != expected or not found.is_contiguous():
            raise InvalidArgument(
                f"output_scales: expected {expected} contiguous scales ({num_rows} rows of "
                f"{self._columns} blocks{self._padding()}), got {list(found.shape)}"
            )
        self.shape = [num_rows, hidden // 2 if mode.is_packed else hidden]
        self.dtype = torch().uint8 if mode.is_packed else torch().float8_e4m3fn

    def write(self, rows: Any, output: Any) -> None:
        """Quantise ``rows`` ``[T, H]`` into ``output`` and the scales; only enqueues on a GPU."""
        mode, block = self._mode, self._mode.block
        hidden = int(rows.shape[1])
        padded = torch().nn.functional.pad(rows.float(), (0, self._columns * block - hidden))
        blocks = padded.view(self._num_rows, self._columns, block)
        scales, factors = self._scales_of(blocks.abs().amax(dim=2))
        values = (blocks * factors.unsqueeze(2)).flatten(1)[:, :hidden]
        output.copy_(_pack_e2m1(values) if mode.is_packed else _to_e4m3(values))
        self._place(scales)

    def _scales_of(self, largest: Any) -> tuple[Any, Any]:
        """The scales as bytes, and what the numbers of each block are multiplied by."""
        ratio = largest / self._mode.largest
        if self._mode is _NVFP4:
            scalar = float(self._scaling.scalar)
            scale = _to_e4m3(ratio * scalar)
            divisor = scale.float()
            return scale.view(torch().uint8), torch().where(divisor == 0, 0.0, scalar / divisor)
        mantissa, exponent = torch().frexp(ratio)
        exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
        is_finite = ratio.isfinite()
        exponent = torch().where(is_finite, exponent, 127)
        scale = torch().where(ratio == 0, 0, exponent + 127)
        scale = torch().where(ratio.isnan(), 255, scale).to(torch().uint8)
        factor = torch().exp2(-exponent.double()).float()
        return scale, torch().where(ratio == 0, 0.0, factor)

    def _tiles(self) -> tuple[int, int]:
        rows, columns = self._tile or (1, 1)
        return -(-self._num_rows // rows), -(-self._columns // columns)

    def _scale_places(self) -> int:
        rows, columns = self._tile or (1, 1)
        down, across = self._tiles()
        return down * rows * across * columns

    def _padding(self) -> str:
        return "" if self._tile is None else f", in tiles of {self._tile[0]}x{self._tile[1]}"

    def _place(self, scales: Any) -> None:
        """Write ``[T, columns]`` bytes in the order of the layout; padding becomes zero."""
        target = self._scaling.scales.view(torch().uint8).view(-1)
        if self._tile is None:
            target.copy_(scales.reshape(-1))
            return
        rows, columns = self._tile
        down, across = self._tiles()
        grid = scales.new_zeros(down * rows, across * columns)
        grid[: self._num_rows, : self._columns] = scales
        tiles = grid.view(down, rows, across, columns).permute(0, 2, 1, 3)
        if rows == 128:  # rows 32 apart lie beside each other
            tiles = tiles.reshape(down, across, 4, 32, columns).transpose(2, 3)
        target.copy_(tiles.reshape(-1))


def quantiser(
    payload: Any, num_rows: int, output_dtype: Any, output: Any, scaling: Scaling
) -> Quantiser | None:
    """Who makes the wanted results of the sums of ``payload``; None: they stay as they are.

    Raises:
        Refused, InvalidArgument: types, shapes or the layout do not fit.
    """
    if scaling.scales is None:
        if scaling.scalar != 1.0:
            _logger.warning(
                "output_scalar_scale: without output_scales %s is ignored", scaling.scalar
            )
        return None
    if payload.dtype not in (torch().float16, torch().bfloat16):
        raise Refused(f"payload: quantised output expects float16 or bfloat16, got {payload.dtype}")
    wanted = output_dtype if output_dtype is not None else getattr(output, "dtype", None)
    known = {
        (torch().float8_e4m3fn, torch().uint8): _MXFP8,
        (torch().uint8, torch().uint8): _MXFP4,
        (torch().uint8, torch().float8_e4m3fn): _NVFP4,
    }
    mode = known.get((wanted, scaling.scales.dtype))
    if mode is None:
        raise Refused(
            "output_dtype, output_scales: expected float8_e4m3fn with uint8 (MXFP8), uint8 with "
            f"uint8 (MXFP4) or uint8 with float8_e4m3fn (NVFP4), got {wanted} with "
            f"{scaling.scales.dtype}"
        )
    if scaling.scales.device != payload.device:
        raise InvalidArgument(
            f"output_scales: expected a tensor on {payload.device}, got one on "
            f"{scaling.scales.device}"
        )
    return Quantiser(mode, scaling, num_rows, int(payload.shape[2]))


def _to_e4m3(values: Any) -> Any:
    return values.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch().float8_e4m3fn)


def _pack_e2m1(values: Any) -> Any:
    """``[T, H]`` to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 as bytes ``[T, H / 2]``; NaN to 6."""
    size = values.abs()
    # From which magnitude on the next number is nearest; a tie goes to the even code.
    code = (size > 0.25).to(torch().uint8)
    for is_next in (size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0):
        code += is_next
    code = torch().where(values.isnan(), 7, code | (values.signbit().to(torch().uint8) << 3))
    return code[:, 0::2] | (code[:, 1::2] << 4)
