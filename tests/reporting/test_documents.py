"""Pages of survey and score reports: every kind in every format, and facts no page may hide."""

import io
import json
from math import inf

import msgspec
import pytest
from msgspec.structs import replace
from tests.messages import one_line
from tests.reporting import gate_reports, samples

from attncheck.core.errors import UnknownName, UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.record import Diagnosis, Explanation
from attncheck.records.survey_reports import Distance, ModAnswer, Rows
from attncheck.reporting.exit_codes import exit_code
from attncheck.reporting.rendering import FORMATS, GATE_FORMATS, render, show
from attncheck.reporting.score_documents import tally

SAMPLES = samples.SAMPLES
EVIL = "</script>\x1b[31m|=cmd()\u202e\nnext \ud800"


def hostile(report):
    data = msgspec.to_builtins(report)
    data["command"] = EVIL
    for name in ("detail", "reason", "summary"):
        data = _with_field(data, name)
    return msgspec.convert(data, type(report))


def _with_field(value, name):
    if isinstance(value, dict):
        return {
            key: f"{one} {EVIL}" if key == name and one else _with_field(one, name)
            for key, one in value.items()
        }
    return [_with_field(one, name) for one in value] if isinstance(value, list) else value


def line(report, start):
    """The words of the table's only line that begins with ``start``."""
    (match,) = [
        each for each in render(report, "table").splitlines() if each.split()[:1] == [start]
    ]
    return " ".join(match.split())


# Every kind of report


@pytest.mark.parametrize("kind", SAMPLES)
def test_table_matches_snapshot(kind, matches_snapshot):
    matches_snapshot(f"{kind}.txt", render(SAMPLES[kind], "table"))


LATE_ROWS = {
    "bench": "decode",
    "oracles": "large",
    "certificates": "sink",
    "mods": "long",
    "blocks": "causal",
    "fingerprint": "bf16",
    "model": "takes none",
    "faults": "window-left",
    "own-tests": "f4",
    "mutants": "off-by-one:7:6",
    "sensitivity": "scale is off",
    "properties": "mine",
    "baseline": "better",
}


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("fmt", ["md", "csv", "html"])
def test_every_format_contains_late_rows(kind, fmt):
    page = render(SAMPLES[kind], fmt)
    assert LATE_ROWS[kind] in page
    assert page.endswith("\n")


@pytest.mark.parametrize("kind", [*SAMPLES, "gate"])
def test_json_round_trips_and_other_schemas_are_rejected(kind):
    report = gate_reports.sample() if kind == "gate" else SAMPLES[kind]
    text = render(report, "json")
    assert load_report(text, type(report)) == report
    for change in ({"schema": 99}, {"schema": True}, {"more": 1}):
        with one_line(UsageError):
            load_report(json.dumps(json.loads(text) | change), type(report))
    for broken in ("", "[]", "{", '{"schema": 1}', "[" * 100_000):
        with one_line(UsageError):
            load_report(broken, type(report))


def test_model_report_round_trips_infinities_and_the_text_nan():
    report = SAMPLES["model"]
    first, *rest = report.records
    calls = (replace(first.calls[0], module="nan", over_bound=inf), *first.calls[1:])
    drifts = (replace(first.drifts[0], error=inf, most=-inf), *first.drifts[1:])
    broken = replace(first, calls=calls, drifts=drifts, gradient_norm=inf)
    report = replace(report, records=(broken, *rest))
    assert load_report(render(report, "json"), type(report)) == report


def test_diagnosis_round_trips_infinities_and_the_text_nan(make):
    named = Explanation(
        model="nan", sentence="inf", share=inf, explains_all=False, parameters={"tensor": "nan"}
    )
    diagnosis = Diagnosis(ranked=(named,), tied=1, tried=3)
    report = make.report(make.record("nan", diagnosis=diagnosis))
    assert load_report(render(report, "json"), type(report)) == report


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("fmt", ["table", "md", "csv", "html"])
def test_hostile_text_is_neutralised(kind, fmt):
    page = render(hostile(SAMPLES[kind]), fmt)
    assert not set(page) & {"\x1b", "\u202e", "\ud800"}
    assert "cmd()\nnext" not in page
    if fmt in {"md", "html"}:
        assert page.count("</script>") == (fmt == "html") + page.count("`</script>")


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("width", [80, 140])
def test_lines_fit_the_terminal(kind, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    show(SAMPLES[kind], stream=stream)
    assert max(map(len, stream.getvalue().splitlines())) <= max(width, 100)


@pytest.mark.parametrize(
    ("report", "formats"),
    [(SAMPLES["oracles"], FORMATS), (gate_reports.sample(), GATE_FORMATS)],
    ids=["oracles", "gate"],
)
def test_unknown_format_is_rejected(report, formats):
    with pytest.raises(UnknownName, match=f"choose from {', '.join(sorted(formats))}"):
        render(report, "pdf")


# Oracles and certificates


@pytest.mark.parametrize(
    ("rows", "cell", "remark"),
    [
        ({"overflowed": 48}, "overflow", "naive overflows in 48 of 48 rows"),
        ({"vanished": 5}, "0/0", "naive is 0/0 in 5 of 48 rows"),
        (
            {"overflowed": 1, "vanished": 2},
            "overflow",
            "naive overflows in 1 of 48 rows, is 0/0 in 2 of 48 rows",
        ),
    ],
)
def test_overflow_and_vanished_rows_are_counted(rows, cell, remark):
    report = samples.oracles(samples.naive(**rows), samples.oracle(distribution="large_logits"))
    for fmt in ("table", "md"):
        text = render(report, fmt)
        assert cell in text
        assert remark in text
        assert "nan" not in text.lower().replace("nan or infinite", "")


def test_unexplained_nan_and_wrong_dead_rows_are_counted():
    no_distance = Distance(units=None, at=None, compared=0, nonfinite=160)
    broken = samples.oracle(
        "online", out=no_distance, rows=Rows(total=40, nonfinite=2, dead_wrong=8)
    )
    text = render(samples.oracles(broken), "table")
    assert "not finite" in text
    assert "online is not finite in 2 of 40 rows, is wrong in 8 rows that see no key\n" in text
    assert exit_code(samples.oracles(broken)) == 1


@pytest.mark.parametrize(
    ("apart", "cell", "remark"),
    [
        ({"log10": None}, "0", ""),
        (
            {"log10": -39.9, "furthest": "online"},
            "1e-39",
            "in 50 digits online and safe agree to fewer than 40",
        ),
        (
            {"log10": -51.3, "infinite": 3, "furthest": "online"},
            "infinite",
            "in 50 digits 3 numbers are infinitely far from safe's: online's among them",
        ),
        (
            {"log10": None, "infinite": 1, "furthest": "naive"},
            "infinite",
            "in 50 digits 1 number is infinitely far from safe's: naive's",
        ),
    ],
)
def test_disagreeing_oracles_are_named(apart, cell, remark):
    report = samples.oracles(samples.oracle(), **apart)
    lines = render(report, "table").splitlines()
    assert lines[5].split() == ["normal", "1.23", cell]
    assert lines[6] == (f"    └ {remark}" if remark else "")
    assert exit_code(report) == bool(remark)


@pytest.mark.parametrize(
    ("units", "text"),
    [(0.0, "0"), (1e-30, "<0.01"), (0.5, "0.50"), (135.0, "135.00"), (2.0**54, "1.80e+16")],
)
def test_units_are_shown_with_two_decimals(units, text):
    distance = Distance(units=units, at=samples.AT, compared=192)
    report = samples.oracles(samples.oracle(out=distance))
    rows = [each.split() for each in render(report, "table").splitlines()]
    assert ["normal", text, "1e-51"] in rows


@pytest.mark.parametrize(
    ("changes", "warning", "code"),
    [
        ({"out": {"share": 0.0123}}, "more than 1 % of the allowance: a verdict here is", 1),
        ({"out": {"a_priori": 1.5}}, "more than is assumed of it: that bound is in doubt", 1),
        ({"lse": {"unproven": 4}}, "truth: nothing is proven of 4 of 196 numbers", 1),
        ({"lse": {"unbounded": 8}}, "8 of 200 numbers have no allowance", 0),
        ({"proven_rows": 32}, "32 of 48 rows were examined", 0),
    ],
)
def test_certificate_page_warns_about_gaps_in_the_proof(changes, warning, code):
    fields = {
        name: samples.proven(**value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    report = samples.certificates(samples.certificate(**fields))
    for fmt in ("table", "md"):
        assert warning in " ".join(render(report, fmt).split())
    assert exit_code(report) == code
    assert exit_code(SAMPLES["certificates"]) == 0


@pytest.mark.parametrize("kind", ["oracles", "certificates"])
def test_record_without_problem_is_rejected(kind):
    data = json.loads(render(SAMPLES[kind], "json"))
    data["records"][0]["case"] = {}
    with pytest.raises(UsageError, match="holds no problem"):
        load_report(json.dumps(data), type(SAMPLES[kind]))


# Mods


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("others", [(), ("sdpa-math", "mine", "triton-flash3", "triton-flash4")])
def test_every_backend_has_a_column_at_any_width(monkeypatch, width, others):
    names = ["ideal", "triton-flash1", "triton-flash2", "flex", *others]
    answers = dict.fromkeys(names, samples.EQUAL)
    rows = [
        samples.mod(**answers),
        samples.mod("odd", **answers | {names[-1]: samples.DIFFERENT}),
        samples.mod("long", "score mod", samples.LONG, **answers | {names[0]: samples.ABSENT}),
    ]
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    show(samples.mods(*rows, backends=("mpmath", *names)), stream=stream)
    lines = stream.getvalue().splitlines()
    headings = [each.split() for each in lines if each.startswith("  mod  ")]
    assert [name for heading in headings for name in heading[3:]] == ["mpmath", *names]
    assert len(headings) == 1 or others or width == 80
    assert sum("└" in each for each in lines) == 1  # also when the table is split


def test_backend_absent_for_all_mods_is_noted_once():
    report = samples.mods(
        samples.mod(flex=samples.ABSENT), samples.mod("other", flex=samples.ABSENT)
    )
    assert "— flex: torch.compile is broken here\n" in render(report, "table")
    assert exit_code(report) == 0


@pytest.mark.parametrize("status", ["different", "unknown", "error"])
def test_unequal_backend_fails_the_report(status):
    report = samples.mods(samples.mod(flex=ModAnswer(status=status, detail="here")))
    assert exit_code(report) == 1
    assert "└ flex: here" in render(report, "table")


# Planted faults


def test_fault_row_contains_all_columns():
    row = line(samples.faults(samples.CAUGHT), "missing-alpha")
    assert row.startswith("missing-alpha online softmax caught probes ones bf16 full B1 H1 Q1")
    assert row.endswith("23 6.6 9 0/19 2")


@pytest.mark.parametrize(
    ("scores", "controls", "fields", "code"),
    [
        ((samples.CAUGHT,), (), {}, 0),
        ((samples.CAUGHT, samples.SAME, samples.NOWHERE), (samples.CLEAN,), {}, 0),
        ((samples.CAUGHT, samples.MISSED), (), {}, 1),
        ((samples.CAUGHT,), (samples.FLAGGED,), {}, 1),
        ((samples.CAUGHT, samples.BROKEN), (), {}, 3),
        ((samples.CAUGHT,), (), {"unfinished": 1}, 3),
        ((samples.SAME, samples.NOWHERE), (), {}, 5),
        ((), (), {}, 5),
    ],
)
def test_exit_code_of_fault_report(scores, controls, fields, code):
    assert exit_code(samples.faults(*scores, controls=controls, **fields)) == code


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (samples.own_tests("caught", "not shown"), 0),
        (samples.own_tests("caught", "missed"), 1),
        (samples.own_tests("missed", unfinished=1), 1),
        (samples.own_tests("caught", "not scored"), 3),
        (samples.own_tests("caught", unfinished=2, unfinished_because="interrupted"), 3),
        (samples.own_tests("not shown", "not reached"), 5),
        (samples.sensitivity(), 0),
        (samples.sensitivity(size=None), 1),
        (SAMPLES["fingerprint"], 0),
        (SAMPLES["model"], 1),
    ],
)
def test_exit_code_of_other_score_reports(report, code):
    assert exit_code(report) == code


def test_unfinished_scores_are_counted_with_the_reason():
    report = samples.own_tests("caught", unfinished=2, unfinished_because="interrupted")
    assert "2 have no score: interrupted." in render(report, "table")


# Properties


def test_refused_problems_are_not_counted_as_answered():
    rows = [each.split() for each in render(samples.MIXED, "table").splitlines()]
    kernels = {row[0]: row[1:] for row in rows if len(row) == 12}  # 500 ms are two words
    assert kernels["ideal"][:3] == ["1", "4", "1"]
    assert kernels["mine"][:2] == ["2", "1"]


def test_empty_property_report_does_not_divide_by_zero():
    assert "0 problems in 0 s\n" in render(samples.properties(seconds=0.0), "table")


# The baseline


def test_long_lists_of_harmless_changes_are_truncated_but_regressions_are_not():
    many = render(samples.comparison(*[samples.change("new", after=1e-3)] * 60), "table")
    assert "new (the first 50 of 60)" in many
    assert many.count("mine.py::fwd") == 50
    worse = render(samples.comparison(*[samples.change("worse")] * 60), "table")
    assert worse.count("mine.py::fwd") == 60


def test_empty_comparison_says_nothing_to_compare():
    assert tally(()) == "nothing to compare"
    assert "nothing to compare" in render(samples.comparison(), "table")
