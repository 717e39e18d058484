"""A diagnosis in words: the lines labelled "likely", "or", "perhaps" and "seen"."""

import msgspec
import pytest

from attncheck.records.record import Diagnosis, Explanation, TileMap
from attncheck.reporting.diagnosis_text import explanation_facts, tile_picture


def explanation(sentence, share=0.998, explains_all=True, **parameters):
    return Explanation(
        model="m", sentence=sentence, share=share, explains_all=explains_all, parameters=parameters
    )


def lines(*ranked, tied=0, tried=45, **known):
    level = "named" if tied else "unknown"
    fields = {"level": level, **known}
    return list(explanation_facts(Diagnosis(ranked=ranked, tied=tied, tried=tried, **fields)))


def test_confirmed_model_is_likely():
    (line,) = lines(explanation("the mask is wide"), explanation("else", 0.3, False), tied=1)
    assert line == (
        "likely",
        "the mask is wide (explains 99.8 % of the error, and rounding the rest)",
    )


def test_tied_models_are_joined_by_or():
    (likely, text), (alternative, _) = lines(
        explanation("one", tile=64), explanation("two"), tied=2
    )
    assert (likely, alternative) == ("likely", "or")
    assert text.startswith("one [tile 64]")


def test_proven_fault_precedes_partial_explanation():
    ranked = (explanation("it reads beside", 1.0, of="v"), explanation("else", 0.7, False))
    assert list(explanation_facts(Diagnosis(ranked=ranked, tied=1, tried=0))) == [
        ("likely", "it reads beside [of v]"),
        ("perhaps", "else (explains 70 % of the error)"),
    ]


def test_partial_explanation_is_perhaps():
    assert lines(explanation("one", 0.99999, False)) == [
        ("likely", "unknown: none of 45 fault models fits"),
        ("perhaps", "one (explains 99.9 % of the error)"),
    ]


def test_family_is_shown_with_observed_facts():
    observed = {"level": "family", "family": "a factor", "facts": ("right in fp32",)}
    assert lines(explanation("one"), **observed) == [
        ("likely", "a factor; none of 45 fault models alone is confirmed"),
        ("perhaps", "one (explains 99.8 % of the error, and rounding the rest)"),
        ("seen", "right in fp32"),
    ]


def test_unknown_when_no_model_fits():
    assert lines() == [("likely", "unknown: none of 45 fault models fits")]


def test_single_model_is_no_plural():
    text = "the one fault model that applies"
    assert lines(tried=1) == [("likely", f"unknown: {text} does not fit")]
    family = {"level": "family", "family": "a factor"}
    assert lines(tried=1, **family) == [("likely", f"a factor; {text} is not confirmed")]


def test_undiagnosed_record_has_no_lines():
    assert list(explanation_facts(msgspec.UNSET)) == []


@pytest.mark.parametrize(("rows", "shown"), [(4, True), (1, False)])
def test_tile_map_is_drawn_only_for_several_rows(rows, shown):
    values = tuple(tuple(1.0 if i == j else 0.0 for j in range(8)) for i in range(rows))
    tiles = TileMap(rows=16, keys=32, values=values)
    picture = list(tile_picture(Diagnosis(ranked=(), tied=0, tried=1, tiles=tiles)))
    assert bool(picture) is shown
    if shown:
        assert picture[0] == "weights that are off; a line is 16 rows, a column 32 keys"
        assert picture[1] == "█·······"
