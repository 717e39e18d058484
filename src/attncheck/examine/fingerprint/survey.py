"""Every field of a kernel's arithmetic, read and compared: one FingerprintReport."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from attncheck.examine.environment import environment
from attncheck.examine.executor import InProcess
from attncheck.examine.fingerprint import (
    accumulators,
    compared,
    exponentials,
    products,
    row_sums,
    sentinels,
    subnormals,
    tiles,
    weights,
)
from attncheck.examine.fingerprint.asker import Asker, Unanswered
from attncheck.examine.fingerprint.scene import blank, scene
from attncheck.fingerprint_record import DtypeFingerprint, FingerprintReport, Reading
from attncheck.formats import FORMATS, dtype_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attncheck.examine.executor import Executor
    from attncheck.examine.fingerprint.asker import Told
    from attncheck.examine.fingerprint.grids import Grid
    from attncheck.formats import Format
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.subjects.contract import Subject, Tiling

__all__ = ["fingerprint", "survey"]

_FULL_BITS = FORMATS["fp32"].significand
_SHORT, _MIDDLE, _LONG, _BATCH = 256, 1024, 2048, 4
_NO_GRID = "what was told apart is on no grid of bits"

T = TypeVar("T")


def survey(
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
        records.append(fingerprint(subject, dtype, device=device, executor=executor))
        done(dtype)
    return FingerprintReport(
        command=command,
        kernel=subject.name,
        device=device,
        environment=environment(device),
        records=tuple(records),
    )


def fingerprint(
    subject: Subject, dtype: str, *, device: str = "cpu", executor: Executor | None = None
) -> DtypeFingerprint:
    """The arithmetic of ``subject`` in ``dtype``; never raises for what the kernel does.

    Raises:
        UnknownName: for a dtype that there is not.
    """
    dtype_named(dtype)
    asker = Asker(subject=subject, dtype=dtype, device=device, executor=executor or InProcess())
    try:
        plain = asker.ask(scene(dtype, *blank()))
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

    asker: Asker
    declared: Arithmetic

    def readings(self) -> Iterator[Reading]:
        """One a field, in the order of ``FIELDS``."""
        held = self._grid(weights.significand)
        least = self._tried(weights.smallest)
        if isinstance(least, str):  # values may have been too large for a format of its own
            least = self._tried(partial(weights.smallest, tall=False))
        yield self._products()
        yield self._sum("q·k", accumulators.of_scores)
        yield self._exponential(held, least)
        yield self._weights(held, least)
        yield self._row_sum(held)
        yield self._sum("P·V", accumulators.of_values)
        yield from self._walk()
        yield self._said("sentinel", lambda: compared.sentinel(sentinels.sentinel(self.asker)))
        yield self._subnormals(least)

    def _products(self) -> Reading:
        def read() -> Reading:
            found = [products.of_q(self.asker), products.of_v(self.asker)]
            grids = [grid for grid in found if grid is not None]
            if not grids:
                return Reading(field="products", standing="not seen", reason=_NO_GRID)
            dtype = dtype_named(self.asker.dtype)
            return compared.products(min(grids), dtype, self.declared)

        return self._said("products", read)

    def _sum(self, field: str, how: Callable[[Asker], Grid | None]) -> Reading:
        declared = self.declared.scores if field == "q·k" else self.declared.values

        def read() -> Reading:
            found = how(self.asker)
            if found is None:
                return Reading(
                    field=field, standing="not seen", declared=declared.name, reason=_NO_GRID
                )
            return compared.accumulator(field, found, declared)

        return self._said(field, read)

    def _exponential(self, held: Grid | str, least: weights.Smallest | str | None) -> Reading:
        if isinstance(held, str):
            return Reading(field="exp2", standing="not seen", reason=held)
        scores = self._tried(accumulators.of_scores)
        if not isinstance(scores, str) and scores is not None and scores.bits < _FULL_BITS:
            reason = f"scores have {scores.bits} bits: too few to come near where P turns"
            return Reading(field="exp2", standing="not seen", reason=reason)
        fmt = _format(held, least)
        rounded = fmt is not None and fmt[0].significand < _FULL_BITS

        def read() -> Reading:
            found = exponentials.exponential(self.asker, held, rounded=rounded)
            return compared.exponential(found, self.declared)

        return self._said("exp2", read)

    def _weights(self, held: Grid | str, least: weights.Smallest | str | None) -> Reading:
        if isinstance(held, str):
            return Reading(
                field="P", standing="not seen", declared=self.declared.weights.name, reason=held
            )
        fmt = _format(held, least)
        return compared.weights(held, fmt, self.declared)

    def _row_sum(self, held: Grid | str) -> Reading:
        if isinstance(held, str) or held.bits >= _FULL_BITS:
            reason = held if isinstance(held, str) else "P is not rounded"
            return Reading(field="row sum", standing="not seen", reason=reason)
        output = dtype_named(self.asker.dtype).output.name
        return self._said(
            "row sum",
            lambda: compared.row_sum(
                row_sums.sums_rounded(self.asker, held), self.declared, output=output
            ),
        )

    def _walk(self) -> Iterator[Reading]:
        """Tile, order and parts."""
        known = self._tried_square(tiles.parts, keys=_SHORT)
        merged = None if isinstance(known, str) else known
        steps: tuple[tiles.Tiles, Told] | str | None = None
        for keys in (_SHORT, _LONG):
            steps = self._tried_square(tiles.tiles, keys=keys, known=merged)
            if isinstance(steps, str) or (steps is not None and steps[0].starts):
                break
        if isinstance(steps, str) or steps is None:
            reason = steps or ""
            yield Reading(field="tile", standing="not seen", reason=reason)
            yield Reading(field="order", standing="not seen", reason=reason)
        else:
            found, told = steps
            tiling: Tiling | None = told.tiling
            yield compared.tile(found, tiling, told.arithmetic)
            yield compared.order(found, tiling)
        if merged is None:
            yield Reading(field="parts", standing="not seen", reason=str(known or ""))
            return
        every = [(merged, 1)]
        for keys, batch in ((_SHORT, _BATCH), (_MIDDLE, 1)):
            one = self._tried_square(tiles.parts, keys=keys, batch=batch)
            if one is not None and not isinstance(one, str):
                every.append((one, batch))
        yield compared.parts(every, steps[0] if isinstance(steps, tuple) else None)

    def _subnormals(self, least: weights.Smallest | str | None) -> Reading:
        lost = self._tried(subnormals.flushed)
        kept = weights.kept(least) if isinstance(least, weights.Smallest) else None
        return compared.subnormals(
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

    def _grid(self, how: Callable[[Asker], Grid | None]) -> Grid | str:
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

    def _tried(self, how: Callable[[Asker], T]) -> T | str:
        """What it reads, or why nothing was."""
        try:
            return how(self.asker)
        except Unanswered as error:
            return str(error)


def _format(held: Grid, least: weights.Smallest | str | None) -> tuple[Format, int] | None:
    return weights.format_of(held, None if isinstance(least, str) else least)
