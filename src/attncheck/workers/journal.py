"""The journal of a run: what is done is on the disk before anybody is told, and is done once.

``Journal`` writes it, one process at a time; ``read_journal`` says what it holds, also meanwhile.
Its lines: ``journal_format``. Everything else that a run leaves behind can be made from it.
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
from attncheck.workers.units import Done, Shard, Unit

MOST_LOST = 2  # a unit that was begun so often without a result is not begun again

_A_LINE = 100  # units that are queued by one line


class Disk:
    """The two calls that make a line durable; a test's disk is full, or fails."""

    def write(self, descriptor: int, data: bytes) -> int:
        """``os.write``."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """``os.fdatasync``."""
        os.fdatasync(descriptor)


class Journal:
    """A journal that is open for writing; no other process can open it meanwhile.

    Not for several threads at once. Use it in a ``with``, or call ``close``.
    """

    path: Path  # where it is
    content: JournalContent  # what it says, from all sessions

    def __init__(self, path: Path, descriptor: int, content: JournalContent, disk: Disk) -> None:
        """For ``open``."""
        self.path, self.content = path, content
        self._descriptor, self._disk = descriptor, disk
        self._began, self._broken, self._why = time.monotonic(), "", ""

    @classmethod
    def open(
        cls, path: Path | str, header: Mapping[str, Any], *, resume: bool, disk: Disk | None = None
    ) -> Self:
        """The journal at ``path``, which is made if need be, its folder too.

        Args:
            header: What makes two runs the same: command (without ``--shard``), tier, kernels, the
                fingerprint of the environment, …, and ``shard`` (``2/4``, empty for the whole); and
                ``started`` and ``typed``, the command line, which do not.
            resume: Go on with one that is there; otherwise it is forgotten.
            disk: Another than the operating system's, for tests.

        Raises:
            JournalError: where it cannot be written or locked, is damaged before its last line, or
                holds a run of another header.
        """
        path, disk = Path(path), disk or Disk()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Appending, so that no write can land on what is there already.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _write_error(path, error) from None
        try:
            _lock(path, descriptor)
            content = _resumed_content(path, descriptor, resume=resume)
            journal = cls(path, descriptor, content, disk)
            journal._begin(dict(header))
        except BaseException:
            # Also after an interrupt, because the open descriptor holds the lock.
            os.close(descriptor)
            raise
        return journal

    @property
    def results(self) -> Mapping[str, Done]:
        """The result of each unit, by id, in the order of their writing."""
        return self.content.results

    def lost(self, unit: Unit) -> int:
        """Return how often ``unit`` was begun without a result, and without our ending it."""
        return self.content.lost.get(unit.id, 0)

    def queued(self, units: Iterable[Unit]) -> None:
        """``units`` are to be done: those that the journal does not know yet are written."""
        new = [unit for unit in units if unit.id not in self.content.units]
        for first in range(0, len(new), _A_LINE):
            self._write("queued", {"units": new[first : first + _A_LINE]})

    def begun(self, unit: Unit) -> None:
        """``unit`` is begun now; a process that dies finds this when it is resumed."""
        self._check_open(unit.id)
        # Not synced: where the machine loses it, one more attempt is the whole damage.
        self._write("start", {"unit": unit})

    def done(self, done: Done, *, quarantined: bool = False) -> None:
        """Its result is on the disk when this returns; only then may anybody be told.

        Args:
            quarantined: Whether it says only that the unit was lost too often.

        Raises:
            JournalError: where it is not, or the unit has a result already.
        """
        self._check_open(done.unit)
        self._write("quarantine" if quarantined else "result", {"done": done}, sync=True)

    def abandoned(self, units: Iterable[str]) -> None:
        """The units of these ids were begun, and we end them before they are done."""
        if ids := sorted(id_ for id_ in units if self.content.lost.get(id_)):
            self._write("abandoned", {"units": ids}, sync=True)

    def end(self, why: str) -> None:
        """Note why the session ends before everything is done; empty where everything is."""
        self._why = why

    def close(self) -> None:
        """Write that the session ends, and let others open the file."""
        if self._descriptor < 0:
            return
        try:
            # A journal that failed stays as its last whole line left it.
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
        """One event: a line, by one call; our own content says it when it is written."""
        if self._broken or self._descriptor < 0:
            raise JournalError(self._broken or f"{one_line(str(self.path))} is closed.")
        try:
            raw = journal_line(self.content.lines, kind, self._seconds(), rest)
        except JournalError as error:
            raise JournalError(f"{one_line(str(self.path))}: {error}.") from None
        try:
            written = self._disk.write(self._descriptor, raw)
            while written < len(raw):  # of a disk that is full the next call says it
                written += self._disk.write(self._descriptor, raw[written:])
            if sync:
                self._disk.sync(self._descriptor)
        except OSError as error:
            self._fail(error)
        self.content.take({"kind": kind, "at": self._seconds(), **rest})
        self.content.size += len(raw)

    def _fail(self, error: OSError) -> None:
        """Write nothing from here on; what was written before is left as it was."""
        failure = _write_error(self.path, error)
        self._broken = str(failure)
        with suppress(OSError):  # then the last line is torn, and the next session cuts it
            os.ftruncate(self._descriptor, self.content.size)
        raise failure from None


def _lock(path: Path, descriptor: int) -> None:
    try:
        # The kernel drops this lock with the process: no stale one is ever left behind.
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


def _resumed_content(path: Path, descriptor: int, *, resume: bool) -> JournalContent:
    """Read what is there and cut a torn last line; forget all where nothing is resumed."""
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
            # The next line would be glued to the torn one otherwise.
            os.ftruncate(descriptor, content.size)
            os.fsync(descriptor)
    except OSError as error:
        raise _write_error(path, error) from None
    return content


def _sync_folder(path: Path) -> None:
    """So that a new file's name is on the disk too."""
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
    differences = [
        f"{n} is {_short(there.get(n))} there and {_short(here.get(n))} here" for n in names
    ]
    return JournalError(
        f"{one_line(str(path))} holds another run: {'; '.join(differences)}. "
        "Go on with that one, start anew with --fresh, or choose another --out."
    )


def _short(value: object) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 80 else f"{text[:80]}…"


_OF_A_PART = frozenset({"shard", "started", "command", "typed"})
"""What the headers of two parts may say differently."""
_OF_A_CLOCK = frozenset({"seconds", "compiling", "attempts"})
"""What two results of one unit may say differently."""
_OF_A_FOLDER = frozenset({"files"})
"""The same: a kernel may lie elsewhere on each machine; what it is, the headers say."""
_IN_WORDS = frozenset({"absent", "missing"})
"""Facts that say why: in words of the machine, which may name a process."""
_TYPED_SHARD = re.compile(r" --shard[ =]\S+")


def merge_journals(journals: Mapping[str, JournalContent]) -> JournalContent:
    """All results of the parts of one run.

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
    merged.plan = plan_fingerprint(head, one.version)
    # Which journal has each, for the message where two of them differ.
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


def missing_shards(journals: Sequence[JournalContent]) -> tuple[Shard, ...]:
    """Parts of the run that none of ``journals`` is.

    Raises:
        UsageError: where they count the parts differently.
    """
    shards = {Shard.parse(str(content.head.get("shard", ""))) for content in journals}
    counts = {shard.count for shard in shards}
    if len(counts) > 1:
        numbers = " and ".join(str(count) for count in sorted(counts))
        raise UsageError(f"the journals are of runs in {numbers} parts.")
    every = {Shard(number, count) for count in counts for number in range(1, count + 1)}
    return tuple(sorted(every - shards, key=lambda shard: shard.number))


def merged_journal_bytes(content: JournalContent) -> bytes:
    """The file of a merged journal, which can be read and resumed as any other."""
    results = [
        ("quarantine" if id_ in content.quarantined else "result", {"done": done})
        for id_, done in content.results.items()
    ]
    rest = {"schema": SCHEMA, "version": content.version, "plan": content.plan}
    events: list[tuple[str, dict[str, Any]]] = [
        ("header", rest | {"head": content.head}),
        # No time of day, so that equal parts make equal files.
        ("session", {"started": "", "pid": content.pid, "host": content.host}),
        *(("queued", {"units": [unit]}) for unit in content.units.values()),
        *results,
        ("end", {"seconds": content.seconds, "why": content.why}),
    ]
    return b"".join(journal_line(n, kind, 0.0, rest) for n, (kind, rest) in enumerate(events))


def _check_same(first: str, one: JournalContent, others: list[tuple[str, JournalContent]]) -> None:
    """Raise UsageError unless all are parts of one run."""
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
    if _comparable(unit, one) != _comparable(unit, other):
        raise JournalError(
            f"{one_line(first)} and {one_line(name)} have different results of unit {one.unit}: "
            "were they made by the same kernels on equal machines?"
        )


def _comparable(unit: Unit | None, done: Done) -> Any:
    """Return the part of a result in which two of ``unit`` must agree.

    Of what every part does: what follows and what was answered, but not why, which can quote what a
    process said as it died.
    """
    words = _timeless(msgspec.to_builtins(done))
    if unit is None or unit.kind not in {"describe", "draw"}:
        return words
    records = [(answer["stage"], answer["record"]) for answer in words["answers"]]
    return words | {
        "harness": bool(done.harness),
        "facts": {k: bool(v) if k in _IN_WORDS else v for k, v in words["facts"].items()},
        "answers": [(s, r["kernel"], r["variant"], r["case"], r["status"]) for s, r in records],
    }


def _timeless(value: Any) -> Any:
    """``value`` without what a clock says; as text where it is a number, so that NaN is NaN."""
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in _OF_A_CLOCK | _OF_A_FOLDER}
    if isinstance(value, list | tuple):
        return [_timeless(v) for v in value]
    return repr(value) if isinstance(value, float) else value
