"""A process is listened to and ended with all that it started, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncheck.workers.process import KEPT, Ended, Late, Process, Tail

# A daemon: out of the session, its parent gone, its name in a file when it is there.
_DAEMON = """
import os, sys, time
if os.fork():
    os.wait()
    os.write(int(sys.argv[2]), b"started ")
    os.read(int(sys.argv[1]), 1)
    {then}
elif os.fork():
    os._exit(0)
os.setsid()
os.write(int(sys.argv[2]), f"{{os.getpid()}} ".encode())
time.sleep(1000)
"""


def started(code):
    return Process(
        lambda reads, writes: [sys.executable, "-S", "-c", code, str(reads), str(writes)],
        environment={**os.environ},
        folder="",
    )


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def descriptors():
    return {each.name for each in Path("/proc/self/fd").iterdir()}


def soon(seconds=30.0):
    return time.monotonic() + seconds


def read_until(process, count):
    found = b""
    while len(found.split()) < count:
        process.wait(process.replies, soon())
        found += os.read(process.replies, 100)
    return found.decode().split()


@pytest.mark.parametrize("then", ["time.sleep(1000)", "os._exit(0)"], ids=["hangs", "leaves"])
def test_a_daemon_ends_with_who_started_it(then):
    process = started(_DAEMON.format(then=then))
    said = read_until(process, 2)
    (daemon,) = (int(each) for each in said if each != "started")
    assert runs(daemon)
    os.write(process.requests, b"x")
    process.await_end(0.0 if "sleep" in then else 30.0)
    process.kill(5.0)
    assert not runs(daemon)
    assert not runs(process.pid)


def test_the_last_of_what_is_printed_is_kept():
    code = "import os\nfor _ in range(200): os.write(1, bytes(1 << 16))\nos.write(2, b'e')"
    process = started(code)
    process.wait(process.replies, soon())  # until it closes it, by its end
    assert os.read(process.replies, 1) == b""
    assert process.await_end(30.0) == 0
    process.kill(5.0)
    assert (len(process.stdout.text), process.stderr.text) == (KEPT, "e")
    assert process.stdout.forgotten == 200 * 65536 - KEPT


def test_who_is_silent_is_late():
    process = started("import time; time.sleep(1000)")
    with pytest.raises(Late):
        process.wait(process.replies, time.monotonic())
    assert process.ended is None
    process.kill(5.0)


@pytest.mark.parametrize(("end", "code"), [("os._exit(3)", 3), ("os.abort()", -signal.SIGABRT)])
def test_how_it_ended_is_known(end, code):
    process = started(f"import os; {end}")
    assert process.await_end(30.0) == code
    process.kill(5.0)
    assert process.ended == code


def test_an_end_is_seen_though_a_fork_holds_the_pipe():
    process = started("import os, time\nif os.fork(): os._exit(0)\ntime.sleep(1000)")
    with pytest.raises(Ended):
        process.wait(process.replies, soon())
    process.kill(5.0)


def test_lines_are_harmless():
    tail = Tail()
    tail.add(b"first\n\x1b[31mred\x1b[0m \xe2\x80\xae\xff\n\n  \nlast\n")
    assert tail.lines(2) == "red \N{REPLACEMENT CHARACTER} | last"


_OWNER = """
import os, sys, time
from attncheck.examine.process import Process
{start}
print(pid, flush=True)
time.sleep(1000)
"""
_CONNECTED = """
from attncheck.examine.connection import Connection, Deadlines
words = dict(convention="", device="cpu", gpu="", deadlines=Deadlines(), folder="")
connection = Connection("ideal", **words)
pid = connection.pid
"""
_HOLDS_THE_GIL = """
code = '''
import ctypes, os, sys
from attncheck.examine.worker import _bind
_bind(int(sys.argv[1]), dies_with_it=True)
ctypes.PyDLL(None).pause()
'''
command = [sys.executable, "-c", code, str(os.getpid())]
process = Process(lambda *_: command, environment={**os.environ}, folder="")
pid = process.pid
"""


@pytest.mark.parametrize("start", [_CONNECTED, _HOLDS_THE_GIL], ids=["a worker", "the GIL held"])
def test_no_process_outlives_its_owner(start):
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER.format(start=start)], stdout=subprocess.PIPE, text=True
    ) as owner:
        worker = int(owner.stdout.readline())
        assert runs(worker)
        owner.kill()
    deadline = soon(60.0)
    while runs(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_descriptors_are_given_back():
    before = descriptors()
    process = started("pass")
    process.end(30.0)
    assert descriptors() == before
