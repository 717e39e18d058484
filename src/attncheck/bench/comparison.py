"""Compares two kernels' times in the same rounds: faster, slower or the same.

If two kernels are equally fast, which call is faster in a round is a coin toss, whatever the
distribution of times and the changes of the clock. So the median of the ratio of the two times lies
between the k-th smallest and the k-th largest ratio, except with the chance of too many equal coins
(the interval of the sign test). The allowed chance is divided among all comparisons, so that it
bounds the chance of any wrong finding. Rounds are taken as independent.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from attncheck.records.bench_report import BenchCell, Finding, TimeChange, Times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHANCE = 0.01  # probability that any finding of a report is wrong
MARGIN = 0.02  # times within 2 % count as the same, because memory placement has such effects


def ratio_interval(ratios: Sequence[float], chance: float) -> tuple[float, float] | None:
    """Return an interval that contains the ratios' true median, except with probability ``chance``.

    None if there are too few ratios.
    """
    ordered, count = sorted(ratios), len(ratios)
    outside, k = 0.0, 0
    # ``ordered[k]`` to ``ordered[-k - 1]`` misses it with chance 2·P(at most k of the coins).
    while k < count // 2:
        outside += 2 * math.comb(count, k) / 2**count
        if outside > chance:
            break
        k += 1
    return (ordered[k - 1], ordered[-k]) if k else None


def finding_of(interval: tuple[float, float] | None) -> Finding:
    """Return the finding that an interval of the ratio of times supports."""
    if interval is None:
        return "unclear"
    low, high = interval
    if low >= 1 / (1 + MARGIN) and high <= 1 + MARGIN:
        return "same"
    return "faster" if high < 1 else "slower" if low > 1 else "unclear"


def time_changes(cells: Sequence[BenchCell], others: Mapping[str, str]) -> tuple[TimeChange, ...]:
    """Return how kernels' times changed from another commit, cell by cell.

    Args:
        others: For each kernel's name, the name of the other commit's kernel in the same cells.
    """
    comparisons = []
    for number, cell in enumerate(cells):
        rows = {row.record.kernel: row for row in cell.rows}
        for kernel, other in others.items():
            if kernel not in rows or other not in rows:
                continue
            for timed in ("forward", "both"):
                times = [getattr(rows[name], timed) for name in (kernel, other)]
                if all(isinstance(one, Times) for one in times):
                    ratios = [a / b for a, b in zip(*(p.seconds for p in times), strict=True)]
                    comparisons.append((kernel, number, timed, ratios))
    changes = []
    for kernel, number, timed, ratios in comparisons:
        interval = ratio_interval(ratios, CHANCE / len(comparisons))
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
