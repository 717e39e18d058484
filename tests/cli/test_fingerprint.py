"""``attncheck fingerprint``: exit codes and the page of declared and measured arithmetic."""

import io

import pytest

from attncheck.cli.fingerprint import fingerprint
from attncheck.records.json_reports import load_report
from attncheck.records.survey_reports import FIELDS, FingerprintReport
from attncheck.reporting.exit_codes import exit_code
from attncheck.reporting.rendering import show

KERNELS = """
import torch
from attncheck.subjects.ideal import Ideal


class Planted(Ideal):
    name = "planted"
    hidden_score = -1e4


class Refuses(Ideal):
    name = "refuses"

    def unsupported(self, problem, device):
        return "nothing is ever taken"


def plain(query, key, value, *, is_causal=False, scale=None):
    scores = (query.float() @ key.float().mT) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ value.float()).to(query.dtype)
"""


@pytest.fixture
def run(invoke, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    return lambda *words: invoke(fingerprint, *words, "--device", "cpu", "-q")


def test_kernel_matching_its_declaration_passes_with_a_line_per_field(run):
    result = run("ideal", "--dtype", "bf16")
    assert result.return_value == 0
    for field in FIELDS:
        assert f"\n  {field} " in result.output
    assert "bf16 · " in result.output
    assert "agrees" in result.output
    assert "differs" not in result.output


def test_finite_sentinel_exits_1(run):
    result = run("mine.py::Planted", "--dtype", "bf16")
    assert result.return_value == 1
    (line,) = (line for line in result.output.splitlines() if line.startswith("  sentinel"))
    assert line.split() == ["sentinel", "−10000", "−∞", "differs"]


def test_json_round_trips(run):
    result = run("mine.py::Planted", "--dtype", "fp16", "--json")
    report = load_report(result.output, FingerprintReport)
    assert (report.kernel, report.device) == ("planted", "cpu")
    assert [record.dtype for record in report.records] == ["fp16"]
    assert exit_code(report) == 1
    page = io.StringIO()
    show(report, "md", page)
    assert "| sentinel | −10000 | −∞ | **differs** |" in page.getvalue()


def test_kernel_that_supports_nothing_exits_5(run):
    result = run("mine.py::Refuses", "--dtype", "bf16", "--dtype", "fp32")
    assert result.return_value == 5
    assert "bf16 · not asked: nothing is ever taken" in result.output


def test_function_without_lse_is_fingerprinted(run):
    result = run("mine.py::plain", "--dtype", "bf16", "--convention", "sdpa")
    assert result.return_value == 0
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.startswith("  ")}
    assert "fp32" in lines["P"]
    assert lines["P"].rstrip().endswith("finer")
