"""Kernels with a capability table: unsupported outside of it, and a refusal inside is an error."""

import math

import pytest
import torch
from tests.messages import one_line
from torch.nn.functional import scaled_dot_product_attention

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.errors import UsageError
from attncheck.core.formats import dtype_named
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.capability_table import read_table
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.conventions import declarations
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case

PLAIN = Problem(query=32, head_dim=64, dtype="fp32")
AT_80 = Problem(query=32, head_dim=80, dtype="fp32")


def correct(q, k, v, is_causal=False):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    if is_causal:
        hidden = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def without_lse(q, k, v, is_causal=False):
    return correct(q, k, v, is_causal)[0]


def only_64(q, k, v, is_causal=False):
    if q.shape[-1] != 64:
        raise ValueError("head_dim must be 64")
    return correct(q, k, v, is_causal)


def half_at_80(q, k, v, is_causal=False):
    out, lse = correct(q, k, v, is_causal)
    return (out / 2 if q.shape[-1] == 80 else out), lse


def table(**fields):
    return read_table({"entry": "mine.py::kernel", **fields}, "kernels.mine")


def declared(function, **fields):
    subject = declarations.make_subject(function, "mine", "sdpa", ConventionOptions())
    assert not isinstance(subject, str), subject
    return Declared(subject, table(**fields), "mine")


def judge(subject, problem=PLAIN):
    return run_case(subject, Case(problem=problem), device="cpu")


COMPLETE = {"dtypes": ["fp32"], "head_dims": [64, 80], "masks": ["none", "causal"]}


@pytest.mark.parametrize(
    ("fields", "changes", "reason"),
    [
        ({"dtypes": ["bf16"]}, {}, "dtype fp32 is not declared: its table has bf16"),
        ({"head_dims": [80, [64, 32]]}, {}, "head_dim=64 is not declared: its table has 80, 64/32"),
        ({"masks": ["window"]}, {}, "mask full is not declared: its table has window"),
        ({"scores": ["alibi"]}, {}, "score mod none is not declared: its table has alibi"),
        ({"gqa": False}, {"heads": 4, "kv_heads": 2}, "2 query heads to a key head: its table"),
        ({"rectangular": False}, {"kv": 40}, "32 queries and 40 keys: its table says rectangular"),
        ({"scale": False}, {"scale": 0.3}, "other than 1/√head_dim: its table says scale = false"),
        ({"length_multiple": 24}, {}, "its table says length_multiple = 24"),
        ({"max_kv": 31}, {}, "length 32: its table says max_kv = 31"),
        (
            {"override": [{"when": {"dtype": "fp32"}, "head_dims": [32]}]},
            {},
            "head_dim=64 is not declared: its table has 32",
        ),
    ],
)
def test_problem_outside_the_table_is_unsupported(fields, changes, reason):
    record = judge(declared(correct, **fields), PLAIN.replace(**changes))
    assert record.status == "unsupported"
    assert reason in record.reason


def test_kernel_that_is_wrong_outside_its_table_is_not_run_there():
    assert judge(declared(half_at_80, head_dims=[64]), AT_80).status == "unsupported"
    assert judge(declared(half_at_80, head_dims=[64, 80]), AT_80).status == "fail"


def test_refusal_of_a_declared_problem_is_an_error():
    record = judge(declared(only_64, **COMPLETE), AT_80)
    assert record.status == "error"
    assert "declared, but refused: ValueError: head_dim must be 64" in record.reason
    assert judge(declared(only_64, **COMPLETE)).status == "pass"
    # A table that does not mention an axis, here the masks, allows a refusal.
    without_masks = {name: value for name, value in COMPLETE.items() if name != "masks"}
    assert judge(declared(only_64, **without_masks), AT_80).status == "unsupported"


def contiguous_alone(q, k, v, is_causal=False):
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v)):
        raise ValueError("contiguous, aligned tensors alone")
    return correct(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("question", ["strides_gapped", "strides_offset", "compare"])
def test_refusal_of_strides_contradicts_no_table(question):
    """A table cannot declare strides; of usual ones it must take what it declares."""
    kernel = declared(contiguous_alone, **COMPLETE)
    record = run_case(kernel, Case(problem=PLAIN, question=question), device="cpu")
    is_usual = question == "compare"
    assert record.status == ("pass" if is_usual else "unsupported")
    assert is_usual or "contiguous, aligned tensors alone" in record.reason


def with_mask(q, k, v, attn_mask=None):
    return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


def test_bias_that_a_dtype_would_round_contradicts_no_table():
    """A table declares a score mod for all numbers of heads; some slopes are exact, others not."""
    kernel = declared(with_mask, dtypes=["bf16"], head_dims=[64], scores=["alibi"])
    problem = PLAIN.replace(dtype="bf16", score=Spec.of("alibi"))
    assert judge(kernel, problem.replace(heads=4, kv_heads=4)).status == "pass"
    record = judge(kernel, problem.replace(heads=3, kv_heads=3))
    assert (record.status, record.reason) == ("unsupported", "would round the bias to bf16")


def test_declared_argument_that_the_function_lacks_is_an_error():
    record = judge(declared(correct, **COMPLETE, gqa=True), PLAIN.replace(heads=2, kv_heads=1))
    assert record.status == "error"
    assert "declared, but refused: takes no enable_gqa" in record.reason


def test_combination_of_declared_values_may_be_unsupported():
    """A bottom-right flag is top-left causal only where the lengths are equal."""
    options = ConventionOptions(causal="bottom_right")
    subject = declarations.make_subject(correct, "mine", "sdpa", options)
    causal = PLAIN.replace(mask=Spec.of("causal"))
    kernel = Declared(subject, table(**COMPLETE, rectangular=True), "mine")
    assert judge(kernel, causal).status == "pass"
    assert judge(kernel, causal.replace(kv=40)).status == "unsupported"


def test_declared_dtype_that_the_machine_lacks_is_unsupported():
    kernel = declared(correct, **COMPLETE | {"dtypes": ["tf32"]})
    record = judge(kernel, PLAIN.replace(dtype="tf32"))
    assert (record.status, record.reason) == ("unsupported", "the CPU has no tf32 products")


@pytest.mark.parametrize(
    ("function", "lse", "status", "exposed"),
    [
        (correct, True, "pass", True),
        (correct, False, "pass", False),
        (without_lse, False, "pass", False),
        (without_lse, True, "error", False),
    ],
)
def test_lse_is_required_or_dropped_as_declared(function, lse, status, exposed):
    record = judge(declared(function, lse=lse))
    assert (record.status, record.lse is not None) == (status, exposed)


def test_declared_arithmetic_replaces_the_default():
    kernel = Declared(Ideal(), table(arithmetic={"p_in_sum": True, "exp2_ulps": 1.0}), "mine")
    arithmetic = kernel.arithmetic(PLAIN.replace(dtype="bf16"), "cpu")
    assert arithmetic.sums_rounded_weights
    assert arithmetic.exp2_ulps == 1.0
    assert kernel.summary.endswith("; declares looser arithmetic: sums_rounded_weights=1")
    tight = Declared(Ideal(), table(arithmetic={"exp2_ulps": 1.0}), "mine")
    assert tight.summary == Ideal().summary


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights_scale", 0.5),
        ("lazy_rescale", 8.0),
        ("sums_rounded_weights", True),
        ("normalised_weights", True),
        ("exp2_ulps", 8.0),
        ("block_kv", 8),
        ("splits", 4),
    ],
)
def test_summary_names_looser_arithmetic(name, value):
    kernel = Declared(Ideal(), table(arithmetic={name: value}), "mine")
    assert f"looser arithmetic: {name}=" in kernel.summary
    usual = getattr(default_arithmetic(dtype_named("bf16")), name)
    assert "looser" not in Declared(Ideal(), table(arithmetic={name: usual}), "mine").summary


def test_override_of_the_arithmetic_applies_to_its_dtype_only():
    override = {"when": {"dtype": ["fp16"]}, "arithmetic": {"splits": 4}}
    kernel = Declared(Ideal(), table(override=[override]), "mine")
    assert kernel.arithmetic(PLAIN, "cpu").splits == 1
    assert kernel.arithmetic(PLAIN.replace(dtype="fp16"), "cpu").splits == 4


def test_promises_of_the_table_replace_those_of_the_kernel():
    assert Declared(Ideal(), table(promises=["repeat"]), "mine").promises == {"repeat"}
    assert Declared(Ideal(), table(), "mine").promises == Ideal().promises


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ([{"when": {"dtype": "fp32"}, "gqa": True}], None),
        ([{"when": {"dtype": "fp16"}, "gqa": True}], "gqa = false"),
        (
            [{"when": {"dtype": "fp32"}, "gqa": True}, {"when": {"mask": "none"}, "gqa": False}],
            "gqa = false",
        ),
        ([{"when": {"phase": "backward"}, "gqa": True}], "gqa = false"),
        ([{"when": {"device": "cpu", "head_dim": [32, 64]}, "gqa": True}], None),
    ],
)
def test_last_matching_override_wins(override, reason):
    refusal = table(gqa=False, override=override).refuses(PLAIN.replace(heads=2, kv_heads=1))
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entrie": "x"}, "key 'entrie' is not known: choose from arithmetic, backward"),
        ({"dtypes": "bf16"}, "dtypes: expected list, got text"),
        ({"dtypes": ["int8"]}, "dtypes 'int8' is not known: choose from"),
        ({"head_dims": [300]}, "head_dims=300 must be 1–256"),
        ({"head_dims": ["64"]}, r"head_dims\[0\]: expected whole number or list"),
        ({"masks": ["triangle"]}, "masks 'triangle' is not known: choose from any, bottom_right"),
        ({"scores": ["and"]}, "scores 'and' is not known"),
        ({"gqa": 1}, "gqa: expected bool, got whole number"),
        ({"lse": "base3"}, "lse 'base3' is not known: choose from base2, natural"),
        ({"empty_row": "one"}, "empty_row 'one' is not known: choose from mean, nan"),
        ({"promises": ["speed"]}, "promises 'speed' is not known: choose from batch, group"),
        ({"max_query": 0}, "max_query=0 must be at least 1"),
        ({"override": [{"gqa": True}]}, "missing required field when"),
        ({"override": [{"when": {}}]}, r"override\[0\].when is empty"),
        ({"override": [{"when": {"dtype": "x"}}]}, r"override\[0\].when.dtype 'x' is not known"),
        ({"override": [{"when": {"speed": 1}}]}, r"key 'override\[0\].when.speed' is not known"),
        ({"arithmetic": {"splits": 0}}, "arithmetic: splits=0 must be an integer of at least 1"),
        (
            {"arithmetic": {"exp3": 0}},
            "key 'arithmetic.exp3' is not known: choose from block_kv, dkv_parts",
        ),
        (
            {"arithmetic": {"p_in_sum": True, "sums_rounded_weights": False}},
            "are one thing: give one",
        ),
        ({"dtypes": ["e4m3"], "arithmetic": {"weights_scale": 512.0}}, "arithmetic: P reaches"),
    ],
)
def test_invalid_table_is_refused_in_one_line(fields, message):
    with one_line(UsageError, match=f"^kernels.mine: .*{message}"):
        table(**fields)
