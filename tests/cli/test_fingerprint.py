"""attncheck fingerprint: the verb, its exit codes, its page."""

import io

import pytest

from attncheck.cli.fingerprint import fingerprint
from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.survey_reports import FIELDS, FingerprintReport
from attncheck.reporting.exit_codes import exit_code
from attncheck.reporting.rendering import show

MINE = """
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
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return lambda *words: invoke(fingerprint, *words, "--device", "cpu", "-q")


def test_a_kernel_that_is_as_it_declares_passes_and_every_field_is_a_line(run):
    done = run("ideal", "--dtype", "bf16")
    assert done.return_value == 0
    for field in FIELDS:
        assert f"\n  {field} " in done.output
    assert "bf16 · " in done.output
    assert "agrees" in done.output
    assert "differs" not in done.output


def test_a_finite_sentinel_exits_with_1(run):
    done = run("mine.py::Planted", "--dtype", "bf16")
    assert done.return_value == 1
    (line,) = (line for line in done.output.splitlines() if line.startswith("  sentinel"))
    assert line.split() == ["sentinel", "−10000", "−∞", "differs"]


def test_json_comes_back_as_the_report_it_was(run):
    done = run("mine.py::Planted", "--dtype", "fp16", "--json")
    report = load_report(done.output, FingerprintReport)
    assert (report.kernel, report.device) == ("planted", "cpu")
    assert [record.dtype for record in report.records] == ["fp16"]
    assert exit_code(report) == 1
    page = io.StringIO()
    show(report, "md", page)
    assert "| sentinel | −10000 | −∞ | **differs** |" in page.getvalue()


def test_a_kernel_that_takes_nothing_exits_with_5(run):
    done = run("mine.py::Refuses", "--dtype", "bf16", "--dtype", "fp32")
    assert done.return_value == 5
    assert "bf16 · not asked: nothing is ever taken" in done.output


def test_a_function_without_lse_is_read_too(run):
    done = run("mine.py::plain", "--dtype", "bf16", "--convention", "sdpa")
    assert done.return_value == 0
    lines = {line.split()[0]: line for line in done.output.splitlines() if line.startswith("  ")}
    assert "fp32" in lines["P"]
    assert lines["P"].rstrip().endswith("finer")


ABLE = "choose from bf16, e4m3, e5m2, fp16, fp32, tf32."


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("ideal", "--dtype", "half"),
            f"dtype 'half' is not known: did you mean 'fp16'? {ABLE.capitalize()}",
        ),
        (("ideal", "--dtype", "fp64"), f"dtype 'fp64' is not known: {ABLE}"),
        (("nobody",), "nobody"),
        (("sdpa-cudnn",), "needs a CUDA GPU"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(run, arguments, said):
    done = run(*arguments)
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)
