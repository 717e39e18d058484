"""Who gives gradients of what a score mod reads: ours as the judge allows, torch's flex of the very
tensors that its callable captures, all others in no Problem."""

import pytest
import torch

from attncheck.core.mod_spec import Entry, Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.mods import library
from attncheck.mods.captured_gradients import captured_tensors
from attncheck.subjects import torch_kernels
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.capabilities.capability_table import Capabilities
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.capabilities.subject import Refused
from attncheck.subjects.torch_kernels import Flex
from attncheck.subjects.triton_flash import Flash2, Flash2Atomic
from attncheck.verify.executor import InProcess
from attncheck.verify.run_case import run_case

BIAS = Spec.of("bias", seed=0, per_batch=1, per_head=1)
CAP = Spec.of("softcap", cap=1.5)
SCORES = {
    "alibi": Spec.of("alibi"),
    "relative bias": Spec.of("relative_bias", distance=3, seed=0),
    "one bias": Spec.of("bias", seed=0, per_batch=0, per_head=0),
    "bias of each": BIAS,
    "later rows": Spec.of("offset", BIAS, rows=3),
    "alibi under a cap": Spec.of("chain", CAP, Spec.of("alibi")),
    "a cap over a bias": Spec.of("chain", BIAS, CAP),
    "two tables": Spec.of("chain", Spec.of("alibi"), Spec.of("relative_bias", distance=3, seed=0)),
}
REASON = "it gives no gradients of the tensors that a score mod reads"


def problem(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "query": 20, "kv": 27, "head_dim": 16}
    asked = {"mask": Spec.of("causal"), "backward": True, "dlse": True, "dcaptured": True}
    return Problem(**(sizes | {"dtype": "fp32", "score": Spec.of("alibi")} | asked | changes))


def passes(subject, asked: Problem) -> bool:
    record = run_case(subject, Case(problem=asked), device="cpu")
    assert record.gradients is None or "dcaptured" in record.gradients
    return record.status == "pass"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("score", SCORES)
def test_our_kernel_gives_them(score, dtype):
    assert passes(Flash2((16, 16)), problem(score=SCORES[score], dtype=dtype))


@pytest.mark.parametrize("subject", [Flash2Atomic((16, 16)), Flash2((16, 32), dense=True)])
def test_other_launches_of_it_do(subject):
    assert passes(subject, problem(score=SCORES["a cap over a bias"], dtype="fp16"))


def test_what_nobody_asks_for_is_not_there():
    found = Flash2().run(draw_inputs(problem(dcaptured=False)))
    assert found.dcaptured is None


def test_its_launch_for_them_has_one_stage():
    """Else a table would be in shared memory several times."""
    asked = problem(dtype="bf16")
    rows, keys = Flash2().gradient_launches(asked, "cuda")
    plain = Flash2().gradient_launches(asked.replace(dcaptured=False), "cuda")
    assert rows.stages == 1 < plain[0].stages
    assert keys == plain[1]


def test_who_gives_them():
    asked, plain = problem(), problem(dcaptured=False)
    able = set()
    for name in named_kernels.builtin_names():
        subject = named_kernels.subject_named(name)
        if not subject.concerns(plain) or subject.absent("cpu"):
            continue
        assert subject.concerns(asked)
        if InProcess().refusal(subject, asked, "cpu") == REASON:
            assert not subject.captured
        else:
            able.add(name)
            assert subject.captured
    assert able == {"ideal", "triton-flash2", "flex"}


def test_a_table_of_what_a_kernel_takes_changes_nothing_of_it():
    table = Capabilities(entry="triton-flash2", dtypes=("fp32",))
    assert InProcess().refusal(Declared(Flash2(), table, "mine"), problem(), "cpu") is None
    sdpa = Declared(named_kernels.subject_named("sdpa-math"), table, "mine")
    assert InProcess().refusal(sdpa, problem(), "cpu") == REASON


def formula(q, k, v, score, blocks, scale):
    """What flex_attention computes, as torch differentiates it; causal."""
    del blocks
    shape = (*q.shape[:3], k.shape[2])
    at = [
        torch.arange(n).view(*(-1 if i == j else 1 for j in range(4))) for i, n in enumerate(shape)
    ]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    z = score(scale * q @ k.mT, *at).masked_fill(at[2] < at[3], -torch.inf)
    return z.softmax(-1) @ v, z.logsumexp(-1)


class FlexByFormula(Flex):
    """As on a GPU, where torch has a backward: what is asked for, and of which tensors."""

    def unsupported(self, problem, device):
        return None


@pytest.mark.parametrize("score", SCORES)
def test_flex_follows_the_tensors_of_the_callable_that_it_passes(score, monkeypatch):
    monkeypatch.setattr(torch_kernels, "_eager", formula)
    assert passes(FlexByFormula(), problem(score=SCORES[score]))


def test_flex_leaves_tensors_as_they_were(monkeypatch):
    """Somebody's own may be in use elsewhere."""
    table = torch.randn(2, 5)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx).clamp(0, 4)].to(score.dtype)

    entry = Entry(summary="of this test", build=lambda *_: mod)
    monkeypatch.setitem(library.SCORES, "of this test", entry)
    seen = []

    def watched(*arguments):
        seen.append(table.requires_grad)
        return formula(*arguments)

    monkeypatch.setattr(torch_kernels, "_eager", watched)
    inputs = draw_inputs(problem(score=Spec.of("of this test")))
    found = FlexByFormula().run(inputs)
    assert found.dcaptured.shape == (10,)
    FlexByFormula().run(draw_inputs(inputs.problem.replace(dcaptured=False)))
    assert seen == [True, False]
    assert not table.requires_grad
    table.requires_grad_()
    FlexByFormula().run(inputs)
    assert table.requires_grad


def test_flex_refuses_what_torch_does_not_add_up():
    from torch._inductor.exc import InductorError

    def call():
        said = "Using multiple indexing operations on the same tensor that requires gradients"
        raise InductorError(NotImplementedError(said), None)

    with pytest.raises(Refused, match="torch adds no gradients up of a tensor read twice"):
        torch_kernels._compile_now(call)


def test_flex_hands_on_what_its_wrapper_captures():
    """The score mod that it passes is a function around the Problem's."""
    mod = torch_kernels.flex_score_mod(problem(score=BIAS), "cpu")
    (found,) = captured_tensors(mod)
    assert found.numel() == 2 * 2 * 20 * 27


def test_flex_refuses_a_table_whose_gradient_torch_rounds(monkeypatch):
    table = torch.randn(2, 5, dtype=torch.bfloat16)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx).clamp(0, 4)].to(score.dtype)

    monkeypatch.setitem(
        library.SCORES, "narrow", Entry(summary="of this test", build=lambda *_: mod)
    )
    monkeypatch.setattr(torch_kernels, "_eager", formula)
    with pytest.raises(Refused, match="rounds the gradient of a 16-bit tensor"):
        FlexByFormula().run(draw_inputs(problem(score=Spec.of("narrow"))))
