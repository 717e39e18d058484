"""The judge for somebody who has tensors: it passes what is attention, and says what is not."""

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
def nobody_looks(monkeypatch):
    """For what is wrong: it takes as long as all the rest, and has tests of its own."""
    monkeypatch.setattr(python_api, "_left", iter(()))


def tensors(dtype=torch.bfloat16, query=24, kv=33, heads=4, kv_heads=4, dim=16):
    generator = torch.Generator().manual_seed(3)
    shapes = (2, heads, query, dim), (2, kv_heads, kv, dim), (2, kv_heads, kv, dim)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in zip("qkv", shapes, strict=True)
    }


def with_lse(given, change=lambda scores, *_: scores, scale=None, sink=None):
    """Out and LSE, every step in fp32 but P as it is read by P·V; a sink has no value."""
    q, k, v = given.values()
    scores = q.float() @ k.float().mT * (scale or 1 / math.sqrt(q.shape[3]))
    indices = [torch.arange(size).view(*(-1 if i == j else 1 for j in range(4)))
               for i, size in enumerate(scores.shape)]  # fmt: skip
    scores = change(scores, *indices)
    lse = scores.logsumexp(-1)
    lse = lse if sink is None else torch.logaddexp(lse, sink.float()[:, None])
    weights = torch.exp(scores - lse[..., None])
    return (weights.to(q.dtype).float() @ v.float()).to(q.dtype), lse


def near(score, b, h, i, j):
    return torch.where((i - j).abs() < 9, score, -math.inf)


def capped(score, b, h, i, j):
    return 5.0 * torch.tanh(score / 5.0) + 0.125 * (j - i)


# What is attention.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}], ids=str)
def test_torchs_attention_is_attention(dtype, options):
    given = tensors(dtype)
    out = scaled_dot_product_attention(*given.values(), **options)
    found = close(out, **given, **options)
    assert isinstance(found, Judgement)
    assert found.status == "pass"
    assert found.out_over_bound <= 1
    with pytest.raises(AssertionError, match="bound: out"):
        close(out * 1.02, **given, **options)


def test_groups_are_read_from_the_shapes():
    given = tensors(heads=6, kv_heads=2)
    out = scaled_dot_product_attention(*given.values(), enable_gqa=True)
    assert close(out, **given).status == "pass"
    in_turn = scaled_dot_product_attention(
        given["q"], *(given[name].repeat(1, 3, 1, 1) for name in "kv")
    )
    with pytest.raises(AssertionError, match="bound"):
        close(in_turn, **given)


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
def test_masks(mask):
    given = tensors()
    out = scaled_dot_product_attention(*given.values(), attn_mask=WINDOW)
    assert close(out, **given, mask=mask).status == "pass"
    with pytest.raises(AssertionError):
        close(scaled_dot_product_attention(*given.values()), **given, mask=mask)


def test_a_mask_by_sequence_and_a_row_that_sees_nothing():
    given = tensors()
    mask = (torch.arange(33) < torch.tensor([[0], [20]]))[:, None, None]
    out = scaled_dot_product_attention(*given.values(), attn_mask=mask)
    assert close(out, **given, mask=mask).status == "pass"
    out[0, 1, 5, 3] = 1e-30
    with pytest.raises(AssertionError, match="empty rows"):
        close(out, **given, mask=mask)


def test_a_score_mod_and_lse():
    given = tensors()
    out, lse = with_lse(given, capped)
    found = close(out, lse, **given, score_mod=capped)
    assert found.status == "pass"
    assert found.lse_over_bound <= 1
    with pytest.raises(AssertionError, match=r"bound: lse\[") as error:
        close(out, lse / math.log(2), **given, score_mod=capped)
    assert "score mod" in str(error.value)  # a part of what is allowed
    with pytest.raises(AssertionError, match="bound"):
        close(out, lse, **given)


def test_a_score_mod_may_hide_keys():
    given = tensors()
    assert close(*with_lse(given, near), **given, score_mod=near).status == "pass"


def test_fp8_with_and_without_descales():
    given = tensors(torch.float8_e4m3fn)
    q, k, v = (tensor.float() for tensor in given.values())
    out = scaled_dot_product_attention(q, k, v).bfloat16()
    assert close(out, **given).status == "pass"
    scales = tuple(torch.full((2, 4), 2.0**n) for n in (-3, 1, 2))
    q, k, v = (t * s[..., None, None] for t, s in zip((q, k, v), scales, strict=True))
    scaled = scaled_dot_product_attention(q, k, v).bfloat16()
    assert close(scaled, **given, descale=scales).status == "pass"
    descale = Descale(q=scales[0], k=scales[1], v=scales[2])
    assert close(scaled, **given, descale=descale).status == "pass"
    with pytest.raises(AssertionError):
        close(scaled, **given)


def test_out_may_be_finer_than_its_inputs():
    given = tensors()
    q, k, v = (tensor.float() for tensor in given.values())
    found = close(scaled_dot_product_attention(q, k, v), **given)
    assert found.status == "pass"
    assert found.arithmetic.endswith("out in fp32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_an_upcast_result_is_judged_as_what_it_was(dtype, wide):
    given = tensors(dtype)
    out = scaled_dot_product_attention(*given.values())
    found = close(out.to(wide), **given)
    stored = str(wide).removeprefix("torch.")
    note = "" if dtype is wide else f", as every number of the {stored} out is one of it"
    assert found.arithmetic == close(out, **given).arithmetic + note
    assert found.out_over_bound == close(out, **given).out_over_bound
    with pytest.raises(AssertionError, match="bound: out"):
        close((out * 1.02).to(wide), **given)


def test_one_number_that_was_never_rounded_shows_that_none_was():
    given = tensors(kv=30)
    # P is 1/30 throughout, far between two bf16: with the rounding of out too much for fp32.
    given["q"].zero_(), given["v"].abs_()
    out = with_lse(given)[0].float()
    assert close(out, **given).status == "pass"
    out[0, 0, 0, 0] *= 1 + 2.0**-20
    with pytest.raises(AssertionError, match="bound: out") as error:
        close(out, **given)
    assert error.value.judgement.arithmetic.endswith("out in fp32")


def test_too_few_numbers_to_tell_an_upcast():
    """One number happens to be of the shorter dtype once in 2^16: more often than a millionth."""
    given = {name: torch.ones(1, 1, 1, 1, dtype=torch.bfloat16) for name in "qkv"}
    assert close(torch.ones(1, 1, 1, 1), **given).arithmetic.endswith("out in fp32")
    given["v"] = torch.tensor([1.0, 2.0], dtype=torch.bfloat16).view(1, 1, 1, 2)
    found = close(torch.tensor([1.0, 2.0]).view(1, 1, 1, 2), **given)
    assert found.arithmetic.endswith("out in bf16, as every number of the float32 out is one of it")


def test_numbers_that_are_not_finite_and_reach_a_row_are_refused():
    given = tensors()
    given["k"][1, 2, 7, 3:5] = math.nan
    given["v"][0, 0, 2, 1] = math.inf
    out = scaled_dot_product_attention(*given.values())
    with one_line(
        AttncheckError,
        whole="the exact result of 48 of 192 rows is not finite, and nothing can be compared with "
        "it: 2 of k, 1 of v are NaN or infinite. Give finite numbers, or hide such keys by a mask.",
    ):
        close(out, **given)
    given = tensors()
    with pytest.raises(AttncheckError, match="the score mod gives NaN or ∞"):
        close(given["q"], **given, score_mod=lambda s, b, h, i, j: s / (i - j) * 0)


def test_what_is_hidden_may_be_anything():
    given = tensors()
    seen = torch.arange(33) < 20
    out = scaled_dot_product_attention(*given.values(), attn_mask=seen.expand(24, -1))
    given["k"][:, :, 20:], given["v"][:, :, 20:] = math.nan, math.inf
    assert close(out, **given, mask=seen).status == "pass"
    out[0, 0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="finite: out"):
        close(out, **given, mask=seen)


ADDED = torch.linspace(-3, 3, 24 * 33).view(24, 33)


@pytest.mark.parametrize(
    "added",
    [
        WINDOW,
        torch.zeros(24, 33).masked_fill(~WINDOW, -math.inf),
        ADDED,
        ADDED.masked_fill(~WINDOW, -math.inf),
        ADDED.bfloat16().expand(2, 4, -1, -1),
        torch.zeros(1, 33),
    ],
    ids=["bool", "0 and −∞", "finite", "both", "bf16, four axes", "nothing"],
)
def test_an_attn_mask_is_torchs(added):
    given = tensors()
    boolean = added.dtype is torch.bool
    out = scaled_dot_product_attention(
        *(tensor.float() for tensor in given.values()),
        attn_mask=added if boolean else added.float(),
    ).bfloat16()
    assert close(out, **given, attn_mask=added).status == "pass"
    if bool(added.any()):
        with pytest.raises(AssertionError):
            close(out, **given)


def test_a_problem_or_its_inputs():
    problem = Problem(query=20, kv=30, head_dim=16, mask=Spec.of("causal"))
    drawn = input_tensors.draw_inputs(problem)
    out = scaled_dot_product_attention(drawn.q, drawn.k, drawn.v, is_causal=True)
    assert close(out, problem=problem) == close(out, problem=drawn)
    with pytest.raises(AssertionError):
        close(scaled_dot_product_attention(drawn.q, drawn.k, drawn.v), problem=problem)


def test_a_softmax_of_a_problem():
    drawn = input_tensors.draw_inputs(Problem(operation="softmax", query=20, kv=30, dtype="fp32"))
    assert close(torch.softmax(drawn.x, -1), problem=drawn).status == "pass"
    with pytest.raises(AssertionError):
        close(torch.softmax(drawn.x, -2), problem=drawn)


# A sink.

SINK = torch.tensor([1.0, -2.0, 40.0, 3.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_sink_is_accepted(dtype):
    given, sink = tensors(), SINK.to(dtype)
    out, lse = with_lse(given, sink=sink)
    assert close(out, lse, **given, sink=sink).status == "pass"
    assert close(out, **given, sink=sink).status == "pass"


def test_a_sink_that_is_another_is_refused():
    given = tensors()
    out, lse = with_lse(given, sink=SINK)
    for other in (None, SINK.roll(1), SINK * math.log(2)):
        with pytest.raises(AssertionError, match="attention: fail"):
            close(out, lse, **given, sink=other)


def test_merged_with_what_keys_alone_gave():
    """Out in fp32 times e^(LSE − LSE'), and minus infinity is no sink."""
    given = tensors()
    q, k, v = (x.float() for x in given.values())
    none = torch.full((4,), -math.inf)
    scores = q @ k.mT / 4
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    assert close(out, lse, **given, sink=none).status == "pass"
    both = torch.logaddexp(lse, SINK[:, None])
    out = (out * (lse - both).exp()[..., None]).bfloat16()
    assert close(out, both, **given, sink=SINK).status == "pass"


# The arithmetic.


def arithmetic(**changes):
    fp32 = FORMATS["fp32"]
    return Arithmetic(**({"products": fp32, "weights": fp32, "output": fp32} | changes))


def test_another_arithmetic_is_another_allowance():
    given = tensors(torch.float32)
    short = {name: tensor.to(torch.float16).float() for name, tensor in given.items()}
    out = scaled_dot_product_attention(*short.values())
    with pytest.raises(AssertionError):
        close(out, **given)
    found = close(out, **given, arithmetic=arithmetic(products=FORMATS["tf32"]))
    assert found.status == "pass"
    assert "products of tf32" in found.arithmetic


def test_an_arithmetic_gives_out_in_its_own_format():
    given = tensors()
    out = scaled_dot_product_attention(*given.values())
    with pytest.raises(AttncheckError, match="but the arithmetic gives out in fp32"):
        close(out, **given, arithmetic=arithmetic())


# What is said.


def test_a_failure_says_everything():
    given = tensors()
    out, lse = with_lse(given)
    out[1, 2, 3, 4] += 1
    with pytest.raises(AssertionError) as error:
        close(out, lse, **given)
    first, *rest = str(error.value).splitlines()
    assert first.startswith("attention: fail: bound: out[1, 2, 3, 4] = ")
    said = {line.split()[0] for line in rest}
    assert {"worst", "got", "should", "allowed", "judged"} <= said
    (allowed,) = [line for line in rest if line.split()[0] == "allowed"]
    assert "output rounding" in allowed


@pytest.mark.parametrize("status", ["warn", "inconclusive"])
def test_what_is_no_proof_is_a_warning(status, monkeypatch):
    planted = Judgement(status=status, rule="improbable", reason="planted", arithmetic="any")
    monkeypatch.setattr(user_tensors, "judge_outputs", lambda *_: planted)
    given = tensors()
    out = scaled_dot_product_attention(*given.values())
    with pytest.warns(UserWarning, match=f"attention: {status}: improbable: planted"):
        assert close(out, **given) is planted


def test_what_rounding_hardly_does_is_a_failure_where_the_numbers_are_random():
    """All errors of one sign, each within the bound: above what independent roundings add up to."""
    given = tensors(query=64, kv=256)
    rounded, lse = with_lse(given)
    lse = lse * (1 + 2.0**-19)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual = close(rounded, lse, **given)
    assert usual.status == "warn"
    assert usual.lse_over_bound < 1 < usual.lse_over_probable
    with pytest.raises(AssertionError, match="improbable: lse"):
        close(rounded, lse, **given, generic=True)


def test_names_are_known_no_longer_than_they_are_needed():
    before = set(MASKS), set(SCORES), set(DISTRIBUTIONS)
    given = tensors()
    with pytest.raises(AssertionError):
        close(torch.zeros_like(given["q"]), **given, mask=WINDOW, score_mod=capped)
    assert (set(MASKS), set(SCORES), set(DISTRIBUTIONS)) == before


def test_nothing_is_written_to_and_no_gradient_is_kept():
    given = {name: tensor.requires_grad_() for name, tensor in tensors(torch.float32).items()}
    out = scaled_dot_product_attention(*given.values())
    before = [tensor.detach().clone() for tensor in (*given.values(), out)]
    assert close(out, **given).status == "pass"
    assert all(map(torch.equal, before, (*given.values(), out)))


# What cannot be asked.

FOUR = torch.ones(4)  # fewer than there are rows
CALLS = itertools.count()


def counting(score, b, h, i, j):
    return score + next(CALLS)


@pytest.mark.parametrize(
    ("changes", "says"),
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
        ({"attn_mask": ADDED, "score_mod": capped}, "attn_mask and score_mod are given both"),
        ({"attn_mask": capped}, "attn_mask is function: it must be a tensor."),
        ({"attn_mask": ADDED[:9]}, "attn_mask.shape=(9, 33) must broadcast to (batch, heads, "),
        ({"attn_mask": ADDED.double()}, "attn_mask.dtype=torch.float64 must be bool, True where"),
        ({"attn_mask": -ADDED.log()}, "attn_mask holds NaN or ∞: what is added is finite"),
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
        ({"out": torch.zeros(2, 4, 24, 16).int()}, "out.dtype=torch.int32 is no dtype"),
        ({"lse": torch.zeros(2, 4, 24, 1)}, "lse.shape=(2, 4, 24, 1), but should be (2, 4, 24)"),
        ({"lse": 3.0}, "lse is float: it must be a tensor."),
        ({"out": torch.zeros(2, 4, 24, 16).to_sparse()}, "out.layout=torch.sparse_coo must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_bad_arguments_are_one_line(changes, says):
    given = tensors()
    asked = {"out": given["q"].clone(), **given} | changes
    with one_line(AttncheckError, says):
        close(**asked)


@pytest.mark.parametrize(
    "descale",
    [(1.0, 1.0, 1.0), (torch.ones(2, 4),), torch.ones(2, 4), "x", (torch.ones(2, 4),) * 4],
    ids=["floats", "one", "a tensor", "text", "four"],
)
def test_bad_descales_are_one_line(descale):
    given = tensors(torch.float8_e4m3fn)
    with pytest.raises(AttncheckError, match=r"^descale must be three fp32 tensors"):
        close(given["q"].bfloat16(), **given, descale=descale)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"problem": 3}, "it must be a Problem, or its Inputs"),
        ({"problem": "bf16"}, "it must be a Problem, or its Inputs"),
        ({"problem": Problem(query=4), "sink": SINK}, "problem and sink are given both"),
    ],
)
def test_a_problem_says_it_all(options, says):
    with pytest.raises(AttncheckError, match=says):
        close(torch.zeros(2, 4, 24, 16), **options)
