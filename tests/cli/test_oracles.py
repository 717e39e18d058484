import json
import math

import pytest

from attncheck import oracles
from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.survey_reports import OracleReport
from attncheck.reporting.rendering import render
from attncheck.surveys.oracle_survey import survey_oracles

PROMISED = 1e-13 * 2.0**53  # units; what the manual says of ordinary inputs
TINY = ("--shape", "1x2/1x5x4", "--distribution", "large_logits", "-q")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, fresh):
    folder = tmp_path_factory.mktemp("tiny")
    words = ("oracles", *TINY, "--format", "json", "--out", "here/too")
    return fresh(*words, cwd=folder), folder


def test_standard_output_is_the_report_alone(tiny):
    run, folder = tiny
    assert (run.returncode, run.stderr) == (0, "")
    report = load_report(run.stdout, OracleReport)
    assert report.command == f"attncheck oracles {' '.join(TINY)} --format json"
    written = folder / "here" / "too"
    assert sorted(p.name for p in written.iterdir()) == ["oracles.json", "oracles.md"]
    assert (written / "oracles.json").read_text() == run.stdout
    assert (written / "oracles.md").read_text() == render(report, "md")


def test_every_oracle_is_measured_on_every_variant(tiny):
    report = load_report(tiny[0].stdout, OracleReport)
    attention = ["naive", "safe", "online", "flash1", "flash2", "split", "streaming"]
    asked = {}
    for record in report.records:
        asked.setdefault(record.variant, []).append(record.oracle)
    assert asked == {
        "full": attention,
        "causal": attention,
        "sharp": attention,
        "softmax": attention[:3],
    }
    assert list(report.oracles) == attention
    assert (report.digits, report.must_agree) == (50, 40)
    assert (report.reference, report.may_overflow) == ("safe", ("naive",))
    assert (report.mpmath, report.backend) != ("", "")


def test_all_oracles_are_near_and_agree_to_forty_digits(tiny):
    report = load_report(tiny[0].stdout, OracleReport)
    for record in report.records:
        if record.oracle != "naive":
            assert record.out.units < PROMISED, record
            assert record.rows.nonfinite == 0
    assert all(agreement.holds(40) for agreement in report.agreements)


def test_where_the_naive_softmax_overflows_is_shown(tiny):
    report = load_report(tiny[0].stdout, OracleReport)
    (naive,) = [r for r in report.records if (r.variant, r.oracle) == ("sharp", "naive")]
    rows = naive.rows
    assert rows.overflowed > 0
    assert naive.out.nonfinite > 0
    table = render(report, "table")
    assert f"naive overflows in {rows.overflowed} of {rows.total} rows" in table
    assert "nan" not in table


@pytest.fixture
def attncheck(in_process, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: in_process("oracles", *words)


def test_more_digits_agree_to_more(attncheck, tmp_path):
    exponents = []
    for digits in ("17", "400"):
        code, out, err = attncheck(
            *TINY, "--variant", "causal", "--digits", digits, "--format", "json"
        )
        assert (code, err) == (0, "")
        exponents.append(json.loads(out)["agreements"][0]["log10"])
    assert -19 < exponents[0] < -14
    assert -402 < exponents[1] < -396
    assert list(tmp_path.iterdir()) == []


def planted(function, change):
    """An oracle, or a recurrence, whose result is changed."""

    def wrong(*asked):
        result = function(*asked)
        change(result)
        return result

    return wrong


def put(tensor, at, value):
    """``put("out", (0, 1, 2, 3), nan)``: a change of one number; of a function of what it was."""

    def change(result):
        numbers = getattr(result, tensor)
        numbers[at] = value(numbers[at]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (put("out", (0, 1, 2, 3), lambda x: x + 1e-9), 0, ""),
        (put("out", (0, 1, 2, 3), math.nan), 1, "flash2 is not finite in 1 of 10 rows"),
        (put("lse", (0, 0, 4), math.inf), 1, "flash2 overflows in 1 of 10 rows"),
        (put("lse", (0, 0, 4), -math.inf), 1, "flash2 is 0/0 in 1 of 10 rows"),
    ],
)
def test_a_planted_fault_shows(attncheck, monkeypatch, tmp_path, change, code, says):
    wrong = planted(oracles.ORACLES["flash2"], change)
    monkeypatch.setitem(oracles.ORACLES, "flash2", wrong)
    ended, out, err = attncheck(*TINY, "--variant", "full", "--out", "here")
    assert (ended, err) == (code, "")
    assert says in out
    report = load_report((tmp_path / "here" / "oracles.json").read_text(), OracleReport)
    units = {record.oracle: record.out.units for record in report.records}
    if not code:  # a billionth is millions of units, and nothing else moves
        assert units["flash2"] > PROMISED
    assert all(value < PROMISED for name, value in units.items() if name != "flash2")


WINDOWED = ("--shape", "1x2/1x5/3x4", "--variant", "sliding_window", "--distribution", "normal")
FAR = "1 number is infinitely far from safe's: {}'s"


def off(digits):
    return lambda x: x * (1 + x.context.mpf(10) ** -digits)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("flash2", put("out", (0, 1, 2, 3), off(42)), ""),
        (
            "flash2",
            put("out", (0, 1, 2, 3), off(30)),
            "in 50 digits flash2 and safe agree to fewer than 40",
        ),
        ("flash2", put("out", (0, 1, 2, 3), lambda x: x.context.nan), FAR.format("flash2")),
        # Rows 3 and 4 see none of the three keys.
        ("flash2", put("lse", (0, 0, 4, 0), lambda x: x.context.one), FAR.format("flash2")),
        ("flash1", put("lse", (0, 0, 1, 0), lambda x: x.context.ninf), FAR.format("flash1")),
        ("flash1", put("out", (0, 0, 4, 1), lambda x: x.context.one), FAR.format("flash1")),
        (
            "safe",
            put("out", (0, 1, 2, 3), lambda x: x.context.nan),
            "streaming is not finite in 1 of 6 rows",
        ),
        ("safe", put("lse", (0, 0, 4, 0), lambda x: x.context.one), "5 numbers are infinitely far"),
    ],
)
def test_a_fault_planted_in_many_digits_shows(attncheck, monkeypatch, tmp_path, name, change, says):
    monkeypatch.setitem(oracles.RECURRENCES, name, planted(oracles.RECURRENCES[name], change))
    code, out, err = attncheck(*WINDOWED, "-q", "--out", "here")
    assert (code, err) == (bool(says), "")
    assert says in out
    report = load_report((tmp_path / "here" / "oracles.json").read_text(), OracleReport)
    assert [a.holds(report.must_agree) for a in report.agreements] == [not says]


def test_by_default_what_does_not_exist_is_left_out(attncheck):
    given = ("--dtype", "e4m3", "--shape", "1x1x2x2", "--distribution", "normal", "-q")
    code, out, err = attncheck(*given, "--format", "json")
    assert (code, err) == (0, "")
    report = load_report(out, OracleReport)
    assert {record.variant for record in report.records} == {"full", "causal", "sharp"}


def test_no_problem_is_no_report():
    with pytest.raises(UsageError, match="nothing can be measured"):
        survey_oracles([], digits=50, command="")


def test_a_score_mod_is_evaluated_in_many_digits(attncheck):
    given = (*TINY, "--variant", "softcap", "--dtype", "fp16", "--format", "json")
    code, out, err = attncheck(*given)
    assert (code, err) == (0, "")
    report = load_report(out, OracleReport)
    assert all(record.out.units < PROMISED for record in report.records)
