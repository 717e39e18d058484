"""A death is asked about once more: the same Case, alone, in a process that has done nothing else.

What a process dies of may be the fault of an earlier call in it, or of the machine. Twice wrong is
the kernel's; once is ``flaky``, and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.record import WRONG

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.examine.isolated import Host
    from attncheck.record import Record, Status

__all__ = ["confirmed"]

_DEATHS: frozenset[Status] = frozenset({"crash", "timeout", "oom"})


def confirmed(host: Host, ask: Callable[[], Record]) -> tuple[Record, int]:
    """The Record that ``ask`` gives, and how often it was asked.

    Args:
        host: Of the kernel that is asked.
        ask: Asks one Case of ``host.subject`` by ``host.executor``.
    """
    first = ask()
    if first.status not in _DEATHS:
        return first, 1
    host.fresh()
    second = ask()
    if second.status == first.status:
        return second, 2
    again = f"asked once more, alone in a new process: {_told(second)}"
    if second.status in WRONG:
        return replace(first, reason=f"{first.reason}; {again}"), 2
    return replace(first, status="flaky", reason=f"{first.status}: {first.reason}; {again}"), 2


def _told(record: Record) -> str:
    why = record.reason or (record.judgement.reason if record.judgement else "")
    return f"{record.status} ({why})" if why else record.status
