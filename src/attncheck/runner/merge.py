"""The journals of all parts of a run, as one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.errors import UsageError
from attncheck.inert import one_line
from attncheck.runner.journal_content import SCHEMA, JournalContent, JournalError
from attncheck.runner.journal_lines import fingerprint, line
from attncheck.runner.shards import Shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.runner.unit import Done, Unit

__all__ = ["merge", "merged_bytes", "missing"]

_OF_A_PART = frozenset({"shard", "started", "command", "typed"})
"""What the headers of two parts may say differently."""
_OF_A_CLOCK = frozenset({"seconds", "compiling", "attempts"})
"""What two results of one unit may say differently."""
_OF_A_FOLDER = frozenset({"files"})
"""The same: a kernel may lie elsewhere on each machine; what it is, the headers say."""
_IN_WORDS = frozenset({"absent", "missing"})
"""Facts that say why: in words of the machine, which may name a process."""
_TYPED_SHARD = re.compile(r" --shard[ =]\S+")


def merge(journals: Mapping[str, JournalContent]) -> JournalContent:
    """All results of the parts of one run.

    Args:
        journals: What each says, by its name.

    Returns:
        A journal's content, without a shard, whose seconds are those of all of them.

    Raises:
        UsageError: where there is none, or they are parts of different runs.
        JournalError: where two have different results of one unit.
    """
    if not journals:
        raise UsageError("no journal was named to merge.")
    (first, one), *others = journals.items()
    _check_same(first, one, others)
    head = one.head | {"shard": "", "typed": _TYPED_SHARD.sub("", str(one.head.get("typed", "")))}
    merged = JournalContent(head=head, version=one.version, pid=one.pid, host=one.host)
    merged.plan = fingerprint(head, one.version)
    results: dict[str, str] = {}
    for name, content in journals.items():
        for id_, done in content.results.items():
            if id_ in merged.results:
                _check_equal(content.units.get(id_), merged.results[id_], done, results[id_], name)
                continue
            merged.results[id_], results[id_] = done, name
        merged.units |= {i: u for i, u in content.units.items() if i not in merged.units}
        merged.quarantined |= content.quarantined
        merged.earlier += content.seconds
        merged.why = merged.why or content.why
    return merged


def missing(journals: Sequence[JournalContent]) -> tuple[Shard, ...]:
    """Parts of the run that none of ``journals`` is.

    Raises:
        UsageError: where they count the parts differently.
    """
    shards = {_shard(content) for content in journals}
    counts = {shard.count for shard in shards}
    if len(counts) > 1:
        said = " and ".join(str(count) for count in sorted(counts))
        raise UsageError(f"the journals are of runs in {said} parts.")
    every = {Shard(number, count) for count in counts for number in range(1, count + 1)}
    return tuple(sorted(every - shards, key=lambda shard: shard.number))


def merged_bytes(content: JournalContent) -> bytes:
    """The file of a merged journal, which can be read and resumed as any other."""
    results = [
        ("quarantine" if id_ in content.quarantined else "result", {"done": done})
        for id_, done in content.results.items()
    ]
    rest = {"schema": SCHEMA, "version": content.version, "plan": content.plan}
    events: list[tuple[str, dict[str, Any]]] = [
        ("header", rest | {"head": content.head}),
        ("session", {"started": "", "pid": content.pid, "host": content.host}),
        *(("queued", {"units": [unit]}) for unit in content.units.values()),
        *results,
        ("end", {"seconds": content.seconds, "why": content.why}),
    ]
    return b"".join(line(n, kind, 0.0, rest) for n, (kind, rest) in enumerate(events))


def _shard(content: JournalContent) -> Shard:
    return Shard.parse(str(content.head.get("shard", "")))


def _check_same(first: str, one: JournalContent, others: list[tuple[str, JournalContent]]) -> None:
    """Raises UsageError unless all are parts of one run."""
    here = {"version": one.version, **one.head}
    for name, other in others:
        there = {"version": other.version, **other.head}
        for key in {**here, **there}.keys() - _OF_A_PART:
            if here.get(key) != there.get(key):
                raise UsageError(
                    f"{one_line(first)} and {one_line(name)} are no parts of one run: {key} is "
                    f"{one_line(repr(here.get(key)))[:80]} and "
                    f"{one_line(repr(there.get(key)))[:80]}."
                )


def _check_equal(unit: Unit | None, one: Done, other: Done, first: str, name: str) -> None:
    if _compared(unit, one) != _compared(unit, other):
        raise JournalError(
            f"{one_line(first)} and {one_line(name)} have different results of unit {one.unit}: "
            "were they made by the same kernels on equal machines?"
        )


def _compared(unit: Unit | None, done: Done) -> Any:
    """What two results of ``unit`` must both say.

    Of what every part does: what follows and what was answered, but not why, which can quote what a
    process said as it died.
    """
    said = _timeless(msgspec.to_builtins(done))
    if unit is None or unit.kind not in {"describe", "draw"}:
        return said
    records = [(answer["stage"], answer["record"]) for answer in said["answers"]]
    return said | {
        "harness": bool(done.harness),
        "facts": {k: bool(v) if k in _IN_WORDS else v for k, v in said["facts"].items()},
        "answers": [(s, r["kernel"], r["variant"], r["case"], r["status"]) for s, r in records],
    }


def _timeless(value: Any) -> Any:
    """``value`` without what a clock says; as text where it is a number, so that NaN is NaN."""
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in _OF_A_CLOCK | _OF_A_FOLDER}
    if isinstance(value, list | tuple):
        return [_timeless(v) for v in value]
    return repr(value) if isinstance(value, float) else value
