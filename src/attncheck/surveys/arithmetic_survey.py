"""Every field of a kernel's arithmetic, read and compared: one FingerprintReport."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from attncheck.core.formats import FORMATS, dtype_named
from attncheck.records.survey_reports import DtypeFingerprint, FingerprintReport, Reading
from attncheck.surveys import product_readings, step_readings
from attncheck.surveys.fingerprint_scenes import SceneRunner, blank_inputs, make_scene
from attncheck.verify.call_checks import Unanswered
from attncheck.verify.environment import environment
from attncheck.verify.executor import InProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attncheck.capabilities.subject import Subject, Tiling
    from attncheck.core.formats import Dtype, Format
    from attncheck.judge.declared_arithmetic import Accumulator, Arithmetic
    from attncheck.records.survey_reports import ReadingVerdict
    from attncheck.surveys.fingerprint_scenes import Declaration, Grid
    from attncheck.surveys.step_readings import Exponential, Parts, Sentinel, Tiles
    from attncheck.verify.executor import Executor

__all__ = [
    "compare_accumulator",
    "compare_exponential",
    "compare_order",
    "compare_parts",
    "compare_products",
    "compare_row_sum",
    "compare_sentinel",
    "compare_subnormals",
    "compare_tile",
    "compare_weights",
    "fingerprint_kernel",
    "survey_arithmetic",
]


_NARROWEST_RANGE = FORMATS["fp32"].min_exponent


def _by_bits(read: float, declared: float) -> ReadingVerdict:
    if read == declared:
        return "agrees"
    return "finer" if read > declared else "differs"


def compare_products(found: Grid, dtype: Dtype, declared: Arithmetic) -> Reading:
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


def compare_accumulator(field: str, found: Grid, declared: Accumulator) -> Reading:
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


def compare_weights(found: Grid, fmt: tuple[Format, int] | None, declared: Arithmetic) -> Reading:
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


def compare_row_sum(found: bool | None, declared: Arithmetic, *, output: str) -> Reading:  # noqa: FBT001  # what was read
    """Whether it is of the rounded P."""
    said = {True: "of rounded P", False: "of P unrounded"}
    stated = said[declared.sums_rounded_weights]
    if found is None:
        reason = f"there is no LSE, and out in {output} is too coarse"
        return Reading(field="row sum", standing="not seen", declared=stated, reason=reason)
    standing: ReadingVerdict = "agrees" if found == declared.sums_rounded_weights else "differs"
    return Reading(field="row sum", standing=standing, read=said[found], declared=stated)


_ARGUMENT, _DIVIDED = 1.0, 2.0
"""Ulps besides: the roundings of two arguments, and of two weights that are divided first."""


def compare_exponential(found: Exponential | None, declared: Arithmetic) -> Reading:
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


def compare_tile(found: Tiles, tiling: Tiling | None, declared: Arithmetic) -> Reading:
    """Keys of a step; no fewer than are declared where no tiling is."""
    stated = "" if tiling is None else f"{tiling.block_kv} keys"
    if not found.starts:
        reason = f"no step ends within {found.keys:,} keys, or none shows"
        return Reading(field="tile", standing="not seen", declared=stated, reason=reason)
    size = found.size
    read = f"{size} keys" if size else f"steps begin at {_list(found.starts)}"
    if tiling is not None:
        standing: ReadingVerdict = "agrees" if size == tiling.block_kv else "differs"
    else:
        shortest = min(b - a for a, b in zip((0, *found.starts), found.starts, strict=False))
        standing = "differs" if shortest < declared.block_kv else "not declared"
    return Reading(field="tile", standing=standing, read=read, declared=stated)


def compare_order(found: Tiles, tiling: Tiling | None) -> Reading:
    """From which end the keys come."""
    stated = "" if tiling is None else "reverse" if tiling.reverse else "forward"
    if not found.order:
        reason = "no step is seen" if not found.starts else "each step is divided on its own"
        return Reading(field="order", standing="not seen", declared=stated, reason=reason)
    standing: ReadingVerdict = "agrees" if found.order == stated else "differs"
    return Reading(
        field="order",
        standing=standing if stated else "not declared",
        read=found.order,
        declared=stated,
    )


def compare_parts(found: list[tuple[Parts, int]], steps: Tiles | None) -> Reading:
    """How many parts are merged, of each length and batch asked about."""
    first = found[0][0]
    read = "; ".join(_parts(each, batch) for each, batch in found)
    if len({each.count for each, _ in found}) == 1 and first.count == 1:
        read = "1"
    if first.each_step:
        whole = steps is not None and steps.keys == first.keys and steps.starts == first.starts
        standing: ReadingVerdict = "agrees" if whole else "finer" if first.count == 1 else "differs"
        stated = "O divided after every step"
    else:
        over = any(each.count > each.declared for each, _ in found)
        standing = "differs" if over else "agrees"
        stated = "up to " + "; ".join(dict.fromkeys(str(each.declared) for each, _ in found))
        stated = "1" if stated == "up to 1" else stated
    return Reading(field="parts", standing=standing, read=read, declared=stated)


def _parts(each: Parts, batch: int) -> str:
    return f"{each.count} of {each.keys:,} keys" + (f" in a batch of {batch}" if batch > 1 else "")


def compare_sentinel(found: Sentinel) -> Reading:
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


def compare_subnormals(
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
    standing: ReadingVerdict = "differs" if counts else "not declared" if lost else "agrees"
    if not lost and dtype.storage.min_exponent == _NARROWEST_RANGE:
        standing, stated = "not declared", ""
    return Reading(field="subnormals", standing=standing, read=read, declared=stated, reason=reason)


def _list(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown + (", …" if len(numbers) > 4 else "")


_FULL_BITS = FORMATS["fp32"].significand
_SHORT, _MIDDLE, _LONG, _BATCH = 256, 1024, 2048, 4
_NO_GRID = "what was told apart is on no grid of bits"

T = TypeVar("T")


def survey_arithmetic(
    subject: Subject,
    dtypes: Sequence[str],
    *,
    device: str,
    command: str,
    executor: Executor | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> FingerprintReport:
    """The arithmetic of ``subject`` in each of ``dtypes``.

    Args:
        subject: The kernel.
        dtypes: Names of ``formats.DTYPES``.
        device: Where it runs.
        command: The command line, for the report.
        executor: How it is called; in this process by default.
        done: Called after each dtype, with its name.

    Raises:
        UnknownName: for a dtype that there is not.
    """
    records = []
    for dtype in dict.fromkeys(dtypes):
        records.append(fingerprint_kernel(subject, dtype, device=device, executor=executor))
        done(dtype)
    return FingerprintReport(
        command=command,
        kernel=subject.name,
        device=device,
        environment=environment(device),
        records=tuple(records),
    )


def fingerprint_kernel(
    subject: Subject, dtype: str, *, device: str = "cpu", executor: Executor | None = None
) -> DtypeFingerprint:
    """The arithmetic of ``subject`` in ``dtype``; never raises for what the kernel does.

    Raises:
        UnknownName: for a dtype that there is not.
    """
    dtype_named(dtype)
    asker = SceneRunner(
        subject=subject, dtype=dtype, device=device, executor=executor or InProcess()
    )
    try:
        plain = asker.ask(make_scene(dtype, *blank_inputs()))
    except Unanswered as error:
        return DtypeFingerprint(
            dtype=dtype,
            calls=0,
            readings=(Reading(field="products", standing="not seen", reason=str(error)),),
        )
    readings = tuple(_Survey(asker, plain.arithmetic).readings())
    return DtypeFingerprint(
        dtype=dtype, calls=asker.asked, arithmetic=str(plain.arithmetic), readings=readings
    )


@dataclass(slots=True)
class _Survey:
    """One kernel in one dtype, and what it declares of a small problem."""

    asker: SceneRunner
    declared: Arithmetic

    def readings(self) -> Iterator[Reading]:
        """One a field, in the order of ``FIELDS``."""
        held = self._grid(product_readings.read_weight_significand)
        least = self._tried(product_readings.read_smallest_weight)
        if isinstance(least, str):  # values may have been too large for a format of its own
            least = self._tried(partial(product_readings.read_smallest_weight, tall=False))
        yield self._products()
        yield self._sum("q·k", product_readings.read_score_accumulator)
        yield self._exponential(held, least)
        yield self._weights(held, least)
        yield self._row_sum(held)
        yield self._sum("P·V", product_readings.read_value_accumulator)
        yield from self._walk()
        yield self._said(
            "sentinel", lambda: compare_sentinel(step_readings.read_sentinel(self.asker))
        )
        yield self._subnormals(least)

    def _products(self) -> Reading:
        def read() -> Reading:
            found = [
                product_readings.read_query_product(self.asker),
                product_readings.read_value_product(self.asker),
            ]
            grids = [grid for grid in found if grid is not None]
            if not grids:
                return Reading(field="products", standing="not seen", reason=_NO_GRID)
            dtype = dtype_named(self.asker.dtype)
            return compare_products(min(grids), dtype, self.declared)

        return self._said("products", read)

    def _sum(self, field: str, how: Callable[[SceneRunner], Grid | None]) -> Reading:
        declared = self.declared.scores if field == "q·k" else self.declared.values

        def read() -> Reading:
            found = how(self.asker)
            if found is None:
                return Reading(
                    field=field, standing="not seen", declared=declared.name, reason=_NO_GRID
                )
            return compare_accumulator(field, found, declared)

        return self._said(field, read)

    def _exponential(
        self, held: Grid | str, least: product_readings.SmallestWeight | str | None
    ) -> Reading:
        if isinstance(held, str):
            return Reading(field="exp2", standing="not seen", reason=held)
        scores = self._tried(product_readings.read_score_accumulator)
        if not isinstance(scores, str) and scores is not None and scores.bits < _FULL_BITS:
            reason = f"scores have {scores.bits} bits: too few to come near where P turns"
            return Reading(field="exp2", standing="not seen", reason=reason)
        fmt = _format(held, least)
        rounded = fmt is not None and fmt[0].significand < _FULL_BITS

        def read() -> Reading:
            found = step_readings.read_exponential(self.asker, held, rounded=rounded)
            return compare_exponential(found, self.declared)

        return self._said("exp2", read)

    def _weights(
        self, held: Grid | str, least: product_readings.SmallestWeight | str | None
    ) -> Reading:
        if isinstance(held, str):
            return Reading(
                field="P", standing="not seen", declared=self.declared.weights.name, reason=held
            )
        fmt = _format(held, least)
        return compare_weights(held, fmt, self.declared)

    def _row_sum(self, held: Grid | str) -> Reading:
        if isinstance(held, str) or held.bits >= _FULL_BITS:
            reason = held if isinstance(held, str) else "P is not rounded"
            return Reading(field="row sum", standing="not seen", reason=reason)
        output = dtype_named(self.asker.dtype).output.name
        return self._said(
            "row sum",
            lambda: compare_row_sum(
                product_readings.sums_rounded_weights(self.asker, held),
                self.declared,
                output=output,
            ),
        )

    def _walk(self) -> Iterator[Reading]:
        """Tile, order and parts."""
        known = self._tried_square(step_readings.read_parts, keys=_SHORT)
        merged = None if isinstance(known, str) else known
        steps: tuple[step_readings.Tiles, Declaration] | str | None = None
        for keys in (_SHORT, _LONG):
            steps = self._tried_square(step_readings.read_tiles, keys=keys, known=merged)
            if isinstance(steps, str) or (steps is not None and steps[0].starts):
                break
        if isinstance(steps, str) or steps is None:
            reason = steps or ""
            yield Reading(field="tile", standing="not seen", reason=reason)
            yield Reading(field="order", standing="not seen", reason=reason)
        else:
            found, told = steps
            tiling: Tiling | None = told.tiling
            yield compare_tile(found, tiling, told.arithmetic)
            yield compare_order(found, tiling)
        if merged is None:
            yield Reading(field="parts", standing="not seen", reason=str(known or ""))
            return
        every = [(merged, 1)]
        for keys, batch in ((_SHORT, _BATCH), (_MIDDLE, 1)):
            one = self._tried_square(step_readings.read_parts, keys=keys, batch=batch)
            if one is not None and not isinstance(one, str):
                every.append((one, batch))
        yield compare_parts(every, steps[0] if isinstance(steps, tuple) else None)

    def _subnormals(self, least: product_readings.SmallestWeight | str | None) -> Reading:
        lost = self._tried(step_readings.flushes_subnormals)
        kept = (
            product_readings.kept_weights(least)
            if isinstance(least, product_readings.SmallestWeight)
            else None
        )
        return compare_subnormals(
            None if isinstance(lost, str) else lost,
            kept,
            dtype_named(self.asker.dtype),
            self.declared,
        )

    def _said(self, field: str, read: Callable[[], Reading]) -> Reading:
        try:
            return read()
        except Unanswered as error:
            return Reading(field=field, standing="not seen", reason=str(error))

    def _grid(self, how: Callable[[SceneRunner], Grid | None]) -> Grid | str:
        found = self._tried(how)
        return _NO_GRID if found is None else found

    def _tried_square(self, how: Callable[..., T], *, keys: int, **more: object) -> T | str:
        """The same; where a kernel takes as many rows as keys alone, so many."""
        found = self._tried(partial(how, keys=keys, **more))
        return (
            self._tried(partial(how, keys=keys, rows=keys, **more))
            if isinstance(found, str)
            else found
        )

    def _tried(self, how: Callable[[SceneRunner], T]) -> T | str:
        """What it reads, or why nothing was."""
        try:
            return how(self.asker)
        except Unanswered as error:
            return str(error)


def _format(
    held: Grid, least: product_readings.SmallestWeight | str | None
) -> tuple[Format, int] | None:
    return product_readings.weight_format(held, None if isinstance(least, str) else least)
