"""``attncheck oracles --certify``: proven bounds on the error of the reference."""

import math

import pytest

pytest.importorskip("flint", reason="python-flint is an optional extra")

from attncheck import oracles
from attncheck.core.outputs import Outputs
from attncheck.records.json_reports import load_report
from attncheck.records.survey_reports import CertificateReport
from attncheck.reporting.rendering import render

TINY = ("--certify", "--shape", "1x2/1x5x4", "--distribution", "normal", "-q")


@pytest.fixture
def attncheck(run_in_process, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_in_process("oracles", *words)


def test_error_bound_is_proven_for_every_variant(attncheck, tmp_path):
    code, out, err = attncheck(*TINY, "--format", "json", "--out", "here")
    assert (code, err) == (0, "")
    report = load_report(out, CertificateReport)
    variants = [record.variant for record in report.truths]
    assert variants == ["full", "causal", "alibi", "softcap", "sharp", "softmax"]
    oracle_names = ["truth", "naive", "safe", "online", "flash1", "flash2", "split"]
    assert list(report.oracles) == oracle_names
    assert list(report.arithmetics) == ["fp32"]  # its allowance is the smallest
    assert all(record.holds(report.limit) for record in report.truths)
    assert report.flint
    written = tmp_path / "here"
    assert sorted(p.name for p in written.iterdir()) == ["certificates.json", "certificates.md"]
    assert (written / "certificates.json").read_text() == out
    assert (written / "certificates.md").read_text() == render(report, "md")


@pytest.mark.parametrize(
    ("tensor", "at", "error", "message"),
    [
        ("out", (0, 1, 2, 3), 1e-12, "the truth's error may be more than is assumed of it"),
        ("lse", (0, 1, 2), 1e-3, "a verdict here is inconclusive"),
        ("out", (0, 1, 2, 3), math.nan, "nothing is proven of 1 of 40 numbers"),
    ],
)
def test_planted_error_in_the_truth_is_reported(attncheck, monkeypatch, tensor, at, error, message):
    truth = oracles.truth

    def planted(inputs):
        result = truth(inputs)
        tensors = {"out": result.out.clone(), "lse": result.lse.clone()}
        tensors[tensor][at] += error
        return Outputs(**tensors)

    monkeypatch.setattr(oracles, "truth", planted)
    code, out, err = attncheck(*TINY, "--variant", "causal")
    assert (code, err) == (1, "")
    assert message in " ".join(out.split())


def test_missing_python_flint_error_names_the_extra(run_fresh, tmp_path):
    """Oracles without ``--certify`` still run, because they do not need it."""
    before = "sys.modules['flint'] = None"
    run = run_fresh("oracles", *TINY, cwd=tmp_path, before=before)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1), run.stderr
    assert "pip install 'attncheck[exact]'" in run.stderr
    run = run_fresh("oracles", *TINY[1:], "--variant", "full", cwd=tmp_path, before=before)
    assert run.returncode == 0, run.stderr
