"""Measure every field of a kernel's arithmetic and compare it: one FingerprintReport."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from attncheck.core.declared_arithmetic import Accumulator, Arithmetic
from attncheck.core.formats import FORMATS, Dtype, Format, dtype_named
from attncheck.records.survey_reports import (
    DtypeFingerprint,
    FingerprintReport,
    Reading,
    ReadingVerdict,
)
from attncheck.subjects.capabilities.subject import Subject, Tiling
from attncheck.surveys import product_readings, step_readings
from attncheck.surveys.fingerprint_scenes import (
    Grid,
    SceneResult,
    SceneRunner,
    blank_inputs,
    make_scene,
)
from attncheck.surveys.product_readings import SmallestWeight
from attncheck.surveys.step_readings import Exponential, Parts, Sentinel, Tiles
from attncheck.verify.call_checks import Unanswered
from attncheck.verify.environment import environment
from attncheck.verify.kernel_hosts import executor_of

_FULL_BITS = FORMATS["fp32"].significand
_NARROWEST_RANGE = FORMATS["fp32"].min_exponent
_SHORT, _MIDDLE, _LONG, _BATCH = 256, 1024, 2048, 4  # Numbers of keys, and of sequences.
_NO_GRID = "what was told apart is on no grid of bits"

T = TypeVar("T")


def survey_arithmetic(
    subject: Subject,
    dtypes: Sequence[str],
    *,
    device: str,
    command: str,
    done: Callable[[str], None] = lambda _: None,
) -> FingerprintReport:
    """Measure the arithmetic of ``subject`` in each of ``dtypes``.

    Args:
        done: Called after each dtype, with its name.

    Raises:
        UnknownName: for an unknown dtype.
    """
    records = []
    for dtype in dict.fromkeys(dtypes):
        records.append(fingerprint_kernel(subject, dtype, device=device))
        done(dtype)
    return FingerprintReport(
        command=command,
        kernel=subject.name,
        device=device,
        environment=environment(device),
        records=tuple(records),
    )


def fingerprint_kernel(subject: Subject, dtype: str, *, device: str = "cpu") -> DtypeFingerprint:
    """Measure the arithmetic of ``subject`` in ``dtype``; errors of the kernel are not raised.

    Raises:
        UnknownName: for an unknown dtype.
    """
    dtype_named(dtype)
    runner = SceneRunner(subject=subject, dtype=dtype, device=device, executor=executor_of(subject))
    try:
        # All zeros: a kernel that refuses these takes no scene of this dtype.
        plain = runner.run(make_scene(dtype, *blank_inputs()))
    except Unanswered as error:
        return DtypeFingerprint(
            dtype=dtype, calls=0, readings=(_unread("products", reason=str(error)),)
        )
    readings = tuple(_Survey(runner, plain.arithmetic).readings())
    return DtypeFingerprint(
        dtype=dtype, calls=runner.calls, arithmetic=str(plain.arithmetic), readings=readings
    )


def _unread(field: str, *, reason: str, declared: str = "") -> Reading:
    return Reading(field=field, standing="not seen", declared=declared, reason=reason)


@dataclass(slots=True)
class _Survey:
    """One kernel in one dtype, and the arithmetic that it declares for a small problem."""

    runner: SceneRunner
    declared: Arithmetic

    def readings(self) -> Iterator[Reading]:
        """Yield one reading per field, in the order of ``FIELDS``."""
        grid = self._try(product_readings.read_weight_significand)
        p_grid = _NO_GRID if grid is None else grid
        least = self._try(product_readings.read_smallest_weight)
        if isinstance(least, str):  # values may have been too large for the kernel's formats
            least = self._try(partial(product_readings.read_smallest_weight, tall=False))
        smallest = None if isinstance(least, str) else least
        yield self._reading("products", self._products_reading)
        # Read once, because the reading of exp2 depends on it too.
        scores = self._try(product_readings.read_score_accumulator)
        yield self._sum_reading("q·k", scores, self.declared.scores)
        yield self._exponential_reading(p_grid, smallest, scores)
        if isinstance(p_grid, str):
            yield _unread("P", reason=p_grid, declared=self.declared.weights.name)
        else:
            fmt = product_readings.weight_format(p_grid, smallest)
            yield _compare_weights(p_grid, fmt, self.declared)
        yield self._row_sum_reading(p_grid)
        values = self._try(product_readings.read_value_accumulator)
        yield self._sum_reading("P·V", values, self.declared.values)
        yield from self._steps_and_parts()
        yield self._reading(
            "sentinel", lambda: _compare_sentinel(step_readings.read_sentinel(self.runner))
        )
        lost = self._try(step_readings.flushes_subnormals)
        yield _compare_subnormals(
            None if isinstance(lost, str) else lost,
            None if smallest is None else product_readings.kept_weights(smallest),
            dtype_named(self.runner.dtype),
            self.declared,
        )

    def _try(self, read: Callable[[SceneRunner], T]) -> T | str:
        """Return the result of ``read``, or the reason why the kernel gave none."""
        try:
            return read(self.runner)
        except Unanswered as error:
            return str(error)

    def _reading(self, field: str, read: Callable[[], Reading]) -> Reading:
        try:
            return read()
        except Unanswered as error:
            return _unread(field, reason=str(error))

    def _products_reading(self) -> Reading:
        q, v = (
            read(self.runner)
            for read in (product_readings.read_query_product, product_readings.read_value_product)
        )
        grids = [grid for grid in (q, v) if grid is not None]
        if not grids:
            return _unread("products", reason=_NO_GRID)
        return _compare_products(min(grids), dtype_named(self.runner.dtype), self.declared)

    def _sum_reading(self, field: str, grid: Grid | str | None, declared: Accumulator) -> Reading:
        if isinstance(grid, str):
            return _unread(field, reason=grid)
        if grid is None:
            return _unread(field, reason=_NO_GRID, declared=declared.name)
        return _compare_accumulator(field, grid, declared)

    def _exponential_reading(
        self, p_grid: Grid | str, smallest: SmallestWeight | None, scores: Grid | str | None
    ) -> Reading:
        if isinstance(p_grid, str):
            return _unread("exp2", reason=p_grid)
        if not isinstance(scores, str) and scores is not None and scores.bits < _FULL_BITS:
            reason = f"scores have {scores.bits} bits: too few to come near where P turns"
            return _unread("exp2", reason=reason)
        fmt = product_readings.weight_format(p_grid, smallest)
        rounded = fmt is not None and fmt[0].significand < _FULL_BITS

        def read() -> Reading:
            exponential = step_readings.read_exponential(self.runner, p_grid, rounded=rounded)
            return _compare_exponential(exponential, self.declared)

        return self._reading("exp2", read)

    def _row_sum_reading(self, p_grid: Grid | str) -> Reading:
        # If P stays in fp32, rounded and unrounded sums are equal.
        if isinstance(p_grid, str) or p_grid.bits >= _FULL_BITS:
            return _unread(
                "row sum", reason=p_grid if isinstance(p_grid, str) else "P is not rounded"
            )

        def read() -> Reading:
            rounded = product_readings.sums_rounded_weights(self.runner, p_grid)
            if rounded is None:
                output = dtype_named(self.runner.dtype).output.name
                reason = f"there is no LSE, and out in {output} is too coarse"
                return _unread("row sum", reason=reason, declared=phrases[declared])
            return Reading(
                field="row sum",
                standing="agrees" if rounded == declared else "differs",
                read=phrases[rounded],
                declared=phrases[declared],
            )

        phrases = {True: "of rounded P", False: "of P unrounded"}
        declared = self.declared.sums_rounded_weights
        return self._reading("row sum", read)

    def _steps_and_parts(self) -> Iterator[Reading]:
        """Yield the readings of tile, order and parts."""
        short = self._try_square(step_readings.read_parts, keys=_SHORT)
        merged = None if isinstance(short, str) else short
        steps: tuple[Tiles, SceneResult] | str = ""
        # Most tiles end within 256 keys; the CPU's flash kernel steps 512 at a time.
        for keys in (_SHORT, _LONG):
            steps = self._try_square(step_readings.read_tiles, keys=keys, known=merged)
            if isinstance(steps, str) or steps[0].starts:
                break
        if isinstance(steps, str):
            yield _unread("tile", reason=steps)
            yield _unread("order", reason=steps)
        else:
            tiles, result = steps
            yield _compare_tile(tiles, result.tiling, result.arithmetic)
            yield _compare_order(tiles, result.tiling)
        if merged is None:
            yield _unread("parts", reason=str(short))
            return
        parts = [(merged, 1)]
        for keys, batch in ((_SHORT, _BATCH), (_MIDDLE, 1)):
            longer = self._try_square(step_readings.read_parts, keys=keys, batch=batch)
            if not isinstance(longer, str):
                parts.append((longer, batch))
        yield _compare_parts(parts, steps[0] if isinstance(steps, tuple) else None)

    def _try_square(self, read: Callable[..., T], *, keys: int, **more: Any) -> T | str:
        """Return ``_try``; for a kernel that needs as many rows as keys, with that many rows."""
        result = self._try(partial(read, keys=keys, **more))
        if isinstance(result, str):
            return self._try(partial(read, keys=keys, rows=keys, **more))
        return result


# ------------------------------------------------------------------ comparison with declarations


def _verdict_on_bits(read: float, declared: float) -> ReadingVerdict:
    if read == declared:
        return "agrees"
    return "finer" if read > declared else "differs"


def _verdict_on_grid(grid: Grid, declared: Format, *, truncates: bool) -> ReadingVerdict:
    """Return the verdict on bits; with equal bits, truncating is worse than rounding."""
    standing = _verdict_on_bits(grid.bits, declared.significand)
    if standing == "agrees" and grid.rounding and (grid.rounding == "truncated") != truncates:
        return "finer" if truncates else "differs"
    return standing


def _compare_products(grid: Grid, dtype: Dtype, declared: Arithmetic) -> Reading:
    """Compare the bits of the operands; ``grid`` is the coarser one of q and v."""
    fmt = declared.products
    truncates = declared.truncates and fmt.name == "tf32"
    stored = not grid.rounding and grid.bits >= dtype.storage.significand
    standing = _verdict_on_grid(grid, fmt, truncates=truncates)
    if not grid.rounding and not stored:  # grid.bits is only a lower bound
        standing = "agrees" if grid.bits >= fmt.significand else "not seen"
    return Reading(
        field="products",
        standing=standing,
        read="as stored" if stored else str(grid),
        declared=f"{fmt.name}{', truncated' if truncates else ''}",
        reason="fewer bits are read than are stored" if standing == "differs" else "",
    )


def _compare_accumulator(field: str, grid: Grid, declared: Accumulator) -> Reading:
    """Compare the bits of a sum; its rounding does not matter if it has the declared bits."""
    bits = declared.format.significand if declared.block is None else declared.result
    standing = _verdict_on_bits(grid.bits, bits)
    read = str(grid)
    if not grid.rounding:
        read += " or more"
        standing = "not seen" if standing == "differs" else standing
    return Reading(
        field=field, standing=standing, read=read, declared=f"{declared.name}, {bits} bits"
    )


def _compare_weights(grid: Grid, fmt: tuple[Format, int] | None, declared: Arithmetic) -> Reading:
    """Compare the format of P; in fp8 also the factor that P is scaled by."""
    weights = declared.weights
    truncates = declared.truncates and weights.name == "tf32"
    standing = _verdict_on_grid(grid, weights, truncates=truncates)
    read = str(grid)
    if fmt is not None:
        rounding = f", {grid.rounding}" if grid.rounding else ""
        read = f"{_scaled(fmt[0], 2.0 ** fmt[1])}{rounding}"
        # More bits do not make up for a smaller range, which loses small weights.
        declared_min = weights.min_exponent - math.log2(declared.weights_scale)
        if fmt[0].min_exponent - fmt[1] > declared_min:
            standing = "differs"
        if standing == "agrees" and weights.saturates and not declared.normalised_weights:
            standing = _verdict_on_bits(2.0 ** fmt[1], declared.weights_scale)
    elif grid.rounding and grid.bits == FORMATS["fp16"].significand:
        read += ": fp16 or tf32"
    elif grid.rounding:
        read += ": no format's"
        standing = "differs" if standing == "agrees" else standing
    return Reading(
        field="P",
        standing=standing,
        read=read,
        declared=_scaled(weights, declared.weights_scale) + (", truncated" if truncates else ""),
    )


def _scaled(fmt: Format, scale: float) -> str:
    return fmt.name + (f" × {scale:g}" if scale != 1 else "")


_ARGUMENT, _DIVIDED = 1.0, 2.0
"""Ulps allowed besides exp2's: for rounding two arguments, and two weights if divided first."""


def _compare_exponential(exponential: Exponential | None, declared: Arithmetic) -> Reading:
    """Compare the largest error that was found with the declared one."""
    stated = f"{declared.exp2_ulps:g} ulp"
    if exponential is None:
        reason = "P is not rounded, and out is too coarse to show it"
        return _unread("exp2", reason=reason, declared=stated)
    allowed = declared.exp2_ulps + _ARGUMENT + _DIVIDED * declared.normalised_weights
    # Rounded down, because the number is a lower bound.
    ulps = math.floor(exponential.ulps * 100) / 100
    return Reading(
        field="exp2",
        standing="agrees" if exponential.ulps <= allowed else "differs",
        read=f"{ulps:g} ulp of {exponential.places:,} places",
        declared=stated,
    )


def _compare_tile(tiles: Tiles, tiling: Tiling | None, declared: Arithmetic) -> Reading:
    """Compare the keys per step; without a tiling, with the smallest number that is declared."""
    stated = "" if tiling is None else f"{tiling.block_kv} keys"
    if not tiles.starts:
        reason = f"no step ends within {tiles.keys:,} keys, or none shows"
        return _unread("tile", reason=reason, declared=stated)
    size = tiles.size
    first = ", ".join(map(str, tiles.starts[:4])) + (", …" if len(tiles.starts) > 4 else "")
    if tiling is not None:
        standing: ReadingVerdict = "agrees" if size == tiling.block_kv else "differs"
    else:
        # Without a tiling only shorter steps than assumed matter: they round more often.
        shortest = min(b - a for a, b in zip((0, *tiles.starts), tiles.starts, strict=False))
        standing = "differs" if shortest < declared.block_kv else "not declared"
    read = f"{size} keys" if size else f"steps begin at {first}"
    return Reading(field="tile", standing=standing, read=read, declared=stated)


def _compare_order(tiles: Tiles, tiling: Tiling | None) -> Reading:
    """Compare the end from which the kernel goes through the keys."""
    stated = "" if tiling is None else "reverse" if tiling.reverse else "forward"
    if not tiles.order:
        reason = "no step is seen" if not tiles.starts else "each step is divided on its own"
        return _unread("order", reason=reason, declared=stated)
    standing: ReadingVerdict = "agrees" if tiles.order == stated else "differs"
    standing = standing if stated else "not declared"
    return Reading(field="order", standing=standing, read=tiles.order, declared=stated)


def _compare_parts(parts: list[tuple[Parts, int]], steps: Tiles | None) -> Reading:
    """Compare the number of parts that are merged, for each length and batch."""
    first = parts[0][0]
    read = "; ".join(
        f"{each.count} of {each.keys:,} keys" + (f" in a batch of {batch}" if batch > 1 else "")
        for each, batch in parts
    )
    if len({each.count for each, _ in parts}) == 1 and first.count == 1:
        read = "1"
    # If O is divided after every step, each step looks like a part.
    if first.each_step:
        same = steps is not None and steps.keys == first.keys and steps.starts == first.starts
        standing: ReadingVerdict = "agrees" if same else "finer" if first.count == 1 else "differs"
        stated = "O divided after every step"
    else:
        standing = "differs" if any(each.count > each.declared for each, _ in parts) else "agrees"
        stated = "up to " + "; ".join(dict.fromkeys(str(each.declared) for each, _ in parts))
        stated = "1" if stated == "up to 1" else stated
    return Reading(field="parts", standing=standing, read=read, declared=stated)


def _compare_sentinel(sentinel: Sentinel) -> Reading:
    """Compare the sentinel: hidden keys must have no weight, however low the visible scores."""
    reason = ""
    if sentinel.above is not None and sentinel.below is not None:
        number = _round_number(sentinel.above, sentinel.below)
        read = number or f"between {sentinel.above:.6g} and {sentinel.below:.6g}"
        standing: ReadingVerdict = "differs"
    else:
        if sentinel.empty == "a mean":
            read, standing = "finite, lower than was asked", "differs"
        else:
            read, standing = "−∞" if sentinel.empty else "−∞, or below −2^126", "agrees"
        if sentinel.empty not in {"", "0"}:
            reason = f"a row that sees nothing gives {sentinel.empty}"
    return Reading(field="sentinel", standing=standing, read=read, declared="−∞", reason=reason)


def _round_number(above: float, below: float) -> str:
    """Return the only power of ten, or else number of two digits, between the bounds.

    In natural units, or else in log2 units; empty if there is none.
    """
    for unit, suffix in ((1.0, ""), (math.log(2.0), " in log2 units")):
        low, high = -below / unit, -above / unit
        ten = math.floor(math.log10(high))
        for step in (10.0**ten, 10.0 ** (ten - 1)):
            number = math.ceil(low / step) * step
            alone = number == step == 10.0**ten or high < number + step
            if number <= high and alone:
                return f"−{number:g}{suffix}".replace("e+0", "e").replace("e+", "e")
    return ""


def _compare_subnormals(
    flushed: tuple[str, ...] | None,
    weights_kept: bool | None,  # noqa: FBT001
    dtype: Dtype,
    declared: Arithmetic,
) -> Reading:
    """Compare flushing to 0, an error only in formats whose smallest normal exceeds fp32's."""
    lost = list(flushed or ())
    counts = bool(lost) and dtype.storage.min_exponent > _NARROWEST_RANGE
    if weights_kept is False:
        lost.append("P")
        counts = counts or declared.weights.min_exponent > _NARROWEST_RANGE
    unknown = [name for name, one in (("q, k and v", flushed), ("P", weights_kept)) if one is None]
    # One of the two suffices for a reading.
    if len(unknown) == 2:
        return _unread("subnormals", reason="nothing shows them")
    stated = "kept" if counts or not lost else ""
    standing: ReadingVerdict = "differs" if counts else "not declared" if lost else "agrees"
    # Formats with fp32's range may flush, so that keeping subnormals is not declared.
    if not lost and dtype.storage.min_exponent == _NARROWEST_RANGE:
        standing, stated = "not declared", ""
    return Reading(
        field="subnormals",
        standing=standing,
        read=f"{', '.join(lost)} flushed to 0" if lost else "kept",
        declared=stated,
        reason=f"not seen: {' and '.join(unknown)}" if unknown else "",
    )
