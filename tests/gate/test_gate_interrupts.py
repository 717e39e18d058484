"""One Ctrl-C ends a gate in good order, two end it at once, and the same command resumes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from tests.gate.gate_driver import git

from attncheck.workers.journal_format import JournalError, read_journal

WORDS = ("ideal", "--device", "cpu", "--dtype", "fp32", "--stage", "contract", "--jobs", "1")


HANGS = """\
import pathlib
import time


def kernel(query, key, value):
    pathlib.Path("called").touch()
    time.sleep(600)
"""


def start_gate(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "attncheck", "gate", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_gate_and_wait(folder, *words):
    """Starts a gate and returns once its journal has an answer."""
    process = start_gate(folder, *WORDS, *words)
    journal = folder / "reports" / "gate" / "results.jsonl"
    while process.poll() is None and not _has_answer(journal):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    return process, journal


def _has_answer(journal):
    try:
        return any(done.answers for done in read_journal(journal).results.values())
    except JournalError:  # no file yet, or no line in it
        return False


def test_one_interrupt_ends_the_run_cleanly_and_the_same_command_resumes(tmp_path, warm_python):
    process, journal = start_gate_and_wait(tmp_path, "--in-process", "-q")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "interrupted at" in err
    assert "the same command goes on" in err
    assert "Traceback" not in err
    assert "INCOMPLETE" in out
    content = read_journal(journal)
    assert content.why == "interrupted"
    assert content.unfinished
    assert content.head["typed"].startswith("attncheck gate ideal --device cpu")
    answered = set(content.results)

    words = ("gate", *WORDS, "--in-process", "--strict", "-q")
    resumed = warm_python.run("attncheck", *words, cwd=tmp_path, timeout=300)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    content = read_journal(journal)
    assert answered <= set(content.results)
    assert not content.unfinished
    assert "--strict" in content.head["typed"]  # the head records the last command


def test_two_interrupts_end_a_hanging_run_at_once(tmp_path):
    """The kernel never returns, so one interrupt would wait.

    The other commit's tree is removed too.
    """
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "temporary").mkdir()
    for words in (("init", "-q"), ("add", "hangs.py"), ("commit", "-q", "-m", "It hangs")):
        git(tmp_path, *words)
    more = ("--stage", "baseline", "--against", "HEAD", "--in-process", "-q")
    process = start_gate(tmp_path, "hangs.py::kernel", *WORDS[1:], *more)
    while process.poll() is None and not (tmp_path / "called").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):  # of two simultaneous signals one is lost
        process.wait(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    content = read_journal(tmp_path / "reports" / "gate" / "results.jsonl")
    assert content.why == "interrupted"
    assert not any(content.lost.values())  # an interrupt does not count as a death of its unit
    assert not list((tmp_path / "temporary").glob("attncheck-against-*"))
    assert git(tmp_path, "worktree", "list").count("\n") == 1
