import json

import pytest

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


def test_more_digits_agree_to_more(attncheck, tmp_path):
    exponents = []
    for digits in ("17", "400"):
        given = (*TINY, "--variant", "causal", "--digits", digits, "--format", "json")
        run = attncheck("oracles", *given, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        exponents.append(json.loads(run.stdout)["agreements"][0]["log10"])
    assert -19 < exponents[0] < -14
    assert -402 < exponents[1] < -396
    assert list(tmp_path.iterdir()) == []


PLANTED = """
import dataclasses, sys
from attncheck import oracles
from attncheck.cli import main

def planted(inputs, oracle=oracles.ORACLES["flash2"]):
    outputs = oracle(inputs)
    {fault}
    return outputs

oracles.ORACLES["flash2"] = planted
sys.argv = ["attncheck", "oracles", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("outputs.out[0, 1, 2, 3] += 1e-9", 0, ""),
        ("outputs.out[0, 1, 2, 3] = float('nan')", 1, "flash2 is not finite in 1 of 10 rows"),
        ("outputs.lse[0, 0, 4] = float('inf')", 1, "flash2 overflows in 1 of 10 rows"),
        ("outputs.lse[0, 0, 4] = float('-inf')", 1, "flash2 is 0/0 in 1 of 10 rows"),
    ],
)
def test_a_planted_fault_shows(warm_python, tmp_path, fault, code, says):
    program = PLANTED.format(fault=fault)
    words = (*TINY, "--variant", "full", "--out", "here")
    run = warm_python.run("-c", program, *words, cwd=tmp_path)
    assert run.returncode == code, run.stderr
    assert says in run.stdout
    report = load_report((tmp_path / "here" / "oracles.json").read_text(), OracleReport)
    units = {record.oracle: record.out.units for record in report.records}
    if not code:  # a billionth is millions of units, and nothing else moves
        assert units["flash2"] > PROMISED
    assert all(value < PROMISED for name, value in units.items() if name != "flash2")


PLANTED_IN_MANY_DIGITS = """
import sys
from attncheck import oracles
from attncheck.cli import main

def planted(numbers, inputs, recurrence=oracles.RECURRENCES[{name!r}]):
    result, mp = recurrence(numbers, inputs), numbers.context
    {fault}
    return result

oracles.RECURRENCES[{name!r}] = planted
sys.argv = ["attncheck", "oracles", *sys.argv[1:]]
main()
"""
WINDOWED = ("--shape", "1x2/1x5/3x4", "--variant", "sliding_window", "--distribution", "normal")


@pytest.mark.parametrize(
    ("name", "fault", "code", "says"),
    [
        ("flash2", "pass", 0, ""),
        ("flash2", "result.out[0, 1, 2, 3] *= 1 + mp.mpf(10) ** -42", 0, ""),
        (
            "flash2",
            "result.out[0, 1, 2, 3] *= 1 + mp.mpf(10) ** -30",
            1,
            "in 50 digits flash2 and safe agree to fewer than 40",
        ),
        (
            "flash2",
            "result.out[0, 1, 2, 3] = mp.nan",
            1,
            "1 number is infinitely far from safe's: flash2's",
        ),
        # Rows 3 and 4 see none of the three keys.
        (
            "flash2",
            "result.lse[0, 0, 4] = mp.one",
            1,
            "1 number is infinitely far from safe's: flash2's",
        ),
        (
            "flash1",
            "result.lse[0, 0, 1] = mp.ninf",
            1,
            "1 number is infinitely far from safe's: flash1's",
        ),
        (
            "flash1",
            "result.out[0, 0, 4, 1] = mp.one",
            1,
            "1 number is infinitely far from safe's: flash1's",
        ),
        ("safe", "result.out[0, 1, 2, 3] = mp.nan", 1, "streaming is not finite in 1 of 6 rows"),
        ("safe", "result.lse[0, 0, 4] = mp.one", 1, "5 numbers are infinitely far"),
    ],
)
def test_a_fault_planted_in_many_digits_shows(warm_python, tmp_path, name, fault, code, says):
    program = PLANTED_IN_MANY_DIGITS.format(name=name, fault=fault)
    run = warm_python.run("-c", program, *WINDOWED, "-q", "--out", "here", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (code, "")
    assert says in run.stdout
    report = load_report((tmp_path / "here" / "oracles.json").read_text(), OracleReport)
    assert [a.holds(report.must_agree) for a in report.agreements] == [not code]


def test_by_default_what_does_not_exist_is_left_out(attncheck, tmp_path):
    given = ("--dtype", "e4m3", "--shape", "1x1x2x2", "--distribution", "normal", "-q")
    run = attncheck("oracles", *given, "--format", "json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    report = load_report(run.stdout, OracleReport)
    assert {record.variant for record in report.records} == {"full", "causal", "sharp"}


def test_no_problem_is_no_report():
    with pytest.raises(UsageError, match="nothing can be measured"):
        survey_oracles([], digits=50, command="")


def test_a_score_mod_is_evaluated_in_many_digits(attncheck, tmp_path):
    given = (*TINY, "--variant", "softcap", "--dtype", "fp16", "--format", "json")
    run = attncheck("oracles", *given, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    report = load_report(run.stdout, OracleReport)
    assert all(record.out.units < PROMISED for record in report.records)
