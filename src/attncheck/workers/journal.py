"""The journal of a run: results are durable before they are announced, and no unit is done twice.

``Journal`` writes it, from one process at a time; ``read_journal`` reads it, also during the run.
``journal_format`` describes its lines. All other output of a run can be derived from it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from attncheck.core import VERSION
from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.journal_format import (
    SCHEMA,
    VOLATILE,
    JournalContent,
    JournalError,
    journal_line,
    plan_fingerprint,
    read_journal,
    read_journal_file,
)
from attncheck.workers.units import Shard, Unit, UnitResult

MAX_LOSSES = 2  # A unit is given up after so many attempts without a result.

_UNITS_PER_LINE = 100  # Units in one ``queued`` line.


class Disk:
    """The two system calls that make a line durable; tests replace them to simulate errors."""

    def write(self, descriptor: int, data: bytes) -> int:
        """``os.write``."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """``os.fdatasync``."""
        os.fdatasync(descriptor)


class Journal:
    """A journal that is open for writing, locked against other processes.

    Not thread-safe. Use it in a ``with`` statement, or call ``close``.
    """

    path: Path
    content: JournalContent  # The content written by all sessions so far.

    def __init__(self, path: Path, descriptor: int, content: JournalContent, disk: Disk) -> None:
        """Initialize a journal; use ``open`` instead."""
        self.path, self.content = path, content
        self._descriptor, self._disk = descriptor, disk
        self._began, self._broken, self._why = time.monotonic(), "", ""

    @classmethod
    def open(
        cls, path: Path | str, header: Mapping[str, Any], *, resume: bool, disk: Disk | None = None
    ) -> Self:
        """Open the journal at ``path``; create it, and its folder, if it does not exist.

        Args:
            header: Data that identify a run: command (without ``--shard``), tier, kernels, the
                fingerprint of the environment, …, and ``shard`` (``2/4``, empty for the whole run);
                besides ``started`` and ``typed``, the command line, which may differ.
            resume: Whether to continue an existing journal rather than to erase it.
            disk: A replacement of the system calls, for tests.

        Raises:
            JournalError: if it cannot be written or locked, is damaged before its last line, or
                holds a run with another header.
        """
        path, disk = Path(path), disk or Disk()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # O_APPEND, so that no write can overwrite existing lines.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _write_error(path, error) from None
        try:
            _lock(path, descriptor)
            content = _read_or_erase(path, descriptor, resume=resume)
            journal = cls(path, descriptor, content, disk)
            journal._begin(dict(header))
        except BaseException:
            # Also after an interrupt, since the open descriptor holds the lock.
            os.close(descriptor)
            raise
        return journal

    @property
    def results(self) -> Mapping[str, UnitResult]:
        """Results by unit id, in the order in which they were written."""
        return self.content.results

    def losses(self, unit: Unit) -> int:
        """Return how often ``unit`` was begun but neither finished nor abandoned."""
        return self.content.lost.get(unit.id, 0)

    def write_queued(self, units: Iterable[Unit]) -> None:
        """Write those of ``units`` that the journal does not contain yet."""
        new = [unit for unit in units if unit.id not in self.content.units]
        for first in range(0, len(new), _UNITS_PER_LINE):
            self._write("queued", {"units": new[first : first + _UNITS_PER_LINE]})

    def write_start(self, unit: Unit) -> None:
        """Write that ``unit`` is begun now, so that a resumed run knows of the attempt."""
        self._check_open(unit.id)
        # Not synced: losing this line costs no more than one additional attempt.
        self._write("start", {"unit": unit})

    def write_result(self, done: UnitResult, *, quarantined: bool = False) -> None:
        """Write a unit's result and sync it to the disk before returning.

        Args:
            quarantined: Whether the result only states that the unit was lost too often.

        Raises:
            JournalError: if it cannot be written, or the unit has a result already.
        """
        self._check_open(done.unit)
        self._write("quarantine" if quarantined else "result", {"done": done}, sync=True)

    def write_abandoned(self, units: Iterable[str]) -> None:
        """Write that these units were begun, and are ended by us before they are done."""
        if ids := sorted(id_ for id_ in units if self.content.lost.get(id_)):
            self._write("abandoned", {"units": ids}, sync=True)

    def end(self, why: str) -> None:
        """Set the reason why the session ends early; empty if everything is done."""
        self._why = why

    def close(self) -> None:
        """Write the end of the session and unlock the file."""
        if self._descriptor < 0:
            return
        try:
            # After an error nothing may follow the last whole line.
            if not self._broken:
                self._write("end", {"seconds": self._seconds(), "why": self._why}, sync=True)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._why = self._why or f"{kind.__name__}: {one_line(str(error))}"
        self.close()

    def _begin(self, head: dict[str, Any]) -> None:
        plan = plan_fingerprint(head, VERSION)
        if not self.content.lines:
            rest = {"schema": SCHEMA, "version": VERSION, "plan": plan, "head": head}
            self._write("header", rest, sync=True)
            _sync_folder(self.path)
        elif plan != self.content.plan:
            raise _other_run(self.path, self.content, head)
        started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        rest = {"started": started, "pid": os.getpid(), "host": platform.node()}
        rest["typed"] = str(head.get("typed", ""))
        self._write("session", rest)

    def _check_open(self, id_: str) -> None:
        if id_ in self.content.results:
            raise JournalError(f"{one_line(str(self.path))}: unit {id_} has a result already.")

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _write(self, kind: str, rest: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append one event as a line, in one call if possible, and add it to ``content``."""
        if self._broken or self._descriptor < 0:
            raise JournalError(self._broken or f"{one_line(str(self.path))} is closed.")
        try:
            raw = journal_line(self.content.lines, kind, self._seconds(), rest)
        except JournalError as error:
            raise JournalError(f"{one_line(str(self.path))}: {error}.") from None
        try:
            written = self._disk.write(self._descriptor, raw)
            while written < len(raw):  # a full disk makes the next call fail
                written += self._disk.write(self._descriptor, raw[written:])
            if sync:
                self._disk.sync(self._descriptor)
        except OSError as error:
            self._fail(error)
        self.content.take({"kind": kind, "at": self._seconds(), **rest})
        self.content.size += len(raw)

    def _fail(self, error: OSError) -> None:
        """Raise a JournalError, cut off a partial line, and refuse all further writes."""
        failure = _write_error(self.path, error)
        self._broken = str(failure)
        with suppress(OSError):  # otherwise the next session cuts off the partial line
            os.ftruncate(self._descriptor, self.content.size)
        raise failure from None


def _lock(path: Path, descriptor: int) -> None:
    try:
        # The operating system releases the lock when the process ends, so it is never stale.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalError(
            f"{one_line(str(path))} is being written by another process{_writer(path)}: "
            "wait for it, or choose another folder."
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise JournalError(f"{one_line(str(path))} cannot be locked: {reason}.") from None


def _writer(path: Path) -> str:
    try:
        content = read_journal(path)
    except JournalError:
        return ""
    return f" ({content.pid} on {one_line(content.host)})" if content.pid else ""


def _read_or_erase(path: Path, descriptor: int, *, resume: bool) -> JournalContent:
    """Read the journal and cut off a partial last line; erase the file unless resuming."""
    try:
        if not resume:
            os.ftruncate(descriptor, 0)
            return JournalContent()
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            try:
                content = read_journal_file(file, str(path))
            except JournalError as error:
                raise JournalError(
                    f"{error} Start anew with --fresh, or choose another --out."
                ) from None
        if content.torn:
            # Otherwise the next line would be appended to the partial one.
            os.ftruncate(descriptor, content.size)
            os.fsync(descriptor)
    except OSError as error:
        raise _write_error(path, error) from None
    return content


def _sync_folder(path: Path) -> None:
    """Sync the folder, so that the name of a new file is durable too."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _write_error(path, error) from None


def _write_error(path: Path, error: OSError) -> JournalError:
    reason = error.strerror or str(error)
    return JournalError(
        f"{one_line(str(path))} cannot be written: {reason}; what was written before is intact."
    )


def _other_run(path: Path, content: JournalContent, head: Mapping[str, Any]) -> JournalError:
    there: dict[str, Any] = {"version": content.version, **content.head}
    here = {"version": VERSION, **head}
    names = [n for n in {**there, **here} if there.get(n) != here.get(n) and n not in VOLATILE]
    differences = [f"{n} is {_cut(there.get(n))} there and {_cut(here.get(n))} here" for n in names]
    return JournalError(
        f"{one_line(str(path))} holds another run: {'; '.join(differences)}. "
        "Go on with that one, start anew with --fresh, or choose another --out."
    )


def _cut(value: object) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 80 else f"{text[:80]}…"


# Keys in which the headers of two shards may differ.
_SHARD_KEYS = frozenset({"shard", "started", "command", "typed"})
# Keys in which two results of one unit may differ: times and attempts, and the files of a kernel,
# which may lie elsewhere on each machine (the headers identify the kernels).
_TIMING_KEYS = frozenset({"seconds", "compiling", "attempts"})
_PATH_KEYS = frozenset({"files"})
# Facts whose texts depend on the machine, and may name a process.
_TEXT_FACTS = frozenset({"absent", "missing"})
_TYPED_SHARD = re.compile(r" --shard[ =]\S+")


def merge_journals(journals: Mapping[str, JournalContent]) -> JournalContent:
    """Merge the results of the shards of one run.

    Returns:
        The content of an unsharded journal; its seconds are the sum over all shards.

    Raises:
        UsageError: if there is no journal, or they belong to different runs.
        JournalError: if two have different results of one unit.
    """
    if not journals:
        raise UsageError("no journal was named to merge.")
    (first, one), *others = journals.items()
    _check_same(first, one, others)
    head = one.head | {"shard": "", "typed": _TYPED_SHARD.sub("", str(one.head.get("typed", "")))}
    merged = JournalContent(head=head, version=one.version, pid=one.pid, host=one.host)
    merged.plan = plan_fingerprint(head, one.version)
    # Name of the journal that each result is from, for error messages.
    origin: dict[str, str] = {}
    for name, content in journals.items():
        for id_, done in content.results.items():
            if id_ in merged.results:
                _check_equal(content.units.get(id_), merged.results[id_], done, origin[id_], name)
                continue
            merged.results[id_], origin[id_] = done, name
        merged.units |= {i: u for i, u in content.units.items() if i not in merged.units}
        merged.quarantined |= content.quarantined
        merged.earlier += content.seconds
        merged.why = merged.why or content.why
    return merged


def missing_shards(journals: Sequence[JournalContent]) -> tuple[Shard, ...]:
    """Return the shards of a run that are missing among ``journals``.

    Raises:
        UsageError: if they are shards of different counts.
    """
    shards = {Shard.parse(str(content.head.get("shard", ""))) for content in journals}
    counts = {shard.count for shard in shards}
    if len(counts) > 1:
        numbers = " and ".join(str(count) for count in sorted(counts))
        raise UsageError(f"the journals are of runs in {numbers} parts.")
    all_shards = {Shard(number, count) for count in counts for number in range(1, count + 1)}
    return tuple(sorted(all_shards - shards, key=lambda shard: shard.number))


def merged_journal_bytes(content: JournalContent) -> bytes:
    """Return the file of a merged journal, which can be read and resumed like any other."""
    results = [
        ("quarantine" if id_ in content.quarantined else "result", {"done": done})
        for id_, done in content.results.items()
    ]
    rest = {"schema": SCHEMA, "version": content.version, "plan": content.plan}
    events: list[tuple[str, dict[str, Any]]] = [
        ("header", rest | {"head": content.head}),
        # No time of day, so that merging equal shards gives equal files.
        ("session", {"started": "", "pid": content.pid, "host": content.host}),
        *(("queued", {"units": [unit]}) for unit in content.units.values()),
        *results,
        ("end", {"seconds": content.seconds, "why": content.why}),
    ]
    return b"".join(journal_line(n, kind, 0.0, rest) for n, (kind, rest) in enumerate(events))


def _check_same(first: str, one: JournalContent, others: list[tuple[str, JournalContent]]) -> None:
    """Raise UsageError unless all are shards of one run."""
    here = {"version": one.version, **one.head}
    for name, other in others:
        there = {"version": other.version, **other.head}
        for key in {**here, **there}.keys() - _SHARD_KEYS:
            if here.get(key) != there.get(key):
                raise UsageError(
                    f"{one_line(first)} and {one_line(name)} are no parts of one run: {key} is "
                    f"{one_line(repr(here.get(key)))[:80]} and "
                    f"{one_line(repr(there.get(key)))[:80]}."
                )


def _check_equal(
    unit: Unit | None, one: UnitResult, other: UnitResult, first: str, name: str
) -> None:
    if _comparable(unit, one) != _comparable(unit, other):
        raise JournalError(
            f"{one_line(first)} and {one_line(name)} have different results of unit {one.unit}: "
            "were they made by the same kernels on equal machines?"
        )


def _comparable(unit: Unit | None, done: UnitResult) -> Any:
    """Return the part of a result in which two results of ``unit`` must agree.

    For a unit that every shard does, these are the units that follow and the answers' statuses, but
    not the reasons, which may quote the output of a process that died.
    """
    words = _untimed(msgspec.to_builtins(done))
    if unit is None or unit.kind not in {"describe", "draw"}:
        return words
    records = [(answer["stage"], answer["record"]) for answer in words["answers"]]
    return words | {
        "harness": bool(done.harness),
        "facts": {k: bool(v) if k in _TEXT_FACTS else v for k, v in words["facts"].items()},
        "answers": [(s, r["kernel"], r["variant"], r["case"], r["status"]) for s, r in records],
    }


def _untimed(value: Any) -> Any:
    """Return ``value`` without times and paths, with floats as text so that NaN equals NaN."""
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if k not in _TIMING_KEYS | _PATH_KEYS}
    if isinstance(value, list | tuple):
        return [_untimed(v) for v in value]
    return repr(value) if isinstance(value, float) else value
