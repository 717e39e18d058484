"""The journal of a run: acknowledged results are on disk exactly once, and damage is detected."""

import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.messages import one_line
from tests.workers.stub_work import unit

from attncheck.records.record import Record
from attncheck.records.run_reports import Answer
from attncheck.workers.journal import Disk, Journal
from attncheck.workers.journal_format import LONGEST, JournalError, journal_line, read_journal
from attncheck.workers.units import UnitResult

HEADER = {"command": "gate k", "tier": "smoke", "kernels": ["k"]}
UNITS = [unit(f"u{n}") for n in range(4)]


def open_journal(path, resume=True, disk=None, **header):
    return Journal.open(path, HEADER | header, resume=resume, disk=disk)


def done(unit, **fields):
    return UnitResult(unit=unit.id, **fields)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gate" / "results.jsonl"


@pytest.fixture
def two(path):
    """A journal in which two units are done and one was begun."""
    with open_journal(path) as journal:
        journal.write_queued(UNITS)
        for one in UNITS[:2]:
            journal.write_start(one)
            journal.write_result(done(one, facts={"x": 1}))
        journal.write_start(UNITS[2])
    return path


def test_reopened_journal_has_results_and_lost_attempts(two):
    with open_journal(two) as journal:
        assert list(journal.results) == [one.id for one in UNITS[:2]]
        assert journal.losses(UNITS[2]) == 1
        assert journal.losses(UNITS[3]) == 0
        assert journal.content.unfinished == tuple(UNITS[2:])


def test_result_round_trips_through_the_journal(path):
    record = Record(
        case_id="c",
        case={"scale": -math.inf, "seed": 2**62, "x": 0.1, "kind": "text"},
        kernel="nan",
        variant="",
        heads="",
        status="crash",
        reason="inf",
        seconds=math.nan,
        environment="e",
    )
    answer = Answer(unit="u", stage="bounds", record=record, seconds=0.1 + 0.2)
    whole = done(UNITS[0], answers=(answer,), units=(unit("f", scale=math.inf),), seconds=1 / 3)
    with open_journal(path) as journal:
        journal.write_result(whole)
    back = read_journal(path).results[UNITS[0].id]
    assert repr(back) == repr(whole)  # NaN is not equal to itself
    assert back.units[0].id == whole.units[0].id


def test_lone_surrogates_are_written_as_escapes(path):
    with open_journal(path) as journal:
        journal.write_result(done(UNITS[0], harness="bad \ud800 and \x1b[31m"))
    assert read_journal(path).results[UNITS[0].id].harness == "bad \\ud800 and \x1b[31m"


def test_reader_sees_acknowledged_results_while_the_journal_is_open(path):
    with open_journal(path) as journal:
        journal.write_start(UNITS[0])
        journal.write_result(done(UNITS[0]))
        assert list(read_journal(path).results) == [UNITS[0].id]
        assert read_journal(path).why == "killed"
        journal.end("interrupted")
    content = read_journal(path)
    assert content.why == "interrupted"
    assert content.seconds > 0


def test_torn_last_line_is_removed(two):
    whole = two.read_bytes()
    lines = whole.splitlines(keepends=True)
    results = len(read_journal(two).results)
    for size in (len(whole) - 1, len(whole) - 2, len(whole) - len(lines[-1]) + 1):
        two.write_bytes(whole[:size])
        assert read_journal(two).torn
        open_journal(two).close()
        content = read_journal(two)
        assert not content.torn
        assert len(content.results) == results
        assert two.read_bytes().startswith(whole[: len(whole) - len(lines[-1])])


def test_every_prefix_of_a_journal_can_be_resumed(two):
    """A writer may be killed after any byte: only acknowledged results may be recalled."""
    whole = two.read_bytes()
    acknowledged = [
        (end, content.results)
        for end in range(len(whole) + 1)
        if whole[:end].endswith(b"\n") and (content := _content(two, whole[:end]))
    ]
    for size in range(0, len(whole), 7):
        two.write_bytes(whole[:size])
        with open_journal(two) as journal:
            expected = [results for end, results in acknowledged if end <= size]
            assert dict(journal.results) == (expected[-1] if expected else {})


def _content(path, raw):
    path.write_bytes(raw)
    return read_journal(path)


def test_zeros_after_a_power_cut_are_a_torn_line(two):
    two.write_bytes(two.read_bytes() + bytes(300))
    assert len(read_journal(two).results) == 2
    open_journal(two).close()
    assert not read_journal(two).torn


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_damaged_line_before_the_end_is_an_error(two, number):
    lines = two.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b'"at":0', b'"at":1', 1)
    two.write_bytes(b"".join(lines))
    before = two.read_bytes()
    damage = (
        f"line {number + 1}: it is not whole, or its checksum is wrong. Start anew with --fresh"
    )
    with pytest.raises(JournalError, match=damage):
        open_journal(two)
    with pytest.raises(JournalError):
        read_journal(two)
    assert two.read_bytes() == before


def test_missing_and_repeated_lines_are_errors(two):
    lines = two.read_bytes().splitlines(keepends=True)
    two.write_bytes(b"".join(lines[:4] + lines[5:]))
    with pytest.raises(JournalError, match="line 5: its number is 5, not 4"):
        read_journal(two)
    two.write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(JournalError, match=f"its number is {len(lines) - 1}, not {len(lines)}"):
        read_journal(two)


def test_second_result_of_a_unit_is_an_error_when_reading(two):
    content = read_journal(two)
    with two.open("ab") as file:
        file.write(journal_line(content.lines, "result", 0.0, {"done": done(UNITS[0])}))
    with pytest.raises(JournalError, match="has two results"):
        read_journal(two)


def test_unit_with_a_result_can_be_neither_done_nor_begun_again(two):
    size = two.stat().st_size
    with open_journal(two) as journal:
        for repeat in (
            lambda: journal.write_result(done(UNITS[0])),
            lambda: journal.write_start(UNITS[0]),
        ):
            with pytest.raises(JournalError, match="has a result already"):
                repeat()
    assert b'"result"' not in two.read_bytes()[size:]


def test_file_that_is_no_journal_is_rejected_and_kept(path):
    path.parent.mkdir()
    for text in (b"notes without a newline", b"notes\n", b'{"n":1}\n', b"[1,2]\n{}\n"):
        path.write_bytes(text)
        with pytest.raises(JournalError, match="line 1"):
            open_journal(path)
        assert path.read_bytes() == text


def test_abandoned_units_do_not_count_as_lost(two):
    with open_journal(two) as journal:
        journal.write_start(UNITS[2])
        assert journal.losses(UNITS[2]) == 2
        journal.write_abandoned([UNITS[2].id])
    assert read_journal(two).lost[UNITS[2].id] == 1


def test_second_writer_is_refused_with_a_one_line_message(two):
    with open_journal(two):
        with pytest.raises(JournalError) as excinfo:
            open_journal(two)
        code = (
            "from attncheck.workers.journal import Journal\n"
            f"Journal.open({str(two)!r}, {HEADER!r}, resume=False)"
        )
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = str(excinfo.value)
    assert message.startswith(f"{two} is being written by another process ({os.getpid()} on ")
    assert "\n" not in message
    assert "is being written by another process" in other.stderr
    assert len(read_journal(two).results) == 2
    open_journal(two).close()  # the lock is released by now


@pytest.mark.parametrize(
    ("header", "difference"),
    [
        ({"tier": "pr"}, "tier is 'smoke' there and 'pr' here"),
        ({"kernels": ["k", "l"]}, "kernels is ['k'] there and ['k', 'l'] here"),
        ({"shard": "1/2"}, "shard is None there and '1/2' here"),
    ],
)
def test_journal_of_another_run_is_refused_naming_the_difference(two, header, difference):
    before = two.read_bytes()
    with one_line(JournalError, difference, match="start anew with --fresh"):
        open_journal(two, **header)
    assert two.read_bytes() == before
    with open_journal(two, resume=False, **header) as journal:
        assert not journal.results


def test_journal_of_another_version_is_refused(two, monkeypatch):
    monkeypatch.setattr("attncheck.workers.journal.VERSION", "99")
    with pytest.raises(JournalError, match=r"version is '.*' there and '99' here"):
        open_journal(two)


def test_journal_of_another_schema_is_refused(two, monkeypatch):
    monkeypatch.setattr("attncheck.workers.journal_format.SCHEMA", 2)
    with pytest.raises(JournalError, match="its schema is 1, this version reads 2"):
        read_journal(two)


def test_start_time_does_not_distinguish_runs(path):
    open_journal(path, started="1").close()
    open_journal(path, started="2").close()
    assert read_journal(path).head["started"] == "1"


class Failing(Disk):
    """A disk whose n-th ``write`` or ``sync`` fails, after writing ``after`` bytes."""

    def __init__(self, call, number, code, after=0):
        self.calls, self.call, self.number, self.code, self.after = 0, call, number, code, after

    def _count(self, call):
        self.calls += call == self.call
        if call == self.call and self.calls == self.number:
            raise OSError(self.code, os.strerror(self.code))

    def write(self, descriptor, data):
        try:
            self._count("write")
        except OSError:
            os.write(descriptor, data[: self.after])
            raise
        return super().write(descriptor, data)

    def sync(self, descriptor):
        self._count("sync")
        super().sync(descriptor)


@pytest.mark.parametrize(
    "disk",
    [
        Failing("write", 5, errno.ENOSPC),
        Failing("write", 5, errno.ENOSPC, after=20),
        Failing("sync", 3, errno.EIO),
        Failing("write", 5, errno.EDQUOT, after=1),
    ],
)
def test_failing_disk_loses_no_acknowledged_result(path, disk):
    acknowledged = []
    with pytest.raises(JournalError, match=r"cannot be written: .*; what was written before is"):
        write_all(path, disk, acknowledged)
    assert list(read_journal(path).results) == acknowledged
    with open_journal(path) as journal:
        assert list(journal.results) == acknowledged


def write_all(path, disk, acknowledged):
    with open_journal(path, disk=disk) as journal:
        for one in UNITS:
            journal.write_start(one)
            journal.write_result(done(one))
            acknowledged.append(one.id)


def test_nothing_is_written_after_a_disk_failure(path):
    journal = open_journal(path, disk=Failing("sync", 2, errno.EIO))
    with pytest.raises(JournalError):
        journal.write_result(done(UNITS[0]))
    size = path.stat().st_size
    with pytest.raises(JournalError, match="cannot be written"):
        journal.write_result(done(UNITS[1]))
    journal.close()
    assert path.stat().st_size == size


def test_file_size_limit_is_a_journal_error(path):
    """The operating system itself refuses the write, as it does on a full disk."""
    code = f"""
import resource
from tests.workers.test_journal import *
acknowledged = []
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
try:
    write_all(Path({str(path)!r}), None, acknowledged)
except JournalError as error:
    print(error)
print(*acknowledged)
"""
    root = Path(__file__).parents[2]
    error, acknowledged = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "cannot be written: File too large" in error
    assert 0 < len(acknowledged.split()) < len(UNITS)
    assert list(read_journal(path).results) == acknowledged.split()


def test_unwritable_path_is_a_journal_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot be written: File exists"):
        open_journal(tmp_path / "file" / "results.jsonl")
    with pytest.raises(JournalError, match="cannot be written: Is a directory"):
        open_journal(tmp_path)
    with pytest.raises(JournalError, match="cannot be written"):
        open_journal(Path("/proc/results.jsonl"))


def test_too_long_and_too_deep_lines_are_refused(path, monkeypatch):
    deep = {}
    for _ in range(70):
        deep = {"d": deep}
    with open_journal(path) as journal, pytest.raises(JournalError, match="nested deeper than 64"):
        journal.write_result(done(UNITS[0], facts=deep))
    monkeypatch.setattr("attncheck.workers.journal_format.LONGEST", 1000)
    with open_journal(path) as journal, pytest.raises(JournalError, match="is longer than 1000"):
        journal.write_result(done(UNITS[0], harness="x" * 1000))
    assert LONGEST > 2**20


def test_reading_a_too_deep_line_is_an_error(path):
    open_journal(path).close()
    content, deep = read_journal(path), b'{"d":' * 100_000 + b"1" + b"}" * 100_000
    from attncheck.workers.journal_format import _SUM, _checksum

    body = b'{"n":%d,"kind":"end","at":0,"x":%s' % (content.lines, deep)
    with path.open("ab") as file:
        file.write(body + _SUM + _checksum(body) + b'"}\n')
    with pytest.raises(JournalError, match=f"line {content.lines + 1}"):
        read_journal(path)


def test_journal_records_the_exception_that_ended_the_run(path):
    with pytest.raises(ZeroDivisionError), open_journal(path):
        raise ZeroDivisionError("of something")
    assert read_journal(path).why == "ZeroDivisionError: of something"


class LoggedDisk(Disk):
    """Logs its calls in order."""

    def __init__(self):
        self.calls = []

    def write(self, descriptor, data):
        self.calls.append("write")
        return super().write(descriptor, data)

    def sync(self, descriptor):
        self.calls.append("sync")
        super().sync(descriptor)


class Hasty(Journal):
    """Planted fault: acknowledges a result that is not on disk yet."""

    def write_result(self, done, *, quarantined=False):
        self._write("result", {"done": done})


@pytest.mark.parametrize(("kind", "right"), [(Journal, True), (Hasty, False)])
def test_result_is_written_and_synced_before_it_is_acknowledged(path, kind, right):
    disk = LoggedDisk()
    with kind.open(path, HEADER, resume=True, disk=disk) as journal:
        disk.calls.clear()
        journal.write_result(done(UNITS[0]))
        assert (disk.calls == ["write", "sync"]) == right
