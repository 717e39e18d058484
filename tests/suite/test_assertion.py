"""``assert_attention_close`` accepts attention to the given tensors and rejects the rest."""

import itertools
import math
import warnings

import pytest
import torch
from tests.messages import one_line
from torch.nn.functional import scaled_dot_product_attention

import attncheck
from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import AttncheckError
from attncheck.core.formats import FORMATS
from attncheck.core.judgement import Judgement
from attncheck.core.mod_spec import Spec
from attncheck.diagnose import user_tensors
from attncheck.inputs import input_tensors
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.input_tensors import Descale
from attncheck.inputs.problem import Problem
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES
from attncheck.suite import python_api

close = attncheck.assert_attention_close


@pytest.fixture(autouse=True)
def without_diagnosis(monkeypatch):
    """Diagnosing failures would take as long as all the rest, and has tests of its own."""
    monkeypatch.setattr(python_api, "_left", iter(()))


def random_qkv(dtype=torch.bfloat16, query=24, kv=33, heads=4, kv_heads=4, dim=16):
    generator = torch.Generator().manual_seed(3)
    shapes = (2, heads, query, dim), (2, kv_heads, kv, dim), (2, kv_heads, kv, dim)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in zip("qkv", shapes, strict=True)
    }


def attention_and_lse(qkv, change=lambda scores, *_: scores, scale=None, sink=None):
    """Out and LSE, every step in fp32 but P, which P·V reads rounded; a sink has no value."""
    q, k, v = qkv.values()
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = q.float() @ k.float().mT * scale
    indices = [torch.arange(size).view(*(-1 if i == j else 1 for j in range(4)))
               for i, size in enumerate(scores.shape)]  # fmt: skip
    scores = change(scores, *indices)
    lse = scores.logsumexp(-1)
    lse = lse if sink is None else torch.logaddexp(lse, sink.float()[:, None])
    weights = torch.exp(scores - lse[..., None])
    return (weights.to(q.dtype).float() @ v.float()).to(q.dtype), lse


def hide_distant_keys(score, b, h, i, j):
    return torch.where((i - j).abs() < 9, score, -math.inf)


def cap_scores(score, b, h, i, j):
    return 5.0 * torch.tanh(score / 5.0) + 0.125 * (j - i)


# Accepted results.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}], ids=str)
def test_torch_attention_passes_and_a_scaled_result_fails(dtype, options):
    qkv = random_qkv(dtype)
    out = scaled_dot_product_attention(*qkv.values(), **options)
    judgement = close(out, **qkv, **options)
    assert isinstance(judgement, Judgement)
    assert judgement.status == "pass"
    assert judgement.out_over_bound <= 1
    with pytest.raises(AssertionError, match="bound: out"):
        close(out * 1.02, **qkv, **options)


def test_groups_of_heads_are_read_from_the_shapes():
    qkv = random_qkv(heads=6, kv_heads=2)
    out = scaled_dot_product_attention(*qkv.values(), enable_gqa=True)
    assert close(out, **qkv).status == "pass"
    interleaved = scaled_dot_product_attention(
        qkv["q"], *(qkv[name].repeat(1, 3, 1, 1) for name in "kv")
    )
    with pytest.raises(AssertionError, match="bound"):
        close(interleaved, **qkv)


WINDOW = (torch.arange(24)[:, None] - torch.arange(33)).abs() < 9


@pytest.mark.parametrize(
    "mask",
    [
        WINDOW,
        WINDOW[None, None],
        WINDOW.expand(2, 4, -1, -1),
        lambda b, h, i, j: (i - j).abs() < 9,
    ],
    ids=["two axes", "four", "expanded", "callable"],
)
def test_boolean_and_callable_masks(mask):
    qkv = random_qkv()
    out = scaled_dot_product_attention(*qkv.values(), attn_mask=WINDOW)
    assert close(out, **qkv, mask=mask).status == "pass"
    with pytest.raises(AssertionError):
        close(scaled_dot_product_attention(*qkv.values()), **qkv, mask=mask)


def test_mask_by_sequence_with_rows_that_see_no_key():
    qkv = random_qkv()
    mask = (torch.arange(33) < torch.tensor([[0], [20]]))[:, None, None]
    out = scaled_dot_product_attention(*qkv.values(), attn_mask=mask)
    assert close(out, **qkv, mask=mask).status == "pass"
    out[0, 1, 5, 3] = 1e-30
    with pytest.raises(AssertionError, match="empty rows"):
        close(out, **qkv, mask=mask)


def test_score_mod_and_lse_are_judged():
    qkv = random_qkv()
    out, lse = attention_and_lse(qkv, cap_scores)
    judgement = close(out, lse, **qkv, score_mod=cap_scores)
    assert judgement.status == "pass"
    assert judgement.lse_over_bound <= 1
    with pytest.raises(AssertionError, match=r"bound: lse\[") as error:
        close(out, lse / math.log(2), **qkv, score_mod=cap_scores)
    assert "score mod" in str(error.value)  # one term of the allowance
    with pytest.raises(AssertionError, match="bound"):
        close(out, lse, **qkv)


def test_score_mod_may_hide_keys():
    qkv = random_qkv()
    assert (
        close(*attention_and_lse(qkv, hide_distant_keys), **qkv, score_mod=hide_distant_keys).status
        == "pass"
    )


def test_fp8_with_and_without_descales():
    qkv = random_qkv(torch.float8_e4m3fn)
    q, k, v = (tensor.float() for tensor in qkv.values())
    out = scaled_dot_product_attention(q, k, v).bfloat16()
    assert close(out, **qkv).status == "pass"
    scales = tuple(torch.full((2, 4), 2.0**n) for n in (-3, 1, 2))
    q, k, v = (t * s[..., None, None] for t, s in zip((q, k, v), scales, strict=True))
    scaled = scaled_dot_product_attention(q, k, v).bfloat16()
    assert close(scaled, **qkv, descale=scales).status == "pass"
    descale = Descale(q=scales[0], k=scales[1], v=scales[2])
    assert close(scaled, **qkv, descale=descale).status == "pass"
    with pytest.raises(AssertionError):
        close(scaled, **qkv)


def test_out_may_have_more_precision_than_the_inputs():
    qkv = random_qkv()
    q, k, v = (tensor.float() for tensor in qkv.values())
    judgement = close(scaled_dot_product_attention(q, k, v), **qkv)
    assert judgement.status == "pass"
    assert judgement.arithmetic.endswith("out in fp32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_upcast_out_is_judged_in_its_original_format(dtype, wide):
    qkv = random_qkv(dtype)
    out = scaled_dot_product_attention(*qkv.values())
    judgement = close(out.to(wide), **qkv)
    stored = str(wide).removeprefix("torch.")
    note = "" if dtype is wide else f", as every number of the {stored} out is one of it"
    assert judgement.arithmetic == close(out, **qkv).arithmetic + note
    assert judgement.out_over_bound == close(out, **qkv).out_over_bound
    with pytest.raises(AssertionError, match="bound: out"):
        close((out * 1.02).to(wide), **qkv)


def test_one_unrounded_number_makes_out_fp32():
    qkv = random_qkv(kv=30)
    # Every P is 1/30, far between two bf16: rounded P and out err too much for fp32.
    qkv["q"].zero_(), qkv["v"].abs_()
    out = attention_and_lse(qkv)[0].float()
    assert close(out, **qkv).status == "pass"
    out[0, 0, 0, 0] *= 1 + 2.0**-20
    with pytest.raises(AssertionError, match="bound: out") as error:
        close(out, **qkv)
    assert error.value.judgement.arithmetic.endswith("out in fp32")


def test_upcast_is_assumed_only_where_chance_is_below_one_in_a_million():
    """One number fits the shorter dtype by chance once in 2^16, which is more often."""
    qkv = {name: torch.ones(1, 1, 1, 1, dtype=torch.bfloat16) for name in "qkv"}
    assert close(torch.ones(1, 1, 1, 1), **qkv).arithmetic.endswith("out in fp32")
    qkv["v"] = torch.tensor([1.0, 2.0], dtype=torch.bfloat16).view(1, 1, 1, 2)
    judgement = close(torch.tensor([1.0, 2.0]).view(1, 1, 1, 2), **qkv)
    assert judgement.arithmetic.endswith(
        "out in bf16, as every number of the float32 out is one of it"
    )


def test_visible_nonfinite_inputs_are_rejected():
    qkv = random_qkv()
    qkv["k"][1, 2, 7, 3:5] = math.nan
    qkv["v"][0, 0, 2, 1] = math.inf
    out = scaled_dot_product_attention(*qkv.values())
    with one_line(
        AttncheckError,
        whole="the exact result of 48 of 192 rows is not finite, and nothing can be compared with "
        "it: 2 of k, 1 of v are NaN or infinite. Give finite numbers, or hide such keys by a mask.",
    ):
        close(out, **qkv)
    qkv = random_qkv()
    with pytest.raises(AttncheckError, match="the score mod gives NaN or ∞"):
        close(qkv["q"], **qkv, score_mod=lambda s, b, h, i, j: s / (i - j) * 0)


def test_hidden_keys_may_be_nonfinite():
    qkv = random_qkv()
    visible = torch.arange(33) < 20
    out = scaled_dot_product_attention(*qkv.values(), attn_mask=visible.expand(24, -1))
    qkv["k"][:, :, 20:], qkv["v"][:, :, 20:] = math.nan, math.inf
    assert close(out, **qkv, mask=visible).status == "pass"
    out[0, 0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="finite: out"):
        close(out, **qkv, mask=visible)


BIASES = torch.linspace(-3, 3, 24 * 33).view(24, 33)


@pytest.mark.parametrize(
    "attn_mask",
    [
        WINDOW,
        torch.zeros(24, 33).masked_fill(~WINDOW, -math.inf),
        BIASES,
        BIASES.masked_fill(~WINDOW, -math.inf),
        BIASES.bfloat16().expand(2, 4, -1, -1),
        torch.zeros(1, 33),
    ],
    ids=["bool", "0 and −∞", "finite", "both", "bf16, four axes", "nothing"],
)
def test_attn_mask_follows_torch_semantics(attn_mask):
    qkv = random_qkv()
    boolean = attn_mask.dtype is torch.bool
    out = scaled_dot_product_attention(
        *(tensor.float() for tensor in qkv.values()),
        attn_mask=attn_mask if boolean else attn_mask.float(),
    ).bfloat16()
    assert close(out, **qkv, attn_mask=attn_mask).status == "pass"
    if bool(attn_mask.any()):
        with pytest.raises(AssertionError):
            close(out, **qkv)


def test_problem_and_its_inputs_are_equivalent_arguments():
    problem = Problem(query=20, kv=30, head_dim=16, mask=Spec.of("causal"))
    inputs = input_tensors.draw_inputs(problem)
    out = scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)
    assert close(out, problem=problem) == close(out, problem=inputs)
    with pytest.raises(AssertionError):
        close(scaled_dot_product_attention(inputs.q, inputs.k, inputs.v), problem=problem)


def test_softmax_of_a_problem_is_judged():
    inputs = input_tensors.draw_inputs(Problem(operation="softmax", query=20, kv=30, dtype="fp32"))
    assert close(torch.softmax(inputs.x, -1), problem=inputs).status == "pass"
    with pytest.raises(AssertionError):
        close(torch.softmax(inputs.x, -2), problem=inputs)


# Sinks.

SINK = torch.tensor([1.0, -2.0, 40.0, 3.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_sink_is_accepted(dtype):
    qkv, sink = random_qkv(), SINK.to(dtype)
    out, lse = attention_and_lse(qkv, sink=sink)
    assert close(out, lse, **qkv, sink=sink).status == "pass"
    assert close(out, **qkv, sink=sink).status == "pass"


def test_attention_with_another_sink_fails():
    qkv = random_qkv()
    out, lse = attention_and_lse(qkv, sink=SINK)
    for other in (None, SINK.roll(1), SINK * math.log(2)):
        with pytest.raises(AssertionError, match="attention: fail"):
            close(out, lse, **qkv, sink=other)


def test_sink_merged_after_attention_passes():
    """Out of the keys alone is scaled in fp32 by e^(LSE − LSE'); −∞ is the same as no sink."""
    qkv = random_qkv()
    q, k, v = (x.float() for x in qkv.values())
    none = torch.full((4,), -math.inf)
    scores = q @ k.mT / 4
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    assert close(out, lse, **qkv, sink=none).status == "pass"
    both = torch.logaddexp(lse, SINK[:, None])
    out = (out * (lse - both).exp()[..., None]).bfloat16()
    assert close(out, both, **qkv, sink=SINK).status == "pass"


# Declared arithmetic.


def arithmetic(**changes):
    fp32 = FORMATS["fp32"]
    return Arithmetic(**({"products": fp32, "weights": fp32, "output": fp32} | changes))


def test_declared_arithmetic_changes_the_allowance():
    qkv = random_qkv(torch.float32)
    short = {name: tensor.to(torch.float16).float() for name, tensor in qkv.items()}
    out = scaled_dot_product_attention(*short.values())
    with pytest.raises(AssertionError):
        close(out, **qkv)
    judgement = close(out, **qkv, arithmetic=arithmetic(products=FORMATS["tf32"]))
    assert judgement.status == "pass"
    assert "products of tf32" in judgement.arithmetic


def test_out_must_have_the_format_of_the_declared_arithmetic():
    qkv = random_qkv()
    out = scaled_dot_product_attention(*qkv.values())
    with pytest.raises(AttncheckError, match="but the arithmetic gives out in fp32"):
        close(out, **qkv, arithmetic=arithmetic())


# Messages.


def test_failure_message_lists_element_allowance_and_terms():
    qkv = random_qkv()
    out, lse = attention_and_lse(qkv)
    out[1, 2, 3, 4] += 1
    with pytest.raises(AssertionError) as error:
        close(out, lse, **qkv)
    first, *rest = str(error.value).splitlines()
    assert first.startswith("attention: fail: bound: out[1, 2, 3, 4] = ")
    labels = {line.split()[0] for line in rest}
    assert {"worst", "got", "should", "allowed", "judged"} <= labels
    (allowed,) = [line for line in rest if line.split()[0] == "allowed"]
    assert "output rounding" in allowed


@pytest.mark.parametrize("status", ["warn", "inconclusive"])
def test_unproven_errors_are_warnings(status, monkeypatch):
    planted = Judgement(status=status, rule="improbable", reason="planted", arithmetic="any")
    monkeypatch.setattr(user_tensors, "judge_outputs", lambda *_: planted)
    qkv = random_qkv()
    out = scaled_dot_product_attention(*qkv.values())
    with pytest.warns(UserWarning, match=f"attention: {status}: improbable: planted"):
        assert close(out, **qkv) is planted


def test_improbable_errors_fail_on_generic_inputs_alone():
    """Errors of one sign, within the bound, but beyond the sum of independent roundings."""
    qkv = random_qkv(query=64, kv=256)
    rounded, lse = attention_and_lse(qkv)
    lse = lse * (1 + 2.0**-19)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual = close(rounded, lse, **qkv)
    assert usual.status == "warn"
    assert usual.lse_over_bound < 1 < usual.lse_over_probable
    with pytest.raises(AssertionError, match="improbable: lse"):
        close(rounded, lse, **qkv, generic=True)


def test_temporary_mods_are_unregistered_afterwards():
    before = set(MASKS), set(SCORES), set(DISTRIBUTIONS)
    qkv = random_qkv()
    with pytest.raises(AssertionError):
        close(torch.zeros_like(qkv["q"]), **qkv, mask=WINDOW, score_mod=cap_scores)
    assert (set(MASKS), set(SCORES), set(DISTRIBUTIONS)) == before


def test_inputs_that_require_gradients_are_not_modified():
    qkv = {name: tensor.requires_grad_() for name, tensor in random_qkv(torch.float32).items()}
    out = scaled_dot_product_attention(*qkv.values())
    before = [tensor.detach().clone() for tensor in (*qkv.values(), out)]
    assert close(out, **qkv).status == "pass"
    assert all(map(torch.equal, before, (*qkv.values(), out)))


# Invalid arguments.

FOUR = torch.ones(4)  # fewer than there are rows
CALLS = itertools.count()


def counting(score, b, h, i, j):
    return score + next(CALLS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, "q is missing: give q, k and v, or problem."),
        ({"v": 3}, "v is int: it must be a tensor."),
        ({"q": torch.zeros(2, 24, 16)}, "q.shape=(2, 24, 16) must have the axes (batch, heads, "),
        ({"k": torch.zeros(2, 4, 33, 16)}, "k.dtype=torch.float32, but should be torch.bfloat16"),
        ({"k": torch.zeros(2, 3, 33, 16)}, "kv_heads=3 does not divide heads=4"),
        ({"q": torch.zeros(2, 4, 0, 16)}, "q.shape=(2, 4, 0, 16) has an empty axis."),
        ({"k": torch.zeros(2, 4, 0, 16)}, "k.shape=(2, 4, 0, 16) has an empty axis."),
        ({"v": torch.zeros(2, 4, 33, 16).to_sparse()}, "v.layout=torch.sparse_coo must be torch.s"),
        ({n: torch.zeros(2, 4, 24, 16, device="meta") for n in "qkv"}, "q.device=meta must be cpu"),
        ({"score_mod": lambda s, b, h, i, j: s + FOUR[i]}, "score mod '<lambda>'"),
        ({"mask": lambda b, h, i, j: FOUR[j] > 0}, "mask '<lambda>'"),
        ({"score_mod": counting}, "gives other values than its trace"),
        ({"q": torch.zeros(2, 4, 24, 16, dtype=torch.int8)}, "q.dtype=torch.int8 is not known"),
        ({"k": torch.zeros(2, 4, 33, 16, device="meta")}, "k.device=meta, but q.device=cpu"),
        ({"mask": torch.ones(24, 24, dtype=torch.bool)}, "mask.shape=(24, 24) must broadcast to"),
        ({"mask": torch.ones(24, 33)}, "mask.dtype=torch.float32 must be torch.bool"),
        ({"attn_mask": WINDOW, "mask": WINDOW}, "attn_mask and mask are given both"),
        ({"attn_mask": WINDOW, "is_causal": True}, "attn_mask and is_causal are given both"),
        ({"attn_mask": BIASES, "score_mod": cap_scores}, "attn_mask and score_mod are given both"),
        ({"attn_mask": cap_scores}, "attn_mask is function: it must be a tensor."),
        ({"attn_mask": BIASES[:9]}, "attn_mask.shape=(9, 33) must broadcast to (batch, heads, "),
        ({"attn_mask": BIASES.double()}, "attn_mask.dtype=torch.float64 must be bool, True where"),
        ({"attn_mask": -BIASES.log()}, "attn_mask holds NaN or ∞: what is added is finite"),
        ({"mask": WINDOW, "is_causal": True}, "mask and is_causal are given both"),
        ({"mask": lambda b: b}, "mask '<lambda>' cannot be traced: it must take (b, h, q_idx, "),
        ({"score_mod": lambda s: s}, "score mod '<lambda>' cannot be traced: it must take"),
        ({"scale": 1e-50}, "scale=1e-50 must be a number in the range of fp32"),
        ({"scale": "1"}, "scale='1' must be a number in the range of fp32"),
        ({"descale": (1, 1, 1)}, "descale is given, but q.dtype=torch.bfloat16 has none"),
        ({"arithmetic": 3}, "arithmetic is int: it must be an Arithmetic."),
        ({"problem": Problem(query=3)}, "problem and q are given both"),
        ({"sink": 1.0}, "sink is float: it must be a tensor"),
        ({"sink": SINK[:3]}, "sink.shape=(3,) must be (heads,) = (4,)"),
        ({"sink": SINK.double()}, "sink.dtype=torch.float64 is not known: choose from float32"),
        ({"sink": torch.full((4,), math.nan)}, "sink holds NaN or ∞"),
        ({"out": None}, "out is NoneType: it must be a tensor."),
        ({"out": torch.zeros(2, 4, 24, 8)}, "out.shape=(2, 4, 24, 8), but should be (2, 4, 24, 1"),
        ({"out": torch.zeros(2, 24, 4, 16)}, "transpose axes 1 and 2 of it, or of q, k and v"),
        ({"out": (torch.zeros(2, 4, 24, 16), None)}, "if LSE is in it, give that as lse="),
        ({"causal": True}, "argument 'causal' is not known: did you mean 'is_causal'? Choose from"),
        ({"out": torch.zeros(2, 4, 24, 16).int()}, "out.dtype=torch.int32 is no dtype"),
        ({"lse": torch.zeros(2, 4, 24, 1)}, "lse.shape=(2, 4, 24, 1), but should be (2, 4, 24)"),
        ({"lse": 3.0}, "lse is float: it must be a tensor."),
        ({"out": torch.zeros(2, 4, 24, 16).to_sparse()}, "out.layout=torch.sparse_coo must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_bad_arguments_are_one_line(changes, message):
    qkv = random_qkv()
    arguments = {"out": qkv["q"].clone(), **qkv} | changes
    with one_line(AttncheckError, message) as raised:
        close(**arguments)
    # None of the frames in which arguments are read, and pytest hides those of the public function.
    assert raised.traceback[-1].path.name == "python_api.py"
    assert raised.traceback[-1].ishidden(raised)


@pytest.mark.parametrize(
    "descale",
    [(1.0, 1.0, 1.0), (torch.ones(2, 4),), torch.ones(2, 4), "x", (torch.ones(2, 4),) * 4],
    ids=["floats", "one", "a tensor", "text", "four"],
)
def test_bad_descales_are_one_line(descale):
    qkv = random_qkv(torch.float8_e4m3fn)
    with pytest.raises(AttncheckError, match=r"^descale must be three fp32 tensors"):
        close(qkv["q"].bfloat16(), **qkv, descale=descale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problem": 3}, "it must be a Problem, or its Inputs"),
        ({"problem": "bf16"}, "it must be a Problem, or its Inputs"),
        ({"problem": Problem(query=4), "sink": SINK}, "problem and sink are given both"),
    ],
)
def test_problem_excludes_other_descriptions(options, message):
    with pytest.raises(AttncheckError, match=message):
        close(torch.zeros(2, 4, 24, 16), **options)
