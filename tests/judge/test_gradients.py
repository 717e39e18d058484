"""Bounds of gradients: what they know, by hand, their terms, and where there are none."""

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


def known_of(asked: Problem, rows: Rows | None = None):
    inputs = draw_inputs(asked)
    exact = kernels.Exact.of(inputs)
    rows = rows or next(iter(all_rows(asked, "cpu")))
    return compute_gradient_conditions(inputs, Outputs(exact.out, exact.lse), rows), exact


def rows_of(asked: Problem, arithmetic=None, *, out_error=0.0, lse_error=0.0, **options):
    known, exact = known_of(asked)
    arithmetic = arithmetic or default_arithmetic(asked.formats)
    forward = known.known
    saved = SavedErrors(
        out_error=torch.zeros_like(forward.out) + out_error,
        lse_error=torch.zeros_like(forward.maximum) + lse_error,
        measured=options.pop("measured", True),
    )
    scores = score_error(forward, arithmetic)
    return row_gradients(known, arithmetic, scores, saved, **options), exact


def keys_of(asked: Problem, found, exact, arithmetic=None):
    keys = KeyGradients(
        arithmetic or default_arithmetic(asked.formats),
        batch=asked.batch,
        heads=asked.heads,
        kv_heads=asked.kv_heads,
        query=asked.query,
    )
    keys.add(found)
    given = exact.gradients
    return keys.bounds({name: given[name] for name in given if name != "dq"})


def every(asked: Problem, arithmetic=None, **options) -> dict[str, torch.Tensor]:
    """All bounds by name."""
    found, exact = rows_of(asked, arithmetic, **options)
    of_keys = keys_of(asked, found, exact, arithmetic)
    return {"dq": found.dq} | of_keys[0]


@pytest.fixture
def hides(monkeypatch):
    """A score mod that doubles what it does not hide."""

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where((kv_idx % 3 == 1) & (h % 2 == 0), -math.inf, 2 * score)

    monkeypatch.setitem(SCORES, "hides", Entry(summary="", build=lambda *_: mod))
    return Spec.of("hides")


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("score", ["none", "softcap", "hides"])
def test_conditions_are_what_autograd_says(score, sink, hides):
    spec = Spec.of("softcap", cap=2.0) if score == "softcap" else Spec.of(score)
    asked = problem(
        mask=CAUSAL, score=spec, sink=sink, dlse=True, dtype="fp32", query=14, kv=11, value_dim=5
    )
    known, exact = known_of(asked)
    # Both are float64: each takes a few hundred roundings of numbers of about 10.
    close = {"rtol": 2.0**-40, "atol": 2.0**-40}
    torch.testing.assert_close(
        known.dq.view_as(exact.gradients["dq"]), exact.gradients["dq"], **close
    )
    of_keys = asked.scale * known.dx[..., : asked.kv].mT @ known.known.q
    of_keys = of_keys.view(asked.batch, asked.kv_heads, asked.group, asked.kv, -1).sum(2)
    torch.testing.assert_close(of_keys, exact.gradients["dk"], **close)
    if sink:
        of_sinks = known.dx[..., -1].sum(-1).view(asked.batch, -1).sum(0)
        torch.testing.assert_close(of_sinks, exact.gradients["dsink"], **close)


def test_a_row_of_one_key_has_no_gradient_of_scores_but_what_rounding_makes_of_it():
    """P = 1 and dP = delta: dS is 0, so that dq is what the errors of dO·v and delta leave."""
    asked = problem(batch=1, heads=1, kv_heads=1, query=1, kv=1, head_dim=1, dtype="fp32")
    found, exact = rows_of(asked)
    known, _ = known_of(asked)
    assert not known.dx.any()
    # Products of one term: its own rounding and one of slack; delta the same, and as Σ P dP.
    size = float(known.value_products.abs())
    from_weights = found.dq_terms["delta"] / (asked.scale * known.known.k.abs())
    assert 2 * U * size <= float(from_weights) <= 64 * U * size
    of_product = found.dq_terms["dO·V"] / (asked.scale * known.known.k.abs())
    assert float(of_product) == pytest.approx(2 * U * size, rel=2.0**-20)
    assert float(found.dq_terms[OUTPUT]) == float(
        half_ulp(found.dq - found.dq_terms[OUTPUT], FORMATS["fp32"])
    )
    # dv is dO itself: P within e^ρ, two roundings and the factor's of its sum.
    key_bounds, terms = keys_of(asked, found, exact)
    moved = key_bounds["dv"] - terms["dv"][OUTPUT]
    assert 8 * U <= float(moved / known.dout.abs()) <= 64 * U


def test_what_the_saved_out_makes_of_dq_is_known_exactly():
    """δ̂ − δ = Σ dO e: dq moves by −σ (Σ dO e) Σ P k, to the bit of float64's own rounding."""
    asked = problem()
    known, _ = known_of(asked)
    error = torch.full_like(known.known.out, 2.0**-10)
    found, _ = rows_of(asked, out_error=error)
    weights = torch.exp(known.known.scores - known.known.lse[..., None])
    shift = asked.scale * (known.dout * error).sum(-1, keepdim=True) * (weights @ known.known.k)
    torch.testing.assert_close(found.dq_terms["saved out"], shift.abs(), rtol=2.0**-30, atol=0)


def test_an_error_of_out_that_dout_does_not_see_costs_next_to_nothing():
    options = problem(value_dim=2)
    known, _ = known_of(options)
    across = torch.stack([known.dout[..., 1], -known.dout[..., 0]], -1) * 2.0**-8
    exact, off = (rows_of(options, out_error=e)[0].dq for e in (torch.zeros_like(across), across))
    assert float((off / exact).max()) < 1 + 2.0**-8
    bounded = rows_of(options, out_error=across, measured=False)[0].dq
    assert bool((bounded >= exact).all())
    assert bool((bounded > 2 * exact).any())


@pytest.mark.parametrize("name", NAMES)
def test_terms_sum_to_the_bound(name):
    asked = problem(dtype=name, sink=True, dlse=True, mask=CAUSAL)
    found, exact = rows_of(asked)
    bounds, terms = keys_of(asked, found, exact)
    for total, terms in (
        (found.dq, found.dq_terms),
        *((bounds[name], terms[name]) for name in ("dk", "dv", "dsink")),
    ):
        assert torch.equal(torch.stack(list(terms.values())).sum(0), total)
        assert all(bool((term >= 0).all()) for term in terms.values())
        assert bool(torch.isfinite(total).all())


def test_rows_that_see_no_key_and_keys_that_no_row_sees_are_exact():
    asked = problem(mask=Spec.of("causal_bottom_right"), query=14, kv=12, dlse=True)
    found = every(asked)
    assert not found["dq"][:, :2].any()  # rows 0 and 1 see nothing
    assert bool((found["dq"][:, 2:] > 0).all())
    asked = problem(mask=CAUSAL)
    found = every(asked)
    assert not found["dk"][:, :, 9:].any()  # 9 rows, 12 keys
    assert not found["dv"][:, :, 9:].any()
    assert bool((found["dk"][:, :, :9] > 0).all())


def test_pieces_may_come_in_any_order():
    asked = problem(mask=CAUSAL, sink=True, dlse=True)
    inputs, arithmetic = draw_inputs(asked), default_arithmetic(asked.formats)
    exact, kernel = kernels.Exact.of(inputs), kernels.Backward()
    given = kernel.run(inputs)
    pieces = [
        Rows(range(first, first + 2), torch.arange(start, min(start + 4, asked.query)))
        for first in (5, 3, 1, 7)
        for start in (4, 0, 8)
    ]
    pieces = [Rows(range(p.heads.start, min(p.heads.stop, 8)), p.query) for p in pieces]
    pieces += [Rows(range(1), torch.arange(asked.query))]
    whole = kernels.bounds(inputs, exact, given, arithmetic)
    found = kernels.bounds(inputs, exact, given, arithmetic, pieces=pieces)
    for name, bound in whole.items():
        torch.testing.assert_close(found[name], bound, rtol=2.0**-40, atol=0)


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
def test_a_looser_profile_allows_more(field):
    options = problem(dlse=True, sink=True)
    plain = default_arithmetic(options.formats)
    tight, loose = every(options), every(options, replace(plain, **{field: LOOSER[field]}))
    assert all(bool((loose[name] >= tight[name]).all()) for name in tight)
    assert any(bool((loose[name] > tight[name]).any()) for name in tight)


def test_rounded_heads_are_a_term_of_keys_alone():
    asked = problem()
    arithmetic = replace(default_arithmetic(asked.formats), sums_rounded_heads=True)
    found, exact = rows_of(asked, arithmetic)
    _, terms = keys_of(asked, found, exact, arithmetic)
    assert HEADS not in found.dq_terms
    # At least half an ulp of what each of two heads adds.
    assert bool((terms["dk"][HEADS] > 0).all())
    assert bool((terms["dv"][HEADS] > 0).all())


def test_parts_that_overflow_or_are_very_many_have_no_bound():
    """65504 + 65504 is infinite in fp16, whatever is taken off it afterwards."""
    fp16, bf16 = FORMATS["fp16"], FORMATS["bf16"]
    size = torch.tensor([4 * 65504.0, 16000.0])
    found = partial_sum_error(size, {}, 4, fp16)
    assert torch.isinf(found).tolist() == [True, False]
    running, exact = torch.zeros((), dtype=torch.float16), 0.0
    for part in (8000.0, 3.7, -7999.5, 0.3):
        running, exact = running + torch.tensor(part, dtype=torch.float16), exact + part
    assert 0 < abs(float(running) - exact) <= float(found[1])
    assert torch.isinf(partial_sum_error(torch.ones(1), {}, 10**6, bf16)).all()


def test_an_error_of_lse_is_one_of_every_weight():
    """dX moves by e^±ΔLSE − 1 of itself at least as far as the bound knows of its signs."""
    asked = problem(dtype="fp32")
    known, _ = known_of(asked)
    off, exact = (rows_of(asked, lse_error=error)[0].dq for error in (2.0**-10, 0.0))
    size = asked.scale * known.dx.abs() @ known.known.k.abs()
    assert bool((off - exact >= 2.0**-10 * size).all())
    # δ as Σ P dP may be off as well: by as much of every |dP|.
    values = asked.scale * 2.0**-9 * known.value_products.abs().amax(-1, keepdim=True)
    assert bool(
        (off - exact <= 2.0**-9 * size + values * known.known.k.abs().amax(-2)[:, None]).all()
    )


def one_unknown(forward, value=math.inf) -> torch.Tensor:
    """0 but at one (head, row, key) triple."""
    radius = torch.zeros_like(forward.products)
    radius[3, 2, 5] = value
    return radius


@pytest.mark.parametrize("which", ["mod", "slope"])
def test_a_jump_leaves_its_row_and_the_keys_of_the_row_without_a_bound(which):
    asked = problem(score=Spec.of("softcap", cap=4.0), mask=CAUSAL)
    forward = known_of(asked)[0].known
    nothing = torch.zeros_like(forward.products)
    error = ScoreModError(radius=nothing, own=nothing, jump=nothing > 0)
    odd = replace(error, radius=one_unknown(forward))
    odd.radius[3, 5, 4] = odd.radius[3, 2, 5]  # a key that its row sees; row 2 does not see key 5
    found = every(asked, **{"mod": error, "slope": error} | {which: odd})
    unbounded = torch.isinf(found["dq"]).any(-1).nonzero().tolist()
    of_keys = torch.isinf(found["dk"]).any(-1).nonzero().tolist()
    if which == "slope":  # of a key that is not seen no slope is used
        assert unbounded == [[3, 5]]
        assert of_keys == [[0, 1, key] for key in range(6)]
    else:  # a score mod that may show a hidden key
        assert unbounded == [[3, 2], [3, 5]]
        assert of_keys == [[0, 1, key] for key in range(6)]
    assert bool(torch.isinf(found["dv"][0, 1, :6]).all())
    finite = [found["dq"][:3], found["dk"][1], found["dk"][0, 0], found["dv"][1]]
    assert all(bool(torch.isfinite(bound).all()) for bound in finite)


def test_a_saved_lse_that_is_nan_bounds_nothing_of_its_row():
    options = problem()
    known, _ = known_of(options)
    lse = torch.zeros_like(known.delta)
    lse[1, 4] = math.nan
    found = every(options, lse_error=lse)
    assert torch.isinf(found["dq"]).any(-1).nonzero().tolist() == [[1, 4]]
    assert bool(torch.isinf(found["dk"][0, 0]).all())
    assert bool(torch.isfinite(found["dk"][1]).all())


def test_a_query_that_is_nan_and_sees_nothing_costs_no_key_its_bound():
    asked = problem(mask=Spec.of("causal_bottom_right"), query=20)
    inputs = draw_inputs(asked)
    q = inputs.q.clone()
    q[:, :, 0] = math.nan
    exact = kernels.Exact.of(inputs)
    truth, arithmetic = Outputs(exact.out, exact.lse), default_arithmetic(asked.formats)
    bounds = []
    for given in (inputs, inputs.replace(q=q)):
        keys = KeyGradients(arithmetic, batch=2, heads=4, kv_heads=2, query=20)
        for rows in all_rows(asked, "cpu"):
            known = compute_gradient_conditions(given, truth, rows)
            nothing = torch.zeros_like(known.known.out)
            saved = SavedErrors(out_error=nothing, lse_error=nothing[..., 0])
            scores = score_error(known.known, arithmetic)
            keys.add(row_gradients(known, arithmetic, scores, saved))
        bounds.append(keys.bounds({name: exact.gradients[name] for name in ("dk", "dv")})[0])
    for name in ("dk", "dv"):
        assert torch.equal(bounds[0][name], bounds[1][name])


def test_what_may_overflow_is_not_bounded():
    asked = problem(batch=1, heads=1, kv_heads=1)
    inputs = draw_inputs(asked)
    inputs = inputs.replace(v=inputs.v.clone().fill_(2.0**125))
    exact = kernels.Exact.of(inputs)
    rows = next(iter(all_rows(asked, "cpu")))
    known = compute_gradient_conditions(inputs, Outputs(exact.out, exact.lse), rows)
    arithmetic = default_arithmetic(asked.formats)
    zero = SavedErrors(out_error=known.known.out * 0, lse_error=known.delta * 0)
    found = row_gradients(known, arithmetic, score_error(known.known, arithmetic), zero)
    assert bool(torch.isinf(found.dq).all())


def test_score_gradients_beyond_fp16_are_not_bounded():
    asked = problem(dtype="fp16", batch=1, heads=1, kv_heads=1)
    inputs = draw_inputs(asked)
    arithmetic = default_arithmetic(asked.formats)
    for size, bounded in ((1.0, True), (2.0**12, False)):
        large = inputs.replace(v=size * inputs.v, dout=size * inputs.dout)
        exact = kernels.Exact.of(large)
        rows = next(iter(all_rows(asked, "cpu")))
        known = compute_gradient_conditions(large, Outputs(exact.out, exact.lse), rows)
        zero = SavedErrors(out_error=known.known.out * 0, lse_error=known.delta * 0)
        found = row_gradients(known, arithmetic, score_error(known.known, arithmetic), zero)
        assert bool(torch.isfinite(found.dq).all()) == bounded


@pytest.mark.parametrize("steep", [0.25, 1.0, 1e4])
def test_a_steep_slope_multiplies_what_was_rounded_before_it(steep):
    """In the subnormal range of fp16, where the error of rounding is a constant."""
    arithmetic = replace(default_arithmetic(DTYPES["fp16"]), normalised_weights=True)
    before = 2.0 ** (-26 + 4 * torch.rand(1000, generator=torch.manual_seed(0)).double())
    known = SimpleNamespace(known=SimpleNamespace(scale=1.0))
    error = (before.half().double() - before).abs() * steep
    assert bool((error <= _gradient_rounding(known, arithmetic, before * steep, before)).all())
    fused = _gradient_rounding(known, arithmetic, before * steep)  # as if it were rounded behind it
    assert bool((error <= 2 * fused).all()) == (steep <= 1)


def oracle_bounds(asked: Problem, exact):
    """The proof of a float64 backward."""
    inputs = exact.inputs
    rows = next(iter(all_rows(asked, "cpu")))
    known = compute_gradient_conditions(inputs, Outputs(exact.out, exact.lse), rows)
    scores = score_error(known.known, FP64_ORACLE)
    forward = deterministic_bound(known.known, FP64_ORACLE, scores)
    saved = SavedErrors(out_error=forward.out, lse_error=forward.lse, measured=False)
    found = row_gradients(known, FP64_ORACLE, scores, saved)
    return {"dq": found.dq} | keys_of(asked, found, exact, FP64_ORACLE)[0]


def test_float64_is_within_its_own_proof_and_fp32_is_not():
    asked = problem(dtype="fp32", sink=True, dlse=True)
    inputs = draw_inputs(asked)
    exact = kernels.Exact.of(inputs)
    proof = oracle_bounds(asked, exact)
    known, _ = known_of(asked)
    of_keys = asked.scale * known.dx[..., : asked.kv].mT @ known.known.q
    of_keys = of_keys.view(asked.batch, asked.kv_heads, asked.group, asked.kv, -1).sum(2)
    # Two float64 results: each is within the proof.
    assert bool(
        (
            (known.dq.view_as(exact.gradients["dq"]) - exact.gradients["dq"]).flatten(0, 1).abs()
            <= 2 * proof["dq"]
        ).all()
    )
    assert bool(((of_keys - exact.gradients["dk"]).abs() <= 2 * proof["dk"]).all())
    given = kernels.Backward().run(inputs)
    for name, bound in proof.items():
        error = (getattr(given, name).double() - exact.gradients[name]).abs()
        assert bool((error.view_as(bound) > bound).any()), name


def test_facts_of_a_backward_are_said_and_checked():
    plain = default_arithmetic(DTYPES["bf16"])
    said = str(replace(plain, rounds_value_products=FORMATS["bf16"], sums_rounded_heads=True))
    assert "dO · v rounded to bf16; gradients rounded for each query head" in said
    assert "dO" not in str(plain)
    said = str(replace(plain, rereads_weights=True, dkv_parts=5, dq_parts=2))
    assert "dS of rounded P; dK and dV in 5 rounded parts; dQ in 2 rounded parts" in said
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
