"""Where the errors are, in a few lines of text."""

import io
import math

import msgspec
import pytest
from tests.reporting import gate_reports as made

from attncheck.records.record import ErrorMap
from attncheck.reporting.diagnosis_text import diagnosis_text, map_lines
from attncheck.reporting.terminal import print_text


def mapped(*values, rows=64, heads=1):
    found = ErrorMap(rows=rows, heads=heads, values=values)
    return msgspec.structs.replace(made.wrong(), error_map=found)


def test_heads_are_lines_and_rows_are_columns():
    record = mapped((0.05, 0.5, 2.0, 0.0), (20.0, 1.0, math.inf, 0.0))
    assert list(map_lines(record)) == [
        "error ÷ allowed; a line is 1 head, a column 64 rows",
        "·░▒·",
        "▓░█·",
        "· ≤ 0.1, ░ ≤ 1, ▒ ≤ 10, ▓ ≤ 100, █ more",
    ]


@pytest.mark.parametrize(
    "values",
    [
        ((0.1, 0.2) * 4,),
        ((0.1,) * 7 + (9.0,),),
        ((9.0,) * 8,),
        ((9.0, 9.0, 0.1, 0.1, 0.1, 0.1, 0.1),),
    ],
    ids=["none", "one", "all", "few"],
)
def test_nothing_is_drawn_where_the_worst_element_says_it_all(values):
    assert list(map_lines(mapped(*values))) == []
    assert list(map_lines(made.record())) == []


def test_nan_is_beyond_everything():
    assert list(map_lines(mapped((math.nan, 0.0) * 4)))[1] == "█·█·█·█·"


def test_a_large_map_is_folded_and_the_worst_is_kept():
    values = [[0.0] * 64 for _ in range(32)]
    values[31][63] = values[0][0] = 5.0
    head, *lines, _ = map_lines(mapped(*map(tuple, values), heads=2))
    assert head == "error ÷ allowed; a line is 8 heads, a column 128 rows"
    assert (len(lines), {len(line) for line in lines}) == (8, {32})
    assert (lines[0][0], lines[-1][-1]) == ("▒", "▒")
    assert "".join(lines).count("▒") == 2


def test_the_diagnosis_has_it():
    text = diagnosis_text(mapped((0.05, 2.0, 2.0, 2.0) * 2), kernel="k")
    assert "  where      error ÷ allowed; a line is 1 head, a column 64 rows\n" in text
    assert "\n             ·▒▒▒·▒▒▒\n" in text


def test_a_stream_without_shades_gets_other_signs():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_text("·░▒▓█ ÷", stream)
    stream.flush()
    assert stream.buffer.getvalue() == b".-+#@ ?"


def test_a_stream_that_has_them_keeps_them():
    stream = io.StringIO()
    print_text("·░▒▓█ ÷", stream)
    assert stream.getvalue() == "·░▒▓█ ÷"
