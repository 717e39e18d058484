"""Every hostile kernel and bad input ends as the table says, and the page shows the table."""

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


def ended(entry, folder, servers):
    done = run(entry, folder, servers)
    found = mistakes(entry, folder, done)
    assert not found, f"{found}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("entry", params(each for each in ENTRIES if each not in OPTIONS))
def test_it_ends_as_the_table_says(entry, tmp_path, warm_python):
    ended(entry, tmp_path, warm_python)


@pytest.mark.parametrize("entry", params(OPTIONS))
def test_a_bad_option_is_one_line(entry, tmp_path, warm_python):
    ended(entry, tmp_path, warm_python)


def test_there_are_two_hundred_and_each_is_another():
    assert len(ENTRIES) >= 200
    assert not [name for name, count in Counter(each.id for each in ENTRIES).items() if count > 1]
    same = Counter(repr(replace(each, family="", name="", says="", code=0)) for each in ENTRIES)
    assert not [entry for entry, count in same.items() if count > 1]


def test_the_page_shows_the_table():
    """``ATTNCHECK_UPDATE_SNAPSHOTS=1 pytest tests/hostile`` writes it anew."""
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


@pytest.mark.parametrize("says", PLANTED)
def test_what_is_not_as_the_table_says_is_told(says, tmp_path, warm_python):
    right = next(each for each in ENTRIES if each.name == "waits for standard input")
    entry = replace(right, **PLANTED[says])
    done = run(entry, tmp_path, warm_python)
    found = mistakes(replace(entry, environment={}), tmp_path, done)
    assert any(says in each for each in found), found


def test_a_process_and_a_traceback_that_are_left_are_told(tmp_path, warm_python):
    line = """(sleep 9 > out & echo 'File "x/attncheck/y.py"'; exit 1) 2> out"""
    entry = replace(ENTRIES[0], line=line, kernel="")
    found = mistakes(entry, tmp_path, run(entry, tmp_path, warm_python))
    assert "a traceback of ours" in found
    assert any("still run: [" in each and "sleep 9" in each for each in found), found
