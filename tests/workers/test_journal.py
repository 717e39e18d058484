"""A journal: what is acknowledged is on the disk, once, and what is on the disk is believed."""

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


def opened(path, resume=True, disk=None, **header):
    return Journal.open(path, HEADER | header, resume=resume, disk=disk)


def done(asked, **rest):
    return UnitResult(unit=asked.id, **rest)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gate" / "results.jsonl"


@pytest.fixture
def two(path):
    """A journal in which two units are done and one was begun."""
    with opened(path) as journal:
        journal.queued(UNITS)
        for one in UNITS[:2]:
            journal.begun(one)
            journal.done(done(one, facts={"x": 1}))
        journal.begun(UNITS[2])
    return path


def test_what_was_done_is_there_when_it_is_opened_again(two):
    with opened(two) as journal:
        assert list(journal.results) == [one.id for one in UNITS[:2]]
        assert journal.lost(UNITS[2]) == 1
        assert journal.lost(UNITS[3]) == 0
        assert journal.content.unfinished == tuple(UNITS[2:])


def test_every_number_and_word_comes_back_as_it_was(path):
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
    with opened(path) as journal:
        journal.done(whole)
    back = read_journal(path).results[UNITS[0].id]
    assert repr(back) == repr(whole)  # NaN is not equal to itself
    assert back.units[0].id == whole.units[0].id


def test_foreign_text_that_is_no_unicode_is_written_as_its_escape(path):
    with opened(path) as journal:
        journal.done(done(UNITS[0], harness="bad \ud800 and \x1b[31m"))
    assert read_journal(path).results[UNITS[0].id].harness == "bad \\ud800 and \x1b[31m"


def test_a_reader_needs_no_lock_and_sees_what_is_acknowledged(path):
    with opened(path) as journal:
        journal.begun(UNITS[0])
        journal.done(done(UNITS[0]))
        assert list(read_journal(path).results) == [UNITS[0].id]
        assert read_journal(path).why == "killed"
        journal.end("interrupted")
    content = read_journal(path)
    assert content.why == "interrupted"
    assert content.seconds > 0


def test_one_torn_line_at_the_end_is_cut(two):
    whole = two.read_bytes()
    lines = whole.splitlines(keepends=True)
    results = len(read_journal(two).results)
    for size in (len(whole) - 1, len(whole) - 2, len(whole) - len(lines[-1]) + 1):
        two.write_bytes(whole[:size])
        assert read_journal(two).torn
        opened(two).close()
        content = read_journal(two)
        assert not content.torn
        assert len(content.results) == results
        assert two.read_bytes().startswith(whole[: len(whole) - len(lines[-1])])


def test_every_prefix_of_a_journal_can_be_resumed(two):
    """Whenever its writer was killed."""
    whole = two.read_bytes()
    acknowledged = [
        (end, content.results)
        for end in range(len(whole) + 1)
        if whole[:end].endswith(b"\n") and (content := _content(two, whole[:end]))
    ]
    for size in range(0, len(whole), 7):
        two.write_bytes(whole[:size])
        with opened(two) as journal:
            expected = [results for end, results in acknowledged if end <= size]
            assert dict(journal.results) == (expected[-1] if expected else {})


def _content(path, raw):
    path.write_bytes(raw)
    return read_journal(path)


def test_zeros_after_a_power_cut_are_a_torn_line(two):
    two.write_bytes(two.read_bytes() + bytes(300))
    assert len(read_journal(two).results) == 2
    opened(two).close()
    assert not read_journal(two).torn


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_a_damaged_line_elsewhere_is_an_error(two, number):
    lines = two.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b'"at":0', b'"at":1', 1)
    two.write_bytes(b"".join(lines))
    before = two.read_bytes()
    damage = (
        f"line {number + 1}: it is not whole, or its checksum is wrong. Start anew with --fresh"
    )
    with pytest.raises(JournalError, match=damage):
        opened(two)
    with pytest.raises(JournalError):
        read_journal(two)
    assert two.read_bytes() == before


def test_a_gap_and_a_repeat_are_errors_even_at_the_end(two):
    lines = two.read_bytes().splitlines(keepends=True)
    two.write_bytes(b"".join(lines[:4] + lines[5:]))
    with pytest.raises(JournalError, match="line 5: its number is 5, not 4"):
        read_journal(two)
    two.write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(JournalError, match=f"its number is {len(lines) - 1}, not {len(lines)}"):
        read_journal(two)


def test_two_results_of_one_unit_are_an_error(two):
    content = read_journal(two)
    with two.open("ab") as file:
        file.write(journal_line(content.lines, "result", 0.0, {"done": done(UNITS[0])}))
    with pytest.raises(JournalError, match="has two results"):
        read_journal(two)


def test_a_result_is_written_once_and_not_begun_after(two):
    size = two.stat().st_size
    with opened(two) as journal:
        for again in (lambda: journal.done(done(UNITS[0])), lambda: journal.begun(UNITS[0])):
            with pytest.raises(JournalError, match="has a result already"):
                again()
    assert b'"result"' not in two.read_bytes()[size:]


def test_a_file_that_is_no_journal_is_left_as_it_is(path):
    path.parent.mkdir()
    for text in (b"notes without a newline", b"notes\n", b'{"n":1}\n', b"[1,2]\n{}\n"):
        path.write_bytes(text)
        with pytest.raises(JournalError, match="line 1"):
            opened(path)
        assert path.read_bytes() == text


def test_units_that_were_ended_by_us_were_not_lost(two):
    with opened(two) as journal:
        journal.begun(UNITS[2])
        assert journal.lost(UNITS[2]) == 2
        journal.abandoned([UNITS[2].id])
    assert read_journal(two).lost[UNITS[2].id] == 1


def test_a_second_writer_is_refused_in_one_line(two):
    with opened(two):
        with pytest.raises(JournalError) as excinfo:
            opened(two)
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
    opened(two).close()  # and now it may be opened


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"tier": "pr"}, "tier is 'smoke' there and 'pr' here"),
        ({"kernels": ["k", "l"]}, "kernels is ['k'] there and ['k', 'l'] here"),
        ({"shard": "1/2"}, "shard is None there and '1/2' here"),
    ],
)
def test_another_run_is_refused_and_what_differs_is_said(two, other, said):
    before = two.read_bytes()
    with one_line(JournalError, said, match="start anew with --fresh"):
        opened(two, **other)
    assert two.read_bytes() == before
    with opened(two, resume=False, **other) as journal:
        assert not journal.results


def test_another_version_is_another_run(two, monkeypatch):
    monkeypatch.setattr("attncheck.workers.journal.VERSION", "99")
    with pytest.raises(JournalError, match=r"version is '.*' there and '99' here"):
        opened(two)


def test_another_schema_is_refused(two, monkeypatch):
    monkeypatch.setattr("attncheck.workers.journal_format.SCHEMA", 2)
    with pytest.raises(JournalError, match="its schema is 1, this version reads 2"):
        read_journal(two)


def test_when_it_was_started_makes_no_other_run(path):
    opened(path, started="1").close()
    opened(path, started="2").close()
    assert read_journal(path).head["started"] == "1"


class Failing(Disk):
    """A disk whose n-th call fails."""

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
def test_a_disk_that_fails_loses_nothing_that_was_acknowledged(path, disk):
    acknowledged = []
    with pytest.raises(JournalError, match=r"cannot be written: .*; what was written before is"):
        write_all(path, disk, acknowledged)
    assert list(read_journal(path).results) == acknowledged
    with opened(path) as journal:
        assert list(journal.results) == acknowledged


def write_all(path, disk, acknowledged):
    with opened(path, disk=disk) as journal:
        for one in UNITS:
            journal.begun(one)
            journal.done(done(one))
            acknowledged.append(one.id)


def test_after_a_failure_nothing_more_is_written(path):
    journal = opened(path, disk=Failing("sync", 2, errno.EIO))
    with pytest.raises(JournalError):
        journal.done(done(UNITS[0]))
    size = path.stat().st_size
    with pytest.raises(JournalError, match="cannot be written"):
        journal.done(done(UNITS[1]))
    journal.close()
    assert path.stat().st_size == size


def test_a_file_that_may_not_grow_is_a_journal_error(path):
    """As a full disk, by the operating system itself."""
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
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "cannot be written: File too large" in told[0]
    assert 0 < len(told[1].split()) < len(UNITS)
    assert list(read_journal(path).results) == told[1].split()


def test_a_folder_that_cannot_be_written_is_a_journal_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot be written: File exists"):
        opened(tmp_path / "file" / "results.jsonl")
    with pytest.raises(JournalError, match="cannot be written: Is a directory"):
        opened(tmp_path)
    with pytest.raises(JournalError, match="cannot be written"):
        opened(Path("/proc/results.jsonl"))


def test_lines_have_a_longest_and_a_deepest(path, monkeypatch):
    deep = {}
    for _ in range(70):
        deep = {"d": deep}
    with opened(path) as journal, pytest.raises(JournalError, match="nested deeper than 64"):
        journal.done(done(UNITS[0], facts=deep))
    monkeypatch.setattr("attncheck.workers.journal_format.LONGEST", 1000)
    with opened(path) as journal, pytest.raises(JournalError, match="is longer than 1000"):
        journal.done(done(UNITS[0], harness="x" * 1000))
    assert LONGEST > 2**20


def test_a_foreign_line_that_is_too_deep_is_an_error(path):
    opened(path).close()
    content, deep = read_journal(path), b'{"d":' * 100_000 + b"1" + b"}" * 100_000
    from attncheck.workers.journal_format import _SUM, _checksum

    body = b'{"n":%d,"kind":"end","at":0,"x":%s' % (content.lines, deep)
    with path.open("ab") as file:
        file.write(body + _SUM + _checksum(body) + b'"}\n')
    with pytest.raises(JournalError, match=f"line {content.lines + 1}"):
        read_journal(path)


def test_an_error_within_is_why_it_ended(path):
    with pytest.raises(ZeroDivisionError), opened(path):
        raise ZeroDivisionError("of something")
    assert read_journal(path).why == "ZeroDivisionError: of something"


class Order(Disk):
    """Remembers what was done when."""

    def __init__(self):
        self.seen = []

    def write(self, descriptor, data):
        self.seen.append("write")
        return super().write(descriptor, data)

    def sync(self, descriptor):
        self.seen.append("sync")
        super().sync(descriptor)


class Hasty(Journal):
    """The planted fault: it acknowledges what is not on the disk yet."""

    def done(self, done, *, quarantined=False):
        self._write("result", {"done": done})


@pytest.mark.parametrize(("kind", "right"), [(Journal, True), (Hasty, False)])
def test_a_result_is_one_write_and_one_sync_before_it_is_acknowledged(path, kind, right):
    disk = Order()
    with kind.open(path, HEADER, resume=True, disk=disk) as journal:
        disk.seen.clear()
        journal.done(done(UNITS[0]))
        assert (disk.seen == ["write", "sync"]) == right
