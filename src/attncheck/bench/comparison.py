"""A kernel's times beside those of another in the same rounds: faster, slower or the same?

Which of two calls is quicker in a round is a coin where they are equally quick, whatever the
distribution of times, and whatever moves the clock for both. So the ratio of the two has a median
that lies between its k-th smallest and k-th largest value but for the chance of so many equal faces
of as many coins (the interval of the sign test). The chance is shared out to all comparisons, so
that it is one of any of them being wrong. It counts rounds as independent.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from attncheck.records.bench_report import BenchCell, Finding, TimeChange, Times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHANCE = 0.01  # that any finding of a report is wrong
MARGIN = 0.02  # that two times may differ by and be the same: where memory lies matters as much


def ratio_interval(ratios: Sequence[float], chance: float) -> tuple[float, float] | None:
    """Return what holds the median of a ratio's distribution, but for ``chance``.

    None where there are too few to say.
    """
    ordered, count = sorted(ratios), len(ratios)
    outside, k = 0.0, 0
    # 2·P(at most k of ``count`` coins show heads) is the chance beyond the k-th from either end.
    while k < count // 2:
        outside += 2 * math.comb(count, k) / 2**count
        if outside > chance:
            break
        k += 1
    return (ordered[k - 1], ordered[-k]) if k else None


def finding_of(interval: tuple[float, float] | None) -> Finding:
    """Return what the interval of time ÷ the other's time says."""
    if interval is None:
        return "unclear"
    low, high = interval
    if low >= 1 / (1 + MARGIN) and high <= 1 + MARGIN:
        return "same"
    return "faster" if high < 1 else "slower" if low > 1 else "unclear"


def time_changes(cells: Sequence[BenchCell], others: Mapping[str, str]) -> tuple[TimeChange, ...]:
    """Return for each cell how kernels stand beside those of another commit, in its order.

    Args:
        others: Name of a kernel → that of the other commit's, in the same cells.
    """
    compared = []
    for number, cell in enumerate(cells):
        rows = {row.record.kernel: row for row in cell.rows}
        for kernel, other in others.items():
            if kernel not in rows or other not in rows:
                continue
            for timed in ("forward", "both"):
                pair = [getattr(rows[name], timed) for name in (kernel, other)]
                if all(isinstance(one, Times) for one in pair):
                    ratios = [a / b for a, b in zip(*(p.seconds for p in pair), strict=True)]
                    compared.append((kernel, number, timed, ratios))
    changes = []
    for kernel, number, timed, ratios in compared:
        interval = ratio_interval(ratios, CHANCE / len(compared))
        changes.append(
            TimeChange(
                kernel=kernel,
                cell=number,
                timed=timed,  # type: ignore[arg-type]  # one of the two above
                ratio=statistics.median(ratios),
                interval=interval,
                finding=finding_of(interval),
            )
        )
    return tuple(changes)
