"""A shim calls a kernel of the fault catalogue through the signature of a user's own function."""

import functools

import pytest
import torch
from tests.subjects import plain_kernels
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attncheck.core.outputs import Outputs
from attncheck.diagnose.user_tensors import UserTensors
from attncheck.faults.kernel_shim import ShimSettings, make_shim
from attncheck.inputs.problem import Case
from attncheck.mods.scores import alibi_slopes
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution
from attncheck.verify.judging import judge_outputs


class Skewed(Ideal):
    """Returns O slightly too large: by 0.1 %."""

    def run(self, inputs):
        outputs = super().run(inputs)
        outputs.out.mul_(1.001)
        return outputs


@pytest.fixture
def events():
    return []


@pytest.fixture
def shim(events):
    def shim(function, convention, kernel=None, right=None):
        return make_shim(
            function,
            ShimSettings(
                kernel=kernel or Ideal(),
                right=right,
                convention=convention,
                log_event=lambda event, detail: events.append((event, detail)),
            ),
        )

    return shim


def randn(*shape, seed=0, **more):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **more)


def qkv(heads=2, kv_heads=2, query=40, kv=40, batch=2):
    q = randn(batch, heads, query, 16).requires_grad_()
    k, v = (randn(batch, kv_heads, kv, 16, seed=s).requires_grad_() for s in (1, 2))
    return q, k, v


def check(outputs, q, k, v, dout=None, dlse=None, **arguments):
    """Assert that the judge passes Outputs, or O alone; and gradients where there is ``dout``."""
    outputs = outputs if isinstance(outputs, Outputs) else Outputs(outputs)
    with UserTensors(q=q, k=k, v=v, **arguments).inputs() as inputs:
        problem, more = inputs.problem, {}
        if dout is not None:
            problem = problem.replace(backward=True, dlse=dlse is not None)
            more = {"problem": problem, "dout": dout, "dlse": dlse}
        result = Execution(
            outputs=outputs,
            seconds=None,
            tiling=None,
            arithmetic=Ideal().arithmetic(problem, "cpu"),
        )
        judgement = judge_outputs(
            result, EvidenceBuilder(Case(problem=problem), "cpu", inputs.replace(**more))
        )
    assert judgement.status == "pass", judgement.reason


def band(query, kv, arguments):
    """The keys each row sees under flash_attn's ``causal`` and ``window_size``."""
    own = torch.arange(kv) - (torch.arange(query) + kv - query)[:, None]
    left, right = arguments.get("window_size", (-1, 0 if arguments.get("causal") else -1))
    return ((left < 0) | (own >= -left)) & ((right < 0) | (own <= right))


def unreplaced(function):
    """A function of the same signature, which the shim must replace."""

    @functools.wraps(function)
    def call(*_, **__):
        raise AssertionError("the shim must replace this")

    return call


flash_attn_func = unreplaced(plain_kernels.flash_attn_with())


@unreplaced
def varlen_func(  # noqa: PLR0917  # theirs
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=None
): ...


ADDED, BY_BATCH = randn(40, 40), randn(2, 1, 40, 40) > -1


@pytest.mark.parametrize(
    ("arguments", "meaning"),
    [
        ({}, {}),
        ({"is_causal": True}, {"is_causal": True}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"attn_mask": ADDED > -1}, {"mask": ADDED > -1}),
        ({"attn_mask": BY_BATCH}, {"mask": BY_BATCH}),
        ({"attn_mask": ADDED}, {"score_mod": lambda s, b, h, i, j: s + ADDED[i, j]}),
    ],
    ids=["plain", "causal", "scale", "mask", "mask by batch", "added"],
)
def test_sdpa_shim_passes_with_gradients(shim, events, arguments, meaning):
    leaves = qkv()
    out = shim(scaled_dot_product_attention, "sdpa")(*leaves, **arguments)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    out = out.detach()
    check(Outputs(out, None, *gradients), *leaves, dout=2 * out, **meaning)
    assert events == [("called", "")]


def test_check_fails_outputs_of_a_wrong_kernel(shim):
    leaves = qkv()
    out = shim(scaled_dot_product_attention, "sdpa", Skewed())(*leaves)
    with pytest.raises(AssertionError, match="beyond"):
        check(out.detach(), *leaves)


def test_sdpa_shim_takes_arguments_by_position_and_name_and_grouped_heads(shim, events):
    sdpa = shim(scaled_dot_product_attention, "sdpa")
    q, k, v = qkv(heads=4)
    check(sdpa(query=q, key=k, value=v, enable_gqa=True).detach(), q, k, v)
    one = k[:, :1], v[:, :1]
    check(sdpa(q, *one, None, 0.0, False, 0.3, True).detach(), q, *one, scale=0.3)
    assert {what for what, _ in events} == {"called"}


def test_shim_recognises_other_parameter_names(shim, events):
    def mine(a, b, c, causal, sm_scale, *, return_lse=False):
        raise AssertionError("the shim must replace this")

    leaves = qkv()
    out, lse = shim(mine, "sdpa")(*leaves, True, 0.5, return_lse=True)
    gradients = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
    out, lse = out.detach(), lse.detach()
    loss = {"dout": 2 * out, "dlse": torch.ones_like(lse)}
    check(Outputs(out, lse, *gradients), *leaves, **loss, is_causal=True, scale=0.5)


@pytest.mark.parametrize(("query", "kv"), [(40, 40), (24, 40), (40, 24)])
@pytest.mark.parametrize(
    "arguments",
    [
        {"causal": True},
        {"window_size": (7, 0)},
        {"window_size": (7, 3)},
        {"window_size": (-1, 5), "softcap": 2.0},
        {"causal": True, "alibi_slopes": torch.tensor(alibi_slopes(2))},
        {"window_size": (9, 9), "alibi_slopes": randn(2, 2).abs()},
    ],
    ids=str,
)
def test_flash_attn_shim_passes(shim, events, query, kv, arguments):
    q, k, v = qkv(query=query, kv=kv)
    cap, slopes = arguments.get("softcap"), arguments.get("alibi_slopes")

    def score(s, b, h, i, j):
        s = cap * torch.tanh(s / cap) if cap else s
        if slopes is None:
            return s
        return s - slopes.expand(2, 2)[b, h] * (j - i - kv + query).abs()

    out, lse, nothing = shim(flash_attn_func, "flash_attn")(
        *(x.transpose(1, 2) for x in (q, k, v)), **arguments, return_attn_probs=True
    )
    assert nothing is None
    # A slope may add one constant to a whole row, which shows in LSE alone.
    lse = lse.detach() if slopes is None else None
    outputs = Outputs(out.detach().transpose(1, 2), lse)
    check(outputs, q, k, v, mask=band(query, kv, arguments), score_mod=score)
    assert events == [("called", "")]


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
@pytest.mark.parametrize("keys", [[0, 9, 9, 40], [0, 5, 13, 60]])
def test_varlen_shim_passes(shim, events, keys, arguments):
    rows = [0, 9, 9, 40] if keys[1] == 9 else [0, 9, 12, 40]
    q, k, v = (randn(n, 2, 16, seed=s) for s, n in enumerate((rows[-1], keys[-1], keys[-1])))
    starts = [torch.tensor(each, dtype=torch.int32) for each in (rows, keys)]
    packed = shim(varlen_func, "varlen")(q, k, v, *starts, 40, 60, **arguments)
    for number in range(3):
        (a, b), (c, d) = (each[number : number + 2] for each in (rows, keys))
        if b > a:
            one = (x[None, i:j].transpose(1, 2) for x, i, j in ((q, a, b), (k, c, d), (v, c, d)))
            out = packed[None, a:b].transpose(1, 2)
            check(out, *one, mask=band(b - a, d - c, arguments))
    assert {what for what, _ in events} == {"called"}


def test_flex_attention_shim_passes(shim, events):
    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx % 5 == h)

    def score(s, b, h, q_idx, kv_idx):
        return s + (q_idx - kv_idx) * 0.1

    q, k, v = (x.detach() for x in qkv())
    arguments = {"score_mod": score, "block_mask": create_block_mask(mask, None, 2, 40, 40, "cpu")}
    flex = shim(flex_attention, "flex")
    check(flex(q, k, v, **arguments), q, k, v, mask=mask, score_mod=score)
    out, aux = flex(q, k, v, **arguments, return_aux=AuxRequest(lse=True))
    check(Outputs(out, aux.lse), q, k, v, mask=mask, score_mod=score)
    assert aux.lse.shape == (2, 2, 40)
    assert {what for what, _ in events} == {"called"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": randn(40, 40).requires_grad_()}, "gradient"),
    ],
    ids=str,
)
def test_call_no_kernel_supports_goes_to_the_original_function(shim, events, arguments, reason):
    torch.manual_seed(0)
    out = shim(scaled_dot_product_attention, "sdpa")(*qkv(), **arguments)
    torch.manual_seed(0)
    assert bool((out == scaled_dot_product_attention(*qkv(), **arguments)).all())
    assert [what for what, _ in events] == ["left"]
    assert reason in events[0][1]


def test_unknown_argument_or_dtype_goes_to_the_original_function(shim, events):
    def mine(q, k, v, *, rotary=None):
        return "its own"

    replaced = shim(mine, "sdpa")
    assert replaced(*qkv(), rotary=torch.ones(3)) == "its own"
    assert replaced(*(x.double() for x in qkv())) == "its own"
    assert [what for what, _ in events] == ["left", "left"]
    assert "rotary" in events[0][1]
    assert "float64" in events[1][1]


def test_call_whose_outputs_differ_from_the_right_kernel_is_logged(shim, events):
    faulty = shim(scaled_dot_product_attention, "sdpa", Skewed(), Ideal())
    right = shim(scaled_dot_product_attention, "sdpa", Ideal(), Ideal())
    right(*qkv())
    assert events == [("called", "")]
    faulty(*qkv())
    assert events[-1] == ("shown", "")


def test_exception_of_the_kernel_reaches_the_caller(shim):
    class Breaks(Ideal):
        def run(self, inputs):
            raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory"):
        shim(scaled_dot_product_attention, "sdpa", Breaks())(*qkv())
