"""Worker processes: output, deadlines, deaths, and that no process outlives its owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.workers.planted_servers import is_running

from attncheck.workers import process
from attncheck.workers.process import KEPT, Died, HeldOutput, Tail, Worker
from attncheck.workers.transport import Frame

SERVER = "tests.workers.planted_servers:planted"


def start_worker():
    return Worker(SERVER, paths=(str(Path(__file__).parents[2]),))


def call(worker, method, seconds=30.0, **words):
    frame = Frame(kind=method, words=words)
    return worker.exchange(frame, seconds=seconds, most=0, what="at all").words["value"]


@pytest.mark.parametrize("ending", ["kill", "end"])
def test_daemon_ends_with_the_worker_that_started_it(ending):
    worker = start_worker()
    daemon = call(worker, "daemon")
    assert is_running(daemon)
    getattr(worker, ending)(5.0)
    assert not is_running(daemon)
    assert not is_running(worker.pid)


def test_daemon_of_a_worker_that_died_is_killed():
    worker = start_worker()
    daemon = call(worker, "daemon")
    with pytest.raises(Died):
        call(worker, "exits", code=3)
    assert not is_running(daemon)


def test_only_the_end_of_the_output_is_kept():
    worker = start_worker()
    assert call(worker, "prints", chunks=200) == 200
    worker.kill(5.0)
    assert (len(worker.stdout.text), worker.stderr.text) == (KEPT, "e")


@pytest.mark.parametrize("method", ["hangs", "holds_the_lock"])
def test_hanging_worker_times_out_and_is_killed(method):
    worker = start_worker()
    call(worker, "says", words="ready")
    with pytest.raises(Died, match=r"^it did not answer at all in 0\.2 s; it said: ready$") as late:
        call(worker, method, seconds=0.2)
    assert late.value.kind == "timeout"
    assert not is_running(worker.pid)


@pytest.mark.parametrize(
    ("method", "words", "code", "message"),
    [
        ("exits", {"code": 3}, 3, "its process ended with exit code 3 before it answered."),
        ("aborts", {}, -signal.SIGABRT, "its process died of SIGABRT before it answered; it said:"),
        ("forks_and_exits", {}, 0, "its process ended with exit code 0 before it answered."),
    ],
)
def test_death_reports_exit_code_or_signal(method, words, code, message):
    worker = start_worker()
    with pytest.raises(Died) as died:
        call(worker, method, **words)
    assert (died.value.kind, worker.ended) == ("crash", code)
    assert str(died.value).startswith(message)
    with pytest.raises(Died):  # as does every later call
        worker.receive(seconds=30.0, most=0)


def test_tail_strips_escapes_and_blank_lines():
    tail = Tail()
    tail.add(b"first\n\x1b[31mred\x1b[0m \xe2\x80\xae\xff\n\n  \nlast\n")
    assert tail.lines(2) == "red \N{REPLACEMENT CHARACTER} | last"


def test_held_output_is_shown_without_the_dump_of_threads(capsys):
    """A last line without a newline is shown; a dump of threads is quoted elsewhere."""
    for parts, shown in (
        ((b"first\nlast", b""), "first\nlast\n"),
        ((b"la", b"st", b""), "last\n"),
        ((b"before\nFatal Python error: Segmentation fault\nframe\n", b""), "before\n"),
        ((b"before\nFatal Python error: Aborted\n  File", b" of ours\n", b""), "before\n"),
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
worker.send(Frame(kind={method!r}, words={{}}), seconds=60)
print(worker.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("method", ["hangs", "holds_the_lock"])
def test_worker_does_not_outlive_its_killed_owner(method):
    code = _OWNER.format(root=str(Path(__file__).parents[2]), method=method)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
    deadline = time.monotonic() + 60.0
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ended_worker_leaves_no_descriptors_open():
    before = os.listdir("/proc/self/fd")  # noqa: PTH208  # Path.iterdir() opens another one
    worker = start_worker()
    call(worker, "says", words="ready")
    worker.end(30.0)
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208
