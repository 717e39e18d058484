"""The oracles' gradients equal torch's autograd of the definition, within error bounds."""

import importlib
import math

import pytest
import torch
from tests.oracles import gradients_by_torch as reference
from tests.oracles.conftest import SMALL

from attncheck import oracles
from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Spec
from attncheck.core.tensor_names import GRADIENTS
from attncheck.inputs.problem import Problem
from attncheck.oracles.backward_recurrences import flash2_backward
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.mod_calls import Indices
from attncheck.oracles.streaming_gradients import streaming_backward

SCORES, Definition = reference.SCORES, reference.Definition
tiny, allowed_of = reference.tiny, reference.allowed


def _flash2(inputs, block_query, block_kv):
    numbers = Float64()
    blocks = {"block_query": block_query, "block_kv": block_kv}
    return flash2_backward(numbers, inputs, **blocks).rounded(numbers)


BACKWARDS = oracles.BACKWARDS | {
    "flash2, odd blocks": lambda inputs: _flash2(inputs, 2, 3),
    "flash2, other odd blocks": lambda inputs: _flash2(inputs, 4, 20),
    "streaming, many tiles": lambda inputs: streaming_backward(inputs, blocks=SMALL),
}
every_backward = pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS.keys())

MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("causal_bottom_right"),
    Spec.of("sliding_window", window=3),
    Spec.of("sliding_window", window=0),  # no row sees a key
    Spec.of("padding", lengths=[0, 7]),
    Spec.of("document", lengths=[2, 5, 4]),
    Spec.of("expression", text="abs(q_idx - kv_idx) % 3 <= h + b"),
]
CASES = [(mask, Spec.of("none")) for mask in MASKS] + [(MASKS[1], score) for score in SCORES]


@every_backward
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize(("mask", "score"), CASES, ids=str)
def test_gradients_equal_torchs_autograd(backward, mask, score, sink, allowance):
    inputs = tiny(mask=mask, score=score, sink=sink)
    exact = Definition.of(inputs).gradients(inputs)
    assert not allowed_of(inputs, allowance).misses(backward(inputs), exact)


@every_backward
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dlse", [False, True], ids=["", "dLSE"])
def test_gradients_for_head_groups_with_and_without_a_loss_of_lse(
    backward, kv_heads, dlse, allowance
):
    inputs = tiny(kv_heads=kv_heads, dlse=dlse)
    exact = Definition.of(inputs).gradients(inputs)
    assert not allowed_of(inputs, allowance).misses(backward(inputs), exact)


@every_backward
def test_gradients_of_a_loss_of_lse_alone(backward, allowance):
    inputs = tiny(sink=True, mask=Spec.of("causal"))
    inputs = inputs.replace(dout=torch.zeros_like(inputs.dout))
    gradients = backward(inputs)
    exact = Definition.of(inputs).gradients(inputs)
    assert not allowed_of(inputs, allowance).misses(gradients, exact)
    assert (gradients.dv == 0).all()
    assert (gradients.dq != 0).any()


@every_backward
def test_rows_without_keys_and_keys_without_rows_have_zero_gradients(backward):
    inputs = tiny(mask=Spec.of("expression", text="(q_idx % 3 > 0) & (kv_idx % 4 > 0)"))
    gradients = backward(inputs)
    assert (gradients.dq[:, :, ::3] == 0).all()
    assert (gradients.dk[:, :, ::4] == 0).all()
    assert (gradients.dv[:, :, ::4] == 0).all()
    for name in ("dq", "dk", "dv"):
        assert (getattr(gradients, name)[:, :, 1] != 0).any()


@every_backward
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_hidden_infinities_and_nan_reach_no_gradient(backward, value, sink, allowance):
    mask = Spec.of("expression", text="(q_idx % 3 > 0) & (kv_idx % 4 > 0)")
    inputs = tiny(mask=mask, sink=sink)
    tensors = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "dout")}
    for name, step in (("q", 3), ("k", 4), ("v", 4), ("dout", 3)):
        tensors[name][:, :, ::step] = value
    gradients = backward(inputs.replace(**tensors))
    exact = Definition.of(inputs).gradients(inputs)
    assert not allowed_of(inputs, allowance).misses(gradients, exact)


@every_backward
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_infinite_dlse_reaches_only_what_its_row_sees(backward, value, allowance):
    """A loss of LSE² has a gradient of −∞ for a row that sees no key."""
    mask = Spec.of("expression", text="(q_idx > 0) & (kv_idx % 4 > q_idx % 2)")
    inputs = tiny(mask=mask)
    of_dead, of_odd = inputs.dlse.clone(), inputs.dlse.clone()
    of_dead[:, :, 0] = value
    of_odd[:, :, 1] = value
    exact = Definition.of(inputs).gradients(inputs)
    gradients = backward(inputs.replace(dlse=of_dead))
    assert not allowed_of(inputs, allowance).misses(gradients, exact)
    gradients = backward(inputs.replace(dlse=of_odd))
    unseen = torch.arange(inputs.k.shape[2]) % 4 <= 1
    assert torch.isfinite(gradients.dk[:, :, unseen]).all()
    assert not torch.isfinite(gradients.dk[:, :, ~unseen]).any()
    assert torch.isfinite(gradients.dq[:, :, 2:]).all()
    assert torch.isfinite(gradients.dv).all()


@every_backward
def test_nan_reaches_only_rows_and_keys_that_attend_to_each_other(backward):
    # Rows and keys of one parity see each other.
    inputs = tiny(mask=Spec.of("expression", text="q_idx % 2 == kv_idx % 2"))
    for name in ("q", "k", "v", "dout"):
        spoiled = getattr(inputs, name).clone()
        spoiled[:, :, 4] = math.nan
        gradients = backward(inputs.replace(**{name: spoiled}))
        dq, dk, dv = (getattr(gradients, each).isnan().any(-1) for each in ("dq", "dk", "dv"))
        assert not dq[:, :, 1::2].any()
        assert not dk[:, :, 1::2].any()
        assert not dv[:, :, 1::2].any()
        rows = [4] if name in {"q", "dout"} else [0, 2, 4, 6, 8]
        assert dq[:, :, ::2].any(dim=(0, 1)).nonzero().flatten().mul(2).tolist() == rows
        assert dk[:, :, ::2].all()
        assert dv[:, :, ::2].all() == (name != "v")


@every_backward
def test_score_mod_of_minus_infinity_hides_keys_like_a_mask(backward, allowance, monkeypatch):
    masked = tiny(mask=Spec.of("causal"))
    exact, allowed = Definition.of(masked).gradients(masked), allowed_of(masked, allowance)

    def hides(s, b, h, q, k):
        return torch.where(q >= k, s, -math.inf)

    monkeypatch.setattr(Problem, "score_mod", lambda problem, device: hides)
    assert not allowed.misses(backward(tiny()), exact)


@every_backward
def test_score_mod_of_scalar_indices_is_mapped_over_all_indices(backward, monkeypatch):
    plain = backward(tiny(score=Spec.of("alibi")))
    alibi = tiny(score=Spec.of("alibi")).problem.score_mod("cpu")

    def for_one(s, b, h, q, k):
        if q.dim():
            raise TypeError("one index at a time")
        return alibi(s, b, h, q, k)

    monkeypatch.setattr(Problem, "score_mod", lambda problem, device: for_one)
    gradients = backward(tiny())
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(gradients, name), getattr(plain, name))


ODD_MODS = {
    "a parameter alone": (lambda p: lambda s, b, h, q, k: p[h].double(), 0.0),
    "adds a parameter": (lambda p: lambda s, b, h, q, k: s + p[h], 1.0),
    "writes to the score": (lambda p: lambda s, b, h, q, k: s.mul_(3).add_(1), 3.0),
    "in fp32": (lambda p: lambda s, b, h, q, k: s.float() * 2, 2.0),
}


def test_score_mod_without_a_gradient_is_refused():
    scores = torch.arange(24.0).double().view(1, 2, 3, 4)
    at = Indices.of(*map(range, scores.shape))
    with pytest.raises(
        ProblemError, match=r"the score mod has no gradient, torch says: .*floor_di"
    ):
        Float64().score_slope(lambda s, b, h, q, k: s // 2.0, scores, at)


@pytest.mark.parametrize(("mod", "slope"), ODD_MODS.values(), ids=ODD_MODS)
def test_slopes_of_unusual_score_mods(mod, slope):
    scores = torch.arange(24.0).double().view(1, 2, 3, 4)
    kept, at = scores.clone(), Indices.of(*map(range, scores.shape))
    gradients = Float64().score_slope(mod(torch.nn.Parameter(torch.ones(2))), scores, at)
    assert torch.equal(gradients, torch.full_like(scores, slope))
    assert torch.equal(scores, kept)
    assert not gradients.requires_grad


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_streaming_with_and_without_bounded_scores_agrees(sink, allowance, monkeypatch):
    inputs = tiny(mask=Spec.of("causal"), sink=sink)
    module = importlib.import_module("attncheck.oracles.streaming_gradients")
    bounded = streaming_backward(inputs, blocks=SMALL)
    monkeypatch.setattr(module, "LARGEST_BOUNDED_SCORE", 0.0)
    general = streaming_backward(inputs, blocks=SMALL)
    assert not torch.equal(bounded.dq, general.dq)  # another code path did run
    assert not allowed_of(inputs, allowance).misses(bounded, general.gradients())


def test_truth_has_gradients_exactly_if_the_problem_has_a_backward():
    inputs = tiny(sink=True, score=Spec.of("alibi"), dcaptured=True)
    gradients, forward = oracles.truth(inputs), oracles.truth(inputs.forward())
    assert set(gradients.gradients()) == set(GRADIENTS)
    assert torch.equal(gradients.out, forward.out)
    assert torch.equal(gradients.lse, forward.lse)
    assert not forward.gradients()
    shapes = {name: tuple(tensor.shape) for name, tensor in gradients.gradients().items()}
    assert shapes == {
        "dq": (2, 4, 9, 6),
        "dk": (2, 2, 11, 6),
        "dv": (2, 2, 11, 3),
        "dsink": (4,),
        "dcaptured": (4,),
    }
    assert all(tensor.dtype == torch.float64 for tensor in gradients.tensors().values())


@every_backward
def test_backward_of_a_forward_problem_is_refused(backward):
    with pytest.raises(ProblemError, match="no backward"):
        backward(tiny().forward())
