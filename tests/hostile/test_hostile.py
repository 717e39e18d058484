"""Every hostile kernel and bad input ends as the table says, and the page shows the table."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
from tests.hostile.hostile_entries import PAGE, families, mistakes, page, run

ENTRIES = [entry for family in families() for entry in family.entries]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            each,
            id=each.id,
            marks=pytest.mark.xfail(reason=each.pending) if each.pending else (),
        )
        for each in ENTRIES
    ],
)
def test_it_ends_as_the_table_says(entry, tmp_path, warm_python):
    done = run(entry, tmp_path, warm_python)
    found = mistakes(entry, tmp_path, done)
    assert not found, f"{found}\n{done.stdout}\n{done.stderr}"


def test_there_are_two_hundred_and_each_is_another():
    assert len(ENTRIES) >= 200
    assert not [name for name, count in Counter(each.id for each in ENTRIES).items() if count > 1]


def test_the_page_shows_the_table():
    if os.environ.get("ATTNCHECK_UPDATE_SNAPSHOTS") == "1":
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "run with ATTNCHECK_UPDATE_SNAPSHOTS=1"
