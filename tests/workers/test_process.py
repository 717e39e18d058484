"""A worker is listened to and killed with all that it started, and never outlives its owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.workers.planted_servers import runs

from attncheck.workers import process
from attncheck.workers.process import KEPT, Died, HeldOutput, Tail, Worker
from attncheck.workers.transport import Frame

PLANTED = "tests.workers.planted_servers:planted"
LATE = 30.0


def worker(**how):
    return Worker(PLANTED, paths=(str(Path(__file__).parents[2]),), **how)


def ask(one, kind, seconds=LATE, **words):
    frame = Frame(kind=kind, words=words)
    return one.exchange(frame, seconds=seconds, most=0, what="at all").words["value"]


@pytest.mark.parametrize("ending", ["kill", "end"])
def test_a_daemon_ends_with_who_started_it(ending):
    one = worker()
    daemon = ask(one, "daemon")
    assert runs(daemon)
    getattr(one, ending)(5.0)
    assert not runs(daemon)
    assert not runs(one.pid)


def test_a_daemon_of_who_died_first_is_killed():
    one = worker()
    daemon = ask(one, "daemon")
    with pytest.raises(Died):
        ask(one, "exits", code=3)
    assert not runs(daemon)


def test_the_last_of_what_is_printed_is_kept():
    one = worker()
    assert ask(one, "prints", chunks=200) == 200
    one.kill(5.0)
    assert (len(one.stdout.text), one.stderr.text) == (KEPT, "e")


@pytest.mark.parametrize("how", ["hangs", "holds_the_lock"])
def test_who_is_silent_is_late(how):
    one = worker()
    ask(one, "says", words="ready")
    with pytest.raises(Died, match=r"^it did not answer at all in 0\.2 s; it said: ready$") as late:
        ask(one, how, seconds=0.2)
    assert late.value.kind == "timeout"
    assert not runs(one.pid)


@pytest.mark.parametrize(
    ("how", "words", "code", "message"),
    [
        ("exits", {"code": 3}, 3, "its process ended with exit code 3 before it answered."),
        ("aborts", {}, -signal.SIGABRT, "its process died of SIGABRT before it answered; it said:"),
        ("forks_and_exits", {}, 0, "its process ended with exit code 0 before it answered."),
    ],
)
def test_how_it_ended_is_known(how, words, code, message):
    one = worker()
    with pytest.raises(Died) as died:
        ask(one, how, **words)
    assert (died.value.kind, one.ended) == ("crash", code)
    assert str(died.value).startswith(message)
    with pytest.raises(Died):  # whoever asks on hears the same
        one.receive(seconds=LATE, most=0)


def test_lines_are_harmless():
    tail = Tail()
    tail.add(b"first\n\x1b[31mred\x1b[0m \xe2\x80\xae\xff\n\n  \nlast\n")
    assert tail.lines(2) == "red \N{REPLACEMENT CHARACTER} | last"


def test_what_is_printed_last_is_shown(capsys):
    """A line without an end too, and what stands before a dump of threads, which is quoted."""
    for parts, shown in (
        ((b"first\nlast", b""), "first\nlast\n"),
        ((b"la", b"st", b""), "last\n"),
        ((b"before\nFatal Python error: Segmentation fault\nframe\n", b""), "before\n"),
    ):
        held = HeldOutput()
        echo = process._Echo(held)
        for part in parts:
            echo.add(part)
        held.show(passed=False)
        assert capsys.readouterr().err == shown


_OWNER = """
import sys, time
sys.path.insert(0, {root!r})
from attncheck.workers.process import Worker
from attncheck.workers.transport import Frame
worker = Worker("tests.workers.planted_servers:planted")
worker.exchange(Frame(kind="says", words={{"words": "ready"}}), seconds=60, most=0, what="")
worker.send(Frame(kind={how!r}, words={{}}), seconds=60)
print(worker.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["hangs", "holds_the_lock"])
def test_no_process_outlives_its_owner(how):
    code = _OWNER.format(root=str(Path(__file__).parents[2]), how=how)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        assert runs(pid)
        owner.kill()
    deadline = time.monotonic() + 60.0
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_descriptors_are_given_back():
    before = os.listdir("/proc/self/fd")  # noqa: PTH208  # as it is
    one = worker()
    ask(one, "says", words="ready")
    one.end(30.0)
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208  # as it is
