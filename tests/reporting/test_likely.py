"""A diagnosis in words."""

import msgspec
import pytest

from attncheck.records.record import Diagnosis, Explanation, TileMap
from attncheck.reporting.diagnosis_text import explanation_facts, tile_picture


def explanation(sentence, share=0.998, explains_all=True, **parameters):
    return Explanation(
        model="m", sentence=sentence, share=share, explains_all=explains_all, parameters=parameters
    )


def lines(*ranked, tied=0, **known):
    level = "named" if tied else "unknown"
    fields = {"level": level, **known}
    return list(explanation_facts(Diagnosis(ranked=ranked, tied=tied, tried=45, **fields)))


def test_one_that_explains_all():
    (line,) = lines(explanation("the mask is wide"), explanation("else", 0.3, False), tied=1)
    assert line == (
        "likely",
        "the mask is wide (explains 99.8 % of the error, and rounding the rest)",
    )


def test_ties_are_told():
    found = lines(explanation("one", tile=64), explanation("two"), tied=2)
    assert [label for label, _ in found] == ["likely", "or"]
    assert found[0][1].startswith("one [tile 64]")


def test_what_is_proven_comes_before_what_explains():
    ranked = (explanation("it reads beside", 1.0, of="v"), explanation("else", 0.7, False))
    found = list(explanation_facts(Diagnosis(ranked=ranked, tied=1, tried=0)))
    assert found == [
        ("likely", "it reads beside [of v]"),
        ("perhaps", "else (explains 70 % of the error)"),
    ]


def test_what_explains_a_part():
    found = lines(explanation("one", 0.99999, False))
    assert found[0] == ("likely", "unknown: none of 45 fault models fits")
    assert found[1] == ("perhaps", "one (explains 99.9 % of the error)")


def test_a_family_is_told_with_what_was_seen():
    found = lines(explanation("one"), level="family", family="a factor", facts=("right in fp32",))
    assert found == [
        ("likely", "a factor; none of 45 fault models alone is confirmed"),
        ("perhaps", "one (explains 99.8 % of the error, and rounding the rest)"),
        ("seen", "right in fp32"),
    ]


def test_none_fits():
    assert lines() == [("likely", "unknown: none of 45 fault models fits")]


def test_nobody_looked():
    assert list(explanation_facts(msgspec.UNSET)) == []


@pytest.mark.parametrize(("rows", "shown"), [(4, True), (1, False)])
def test_tiles_are_drawn_where_there_are_several(rows, shown):
    values = tuple(tuple(1.0 if i == j else 0.0 for j in range(8)) for i in range(rows))
    tiles = TileMap(rows=16, keys=32, values=values)
    found = list(tile_picture(Diagnosis(ranked=(), tied=0, tried=1, tiles=tiles)))
    assert bool(found) is shown
    if shown:
        assert found[0] == "weights that are off; a line is 16 rows, a column 32 keys"
        assert found[1] == "█·······"
