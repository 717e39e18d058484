"""The oracles' gradients of *captured* numbers, which a score mod reads from tensors."""

import importlib
import math

import pytest
import torch
from tests.exact_attention import gradients, indices
from tests.oracles import gradients_by_torch as reference
from tests.oracles.conftest import PLANTED, SMALL, assert_balls_contain, make_numbers
from tests.oracles.test_planted_faults import backward

from attncheck import oracles
from attncheck.core.errors import ProblemError, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.captured_gradients import leaf_gradients
from attncheck.mods.mpmath_algebra import MPMATH
from attncheck.oracles.backward_recurrences import dense_backward
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.recurrence_steps import Scores, safe
from attncheck.oracles.streaming_gradients import streaming_backward

tiny = reference.tiny
BACKWARDS = oracles.BACKWARDS | {
    "streaming, many tiles": lambda inputs: streaming_backward(inputs, blocks=SMALL)
}
every_backward = pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS.keys())

SOFTCAP = Spec.of("softcap", cap=1.5)
ALIBI, RELATIVE = Spec.of("alibi"), Spec.of("relative_bias", distance=2, seed=0)
SCORES = [
    ALIBI,
    RELATIVE,
    *(Spec.of("bias", seed=1, per_batch=b, per_head=h) for b in (0, 1) for h in (0, 1)),
    Spec.of("chain", SOFTCAP, ALIBI),
    Spec.of("chain", RELATIVE, SOFTCAP, ALIBI),
]
MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("padding", lengths=[0, 7]),
    Spec.of("expression", text="(q_idx % 3 > 0) & (kv_idx % 4 > 0)"),
]
CASES = [(MASKS[1], score) for score in SCORES] + [(mask, SCORES[-1]) for mask in MASKS]
PLACES = (2, 4, 9, 11)  # batch, heads, query, kv


def draw(**changes):
    return tiny(**{"dcaptured": True, "score": SCORES[-1], **changes})


def make_leaves(mod):
    """Replace the float tensors in a library mod's closures by float64 leaves; return these."""
    leaves = []
    for cell in mod.__closure__ or ():
        content = cell.cell_contents
        if isinstance(content, torch.Tensor) and content.is_floating_point():
            cell.cell_contents = content.double().requires_grad_()
            leaves.append(cell.cell_contents)
        for part in content if isinstance(content, tuple | list) else [content]:
            if callable(part) and hasattr(part, "__closure__"):
                leaves += make_leaves(part)
    return leaves


def by_torch(inputs, monkeypatch):
    """The captured gradients by torch's autograd of the definition."""
    mod = inputs.problem.score_mod("cpu")
    leaves = make_leaves(mod)
    with monkeypatch.context() as patch:
        patch.setattr(Problem, "score_mod", lambda _problem, _device: mod)
        known = reference.Definition.of(inputs).of_leaves
    by_name = {str(place): leaf for place, leaf in enumerate(leaves)}
    exact = gradients(known, by_name, *inputs.loss()).values()
    return torch.cat([each.flatten() for each in exact])


def allowed(inputs, allowance):
    """Error bounds as in ``gradients_by_torch.Allowed``, for dZ · J summed by captured number."""
    p, known = inputs.problem, reference.Definition.of(inputs).of_leaves
    bound, (dout, dlse) = allowance(inputs.forward()), inputs.loss()
    weights = known.p.detach()[..., : p.kv]
    sizes = torch.cat([known.x.flatten(), known.z.flatten(), known.lse.flatten()]).detach()
    of_p = 2 * (bound.weight + p.kv) + 6 * sizes[sizes.isfinite()].abs().max().item() + 4
    v = inputs.promoted()[2].abs().repeat_interleave(p.group, dim=1)
    row = (dout.abs() * bound.spread).sum(-1, keepdim=True) + dlse.abs()[..., None]
    terms = weights * (dout.abs() @ v.mT + row)
    each = of_p + bound.out + 2 * (p.value_dim + 1) + 5 + p.batch * p.heads * p.query * p.kv
    bent = (bound.weight + 16) / 1.5 * max(p.query, p.kv)  # softcap's bend, times alibi's distance
    axes = indices(*known.x.shape)
    tables, parts = {}, []
    for leaf, slope in leaf_gradients(p.score_mod("cpu"), known.x.detach(), *axes):
        sums = tables.setdefault(id(leaf.tensor), torch.zeros(leaf.tensor.shape).double())
        leaf.add(terms * ((each + 8) * slope.abs() + bent), sums)
        parts.append(leaf)
    return torch.cat([table.flatten() for table in tables.values()]) * reference.UNIT


@every_backward
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize(("mask", "score"), CASES, ids=str)
def test_dcaptured_equals_torchs_autograd(backward, mask, score, sink, allowance, monkeypatch):
    inputs = draw(mask=mask, score=score, sink=sink)
    exact, most = by_torch(inputs, monkeypatch), allowed(inputs, allowance)
    outputs = backward(inputs)
    assert outputs.dcaptured.shape == exact.shape
    assert ((outputs.dcaptured - exact).abs() <= 2 * most).all()
    plain = backward(inputs.replace(problem=inputs.problem.replace(dcaptured=False)))
    assert plain.dcaptured is None
    for name, tensor in plain.gradients().items():
        assert torch.equal(tensor, outputs.gradients()[name])


@every_backward
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_hidden_infinities_and_nan_reach_no_captured_number(backward, value):
    inputs = draw(mask=MASKS[3])
    tensors = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "dout")}
    for name, step in (("q", 3), ("k", 4), ("v", 4), ("dout", 3)):
        tensors[name][:, :, ::step] = value
    spoilt, plain = backward(inputs.replace(**tensors)), backward(inputs)
    assert torch.equal(spoilt.dcaptured, plain.dcaptured)


@every_backward
def test_captured_numbers_of_hidden_keys_have_zero_gradients(backward):
    score = Spec.of("bias", seed=1, per_batch=1, per_head=1)
    dcaptured = backward(draw(mask=Spec.of("causal"), score=score)).dcaptured.view(PLACES)
    seen = torch.ones(PLACES[2:]).tril().bool()
    assert (dcaptured[..., ~seen] == 0).all()
    assert (dcaptured[..., seen][..., 1:] != 0).all()


@every_backward
def test_nan_reaches_only_captured_numbers_of_rows_that_attend_to_it(backward):
    inputs = draw(mask=Spec.of("causal"), score=Spec.of("bias", seed=1, per_batch=1, per_head=1))
    k = inputs.k.clone()
    k[0, 0, 4] = math.nan
    dcaptured = backward(inputs.replace(k=k)).dcaptured.view(PLACES)
    assert dcaptured[0, :2, 4:][..., torch.ones(5, 11).tril(4).bool()].isnan().all()
    assert dcaptured[0, :2, :4].isfinite().all()
    assert dcaptured[:, 2:].isfinite().all()
    assert dcaptured[1].isfinite().all()


TABLE = torch.tensor([[0.5, -1.25, 0.75], [1.0, 0.25, -0.5]])


def _mod(table):
    def bent(score, b, h, q_idx, kv_idx):
        bias = table[h, (kv_idx - q_idx).clamp(-1, 1) + 1].to(score.dtype)
        return 1.5 * torch.tanh((score + bias) / 1.5) * bias

    return bent


def _loss(mp, inputs, table, patch):
    """Σ dout·out + Σ dLSE·LSE, from the forward's definition alone."""
    problem = inputs.problem
    patch.setattr(Problem, "score_mod", lambda _problem, _device="cpu": _mod(table))
    q, k, v = (mp.exact(tensor) for tensor in inputs.promoted())
    every = range(problem.query), range(problem.kv)
    scores, attended = Scores.of(mp, inputs)(q, *(mp.repeat_heads(k, 1),), *every)
    weights, lse = safe(mp, scores, attended, None)
    dout, dlse = (mp.exact(x) for x in inputs.loss())
    return (dout * mp.weigh(weights, v, attended)).sum() + (dlse[..., None] * lse).sum()


def _quotient(mp, inputs, place, exponent, patch):
    ends = []
    for sign in (1, -1):
        moved = TABLE.clone()
        moved[place] += sign * 2.0**exponent
        assert (moved[place].double() - TABLE[place].double()).abs() == 2.0**exponent
        ends.append(_loss(mp, inputs, moved, patch))
    return (ends[0] - ends[1]) / mp.context.ldexp(1, exponent + 1)


def _small(**changes):
    sizes = {"query": 3, "kv": 4, "head_dim": 2, "heads": 2, "backward": True, "dlse": True}
    problem = Problem(**sizes, score=ALIBI, dcaptured=True, mask=Spec.of("causal"))
    return draw_inputs(problem.replace(**changes))


def test_dcaptured_equals_difference_quotients_in_many_digits(monkeypatch):
    inputs, mp = _small(), Mp(50, MPMATH.score, MPMATH.slope, MPMATH.captures)
    monkeypatch.setattr(Problem, "score_mod", lambda _problem, _device="cpu": _mod(TABLE))
    in_digits = [run(mp, inputs).dcaptured for run in oracles.BACKWARD_RECURRENCES.values()]
    in_float64 = [run(inputs).dcaptured for run in oracles.BACKWARDS.values()]
    for number, place in enumerate((h, c) for h in range(2) for c in range(3)):
        coarse, fine = (_quotient(mp, inputs, place, e, monkeypatch) for e in (-18, -19))
        exact = (4 * fine - coarse) / 3  # Richardson: the error is h⁴ times the fifth derivative
        for one in in_digits:
            assert abs(one[0, 0, 0, number] - exact) <= 1e-20
        for one in in_float64:
            assert abs(float(one[number]) - float(exact)) <= 1e-14


def test_balls_contain_dcaptured(monkeypatch):
    evaluators = ("score", "slope", "captures")
    ball, mp = (make_numbers(each, *evaluators, digits=60) for each in ("Ball", "Mp"))
    inputs = _small()
    monkeypatch.setattr(Problem, "score_mod", lambda _problem, _device="cpu": _mod(TABLE))
    exact = dense_backward(mp, inputs).dcaptured
    for recurrence in oracles.BACKWARD_RECURRENCES.values():
        assert_balls_contain(recurrence(ball, inputs).dcaptured.array.flat, exact.flat, mp)


@pytest.mark.parametrize("system", ["Mp", "Ball"])
def test_number_system_without_captures_refuses_dcaptured(system):
    with pytest.raises(UsageError, match=f"need {system}'s `captures`"):
        dense_backward(make_numbers(system, "score", "slope"), _small())


def test_score_mod_of_scalar_indices_is_refused(monkeypatch):
    alibi = draw(score=ALIBI).problem.score_mod("cpu")

    def for_one(s, b, h, q, k):
        if q.dim():
            raise TypeError("one index at a time")
        return alibi(s, b, h, q, k)

    inputs = draw()
    monkeypatch.setattr(Problem, "score_mod", lambda problem, device: for_one)
    with pytest.raises(
        ProblemError, match=r"all indices at once .*, torch says: one index at a time"
    ):
        dense_backward(Float64(), inputs)


@pytest.mark.parametrize("fault", PLANTED["captured"])
def test_planted_fault_exceeds_the_bounds(fault, allowance, plant, monkeypatch):
    name, right, wrong = PLANTED["captured"][fault].values()
    score = Spec.of("chain", RELATIVE, SOFTCAP, ALIBI, SOFTCAP)
    inputs = draw(mask=Spec.of("causal"), score=score, query=11)
    exact, most = by_torch(inputs, monkeypatch), allowed(inputs, allowance)
    module = plant(importlib.import_module(f"attncheck.{name}"), right, wrong)
    if name == "mods.captured_gradients":
        float64 = importlib.import_module("attncheck.oracles.float64_numbers")
        monkeypatch.setattr(float64, "CapturedSums", module.CapturedSums)
        module = importlib.import_module("attncheck.oracles.backward_recurrences")
    outputs = backward(fault.partition(":")[0], module, inputs)
    assert not ((outputs.dcaptured - exact).abs() <= 2 * most).all()
