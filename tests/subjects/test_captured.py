"""Gradients of the tensors that a score mod captures: triton-flash2, ideal and flex give them.

flex differentiates the very tensors that its callable captures; all other kernels refuse.
"""

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
from attncheck.verify.executor import Failure, InProcess
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
REFUSED = Failure(
    kind="refused", message="it gives no gradients of the tensors that a score mod reads"
)


def problem(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "query": 20, "kv": 27, "head_dim": 16}
    gradients = {"backward": True, "dlse": True, "dcaptured": True}
    mods = {"mask": Spec.of("causal"), "score": Spec.of("alibi")}
    return Problem(**(sizes | {"dtype": "fp32"} | mods | gradients | changes))


def passes(subject, problem: Problem) -> bool:
    record = run_case(subject, Case(problem=problem), device="cpu")
    assert record.gradients is None or "dcaptured" in record.gradients
    return record.status == "pass"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("score", SCORES)
def test_flash2_gives_correct_captured_gradients(score, dtype):
    assert passes(Flash2((16, 16)), problem(score=SCORES[score], dtype=dtype))


@pytest.mark.parametrize("subject", [Flash2Atomic((16, 16)), Flash2((16, 32), dense=True)])
def test_other_launches_of_flash2_give_correct_captured_gradients(subject):
    assert passes(subject, problem(score=SCORES["a cap over a bias"], dtype="fp16"))


def test_captured_gradients_are_not_computed_unasked():
    assert Flash2().run(draw_inputs(problem(dcaptured=False))).dcaptured is None


def test_flash2_launch_for_captured_gradients_has_one_stage():
    """With more stages, a table would be in shared memory several times."""
    captured = problem(dtype="bf16")
    rows, keys = Flash2().gradient_launches(captured, "cuda")
    plain = Flash2().gradient_launches(captured.replace(dcaptured=False), "cuda")
    assert rows.stages == 1 < plain[0].stages
    assert keys == plain[1]


def test_only_ideal_flash2_and_flex_give_captured_gradients():
    captured, plain = problem(), problem(dcaptured=False)
    able = set()
    for name in named_kernels.builtin_names():
        subject = named_kernels.subject_named(name)
        if not subject.concerns(plain) or subject.absent("cpu"):
            continue
        assert subject.concerns(captured)
        if InProcess().refusal(subject, captured, "cpu") == REFUSED:
            assert not subject.captured
        else:
            able.add(name)
            assert subject.captured
    assert able == {"ideal", "triton-flash2", "flex"}


def test_capability_table_does_not_change_who_gives_captured_gradients():
    table = Capabilities(entry="triton-flash2", dtypes=("fp32",))
    assert InProcess().refusal(Declared(Flash2(), table, "mine"), problem(), "cpu") is None
    sdpa = Declared(named_kernels.subject_named("sdpa-math"), table, "mine")
    assert InProcess().refusal(sdpa, problem(), "cpu") == REFUSED


def formula(q, k, v, score, blocks, scale):
    """Causal flex_attention by the plain formula, which torch differentiates on a CPU too."""
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
    """Flex as on a GPU, where torch has a backward."""

    def unsupported(self, problem, device):
        return None


@pytest.mark.parametrize("score", SCORES)
def test_flex_gives_correct_captured_gradients(score, monkeypatch):
    monkeypatch.setattr(torch_kernels, "_eager", formula)
    assert passes(FlexByFormula(), problem(score=SCORES[score]))


def test_flex_restores_requires_grad_of_captured_tensors(monkeypatch):
    """A user's tensor may be in use elsewhere."""
    table = torch.randn(2, 5)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx).clamp(0, 4)].to(score.dtype)

    entry = Entry(summary="of this test", build=lambda *_: mod)
    monkeypatch.setitem(library.SCORES, "of this test", entry)
    tracked = []

    def record_tracking(*arguments):
        tracked.append(table.requires_grad)
        return formula(*arguments)

    monkeypatch.setattr(torch_kernels, "_eager", record_tracking)
    inputs = draw_inputs(problem(score=Spec.of("of this test")))
    assert FlexByFormula().run(inputs).dcaptured.shape == (10,)
    FlexByFormula().run(draw_inputs(inputs.problem.replace(dcaptured=False)))
    assert tracked == [True, False]
    assert not table.requires_grad
    table.requires_grad_()
    FlexByFormula().run(inputs)
    assert table.requires_grad


def test_flex_refuses_a_tensor_that_is_read_twice():
    """torch adds up no gradients of several reads of one tensor."""
    from torch._inductor.exc import InductorError

    def call():
        message = "Using multiple indexing operations on the same tensor that requires gradients"
        raise InductorError(NotImplementedError(message), None)

    with pytest.raises(Refused, match="torch adds no gradients up of a tensor read twice"):
        torch_kernels._compile_now(call)


def test_flex_finds_tensors_captured_within_its_wrapper():
    """The score mod that flex passes is a function around the Problem's."""
    mod = torch_kernels.flex_score_mod(problem(score=BIAS), "cpu")
    (tensor,) = captured_tensors(mod)
    assert tensor.numel() == 2 * 2 * 20 * 27


def test_flex_refuses_a_captured_tensor_in_bf16(monkeypatch):
    """torch would round its gradient to 16 bits."""
    table = torch.randn(2, 5, dtype=torch.bfloat16)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx).clamp(0, 4)].to(score.dtype)

    monkeypatch.setitem(
        library.SCORES, "narrow", Entry(summary="of this test", build=lambda *_: mod)
    )
    monkeypatch.setattr(torch_kernels, "_eager", formula)
    with pytest.raises(Refused, match="rounds the gradient of a 16-bit tensor"):
        FlexByFormula().run(draw_inputs(problem(score=Spec.of("narrow"))))
