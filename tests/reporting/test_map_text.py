"""The error map by head and row, drawn in a few lines of text."""

import io
import math

import msgspec
import pytest
from tests.reporting import gate_reports as gates

from attncheck.records.record import ErrorMap
from attncheck.reporting.diagnosis_text import diagnosis_text, map_lines
from attncheck.reporting.terminal import print_text


def mapped(*values, rows=64, heads=1):
    error_map = ErrorMap(rows=rows, heads=heads, values=values)
    return msgspec.structs.replace(gates.wrong(), error_map=error_map)


def test_map_has_a_line_per_head_and_a_column_per_row_tile():
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
def test_uninformative_map_is_not_drawn(values):
    assert list(map_lines(mapped(*values))) == []
    assert list(map_lines(gates.record())) == []


def test_nan_gets_the_darkest_shade():
    assert list(map_lines(mapped((math.nan, 0.0) * 4)))[1] == "█·█·█·█·"


def test_large_map_is_folded_keeping_the_worst_value():
    values = [[0.0] * 64 for _ in range(32)]
    values[31][63] = values[0][0] = 5.0
    head, *lines, _ = map_lines(mapped(*map(tuple, values), heads=2))
    assert head == "error ÷ allowed; a line is 8 heads, a column 128 rows"
    assert (len(lines), {len(line) for line in lines}) == (8, {32})
    assert (lines[0][0], lines[-1][-1]) == ("▒", "▒")
    assert "".join(lines).count("▒") == 2


def test_diagnosis_contains_the_map():
    text = diagnosis_text(mapped((0.05, 2.0, 2.0, 2.0) * 2), kernel="k")
    assert "  where      error ÷ allowed; a line is 1 head, a column 64 rows\n" in text
    assert "\n             ·▒▒▒·▒▒▒\n" in text


@pytest.mark.parametrize(
    ("encoding", "text"), [("ascii", ".-+#@ ?"), ("utf-8", "·░▒▓█ ÷")], ids=["ascii", "utf-8"]
)
def test_shades_are_replaced_only_where_the_encoding_lacks_them(encoding, text):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_text("·░▒▓█ ÷", stream)
    stream.flush()
    assert stream.buffer.getvalue().decode() == text
