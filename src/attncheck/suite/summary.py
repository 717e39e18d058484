"""What the terminal says at the end: problems examined, how fast, and how much was compiling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.records.run_reports import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attncheck.records.run_reports import PropertyOutcome

__all__ = ["lines"]


def lines(
    outcomes: Iterable[PropertyOutcome], untaken: Mapping[str, Mapping[str, str]], seconds: float
) -> Iterator[str]:
    """The summary, line by line; none where nothing was asked and nothing refused.

    Args:
        outcomes: Of the tests.
        untaken: Kernel → dtype → why no test was made of it.
        seconds: That the session took.
    """
    tallies = _by_kernel(outcomes)
    width = max(map(len, tallies), default=0)
    for name, tally in tallies.items():
        yield f"{name:<{width}}  {_one(tally)}"
    if tallies:
        whole = Tally()
        for tally in tallies.values():
            whole.add(tally)
        rate = whole.total / seconds if seconds else 0.0
        share = _share(whole.compiling, whole.seconds)
        yield (
            f"{whole.total:,} problems in {seconds:.0f} s: {rate:.1f} a second; of the time spent "
            f"on them {share} was compiling"
        )
    for reason, those in _by_reason(untaken).items():
        yield f"no tests of {', '.join(those)}: {reason}"


def _by_kernel(outcomes: Iterable[PropertyOutcome]) -> dict[str, Tally]:
    found: dict[str, Tally] = {}
    for each in outcomes:
        found.setdefault(each.kernel, Tally()).add(each.tally)
    return {name: tally for name, tally in sorted(found.items()) if tally.problems}


def _one(tally: Tally) -> str:
    others = [f"{n:,} {status}" for status, n in sorted(tally.problems.items()) if status != "pass"]
    said = f" ({', '.join(others)})" if others else ""
    share = _share(tally.compiling, tally.seconds)
    return f"{tally.total:,} problems{said} in {tally.seconds:.1f} s, {share} compiling"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _by_reason(untaken: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Reason → kernels with their dtypes: ``flex in tf32``."""
    found: dict[str, list[str]] = {}
    for kernel, reasons in untaken.items():
        for dtype, reason in reasons.items():
            found.setdefault(reason, []).append(f"{kernel} in {dtype}")
    return found
