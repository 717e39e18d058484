"""Kernels of ours called as somebody's function is."""

import pytest
import torch
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
    """O a little too large."""

    def run(self, inputs):
        found = super().run(inputs)
        found.out.mul_(1.001)
        return found


@pytest.fixture
def said():
    return []


@pytest.fixture
def ours(said):
    def ours(function, convention, kernel=None, right=None):
        return make_shim(
            function,
            ShimSettings(
                kernel=kernel or Ideal(),
                right=right,
                convention=convention,
                log_event=lambda what, of: said.append((what, of)),
            ),
        )

    return ours


def drawn(*shape, seed=0, **more):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **more)


def qkv(heads=2, kv_heads=2, query=40, kv=40, batch=2):
    q = drawn(batch, heads, query, 16).requires_grad_()
    k, v = (drawn(batch, kv_heads, kv, 16, seed=s).requires_grad_() for s in (1, 2))
    return q, k, v


def check(found, q, k, v, dout=None, dlse=None, **given):
    """The judge on what the ideal kernel gave in place of the function; gradients where it has any.

    ``found``: Outputs, or out alone.
    """
    outputs = found if isinstance(found, Outputs) else Outputs(found)
    with UserTensors(q=q, k=k, v=v, **given).inputs() as inputs:
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
        found = judge_outputs(
            result, EvidenceBuilder(Case(problem=problem), "cpu", inputs.replace(**more))
        )
    assert found.status == "pass", found.reason


def band(query, kv, given):
    """What each row sees, and where it is before each key, in flash_attn's words."""
    own = torch.arange(kv) - (torch.arange(query) + kv - query)[:, None]
    left, right = given.get("window_size", (-1, 0 if given.get("causal") else -1))
    return ((left < 0) | (own >= -left)) & ((right < 0) | (own <= right))


def flash_attn_func(  # noqa: PLR0917  # theirs
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    raise AssertionError("it is replaced")


def varlen_func(  # noqa: PLR0917  # theirs
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=None
):
    raise AssertionError("it is replaced")


ADDED, BY_BATCH = drawn(40, 40), drawn(2, 1, 40, 40) > -1


@pytest.mark.parametrize(
    ("given", "meant"),
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
def test_sdpa_with_gradients(ours, said, given, meant):
    leaves = qkv()
    out = ours(scaled_dot_product_attention, "sdpa")(*leaves, **given)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    out = out.detach()
    check(Outputs(out, None, *gradients), *leaves, dout=2 * out, **meant)
    assert said == [("called", "")]


def test_what_is_a_little_too_large_is_refused(ours):
    leaves = qkv()
    out = ours(scaled_dot_product_attention, "sdpa", Skewed())(*leaves)
    with pytest.raises(AssertionError, match="beyond"):
        check(out.detach(), *leaves)


def test_arguments_by_position_by_name_and_in_groups(ours, said):
    sdpa = ours(scaled_dot_product_attention, "sdpa")
    q, k, v = qkv(heads=4)
    check(sdpa(query=q, key=k, value=v, enable_gqa=True).detach(), q, k, v)
    one = k[:, :1], v[:, :1]
    check(sdpa(q, *one, None, 0.0, False, 0.3, True).detach(), q, *one, scale=0.3)
    assert {what for what, _ in said} == {"called"}


def test_a_function_that_names_them_otherwise(ours, said):
    def mine(a, b, c, causal, sm_scale, *, return_lse=False):
        raise AssertionError("it is replaced")

    leaves = qkv()
    out, lse = ours(mine, "sdpa")(*leaves, True, 0.5, return_lse=True)
    gradients = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
    out, lse = out.detach(), lse.detach()
    loss = {"dout": 2 * out, "dlse": torch.ones_like(lse)}
    check(Outputs(out, lse, *gradients), *leaves, **loss, is_causal=True, scale=0.5)


@pytest.mark.parametrize(("query", "kv"), [(40, 40), (24, 40), (40, 24)])
@pytest.mark.parametrize(
    "given",
    [
        {"causal": True},
        {"window_size": (7, 0)},
        {"window_size": (7, 3)},
        {"window_size": (-1, 5), "softcap": 2.0},
        {"causal": True, "alibi_slopes": torch.tensor(alibi_slopes(2))},
        {"window_size": (9, 9), "alibi_slopes": drawn(2, 2).abs()},
    ],
    ids=str,
)
def test_flash_attn(ours, said, query, kv, given):
    q, k, v = qkv(query=query, kv=kv)
    cap, slopes = given.get("softcap"), given.get("alibi_slopes")

    def score(s, b, h, i, j):
        s = cap * torch.tanh(s / cap) if cap else s
        if slopes is None:
            return s
        return s - slopes.expand(2, 2)[b, h] * (j - i - kv + query).abs()

    out, lse, nothing = ours(flash_attn_func, "flash_attn")(
        *(x.transpose(1, 2) for x in (q, k, v)), **given, return_attn_probs=True
    )
    assert nothing is None
    # Of a whole row at once slopes may be added another number, which only LSE shows.
    lse = lse.detach() if slopes is None else None
    found = Outputs(out.detach().transpose(1, 2), lse)
    check(found, q, k, v, mask=band(query, kv, given), score_mod=score)
    assert said == [("called", "")]


@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
@pytest.mark.parametrize("keys", [[0, 9, 9, 40], [0, 5, 13, 60]])
def test_sequences_one_behind_the_other(ours, said, keys, given):
    rows = [0, 9, 9, 40] if keys[1] == 9 else [0, 9, 12, 40]
    q, k, v = (drawn(n, 2, 16, seed=s) for s, n in enumerate((rows[-1], keys[-1], keys[-1])))
    starts = [torch.tensor(each, dtype=torch.int32) for each in (rows, keys)]
    found = ours(varlen_func, "varlen")(q, k, v, *starts, 40, 60, **given)
    for number in range(3):
        (a, b), (c, d) = (each[number : number + 2] for each in (rows, keys))
        if b > a:
            one = (x[None, i:j].transpose(1, 2) for x, i, j in ((q, a, b), (k, c, d), (v, c, d)))
            out = found[None, a:b].transpose(1, 2)
            check(out, *one, mask=band(b - a, d - c, given))
    assert {what for what, _ in said} == {"called"}


def test_flex_attention(ours, said):
    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx % 5 == h)

    def score(s, b, h, q_idx, kv_idx):
        return s + (q_idx - kv_idx) * 0.1

    q, k, v = (x.detach() for x in qkv())
    given = {"score_mod": score, "block_mask": create_block_mask(mask, None, 2, 40, 40, "cpu")}
    flex = ours(flex_attention, "flex")
    check(flex(q, k, v, **given), q, k, v, mask=mask, score_mod=score)
    out, aux = flex(q, k, v, **given, return_aux=AuxRequest(lse=True))
    check(Outputs(out, aux.lse), q, k, v, mask=mask, score_mod=score)
    assert aux.lse.shape == (2, 2, 40)
    assert {what for what, _ in said} == {"called"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": drawn(40, 40).requires_grad_()}, "gradient"),
    ],
    ids=str,
)
def test_what_no_kernel_takes_goes_to_the_function_itself(ours, said, given, reason):
    torch.manual_seed(0)
    found = ours(scaled_dot_product_attention, "sdpa")(*qkv(), **given)
    torch.manual_seed(0)
    assert bool((found == scaled_dot_product_attention(*qkv(), **given)).all())
    assert [what for what, _ in said] == ["left"]
    assert reason in said[0][1]


def test_an_argument_that_the_convention_has_not_is_left_to_the_function(ours, said):
    def mine(q, k, v, *, rotary=None):
        return "its own"

    mine_ = ours(mine, "sdpa")
    assert mine_(*qkv(), rotary=torch.ones(3)) == "its own"
    assert mine_(*(x.double() for x in qkv())) == "its own"
    assert [what for what, _ in said] == ["left", "left"]
    assert "rotary" in said[0][1]
    assert "float64" in said[1][1]


def test_a_call_that_shows_the_fault_is_told(ours, said):
    faulty = ours(scaled_dot_product_attention, "sdpa", Skewed(), Ideal())
    right = ours(scaled_dot_product_attention, "sdpa", Ideal(), Ideal())
    right(*qkv())
    assert said == [("called", "")]
    faulty(*qkv())
    assert said[-1] == ("shown", "")


def test_what_the_kernel_raises_is_the_callers(ours):
    class Breaks(Ideal):
        def run(self, inputs):
            raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory"):
        ours(scaled_dot_product_attention, "sdpa", Breaks())(*qkv())
