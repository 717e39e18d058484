"""Random numbers with the same bits on every machine.

``torch.randn`` gives different bits with different vector instructions, and so may the logarithm or
sine of any libm. Here random bits come from Philox, a counter-based generator of integers, and
become floats by + − × ÷ √ on float64, which IEEE 754 defines to the last bit, in one NumPy or torch
operation at a time, so that no compiler can fuse or reorder them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attncheck.core.mod_spec import GENERATOR

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

# A few float64 temporaries of this length stay in the second-level cache.
_CHUNK = 1 << 14
# Longer draws are split into spans that are drawn in threads: 100 million normal numbers, for q, k
# and v of 16 heads of 16,384 rows, took 5 s in one thread. Chunks are longer there, since threads
# wait for each other between two operations of NumPy.
SPAN = 1 << 20
_CHUNK_OF_SPAN = 1 << 16
_WORDS = 4  # 64-bit numbers that Philox makes of one count.
# Counts at a time on a GPU, with some twenty temporaries of 16 MiB, and then five of 64 MiB.
_COUNTS = 1 << 21
# Philox4x64-10 (Salmon et al. 2011): multipliers, and increments of the key after each round.
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)

# Peter J. Acklam, "An algorithm for computing the inverse normal cumulative distribution function"
# (2003): rational approximations, highest power first; |relative error| < 1.15e-9.
_CENTRE_TOP = (
    -3.969683028665376e01,
    2.209460984245205e02,
    -2.759285104469687e02,
    1.383577518672690e02,
    -3.066479806614716e01,
    2.506628277459239e00,
)
_CENTRE_BOTTOM = (
    -5.447609879822406e01,
    1.615858368580409e02,
    -1.556989798598866e02,
    6.680131188771972e01,
    -1.328068155288572e01,
    1.0,
)
_TAIL_TOP = (
    -7.784894002430293e-03,
    -3.223964580411365e-01,
    -2.400758277161838e00,
    -2.549732539343734e00,
    4.374664141464968e00,
    2.938163982698783e00,
)
_TAIL_BOTTOM = (
    7.784695709041462e-03,
    3.224671290700398e-01,
    2.445134137142996e00,
    3.754408661907416e00,
    1.0,
)
_TAIL = 0.02425  # Acklam's probability at which the approximation changes.

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
# ln((1+s)/(1−s)) = 2s(1 + s²/3 + s⁴/5 + …); with s² ≤ (√2−1)⁴ < 0.0295 the first omitted term is
# below 2**-57 of the sum.
_LOG_SERIES = tuple(1.0 / n for n in range(21, 0, -2))


@dataclass(frozen=True, slots=True)
class Draws:
    """Independent streams of random numbers, identified by names.

    Element i of a stream (in C order) depends only on the seed, the name and i: a longer draw
    begins with the shorter one.
    """

    seed: int  # any whole number

    def integers(self, stream: str, shape: tuple[int, ...], bound: int) -> Integers:
        """Return whole numbers from 0 to ``bound`` − 1, for a ``bound`` from 1 to 2**32 − 1.

        Each is the high half of a 64-bit random number times ``bound``: nothing is rejected, and
        probabilities differ by at most a relative 2**-32.
        """
        factor, half = np.uint64(bound), np.uint64(32)

        def scale(raw: NDArray[np.uint64], part: NDArray[np.generic]) -> None:
            low = ((raw & np.uint64(2**32 - 1)) * factor) >> half
            part[:] = ((raw >> half) * factor + low) >> half

        return self._fill(stream, np.empty(math.prod(shape), np.int64), scale).reshape(shape)

    def uniform(self, stream: str, shape: tuple[int, ...]) -> Floats:
        """Return odd multiples of 2**-53 strictly between 0 and 1, all equally likely."""
        out = np.empty(math.prod(shape), np.float64)
        return self._fill(stream, out, _to_uniform).reshape(shape)

    def normal(self, stream: str, shape: tuple[int, ...]) -> Floats:
        """Return standard normal numbers, all within ±8.3.

        They are the inverse normal distribution function (relative error 1.15e-9, Acklam) of the
        numbers that ``uniform`` returns for this stream.
        """
        out = np.empty(math.prod(shape), np.float64)
        return self._fill(stream, out, _to_quantile).reshape(shape)

    def _fill(
        self,
        stream: str,
        out: NDArray[Number],
        fill: Callable[[NDArray[np.uint64], NDArray[np.generic]], None],
    ) -> NDArray[Number]:
        """Fill ``out`` in place, each part from as many random 64-bit numbers, and return it."""
        key = self.key(stream)

        def draw(first: int, beyond: int, chunk: int) -> None:
            generator = np.random.Philox(key=key)
            generator.advance(first // _WORDS)
            for start in range(first, beyond, chunk):
                part = out[start : min(start + chunk, beyond)]
                fill(generator.random_raw(part.size), part)

        if out.size <= SPAN:
            draw(0, out.size, _CHUNK)
            return out
        with ThreadPoolExecutor() as pool:
            firsts = range(0, out.size, SPAN)
            beyond = (min(first + SPAN, out.size) for first in firsts)
            # list() raises the errors of the threads.
            list(pool.map(draw, firsts, beyond, itertools.repeat(_CHUNK_OF_SPAN)))
        return out

    def key(self, stream: str) -> int:
        """Return the 128-bit Philox key of a stream."""
        name = f"attncheck draws {GENERATOR}/{self.seed}/{stream}"
        # Name and seed are hashed, so that streams are independent and do not overlap.
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")


@dataclass(frozen=True, slots=True)
class TensorDraws:
    """The numbers of ``Draws``, bit for bit, as torch tensors on ``device``.

    For a GPU, which draws 100 million of them in a tenth of a second; short draws are made on the
    host. Not for a CPU, where torch's √ may be MKL's, which is not correctly rounded.
    """

    seed: int
    device: str

    def uniform(self, stream: str, shape: tuple[int, ...]) -> Tensor:
        """See ``Draws``."""
        return self._draw(stream, shape, Draws(self.seed).uniform, lambda x: x)

    def normal(self, stream: str, shape: tuple[int, ...]) -> Tensor:
        """See ``Draws``."""
        import torch

        def quantile(out: Tensor) -> Tensor:
            _to_normal(out, torch)
            return out

        return self._draw(stream, shape, Draws(self.seed).normal, quantile)

    def _draw(
        self,
        stream: str,
        shape: tuple[int, ...],
        draw_on_host: Callable[[str, tuple[int, ...]], Floats],
        convert: Callable[[Tensor], Tensor],
    ) -> Tensor:
        import torch

        size = math.prod(shape)
        if size <= SPAN:
            return torch.from_numpy(draw_on_host(stream, shape)).to(self.device)
        out = torch.empty(size, dtype=torch.float64, device=self.device)
        for start in range(0, size, _COUNTS * _WORDS):
            part = out[start : start + _COUNTS * _WORDS]
            first = start // _WORDS
            counts = torch.arange(first, first + -(-len(part) // _WORDS), device=self.device)
            bits = philox(Draws(self.seed).key(stream), counts).flatten()[: len(part)]
            # Like ``_to_uniform``; the mask removes the sign bits that were shifted in.
            part.copy_((bits >> 12).bitwise_and_(2**52 - 1)).add_(0.5).mul_(2.0**-52)
            convert(part)
        return out.view(shape)


def philox(key: int, counts: Tensor) -> Tensor:
    """Return the 64-bit numbers ``(n, 4)`` of NumPy's Philox for ``key`` and ``counts`` ``(n,)``.

    Counts start at 0; computed in wrapping int64 arithmetic on the device of ``counts``.
    """
    import torch

    keys = [_signed(key), _signed(key >> 64)]
    words = [counts + 1, *(torch.zeros_like(counts) for _ in range(_WORDS - 1))]
    for _ in range(_ROUNDS):
        (high, low), (other_high, other_low) = (
            _multiply(word, factor) for word, factor in zip(words[::2], _MULTIPLIERS, strict=True)
        )
        words = [
            other_high.bitwise_xor_(words[1]).bitwise_xor_(keys[0]),
            other_low,
            high.bitwise_xor_(words[3]).bitwise_xor_(keys[1]),
            low,
        ]
        keys = [_signed(each + grown) for each, grown in zip(keys, _KEY_INCREMENTS, strict=True)]
    return torch.stack(words, -1)


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 64 bits of an unsigned product, from 32-bit halves."""
    half = 2**32 - 1
    top, bottom = factor >> 32, factor & half
    x_top, x_bottom = (x >> 32).bitwise_and_(half), x & half
    middle = (x_bottom * bottom >> 32).bitwise_and_(half).add_(x_top * bottom)
    other = (x_bottom * top).add_(middle & half)
    high = (x_top * top).add_((middle >> 32).bitwise_and_(half))
    return high.add_((other >> 32).bitwise_and_(half)), x * _signed(factor)


def _signed(number: int) -> int:
    """Return the int64 with the lower 64 bits of ``number``."""
    return (number + 2**63) % 2**64 - 2**63


def _to_quantile(raw: NDArray[np.uint64], out: NDArray[np.generic]) -> None:
    """Convert random bits to standard normal numbers in ``out``."""
    _to_uniform(raw, out)
    _to_normal(out, np)


def _to_uniform(raw: NDArray[np.uint64], out: NDArray[np.generic]) -> None:
    """Set ``out`` to (n + ½)·2**-52, n the upper 52 bits of ``raw``: exact, and never 0 or 1."""
    np.add(raw >> np.uint64(12), 0.5, out=out)
    np.multiply(out, 2.0**-52, out=out)


# The following functions take arrays or tensors; ``of`` is the module numpy or torch.


def _to_normal(out: Any, of: Any) -> None:
    """Replace each probability in ``out`` by its standard normal quantile."""
    from_half = out - 0.5  # exact
    square = from_half * from_half
    centre = _polynomial(square, _CENTRE_TOP)
    centre *= from_half
    centre /= _polynomial(square, _CENTRE_BOTTOM)
    (tails,) = of.where(of.abs(from_half) > 0.5 - _TAIL)
    side = from_half[tails]
    centre[tails] = of.copysign(_lower_tail(0.5 - of.abs(side), of), side)
    out[:] = centre


def _lower_tail(probability: Any, of: Any) -> Any:
    """Return the standard normal quantiles of small probabilities."""
    distance = of.sqrt(-2.0 * _log(probability, of))
    return _polynomial(distance, _TAIL_TOP) / _polynomial(distance, _TAIL_BOTTOM)


def _log(x: Any, of: Any) -> Any:
    """Return the natural logarithm of positive normal numbers, to a few units of 2**-53."""
    significand, exponent = of.frexp(x)
    # A significand around 1, so that the series needs few terms.
    small = significand < _SQRT_HALF
    significand = of.where(small, 2.0 * significand, significand)
    exponent = of.where(small, exponent - 1, exponent)
    s = (significand - 1.0) / (significand + 1.0)
    # An array of ln 2, since torch would multiply integers by a scalar in fp32.
    return exponent * of.full_like(x, _LN2) + 2.0 * s * _polynomial(s * s, _LOG_SERIES)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """Evaluate a polynomial by Horner's rule, highest power first."""
    total = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total += coefficient
        total *= x
    total += coefficients[-1]
    return total
