"""``attncheck oracles``: float64 oracles against each other and many-digit recurrences."""

import json
import math

import pytest

from attncheck import oracles
from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.survey_reports import OracleReport
from attncheck.reporting.rendering import render
from attncheck.surveys.oracle_survey import survey_oracles

PROMISED = 1e-13 * 2.0**53  # units; the manual's promise for ordinary inputs
TINY = ("--shape", "1x2/1x5x4", "--distribution", "large_logits", "-q")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, run_fresh):
    folder = tmp_path_factory.mktemp("tiny")
    words = ("oracles", *TINY, "--format", "json", "--out", "here/too")
    return run_fresh(*words, cwd=folder), folder


def test_stdout_is_only_the_report(tiny):
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
    measured = {}
    for record in report.records:
        measured.setdefault(record.variant, []).append(record.oracle)
    assert measured == {
        "full": attention,
        "causal": attention,
        "sharp": attention,
        "softmax": attention[:3],
    }
    assert list(report.oracles) == attention
    assert (report.digits, report.must_agree) == (50, 40)
    assert (report.reference, report.may_overflow) == ("safe", ("naive",))
    assert (report.mpmath, report.backend) != ("", "")


def test_all_oracles_are_accurate_and_agree_to_forty_digits(tiny):
    report = load_report(tiny[0].stdout, OracleReport)
    for record in report.records:
        if record.oracle != "naive":
            assert record.out.units < PROMISED, record
            assert record.rows.nonfinite == 0
    assert all(agreement.holds(40) for agreement in report.agreements)


def test_overflow_of_naive_softmax_is_counted(tiny):
    report = load_report(tiny[0].stdout, OracleReport)
    (naive,) = [r for r in report.records if (r.variant, r.oracle) == ("sharp", "naive")]
    rows = naive.rows
    assert rows.overflowed > 0
    assert naive.out.nonfinite > 0
    table = render(report, "table")
    assert f"naive overflows in {rows.overflowed} of {rows.total} rows" in table
    assert "nan" not in table


@pytest.fixture
def attncheck(run_in_process, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_in_process("oracles", *words)


def test_agreement_grows_with_digits(attncheck, tmp_path):
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
    """An oracle or recurrence whose result ``change`` modifies."""

    def wrong(*arguments):
        result = function(*arguments)
        change(result)
        return result

    return wrong


def put(tensor, at, value):
    """A change of one number: to ``value``, or to ``value(number)`` where it is a function."""

    def change(result):
        numbers = getattr(result, tensor)
        numbers[at] = value(numbers[at]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (put("out", (0, 1, 2, 3), lambda x: x + 1e-9), 0, ""),
        (put("out", (0, 1, 2, 3), math.nan), 1, "flash2 is not finite in 1 of 10 rows"),
        (put("lse", (0, 0, 4), math.inf), 1, "flash2 overflows in 1 of 10 rows"),
        (put("lse", (0, 0, 4), -math.inf), 1, "flash2 is 0/0 in 1 of 10 rows"),
    ],
)
def test_fault_planted_in_an_oracle_is_reported(
    attncheck, monkeypatch, tmp_path, change, code, message
):
    wrong = planted(oracles.ORACLES["flash2"], change)
    monkeypatch.setitem(oracles.ORACLES, "flash2", wrong)
    exit_code, out, err = attncheck(*TINY, "--variant", "full", "--out", "here")
    assert (exit_code, err) == (code, "")
    assert message in out
    report = load_report((tmp_path / "here" / "oracles.json").read_text(), OracleReport)
    units = {record.oracle: record.out.units for record in report.records}
    if not code:  # 1e-9 is millions of units, and no other oracle moves
        assert units["flash2"] > PROMISED
    assert all(value < PROMISED for name, value in units.items() if name != "flash2")


WINDOWED = ("--shape", "1x2/1x5/3x4", "--variant", "sliding_window", "--distribution", "normal")
FAR = "1 number is infinitely far from safe's: {}'s"


def relative_error(digits):
    """A change by 10^-digits of the number."""
    return lambda x: x * (1 + x.context.mpf(10) ** -digits)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("flash2", put("out", (0, 1, 2, 3), relative_error(42)), ""),
        (
            "flash2",
            put("out", (0, 1, 2, 3), relative_error(30)),
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
def test_fault_planted_in_a_recurrence_is_reported(
    attncheck, monkeypatch, tmp_path, name, change, message
):
    monkeypatch.setitem(oracles.RECURRENCES, name, planted(oracles.RECURRENCES[name], change))
    code, out, err = attncheck(*WINDOWED, "-q", "--out", "here")
    assert (code, err) == (bool(message), "")
    assert message in out
    report = load_report((tmp_path / "here" / "oracles.json").read_text(), OracleReport)
    assert [a.holds(report.must_agree) for a in report.agreements] == [not message]


def test_default_variants_skip_those_without_the_dtype(attncheck):
    options = ("--dtype", "e4m3", "--shape", "1x1x2x2", "--distribution", "normal", "-q")
    code, out, err = attncheck(*options, "--format", "json")
    assert (code, err) == (0, "")
    report = load_report(out, OracleReport)
    assert {record.variant for record in report.records} == {"full", "causal", "sharp"}


def test_empty_survey_is_rejected():
    with pytest.raises(UsageError, match="nothing can be measured"):
        survey_oracles([], digits=50, command="")


def test_score_mod_is_evaluated_accurately(attncheck):
    options = ("--variant", "softcap", "--dtype", "fp16", "--format", "json")
    code, out, err = attncheck(*TINY, *options)
    assert (code, err) == (0, "")
    report = load_report(out, OracleReport)
    assert all(record.out.units < PROMISED for record in report.records)
