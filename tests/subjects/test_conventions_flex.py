"""The flex convention: functions that take a mask and a score mod as callables."""

import pytest
import torch
from tests.subjects import plain_kernels as plain
from torch.nn.attention.flex_attention import flex_attention

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.run_case import run_case

CAUSAL = Spec.of("causal")


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "query": 20, "head_dim": 16, "dtype": "fp32"}
    return Problem(**(sizes | changes))


def judge(function, problem, **options):
    subject = make_subject(function, "kernel", "flex", ConventionOptions(**options))
    return run_case(subject, Case(problem=problem), device="cpu")


def with_mask_mod(fault=""):
    """A kernel that takes the mask as a callable rather than a block mask."""

    def kernel(q, k, v, mask_mod=None, score_mod=None, scale=None, *, enable_gqa, return_lse=False):
        assert enable_gqa or q.shape[1] == k.shape[1]
        shape = torch.zeros(*q.shape[:3], k.shape[2])
        b, h, i, j = plain.indices(shape)
        i, j = (j, i) if fault == "transposed" else (i, j)
        seen = shape == 0 if mask_mod is None else mask_mod(b, h, i, j)
        score_mod = None if fault == "no_score" else score_mod
        out, lse = plain.attend(q, k, v, seen | torch.zeros_like(b, dtype=bool), scale, score_mod)
        return (out, lse) if return_lse else out

    return kernel


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("score_mod", {"score": Spec.of("alibi")}),
        ("mask_mod", {"mask": Spec.of("padding", lengths=[20, 13])}),
    ],
)
def test_function_that_writes_to_a_captured_tensor_fails(name, changes):
    def kernel(q, k, v, mask_mod=None, score_mod=None, scale=None, *, enable_gqa=False):
        mod, reads = {"mask_mod": mask_mod, "score_mod": score_mod}[name], []
        out = with_mask_mod()(q, k, v, mask_mod, score_mod, scale, enable_gqa=enable_gqa)
        while not reads:
            cells = [cell.cell_contents for cell in mod.__closure__]
            reads = [each for each in cells if isinstance(each, torch.Tensor)]
            mod = next((each for each in cells if callable(each)), None)
        reads[0].add_(1)
        return out

    record = judge(kernel, small(**changes))
    assert (record.status, record.judgement.rule) == ("fail", "mutation")
    assert record.judgement.reason == f"wrote to its input {name}."


def out_alone(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False):
    return flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa)


PROBLEMS = {
    "plain": {},
    "causal": {"mask": CAUSAL, "kv": 31},
    "gqa": {"mask": Spec.of("causal_bottom_right"), "kv": 31, "kv_heads": 2, "scale": 0.7},
    "tall": {"mask": CAUSAL, "query": 31, "kv": 20, "dtype": "bf16"},
    "documents": {"mask": Spec.of("document", lengths=[5, 0, 15]), "score": Spec.of("alibi")},
    "padding": {"mask": Spec.of("padding", lengths=[0, 20]), "value_dim": 8},
    "softcap": {"score": Spec.of("softcap", cap=2.0), "mask": Spec.of("prefix_lm", prefix=4)},
    "bias": {"score": Spec.of("relative_bias", distance=4, seed=0)},
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    "function", [flex_attention, out_alone, with_mask_mod()], ids=["torch", "out", "callable"]
)
def test_correct_kernel_passes(function, name):
    record = judge(function, small(**PROBLEMS[name]))
    assert record.status == "pass", record.reason
    assert (record.lse is None) == (function is out_alone)


@pytest.mark.parametrize(
    ("fault", "changes", "options"),
    [
        ("transposed", {"mask": CAUSAL}, {}),
        ("no_score", {"score": Spec.of("alibi")}, {}),
        ("", {}, {"lse": "base2"}),
    ],
    ids=["transposed", "no_score", "base2"],
)
def test_planted_fault_or_wrong_option_fails(fault, changes, options):
    assert judge(with_mask_mod(fault), small(**changes), **options).status == "fail"


@pytest.mark.parametrize(
    ("parameters", "changes", "reason"),
    [
        ("score_mod=None", {"mask": CAUSAL}, "takes no block_mask"),
        ("block_mask=None", {"score": Spec.of("alibi")}, "takes no score_mod"),
        ("block_mask=None", {"scale": 0.7}, "takes no scale"),
        ("block_mask=None", {"kv_heads": 2}, "takes no enable_gqa"),
        ("block_mask=None", {"dtype": "e4m3"}, "the flex convention has no descales"),
        ("block_mask=None", {"mask": CAUSAL, "query": 2**20}, "mask, of which blocks are made,"),
    ],
)
def test_problem_that_the_signature_cannot_express_is_unsupported(parameters, changes, reason):
    kernel = eval(f"lambda q, k, v, {parameters}: q")  # noqa: S307  # a signature of this file's
    assert reason in (make_subject(kernel, "kernel").unsupported(small(**changes), "cpu") or "")


def test_declared_lse_is_required_and_undeclared_lse_not_requested():
    assert judge(flex_attention, small(), returns_lse=False).lse is None
    record = judge(lambda q, k, v, score_mod=None: q, small(), returns_lse=True)
    assert "it gave no LSE" in record.judgement.reason
