"""Scoring a kernel author's own test suite: faulty kernels replace the function under test."""

import pytest

from attncheck.core.errors import UnknownName, UsageError
from attncheck.faults import user_suite
from attncheck.faults.user_suite import (
    SuiteRun,
    UserSuite,
    check_scorable,
    run_control,
    score_suite,
)

# A project with a function of its own, tests as they are usually written, and a stricter one.
FUNCTION = """
import torch

def attention(q, k, v, causal=False, sm_scale=None, *, return_lse=False):
    scores = (q.float() @ k.float().mT) * (sm_scale or q.shape[-1] ** -0.5)
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
        )
    out = (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
    return (out, scores.logsumexp(-1)) if return_lse else out
"""
USUAL = """
import pytest, torch
from mine.kernel import attention
import torch.nn.functional as F

@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 64) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.allclose(attention(q, k, v, causal), expected, atol=1e-2)
"""
STRICT = """
import torch, mine.kernel
import torch.nn.functional as F

def test_ragged():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 65, 64).requires_grad_() for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    out, lse = mine.kernel.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    scores = (q @ k.mT) * 64**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    for mine_, right in zip(gradients, torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(mine_, right, rtol=1e-4, atol=1e-5)
"""


TAIL = "tail-keys-not-masked-exp0"  # shows only where the last tile is not full: not with 128 keys


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    files = {
        "mine/__init__.py": "",
        "mine/kernel.py": FUNCTION,
        "mine/empty.py": "number = 3\n",
        "tests/test_usual.py": USUAL,
        "tests/test_strict.py": STRICT,
        "quick/test_quick.py": "import mine.empty\ndef test_nothing(): pass\n",
        "slow/test_slow.py": "import time\ndef test_slow(): time.sleep(60)\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def suite(project):
    def suite(command, replace="mine.kernel:attention", **more):
        return UserSuite(**{"command": command, "replace": replace, "folder": project} | more)

    return suite


def test_right_kernel_passes_the_suite(suite):
    score = run_control(suite("tests"))
    assert (score.status, score.fallback_reasons) == ("not shown", ())


def test_strict_suite_catches_a_fault_and_names_the_test(suite):
    score = score_suite(suite("tests/test_strict.py"), TAIL)
    assert (score.status, score.tests) == ("caught", ("tests/test_strict.py::test_ragged",))
    assert (score.category, score.host) == ("tail tile", "ideal")


def test_fault_that_changes_no_bit_at_the_suites_shapes_is_not_shown(suite):
    score = score_suite(suite("tests/test_usual.py"), TAIL)
    assert (score.status, score.tests) == ("not shown", ())


def test_fault_within_the_suites_tolerance_is_missed(suite):
    assert score_suite(suite("tests/test_usual.py"), "approx-reciprocal").status == "missed"


@pytest.mark.parametrize(
    ("command", "replace", "message"),
    [
        ("quick", "mine.empty:attn", "'attn' of module 'mine.empty' is not there"),
        ("quick", "mine.empty:number", "'number' of module 'mine.empty' is int, no function"),
        ("quick", "mine.kernel:attention", "no test imports module 'mine.kernel'"),
        ("quick -k no_such_test", "m:f", "runs no test"),
        ("no_such_folder", "m:f", "ends with 4: ERROR: file or directory not found"),
    ],
)
def test_suite_that_cannot_be_scored_is_refused_with_the_reason(suite, command, replace, message):
    with pytest.raises(UsageError, match="cannot be scored") as error:
        run_control(suite(command, replace))
    assert message in str(error.value)


def test_suite_that_exceeds_its_timeout_is_refused(suite):
    with pytest.raises(UsageError, match="did not end within 2 s"):
        run_control(suite("slow", timeout=2))


@pytest.fixture
def fake_runs(monkeypatch):
    """Replace runs of the suite by ones with these exit codes and events, in this order."""

    def fake_runs(*runs):
        queue = [SuiteRun(code=code, events=each, output="", seconds=1.0) for code, each in runs]
        monkeypatch.setattr(user_suite, "run_suite", lambda *_, **__: queue.pop(0))

    return fake_runs


FAILS = (1, {"replaced": [""], "called": [""], "failed": ["t.py::test"]})
PASSES = (0, {"replaced": [""], "called": [""], "shown": [""]})


@pytest.mark.parametrize(("alone", "message"), [(0, "passes"), (1, "fails too")])
def test_suite_that_fails_the_right_kernel_is_refused(suite, fake_runs, alone, message):
    fake_runs(FAILS, (alone, {}))
    with pytest.raises(UsageError, match=r"t\.py::test with the right kernel 'ideal'") as error:
        run_control(suite("tests"))
    assert f"{message} with its own" in str(error.value)


@pytest.mark.parametrize(
    ("run", "status", "message"),
    [
        (FAILS, "caught", ""),
        (PASSES, "missed", ""),
        ((0, {"replaced": [""], "called": [""]}), "not shown", "the same bits"),
        ((0, {"replaced": [""], "left": ["it has dropout"]}), "not reached", "it has dropout"),
        ((0, {"replaced": [""]}), "not reached", "no test calls"),
        ((1, {"replaced": [""], "failed": ["t"]}), "not reached", "no test calls"),
        ((2, {"replaced": [""], "called": [""], "failed": ["t.py"]}), "caught", ""),
        ((3, {"replaced": [""], "called": [""]}), "not scored", "ends with 3"),
        ((None, {"replaced": [""], "called": [""]}), "not scored", "did not end"),
    ],
)
def test_status_of_a_fault_by_exit_code_and_events(suite, fake_runs, run, status, message):
    fake_runs(run)
    score = score_suite(suite("tests"), TAIL)
    assert score.status == status
    assert message in score.reason


def test_suite_that_never_calls_the_kernel_is_refused(suite, fake_runs):
    fake_runs((0, {"replaced": [""], "left": ["it has dropout"]}))
    with pytest.raises(UsageError, match="takes its calls: it has dropout"):
        check_scorable(suite("tests"), [TAIL], "ideal")


@pytest.mark.parametrize("replace", ["mine.kernel", "mine/kernel.py:attention", "a:b.c", ":f"])
def test_replace_must_be_module_colon_name(replace):
    with pytest.raises(UsageError, match=r"package\.module:name"):
        UserSuite(command="tests", replace=replace)


def test_bad_command_or_convention_is_refused():
    with pytest.raises(UsageError, match="cannot be split"):
        UserSuite(command="tests -k 'a", replace="m:f")
    with pytest.raises(UnknownName, match="flash_attn"):
        UserSuite(command="tests", replace="m:f", convention="paged")


def test_unknown_fault_or_host_without_it_is_refused(suite):
    with pytest.raises(UnknownName, match="no-such-fault"):
        score_suite(suite("tests"), "no-such-fault")
    with pytest.raises(UsageError, match="not planted in metal"):
        score_suite(suite("tests"), TAIL, "metal")


def test_project_digest_covers_own_python_files_only(tmp_path):
    suite = UserSuite(command="tests", replace="m:f", folder=tmp_path)

    def write(name, text="x = 1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return user_suite.project_digest(suite)

    own = [write("tests/test_a.py"), write("tests/test_a.py", "x = 2"), write("tests/test_b.py")]
    assert len(set(own)) == 3
    write("venv/pyvenv.cfg")
    others = ("venv/lib/a.py", ".tox/a.py", "reports/results.jsonl", "a/site-packages/b.py")
    assert {write(name) for name in others} == {own[-1]}
