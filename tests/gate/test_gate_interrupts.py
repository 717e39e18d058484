"""Ctrl-C in a real run: one ends it in good order, two at once, and the same command goes on."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from tests.gate.driven import git

from attncheck.workers.journal_format import JournalError, read_journal

WORDS = ("ideal", "--device", "cpu", "--dtype", "fp32", "--stage", "contract", "--jobs", "1")


HANGS = """\
import pathlib
import time


def kernel(query, key, value):
    pathlib.Path("called").touch()
    time.sleep(600)
"""


def begun(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "attncheck", "gate", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def started(folder, *words):
    """A gate that is at work: its journal has an answer."""
    process = begun(folder, *WORDS, *words)
    journal = folder / "reports" / "gate" / "results.jsonl"
    while process.poll() is None and not _answered(journal):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    return process, journal


def _answered(journal):
    try:
        return any(done.answers for done in read_journal(journal).results.values())
    except JournalError:  # not there yet, or no line of it
        return False


def test_one_ends_the_run_in_good_order_and_it_goes_on(tmp_path, warm_python):
    process, journal = started(tmp_path, "--in-process", "-q")
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
    before = set(content.results)

    words = ("gate", *WORDS, "--in-process", "--strict", "-q")
    rest = warm_python.run("attncheck", *words, cwd=tmp_path, timeout=300)
    assert rest.returncode == 0, rest.stdout + rest.stderr
    content = read_journal(journal)
    assert before <= set(content.results)
    assert not content.unfinished
    assert "--strict" in content.head["typed"]  # as the last session was typed


def test_two_end_it_at_once_with_130(tmp_path):
    """The kernel is called, and does not come back: one interrupt would wait for it.

    The files of the commit that it is beside are gone then, too.
    """
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "temporary").mkdir()
    for words in (("init", "-q"), ("add", "hangs.py"), ("commit", "-q", "-m", "It hangs")):
        git(tmp_path, *words)
    more = ("--stage", "baseline", "--against", "HEAD", "--in-process", "-q")
    process = begun(tmp_path, "hangs.py::kernel", *WORDS[1:], *more)
    while process.poll() is None and not (tmp_path / "called").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):  # of two at the same moment a process hears one
        process.wait(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    content = read_journal(tmp_path / "reports" / "gate" / "results.jsonl")
    assert content.why == "interrupted"
    assert not any(content.lost.values())  # what was ended is not held against its unit
    assert not list((tmp_path / "temporary").glob("attncheck-against-*"))
    assert git(tmp_path, "worktree", "list").count("\n") == 1
