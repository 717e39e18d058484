"""Every hostile kernel and bad input ends as its table says, and the page shows the table."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from tests.hostile.hostile_entries import PAGE, families, mistakes, page, run

ENTRIES = [entry for family in families() for entry in family.entries]
OPTIONS = [entry for family in families("options") for entry in family.entries]


def params(entries):
    return [
        pytest.param(
            each,
            id=each.id,
            marks=pytest.mark.xfail(reason=each.pending) if each.pending else (),
        )
        for each in entries
    ]


def assert_ends_as_stated(entry, folder, servers):
    done = run(entry, folder, servers)
    problems = mistakes(entry, folder, done)
    assert not problems, f"{problems}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("entry", params(each for each in ENTRIES if each not in OPTIONS))
def test_hostile_entry_ends_as_the_table_says(entry, tmp_path, warm_python):
    assert_ends_as_stated(entry, tmp_path, warm_python)


@pytest.mark.parametrize("entry", params(OPTIONS))
def test_bad_option_is_one_line(entry, tmp_path, warm_python):
    assert_ends_as_stated(entry, tmp_path, warm_python)


def test_there_are_at_least_200_distinct_entries():
    assert len(ENTRIES) >= 200
    assert not [name for name, count in Counter(each.id for each in ENTRIES).items() if count > 1]
    copies = Counter(repr(replace(each, family="", name="", says="", code=0)) for each in ENTRIES)
    assert not [entry for entry, count in copies.items() if count > 1]


def test_documentation_page_shows_the_table():
    """``ATTNCHECK_UPDATE_SNAPSHOTS=1 pytest tests/hostile`` rewrites the page."""
    if os.environ.get("ATTNCHECK_UPDATE_SNAPSHOTS") == "1":
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "run with ATTNCHECK_UPDATE_SNAPSHOTS=1"


PLANTED = {
    "exit code 0, not 1": {"code": 1},
    "nothing says": {"says": "FAIL"},
    "lines of standard error": {
        "kernel": "[sys.stderr.write(f'{n}\\n') for n in range(9)]; os._exit(3)"
    },
    "left ['work/more.txt']": {"kernel": "open('more.txt', 'w'); return right(q, k, v)"},
    "left ['tmp/more.txt']": {"kernel": "open('../tmp/more.txt', 'w'); return right(q, k, v)"},
    "reach the terminal": {"environment": {"FORCE_COLOR": "1"}},
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_mistakes_reports_each_planted_deviation(mistake, tmp_path, warm_python):
    """Without this the table's tests could pass whatever attncheck does."""
    harmless = next(problem for problem in ENTRIES if problem.name == "waits for standard input")
    entry = replace(harmless, **PLANTED[mistake])
    done = run(entry, tmp_path, warm_python)
    problems = mistakes(replace(entry, environment={}), tmp_path, done)
    assert any(mistake in problem for problem in problems), problems


def test_mistakes_reports_a_leftover_process_and_a_traceback(tmp_path, warm_python):
    # Until it is called sleep, the process has no command line that could be reported.
    started = "until grep -aqs ^sleep /proc/$!/cmdline; do :; done"
    line = f"""(sleep 9 > out & {started}; echo 'File "x/attncheck/y.py"'; exit 1) 2> out"""
    entry = replace(ENTRIES[0], line=line, kernel="")
    problems = mistakes(entry, tmp_path, run(entry, tmp_path, warm_python))
    assert "a traceback of ours" in problems
    assert any("still run: [" in problem and "sleep 9" in problem for problem in problems), problems
