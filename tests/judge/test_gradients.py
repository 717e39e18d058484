"""Bounds of gradients: hand calculations, their terms, and where there is no bound."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.judge import backward_kernels as kernels

from attncheck.core.conditions import Rows, ScoreModError
from attncheck.core.declared_arithmetic import AMPERE, FP64_ORACLE, VOLTA, default_arithmetic
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.core.mod_spec import Entry, Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.judge.deterministic_bound import deterministic_bound
from attncheck.judge.gradient_bounds import (
    HEADS,
    OUTPUT,
    KeyGradients,
    partial_sum_error,
    row_gradients,
)
from attncheck.judge.score_errors import score_error
from attncheck.judge.score_gradient_errors import SavedErrors, _gradient_rounding
from attncheck.judge.sum_roundings import half_ulp
from attncheck.mods.scores import SCORES
from attncheck.oracles.row_conditions import all_rows, compute_gradient_conditions

U = 2.0**-24
NAMES = ("fp32", "tf32", "fp16", "bf16")
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 9, "kv": 12, "head_dim": 16}
CAUSAL = Spec.of("causal")


def problem(**changes) -> Problem:
    return Problem(**SIZES | {"backward": True, "dtype": "bf16"} | changes)


def conditions_of(case: Problem, rows: Rows | None = None):
    inputs = draw_inputs(case)
    exact = kernels.Exact.of(inputs)
    rows = rows or next(iter(all_rows(case, "cpu")))
    return compute_gradient_conditions(inputs, Outputs(exact.out, exact.lse), rows), exact


def row_bounds_of(case: Problem, arithmetic=None, *, out_error=0.0, lse_error=0.0, **options):
    known, exact = conditions_of(case)
    arithmetic = arithmetic or default_arithmetic(case.formats)
    forward = known.known
    saved = SavedErrors(
        out_error=torch.zeros_like(forward.out) + out_error,
        lse_error=torch.zeros_like(forward.maximum) + lse_error,
        measured=options.pop("measured", True),
    )
    score_errors = score_error(forward, arithmetic)
    return row_gradients(known, arithmetic, score_errors, saved, **options), exact


def key_bounds_of(case: Problem, row_bounds, exact, arithmetic=None):
    keys = KeyGradients(
        arithmetic or default_arithmetic(case.formats),
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        query=case.query,
    )
    keys.add(row_bounds)
    gradients = exact.gradients
    return keys.bounds({name: gradients[name] for name in gradients if name != "dq"})


def all_bounds(case: Problem, arithmetic=None, **options) -> dict[str, torch.Tensor]:
    """The bounds of all gradients, by name."""
    row_bounds, exact = row_bounds_of(case, arithmetic, **options)
    key_bounds = key_bounds_of(case, row_bounds, exact, arithmetic)
    return {"dq": row_bounds.dq} | key_bounds[0]


@pytest.fixture
def hiding_mod(monkeypatch):
    """A score mod that hides some pairs and doubles the other scores."""

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where((kv_idx % 3 == 1) & (h % 2 == 0), -math.inf, 2 * score)

    monkeypatch.setitem(SCORES, "hiding", Entry(summary="", build=lambda *_: mod))
    return Spec.of("hiding")


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("score", ["none", "softcap", "hiding"])
def test_gradient_conditions_equal_autograd(score, sink, hiding_mod):
    spec = Spec.of("softcap", cap=2.0) if score == "softcap" else Spec.of(score)
    case = problem(
        mask=CAUSAL, score=spec, sink=sink, dlse=True, dtype="fp32", query=14, kv=11, value_dim=5
    )
    known, exact = conditions_of(case)
    # Both are float64: each takes a few hundred roundings of numbers of about 10.
    tolerance = {"rtol": 2.0**-40, "atol": 2.0**-40}
    torch.testing.assert_close(
        known.dq.view_as(exact.gradients["dq"]), exact.gradients["dq"], **tolerance
    )
    dk = case.scale * known.dx[..., : case.kv].mT @ known.known.q
    dk = dk.view(case.batch, case.kv_heads, case.group, case.kv, -1).sum(2)
    torch.testing.assert_close(dk, exact.gradients["dk"], **tolerance)
    if sink:
        dsink = known.dx[..., -1].sum(-1).view(case.batch, -1).sum(0)
        torch.testing.assert_close(dsink, exact.gradients["dsink"], **tolerance)


def test_row_of_one_key_has_only_rounding_errors_of_dq():
    """P = 1 and dP = delta, so dS is 0 and dq is what the errors of dO·v and delta leave."""
    case = problem(batch=1, heads=1, kv_heads=1, query=1, kv=1, head_dim=1, dtype="fp32")
    row_bounds, exact = row_bounds_of(case)
    known, _ = conditions_of(case)
    assert not known.dx.any()
    # Products of one term: its own rounding and one of slack; delta the same, and as Σ P dP.
    size = float(known.value_products.abs())
    from_weights = row_bounds.dq_terms["delta"] / (case.scale * known.known.k.abs())
    assert 2 * U * size <= float(from_weights) <= 64 * U * size
    of_product = row_bounds.dq_terms["dO·V"] / (case.scale * known.known.k.abs())
    assert float(of_product) == pytest.approx(2 * U * size, rel=2.0**-20)
    assert float(row_bounds.dq_terms[OUTPUT]) == float(
        half_ulp(row_bounds.dq - row_bounds.dq_terms[OUTPUT], FORMATS["fp32"])
    )
    # dv is dO itself: P within e^ρ, two roundings and the factor's of its sum.
    key_bounds, terms = key_bounds_of(case, row_bounds, exact)
    moved = key_bounds["dv"] - terms["dv"][OUTPUT]
    assert 8 * U <= float(moved / known.dout.abs()) <= 64 * U


def test_error_of_the_saved_out_moves_dq_by_a_known_amount():
    """δ̂ − δ = Σ dO e, so dq moves by −σ (Σ dO e) Σ P k, to within float64's own rounding."""
    case = problem()
    known, _ = conditions_of(case)
    error = torch.full_like(known.known.out, 2.0**-10)
    row_bounds, _ = row_bounds_of(case, out_error=error)
    weights = torch.exp(known.known.scores - known.known.lse[..., None])
    shift = case.scale * (known.dout * error).sum(-1, keepdim=True) * (weights @ known.known.k)
    torch.testing.assert_close(row_bounds.dq_terms["saved out"], shift.abs(), rtol=2.0**-30, atol=0)


def test_measured_error_of_out_orthogonal_to_dout_hardly_widens_dq():
    case = problem(value_dim=2)
    known, _ = conditions_of(case)
    orthogonal = torch.stack([known.dout[..., 1], -known.dout[..., 0]], -1) * 2.0**-8
    exact, off = (
        row_bounds_of(case, out_error=e)[0].dq for e in (torch.zeros_like(orthogonal), orthogonal)
    )
    assert float((off / exact).max()) < 1 + 2.0**-8
    bounded = row_bounds_of(case, out_error=orthogonal, measured=False)[0].dq
    assert bool((bounded >= exact).all())
    assert bool((bounded > 2 * exact).any())


@pytest.mark.parametrize("name", NAMES)
def test_terms_sum_to_the_bound(name):
    case = problem(dtype=name, sink=True, dlse=True, mask=CAUSAL)
    row_bounds, exact = row_bounds_of(case)
    bounds, terms = key_bounds_of(case, row_bounds, exact)
    for total, terms in (
        (row_bounds.dq, row_bounds.dq_terms),
        *((bounds[name], terms[name]) for name in ("dk", "dv", "dsink")),
    ):
        assert torch.equal(torch.stack(list(terms.values())).sum(0), total)
        assert all(bool((term >= 0).all()) for term in terms.values())
        assert bool(torch.isfinite(total).all())


def test_rows_without_keys_and_keys_without_rows_are_allowed_no_error():
    case = problem(mask=Spec.of("causal_bottom_right"), query=14, kv=12, dlse=True)
    bounds = all_bounds(case)
    assert not bounds["dq"][:, :2].any()  # rows 0 and 1 see nothing
    assert bool((bounds["dq"][:, 2:] > 0).all())
    case = problem(mask=CAUSAL)
    bounds = all_bounds(case)
    assert not bounds["dk"][:, :, 9:].any()  # 9 rows, 12 keys
    assert not bounds["dv"][:, :, 9:].any()
    assert bool((bounds["dk"][:, :, :9] > 0).all())


def test_bounds_do_not_depend_on_the_order_of_pieces():
    case = problem(mask=CAUSAL, sink=True, dlse=True)
    inputs, arithmetic = draw_inputs(case), default_arithmetic(case.formats)
    exact, kernel = kernels.Exact.of(inputs), kernels.Backward()
    outputs = kernel.run(inputs)
    pieces = [
        Rows(range(first, first + 2), torch.arange(start, min(start + 4, case.query)))
        for first in (5, 3, 1, 7)
        for start in (4, 0, 8)
    ]
    pieces = [Rows(range(p.heads.start, min(p.heads.stop, 8)), p.query) for p in pieces]
    pieces += [Rows(range(1), torch.arange(case.query))]
    whole = kernels.bounds(inputs, exact, outputs, arithmetic)
    piecewise = kernels.bounds(inputs, exact, outputs, arithmetic, pieces=pieces)
    for name, bound in whole.items():
        torch.testing.assert_close(piecewise[name], bound, rtol=2.0**-40, atol=0)


LOOSER = {
    "exp2_ulps": 64.0,
    "scores": VOLTA,
    "values": AMPERE,
    "weights": FORMATS["e5m2"],
    "products": FORMATS["e5m2"],
    "output": FORMATS["e5m2"],
    "scaled_query": FORMATS["bf16"],
    "normalised_weights": True,
    "rounds_value_products": FORMATS["bf16"],
    "sums_rounded_heads": True,
    "rereads_weights": True,
    "dkv_parts": 3,
    "dq_parts": 3,
}


@pytest.mark.parametrize("field", LOOSER)
def test_looser_arithmetic_allows_more(field):
    case = problem(dlse=True, sink=True)
    plain = default_arithmetic(case.formats)
    tight, loose = all_bounds(case), all_bounds(case, replace(plain, **{field: LOOSER[field]}))
    assert all(bool((loose[name] >= tight[name]).all()) for name in tight)
    assert any(bool((loose[name] > tight[name]).any()) for name in tight)


def test_rounding_of_heads_is_a_term_of_dk_and_dv_alone():
    case = problem()
    arithmetic = replace(default_arithmetic(case.formats), sums_rounded_heads=True)
    row_bounds, exact = row_bounds_of(case, arithmetic)
    _, terms = key_bounds_of(case, row_bounds, exact, arithmetic)
    assert HEADS not in row_bounds.dq_terms
    # At least half an ulp of each of two heads' contributions.
    assert bool((terms["dk"][HEADS] > 0).all())
    assert bool((terms["dv"][HEADS] > 0).all())


def test_partial_sums_that_may_overflow_or_are_very_many_have_no_bound():
    """65504 + 65504 is infinite in fp16, whatever is subtracted afterwards."""
    fp16, bf16 = FORMATS["fp16"], FORMATS["bf16"]
    size = torch.tensor([4 * 65504.0, 16000.0])
    errors = partial_sum_error(size, {}, 4, fp16)
    assert torch.isinf(errors).tolist() == [True, False]
    running, exact = torch.zeros((), dtype=torch.float16), 0.0
    for part in (8000.0, 3.7, -7999.5, 0.3):
        running, exact = running + torch.tensor(part, dtype=torch.float16), exact + part
    assert 0 < abs(float(running) - exact) <= float(errors[1])
    assert torch.isinf(partial_sum_error(torch.ones(1), {}, 10**6, bf16)).all()


def test_error_of_the_saved_lse_scales_every_weight():
    """dX moves by e^±ΔLSE − 1 of itself, and the bound of dq covers that whatever its signs."""
    case = problem(dtype="fp32")
    known, _ = conditions_of(case)
    off, exact = (row_bounds_of(case, lse_error=error)[0].dq for error in (2.0**-10, 0.0))
    size = case.scale * known.dx.abs() @ known.known.k.abs()
    assert bool((off - exact >= 2.0**-10 * size).all())
    # δ as Σ P dP may be off as well, by the same share of every |dP|.
    values = case.scale * 2.0**-9 * known.value_products.abs().amax(-1, keepdim=True)
    assert bool(
        (off - exact <= 2.0**-9 * size + values * known.known.k.abs().amax(-2)[:, None]).all()
    )


def one_pair(forward, value=math.inf) -> torch.Tensor:
    """0 except at one (head, row, key) triple."""
    radius = torch.zeros_like(forward.products)
    radius[3, 2, 5] = value
    return radius


@pytest.mark.parametrize("which", ["mod", "slope"])
def test_unbounded_score_mod_leaves_its_row_and_that_rows_keys_unbounded(which):
    case = problem(score=Spec.of("softcap", cap=4.0), mask=CAUSAL)
    forward = conditions_of(case)[0].known
    zeros = torch.zeros_like(forward.products)
    error = ScoreModError(radius=zeros, own=zeros, jump=zeros > 0)
    unbounded_error = replace(error, radius=one_pair(forward))
    unbounded_error.radius[3, 5, 4] = unbounded_error.radius[
        3, 2, 5
    ]  # a key that its row sees; row 2 does not see key 5
    bounds = all_bounds(case, **{"mod": error, "slope": error} | {which: unbounded_error})
    unbounded_rows = torch.isinf(bounds["dq"]).any(-1).nonzero().tolist()
    unbounded_keys = torch.isinf(bounds["dk"]).any(-1).nonzero().tolist()
    if which == "slope":  # the slope at a hidden key is not used
        assert unbounded_rows == [[3, 5]]
        assert unbounded_keys == [[0, 1, key] for key in range(6)]
    else:  # a score mod that may show a hidden key
        assert unbounded_rows == [[3, 2], [3, 5]]
        assert unbounded_keys == [[0, 1, key] for key in range(6)]
    assert bool(torch.isinf(bounds["dv"][0, 1, :6]).all())
    finite = [bounds["dq"][:3], bounds["dk"][1], bounds["dk"][0, 0], bounds["dv"][1]]
    assert all(bool(torch.isfinite(bound).all()) for bound in finite)


def test_nan_in_the_saved_lse_leaves_its_row_unbounded():
    case = problem()
    known, _ = conditions_of(case)
    lse = torch.zeros_like(known.delta)
    lse[1, 4] = math.nan
    bounds = all_bounds(case, lse_error=lse)
    assert torch.isinf(bounds["dq"]).any(-1).nonzero().tolist() == [[1, 4]]
    assert bool(torch.isinf(bounds["dk"][0, 0]).all())
    assert bool(torch.isfinite(bounds["dk"][1]).all())


def test_nan_query_of_an_empty_row_changes_no_bound_of_keys():
    case = problem(mask=Spec.of("causal_bottom_right"), query=20)
    inputs = draw_inputs(case)
    q = inputs.q.clone()
    q[:, :, 0] = math.nan
    exact = kernels.Exact.of(inputs)
    truth, arithmetic = Outputs(exact.out, exact.lse), default_arithmetic(case.formats)
    bounds = []
    for call in (inputs, inputs.replace(q=q)):
        keys = KeyGradients(arithmetic, batch=2, heads=4, kv_heads=2, query=20)
        for rows in all_rows(case, "cpu"):
            known = compute_gradient_conditions(call, truth, rows)
            zeros = torch.zeros_like(known.known.out)
            saved = SavedErrors(out_error=zeros, lse_error=zeros[..., 0])
            scores = score_error(known.known, arithmetic)
            keys.add(row_gradients(known, arithmetic, scores, saved))
        bounds.append(keys.bounds({name: exact.gradients[name] for name in ("dk", "dv")})[0])
    for name in ("dk", "dv"):
        assert torch.equal(bounds[0][name], bounds[1][name])


def test_gradients_that_may_overflow_have_no_bound():
    case = problem(batch=1, heads=1, kv_heads=1)
    inputs = draw_inputs(case)
    inputs = inputs.replace(v=inputs.v.clone().fill_(2.0**125))
    exact = kernels.Exact.of(inputs)
    rows = next(iter(all_rows(case, "cpu")))
    known = compute_gradient_conditions(inputs, Outputs(exact.out, exact.lse), rows)
    arithmetic = default_arithmetic(case.formats)
    zero = SavedErrors(out_error=known.known.out * 0, lse_error=known.delta * 0)
    row_bounds = row_gradients(known, arithmetic, score_error(known.known, arithmetic), zero)
    assert bool(torch.isinf(row_bounds.dq).all())


def test_score_gradients_beyond_fp16_have_no_bound():
    case = problem(dtype="fp16", batch=1, heads=1, kv_heads=1)
    inputs = draw_inputs(case)
    arithmetic = default_arithmetic(case.formats)
    for size, bounded in ((1.0, True), (2.0**12, False)):
        large = inputs.replace(v=size * inputs.v, dout=size * inputs.dout)
        exact = kernels.Exact.of(large)
        rows = next(iter(all_rows(case, "cpu")))
        known = compute_gradient_conditions(large, Outputs(exact.out, exact.lse), rows)
        zero = SavedErrors(out_error=known.known.out * 0, lse_error=known.delta * 0)
        row_bounds = row_gradients(known, arithmetic, score_error(known.known, arithmetic), zero)
        assert bool(torch.isfinite(row_bounds.dq).all()) == bounded


@pytest.mark.parametrize("steep", [0.25, 1.0, 1e4])
def test_steep_slope_multiplies_the_rounding_before_it(steep):
    """Tested in the subnormal range of fp16, where the rounding error is a constant."""
    arithmetic = replace(default_arithmetic(DTYPES["fp16"]), normalised_weights=True)
    before = 2.0 ** (-26 + 4 * torch.rand(1000, generator=torch.manual_seed(0)).double())
    known = SimpleNamespace(known=SimpleNamespace(scale=1.0))
    error = (before.half().double() - before).abs() * steep
    assert bool((error <= _gradient_rounding(known, arithmetic, before * steep, before)).all())
    fused = _gradient_rounding(known, arithmetic, before * steep)  # as if rounded after the slope
    assert bool((error <= 2 * fused).all()) == (steep <= 1)


def oracle_bounds(case: Problem, exact):
    """Bounds of a backward in float64."""
    inputs = exact.inputs
    rows = next(iter(all_rows(case, "cpu")))
    known = compute_gradient_conditions(inputs, Outputs(exact.out, exact.lse), rows)
    scores = score_error(known.known, FP64_ORACLE)
    forward = deterministic_bound(known.known, FP64_ORACLE, scores)
    saved = SavedErrors(out_error=forward.out, lse_error=forward.lse, measured=False)
    row_bounds = row_gradients(known, FP64_ORACLE, scores, saved)
    return {"dq": row_bounds.dq} | key_bounds_of(case, row_bounds, exact, FP64_ORACLE)[0]


def test_float64_gradients_are_within_the_float64_bound_and_fp32_is_not():
    case = problem(dtype="fp32", sink=True, dlse=True)
    inputs = draw_inputs(case)
    exact = kernels.Exact.of(inputs)
    proof = oracle_bounds(case, exact)
    known, _ = conditions_of(case)
    dk = case.scale * known.dx[..., : case.kv].mT @ known.known.q
    dk = dk.view(case.batch, case.kv_heads, case.group, case.kv, -1).sum(2)
    # Two float64 results, each within the bound of the exact one.
    assert bool(
        (
            (known.dq.view_as(exact.gradients["dq"]) - exact.gradients["dq"]).flatten(0, 1).abs()
            <= 2 * proof["dq"]
        ).all()
    )
    assert bool(((dk - exact.gradients["dk"]).abs() <= 2 * proof["dk"]).all())
    outputs = kernels.Backward().run(inputs)
    for name, bound in proof.items():
        error = (getattr(outputs, name).double() - exact.gradients[name]).abs()
        assert bool((error.view_as(bound) > bound).any()), name


def test_arithmetic_of_a_backward_is_printed_and_validated():
    plain = default_arithmetic(DTYPES["bf16"])
    text = str(replace(plain, rounds_value_products=FORMATS["bf16"], sums_rounded_heads=True))
    assert "dO · v rounded to bf16; gradients rounded for each query head" in text
    assert "dO" not in str(plain)
    text = str(replace(plain, rereads_weights=True, dkv_parts=5, dq_parts=2))
    assert "dS of rounded P; dK and dV in 5 rounded parts; dQ in 2 rounded parts" in text
    with pytest.raises(ValueError, match="dkv_parts=0 must be an integer of at least 1"):
        replace(plain, dkv_parts=0)
    for name in ("rounds_value_products", "scaled_query"):
        with pytest.raises(TypeError, match=f"{name}='bf16' is no"):
            replace(plain, **{name: "bf16"})
    mixed = replace(plain, weights=FORMATS["fp32"])
    assert mixed.score_gradients.name == "bf16"
    assert default_arithmetic(DTYPES["fp32"]).score_gradients_error == 0
    assert (
        replace(default_arithmetic(DTYPES["tf32"]), truncates=True).score_gradients_error
        == 2.0**-10
    )
