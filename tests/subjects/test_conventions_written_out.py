"""Functions with an additive bias and a key padding mask: what reaches them, what is refused."""

import pytest
import torch
from tests.subjects.plain_kernels import attend

from attncheck.core.mod_spec import NONE, Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.run_case import run_case

PADDED = Spec.of("padding", lengths=[9, 4])
BIASES = (
    Spec.of("bias", per_batch=1, per_head=1, seed=3),
    Spec.of("alibi"),
    Spec.of("relative_bias", distance=4, seed=0),
)


def problem(**changes: object) -> Problem:
    sizes = {"batch": 2, "heads": 4, "query": 6, "kv": 9, "head_dim": 16, "dtype": "bf16"}
    return Problem(**(sizes | changes))


def seen_keys(q, k, mask, *, causal=0):
    """Bool ``(batch, 1, query, kv)`` of q and k ``(batch, heads, length, dim)``."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
    return seen if mask is None else seen & mask[:, None, None]


def adds(bias, factor=1.0):
    return None if bias is None else lambda score, *_: score + factor * bias


def sdpa(q, k, v, attn_bias=None, key_padding_mask=None):
    hidden = key_padding_mask
    seen = seen_keys(q, k, None if hidden is None else ~hidden)
    return attend(q, k, v, seen, score_mod=adds(attn_bias))


def sdpa_wrong(q, k, v, attn_bias=None, key_padding_mask=None):
    # The bias is scaled with the products, and True taken for a visible key.
    factor = q.shape[-1] ** -0.5
    return attend(q, k, v, seen_keys(q, k, key_padding_mask), score_mod=adds(attn_bias, factor))


def flash(q, k, v, bias=None, causal=False, softmax_scale=None, key_padding_mask=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = seen_keys(q, k, key_padding_mask, causal=causal)
    out, lse = attend(q, k, v, seen, softmax_scale, adds(bias))
    return out.transpose(1, 2), lse


def flash_wrong(q, k, v, bias=None, causal=False, softmax_scale=None, key_padding_mask=None):
    bias = None if bias is None else bias[:, :1]  # the first head's for all
    hidden = None if key_padding_mask is None else ~key_padding_mask
    return flash(q, k, v, bias, causal, softmax_scale, hidden)


@pytest.mark.parametrize(
    "changes",
    [
        *({"score": score} for score in BIASES),
        {"mask": PADDED},
        {"mask": PADDED, "score": BIASES[0]},
    ],
    ids=str,
)
@pytest.mark.parametrize(("right", "wrong"), [(sdpa, sdpa_wrong), (flash, flash_wrong)])
def test_bias_and_padding_reach_the_kernel(changes, right, wrong):
    case = Case(problem=problem(**changes))
    for function, status in ((right, "pass"), (wrong, "fail")):
        subject = make_subject(function, function.__name__)
        record = run_case(subject, case, device="cpu")
        assert record.status == status, record


def test_padding_combines_with_a_causal_mask():
    mask = Spec.of("and", Spec.of("causal_bottom_right"), PADDED)
    subject = make_subject(flash, "flash")
    assert run_case(subject, Case(problem=problem(mask=mask)), device="cpu").status == "pass"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"score": Spec.of("softcap", cap=5.0)}, "a bias is added to scores, and softcap"),
        ({"mask": Spec.of("sliding_window", window=3)}, "takes no attn_mask"),
        ({"mask": Spec.of("and", Spec.of("causal"), PADDED)}, "takes no attn_mask or is_causal"),
    ],
    ids=str,
)
def test_problem_that_they_cannot_express_is_unsupported(changes, reason):
    refusal = make_subject(sdpa, "sdpa").unsupported(problem(**changes), "cpu")
    assert refusal is not None
    assert refusal.startswith(reason)


def test_function_with_arbitrary_keywords_is_passed_no_bias():
    def plain(q, k, v, **keywords):
        assert not {"attn_bias", "bias", "key_padding_mask"} & set(keywords)
        assert keywords.get("attn_mask") is None
        return attend(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool))

    subject = make_subject(plain, "plain")
    assert subject.unsupported(problem(score=BIASES[0]), "cpu") == ("would round the bias to bf16")
    assert run_case(subject, Case(problem=problem(score=NONE)), device="cpu").status == "pass"
