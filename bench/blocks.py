"""Packed weights without a quantiser: random blocks of every format, and the identity, written as bytes.

A block begins as random bytes. Then its small scales are moved into the upper half of their range, and its float16
scale is set so that the weights have the standard deviation asked for. Their mean is 0: a minimum takes the codes' mean
away, and where a format has none, the scales' signs are random, since codes like -8 to 7 lean to one side.
"""

import dataclasses
from collections.abc import Callable, Sequence

import gguf
import numpy as np

PLAIN = ("F32", "F16", "BF16")
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_ONE = np.float16(1).tobytes()


@dataclasses.dataclass(frozen=True)
class _Format:
    """Where things are in a block; `quant/formats.py` says what they mean.

    Attributes:
      scale, minimum: offsets of the float16 fields. minimum_sign: -1 where it is added, 1 where it is taken away.
      values: what the codes stand for at scale 1.
      small: turns random bytes into small scales, in blocks [n, block_bytes]; small minima equal the scales.
      scales: which small scales that gives, all as often.
      codes: offset, bits of a code, bytes of a run: codes lie in the lowest bits of a run's bytes, then in the next.
      zero: a block of zeros whose weight becomes 1 when its code is raised by one; empty where the codes have no 0.
    """

    scale: int
    values: Sequence[int]
    codes: tuple[int, int, int]
    zero: bytes
    minimum: int | None = None
    minimum_sign: int = 1
    small: Callable[[np.ndarray], None] = lambda blocks: None
    scales: Sequence[int] = (1,)

    def unit(self) -> float:
        """The weights' standard deviation at scale 1."""
        spread = np.std(self.values) if self.minimum is not None else np.sqrt(np.mean(np.square(self.values)))
        return float(spread * np.sqrt(np.mean(np.square(self.scales))))


def _no_lowest(blocks: np.ndarray) -> None:
    codes = blocks[:, 2:]
    codes[codes == 0x80] = 0  # -128, which quantisers do not write


def _small_q2_k(blocks: np.ndarray) -> None:
    blocks[:, :16] = ((blocks[:, :16] & 7) | 8) * 17


def _small_q3_k(blocks: np.ndarray) -> None:
    _repeat_bits(blocks[:, 104:108])


def _small_q45_k(blocks: np.ndarray) -> None:
    blocks[:, 4:8] |= 0xA0  # the high bit of the first four scales, and that of the last four
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17


def _small_q6_k(blocks: np.ndarray) -> None:
    sign = blocks[:, 192:208] >> 7
    blocks[:, 192:208] = ((blocks[:, 192:208] & 63) | 64) ^ (sign * 0xFF)


def _small_iq4_xs(blocks: np.ndarray) -> None:
    _repeat_bits(blocks[:, 2:4])


def _repeat_bits(pairs: np.ndarray) -> None:
    """The high bit pairs of 6-bit scales less 32, to all ones or none: far from 0 on either side."""
    pairs &= 0x55
    pairs |= pairs << 1


_FAR = (*range(16, 32), *range(-32, -16))
_SMALL_ONES = b"\1\1\1\1\0\0\0\0\1\1\1\1"  # eight scales of 1, eight minima of 0
_FORMATS = {
    "Q8_0": _Format(0, range(-127, 128), (2, 8, 32), _ONE + bytes(32), small=_no_lowest),
    "Q4_0": _Format(0, range(-8, 8), (2, 4, 16), _ONE + b"\x88" * 16),
    "Q4_1": _Format(0, range(16), (4, 4, 16), _ONE + bytes(18), minimum=2, minimum_sign=-1),
    "Q5_0": _Format(0, range(-16, 16), (6, 4, 16), _ONE + b"\xff" * 4 + bytes(16)),
    "Q5_1": _Format(0, range(32), (8, 4, 16), _ONE + bytes(22), minimum=2, minimum_sign=-1),
    "Q2_K": _Format(
        *(80, range(4), (16, 2, 32), b"\1" * 16 + bytes(64) + _ONE + bytes(2)),
        minimum=82,
        small=_small_q2_k,
        scales=range(8, 16),
    ),
    "Q3_K": _Format(
        *(108, range(-4, 4), (32, 2, 32), b"\xff" * 32 + bytes(64) + b"\x11" * 8 + b"\xaa" * 4 + _ONE),
        small=_small_q3_k,
        scales=_FAR,
    ),
    "Q4_K": _Format(
        *(0, range(16), (16, 4, 32), _ONE + bytes(2) + _SMALL_ONES + bytes(128)),
        minimum=2,
        small=_small_q45_k,
        scales=range(32, 64),
    ),
    "Q5_K": _Format(
        *(0, range(32), (48, 4, 32), _ONE + bytes(2) + _SMALL_ONES + bytes(160)),
        minimum=2,
        small=_small_q45_k,
        scales=range(32, 64),
    ),
    "Q6_K": _Format(
        *(208, range(-32, 32), (0, 4, 64), bytes(128) + b"\xaa" * 64 + b"\1" * 16 + _ONE),
        small=_small_q6_k,
        scales=(*range(64, 128), *range(-128, -64)),
    ),
    "IQ4_NL": _Format(0, _IQ4, (2, 4, 16), b""),
    "IQ4_XS": _Format(0, _IQ4, (8, 4, 16), b"", small=_small_iq4_xs, scales=_FAR),
}
NAMES = (*PLAIN, *_FORMATS)


def row_bytes(name: str, columns: int) -> int:
    """Bytes of a row of `columns` weights, which must be whole blocks."""
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    if columns % size:
        raise ValueError(f"a row of {columns} weights is not a multiple of {name}'s blocks of {size}")
    return columns // size * width


def random_rows(rng: np.random.Generator, name: str, rows: int, columns: int, std: float) -> np.ndarray:
    """[rows, row_bytes] uint8: weights of mean 0 and deviation `std`; of 0 all are zero, codes still random."""
    kind = gguf.GGMLQuantizationType[name]
    width = row_bytes(name, columns)
    if name in PLAIN:
        weights = rng.standard_normal((rows, columns), np.float32) * np.float32(std)
        return gguf.quants.quantize(weights, kind).view(np.uint8).reshape(rows, width)
    form = _FORMATS[name]
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.frombuffer(bytearray(rng.bytes(rows * width)), np.uint8).reshape(-1, block_bytes)
    form.small(blocks)
    scale = np.full(len(blocks), std / form.unit(), np.float32)
    if form.minimum is None:
        scale *= rng.integers(0, 2, len(blocks), np.int8) * np.float32(2) - 1
    else:
        _put(blocks, form.minimum, form.minimum_sign * np.float32(np.mean(form.values)) * scale)
    _put(blocks, form.scale, scale)
    return blocks.reshape(rows, width)


def identity_rows(name: str, rows: int, columns: int) -> np.ndarray:
    """[rows, row_bytes] uint8 of the matrix [I | 0], exactly.

    Raises:
      ValueError: the format has no 0 (see `has_zero`).
    """
    kind = gguf.GGMLQuantizationType[name]
    if name in PLAIN:
        return gguf.quants.quantize(np.eye(rows, columns, dtype=np.float32), kind).view(np.uint8).reshape(rows, -1)
    if not has_zero(name):
        raise ValueError(f"{name} cannot hold an identity: its codes have no 0")
    size = gguf.GGML_QUANT_SIZES[kind][0]
    form = _FORMATS[name]
    offset, bits, run = form.codes
    found = np.tile(np.frombuffer(form.zero, np.uint8), (rows, columns // size, 1))
    row = np.arange(rows)
    block, weight = row // size, row % size
    spans = run * 8 // bits  # weights of a run
    place = offset + run * (weight // spans) + weight % run
    found[row, block, place] += (1 << (bits * (weight % spans // run))).astype(np.uint8)
    return found.reshape(rows, -1)


def has_zero(name: str) -> bool:
    """Whether a block can hold a 0 beside a weight that is none."""
    return name in PLAIN or bool(_FORMATS[name].zero)


def _put(blocks: np.ndarray, offset: int, values: np.ndarray) -> None:
    blocks[:, offset : offset + 2] = values.astype(np.float16)[:, None].view(np.uint8)
