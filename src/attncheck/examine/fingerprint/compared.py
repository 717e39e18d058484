"""A reading beside what a kernel declares."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attncheck.fingerprint_record import Reading
from attncheck.formats import FORMATS

if TYPE_CHECKING:
    from attncheck.examine.fingerprint.exponentials import Exponential
    from attncheck.examine.fingerprint.grids import Grid
    from attncheck.examine.fingerprint.sentinels import Sentinel
    from attncheck.examine.fingerprint.tiles import Parts, Tiles
    from attncheck.fingerprint_record import Standing
    from attncheck.formats import Dtype, Format
    from attncheck.judge.accumulators import Accumulator
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.subjects.contract import Tiling

__all__ = [
    "accumulator",
    "exponential",
    "order",
    "parts",
    "products",
    "row_sum",
    "sentinel",
    "subnormals",
    "tile",
    "weights",
]

_NARROWEST_RANGE = FORMATS["fp32"].min_exponent


def _by_bits(read: float, declared: float) -> Standing:
    if read == declared:
        return "agrees"
    return "finer" if read > declared else "differs"


def products(found: Grid, dtype: Dtype, declared: Arithmetic) -> Reading:
    """Bits of the operands, of which q and v have the fewest."""
    held = declared.products
    cut = declared.truncates and held.name == "tf32"
    stored = not found.rounding and found.bits >= dtype.storage.significand
    standing = _by_bits(found.bits, held.significand)
    if standing == "agrees" and found.rounding and (found.rounding == "truncated") != cut:
        standing = "finer" if cut else "differs"
    elif not found.rounding and not stored:  # at least so many
        standing = "agrees" if found.bits >= held.significand else "not seen"
    return Reading(
        field="products",
        standing=standing,
        read="as stored" if stored else str(found),
        declared=f"{held.name}{', truncated' if cut else ''}",
        reason="fewer bits are read than are stored" if standing == "differs" else "",
    )


def accumulator(field: str, found: Grid, declared: Accumulator) -> Reading:
    """Bits of a sum; at least those that are declared are enough, however they are rounded."""
    bits = declared.format.significand if declared.block is None else declared.result
    standing = _by_bits(found.bits, bits)
    read = str(found)
    if not found.rounding:
        read += " or more"
        standing = "not seen" if standing == "differs" else standing
    return Reading(
        field=field, standing=standing, read=read, declared=f"{declared.name}, {bits} bits"
    )


def weights(found: Grid, fmt: tuple[Format, int] | None, declared: Arithmetic) -> Reading:
    """The format of P; in fp8 also what it is multiplied by."""
    held = declared.weights
    cut = declared.truncates and held.name == "tf32"
    standing = _by_bits(found.bits, held.significand)
    if standing == "agrees" and found.rounding and (found.rounding == "truncated") != cut:
        standing = "finer" if cut else "differs"
    read = str(found)
    if fmt is not None:
        rounding = f", {found.rounding}" if found.rounding else ""
        read = f"{_scaled(fmt[0], 2.0 ** fmt[1])}{rounding}"
        # More bits make up for nothing where small weights are lost.
        if fmt[0].min_exponent - fmt[1] > held.min_exponent - math.log2(declared.weights_scale):
            standing = "differs"
        if standing == "agrees" and held.saturates and not declared.normalised_weights:
            standing = _by_bits(2.0 ** fmt[1], declared.weights_scale)
    elif found.rounding and found.bits == FORMATS["fp16"].significand:
        read += ": fp16 or tf32"
    elif found.rounding:
        read += ": no format's"
        standing = "differs" if standing == "agrees" else standing
    return Reading(
        field="P",
        standing=standing,
        read=read,
        declared=_scaled(held, declared.weights_scale) + (", truncated" if cut else ""),
    )


def _scaled(fmt: Format, scale: float) -> str:
    return fmt.name + (f" × {scale:g}" if scale != 1 else "")


def row_sum(found: bool | None, declared: Arithmetic, *, output: str) -> Reading:  # noqa: FBT001  # what was read
    """Whether it is of the rounded P."""
    said = {True: "of rounded P", False: "of P unrounded"}
    stated = said[declared.sums_rounded_weights]
    if found is None:
        reason = f"there is no LSE, and out in {output} is too coarse"
        return Reading(field="row sum", standing="not seen", declared=stated, reason=reason)
    standing: Standing = "agrees" if found == declared.sums_rounded_weights else "differs"
    return Reading(field="row sum", standing=standing, read=said[found], declared=stated)


_ARGUMENT, _DIVIDED = 1.0, 2.0
"""Ulps besides: the roundings of two arguments, and of two weights that are divided first."""


def exponential(found: Exponential | None, declared: Arithmetic) -> Reading:
    """The largest error that was shown beside what may be."""
    stated = f"{declared.exp2_ulps:g} ulp"
    if found is None:
        reason = "P is not rounded, and out is too coarse to show it"
        return Reading(field="exp2", standing="not seen", declared=stated, reason=reason)
    may = declared.exp2_ulps + _ARGUMENT + _DIVIDED * declared.normalised_weights
    rounded = math.floor(found.ulps * 100) / 100
    return Reading(
        field="exp2",
        standing="agrees" if found.ulps <= may else "differs",
        read=f"{rounded:g} ulp of {found.places:,} places",
        declared=stated,
    )


def tile(found: Tiles, tiling: Tiling | None, declared: Arithmetic) -> Reading:
    """Keys of a step; no fewer than are declared where no tiling is."""
    stated = "" if tiling is None else f"{tiling.block_kv} keys"
    if not found.starts:
        reason = f"no step ends within {found.keys:,} keys, or none shows"
        return Reading(field="tile", standing="not seen", declared=stated, reason=reason)
    size = found.size
    read = f"{size} keys" if size else f"steps begin at {_list(found.starts)}"
    if tiling is not None:
        standing: Standing = "agrees" if size == tiling.block_kv else "differs"
    else:
        shortest = min(b - a for a, b in zip((0, *found.starts), found.starts, strict=False))
        standing = "differs" if shortest < declared.block_kv else "not declared"
    return Reading(field="tile", standing=standing, read=read, declared=stated)


def order(found: Tiles, tiling: Tiling | None) -> Reading:
    """From which end the keys come."""
    stated = "" if tiling is None else "reverse" if tiling.reverse else "forward"
    if not found.order:
        reason = "no step is seen" if not found.starts else "each step is divided on its own"
        return Reading(field="order", standing="not seen", declared=stated, reason=reason)
    standing: Standing = "agrees" if found.order == stated else "differs"
    return Reading(
        field="order",
        standing=standing if stated else "not declared",
        read=found.order,
        declared=stated,
    )


def parts(found: list[tuple[Parts, int]], steps: Tiles | None) -> Reading:
    """How many parts are merged, of each length and batch asked about."""
    first = found[0][0]
    read = "; ".join(_parts(each, batch) for each, batch in found)
    if len({each.count for each, _ in found}) == 1 and first.count == 1:
        read = "1"
    if first.each_step:
        whole = steps is not None and steps.keys == first.keys and steps.starts == first.starts
        standing: Standing = "agrees" if whole else "finer" if first.count == 1 else "differs"
        stated = "O divided after every step"
    else:
        over = any(each.count > each.declared for each, _ in found)
        standing = "differs" if over else "agrees"
        stated = "up to " + "; ".join(dict.fromkeys(str(each.declared) for each, _ in found))
        stated = "1" if stated == "up to 1" else stated
    return Reading(field="parts", standing=standing, read=read, declared=stated)


def _parts(each: Parts, batch: int) -> str:
    return f"{each.count} of {each.keys:,} keys" + (f" in a batch of {batch}" if batch > 1 else "")


def sentinel(found: Sentinel) -> Reading:
    """That of hidden keys: what is hidden has no weight, whatever the rest scores."""
    if found.above is not None and found.below is not None:
        number = _round_number(found.above, found.below)
        read = number or f"between {found.above:.6g} and {found.below:.6g}"
        return Reading(field="sentinel", standing="differs", read=read, declared="−∞")
    if found.empty == "a mean":
        read, standing = "finite, lower than was asked", "differs"
    else:
        read = "−∞" if found.empty else "−∞, or below −2^126"
        standing = "agrees"
    reason = f"a row that sees nothing gives {found.empty}" if found.empty not in {"", "0"} else ""
    return Reading(field="sentinel", standing=standing, read=read, declared="−∞", reason=reason)  # type: ignore[arg-type]  # one of them


def _round_number(above: float, below: float) -> str:
    """The power of ten between them, or the number of two digits if there is one alone.

    Natural, or else in log2 units; empty where there is none.
    """
    for unit, said in ((1.0, ""), (math.log(2.0), " in log2 units")):
        low, high = -below / unit, -above / unit
        ten = math.floor(math.log10(high))
        for step in (10.0**ten, 10.0 ** (ten - 1)):
            number = math.ceil(low / step) * step
            alone = number == step == 10.0**ten or high < number + step
            if number <= high and alone:
                return f"−{number:g}{said}".replace("e+0", "e").replace("e+", "e")
    return ""


def subnormals(
    flushed: tuple[str, ...] | None,
    weights_kept: bool | None,  # noqa: FBT001  # what was read
    dtype: Dtype,
    declared: Arithmetic,
) -> Reading:
    """What is flushed; it counts where the format's smallest normal number is above fp32's."""
    lost = list(flushed or ())
    counts = bool(lost) and dtype.storage.min_exponent > _NARROWEST_RANGE
    if weights_kept is False:
        lost.append("P")
        counts = counts or declared.weights.min_exponent > _NARROWEST_RANGE
    unknown = [name for name, one in (("q, k and v", flushed), ("P", weights_kept)) if one is None]
    read = f"{', '.join(lost)} flushed to 0" if lost else "kept"
    reason = f"not seen: {' and '.join(unknown)}" if unknown else ""
    if len(unknown) == 2:
        return Reading(field="subnormals", standing="not seen", reason="nothing shows them")
    stated = "kept" if counts or not lost else ""
    standing: Standing = "differs" if counts else "not declared" if lost else "agrees"
    if not lost and dtype.storage.min_exponent == _NARROWEST_RANGE:
        standing, stated = "not declared", ""
    return Reading(field="subnormals", standing=standing, read=read, declared=stated, reason=reason)


def _list(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown + (", …" if len(numbers) > 4 else "")
