"""Probe inputs: codes identify keys, heads and sequences in columns that rounding cannot blur."""

import pytest
import torch

from attncheck import probes
from attncheck.core.declared_arithmetic import Accumulator
from attncheck.core.errors import ProblemError, UnknownName
from attncheck.core.formats import FORMATS, MEASURED_DTYPES
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.probes.margins import WeightErrors, is_countable
from attncheck.probes.probe_inputs import (
    amplitudes,
    boundary_keys,
    code_values,
    column_shifts,
    count_rounds,
    key_code,
)
from attncheck.probes.tied_keys import iterate_tied_rows


def key_codes(problem):
    return [key_code(problem, number) for number in range(count_rounds(problem))]


def as_float64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kv", "value_dim", "names"),
    [
        (64, 64, ["direct"]),
        (65, 64, ["two digits"]),
        (1024, 64, ["two digits"]),
        (1025, 64, ["digit 0", "digit 1"]),
        (3648, 64, ["digit 0", "digit 1"]),
        (3649, 64, ["marked"] * (1 + 58)),
        (300, 16, ["marked"] * (1 + 19)),
        (4, 1, ["marked"] * (1 + 4)),
        (1, 1, ["direct"]),
    ],
)
def test_key_code_is_first_that_fits_value_columns(kv, value_dim, names):
    problem = Problem(query=1, kv=kv, head_dim=8, value_dim=value_dim, dtype="bf16")
    assert [code.name for code in key_codes(problem)] == names


@pytest.mark.parametrize(("kv", "value_dim"), [(64, 64), (100, 32), (77, 12), (9, 3), (33, 16)])
def test_digits_together_identify_every_key(kv, value_dim):
    problem = Problem(query=1, kv=kv, head_dim=8, value_dim=value_dim, dtype="fp32")
    codes = key_codes(problem)
    digits = torch.cat([code.digits for code in codes])
    assert len(set(map(tuple, digits.T.tolist()))) == kv
    for code in codes:
        for digit in code.digits:
            assert digit.min() >= 0
            assert digit.max() < code.base
            assert torch.bincount(digit).max() <= -(-kv // code.base)


def test_two_digits_are_decoded_as_documented():
    x, y = key_codes(Problem(query=1, kv=50, head_dim=16, dtype="fp32"))[0].digits
    assert torch.equal(x + 8 * ((y - x) % 8), torch.arange(50))


def test_marked_rounds_mark_boundaries_first_and_then_every_key():
    problem = Problem(query=1, kv=300, head_dim=8, value_dim=16, dtype="bf16")
    first, *others = key_codes(problem)
    marked = (first.digits[0] >= 0).nonzero().flatten().tolist()
    assert {0, 63, 64, 127, 128, 255, 256, 299} <= set(marked)
    assert torch.stack([code.digits[0] >= 0 for code in others]).sum(0).tolist() == [1] * 300


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (Spec.of("document", lengths=[10, 30, 60]), [9, 10, 39, 40]),
        (Spec.of("padding", lengths=[13, 50]), [12, 13, 49, 50]),
        (Spec.of("prefix_lm", prefix=21), [20, 21]),
        (Spec.of("sliding_window", window=17), [16, 17, 22, 23]),
        (Spec.of("causal_bottom_right"), [60, 61]),
        (Spec.of("and", Spec.of("prefix_lm", prefix=7), Spec.of("causal")), [6, 7, 39, 40]),
    ],
    ids=str,
)
def test_boundary_keys_begin_with_edges_of_mask(mask, keys):
    boundaries = boundary_keys(Problem(batch=2, query=40, kv=100, mask=mask))
    assert boundaries[:2] == [0, 99]
    assert set(keys) <= set(boundaries[:12])
    assert sorted(boundaries) == list(range(100))


def test_neighbouring_heads_differ_in_amplitude():
    problem = Problem(batch=3, heads=4, query=1)
    sizes = amplitudes(problem)
    assert (sizes[1:] != sizes[:-1]).all()
    assert (sizes[:, 1:] != sizes[:, :-1]).all()
    assert (sizes[1:, 1:] != sizes[:-1, :-1]).all()
    assert (sizes[1:, :-1] != sizes[:-1, 1:]).all()
    ratio = sizes[:, 1:] / sizes[:, :-1]
    assert ((ratio >= 4) | (ratio <= 1 / 4)).all()
    assert len(set(column_shifts(problem).flatten().tolist())) == 12


def test_values_are_shifted_and_scaled_by_head_and_sequence():
    problem = Problem(batch=2, heads=2, query=1, kv=5, head_dim=8)
    v = code_values(problem, key_code(problem))
    assert v[0, 0, :, :5].tolist() == torch.eye(5).tolist()
    assert (v[1, 0].argmax(-1) - v[0, 0].argmax(-1)).tolist() == [2] * 5
    assert torch.equal(v.amax((-1, -2)), amplitudes(problem))


def test_is_countable_matches_hand_calculation():
    """Bf16 at score 0 and 2 keys: C·2^-8 and a little is below a quarter up to C = 63."""
    problem = Problem(query=1, kv=2, dtype="bf16")
    n, zero = as_float64(3.0, 0.0)
    counts = is_countable(problem, as_float64(1, 63, 64, 65), n, zero)
    assert counts.tolist() == [True, True, False, False]
    # e4m3's weights have four bits: a kernel that divides P first is off by C·(2^-4 + 2^-8).
    fp8 = Problem(query=1, kv=2, dtype="e4m3")
    assert is_countable(fp8, as_float64(7, 8), n, zero).tolist() == [True, False]
    # 1/2 is exact; 1/4 may have been reached through 1/3, unless nothing is divided.
    for keys, errors in ((2.0, WeightErrors()), (4.0, WeightErrors(divides=False))):
        counts = is_countable(fp8, as_float64(7, 8, 63), as_float64(keys), zero, errors=errors)
        assert counts.tolist() == [True] * 3
    assert is_countable(fp8, as_float64(7, 8), as_float64(4.0), zero).tolist() == [True, False]
    # Of 100 keys P is 0.01, and unscaled a subnormal number of e4m3: within 2^-10, a tenth.
    for scale, expected in ((1.0, [True, False]), (256.0, [True, True])):
        errors = WeightErrors(scale=scale)
        counts = is_countable(fp8, as_float64(4, 5), as_float64(100.0), zero, errors=errors)
        assert counts.tolist() == expected
    assert not is_countable(problem, as_float64(1), n, zero, others=0.25).any()


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 80])
def test_probe_inputs_are_exact_and_give_intended_scores(dtype, scale, head_dim):
    """Numbers that the format cannot hold raise; scores have the probe's size and spread."""
    problem = Problem(
        batch=2, heads=4, kv_heads=2, query=5, kv=40, head_dim=head_dim, dtype=dtype, scale=scale
    )
    for name in set(probes.PROBES) - {"ones"}:
        for case in probes.cases(name, problem)[:2]:
            inputs = probes.inputs(case)  # raises where a number is no number of the format
            k, q = inputs.promoted()[1::-1]
            score = q @ k.repeat_interleave(2, dim=1).mT * problem.scale
            size = score.abs().amax()
            if name in {"negative", "positive"}:
                assert 128 <= size <= 160
                assert (score == (-1) ** (name == "negative") * size).all()
            if name == "decode":
                assert not score.any()
                assert q.any()
                assert k.any() or head_dim == 1
            if name == "two_level":
                apart = case.parameters["apart"]
                assert apart <= score.max() - score.min() <= apart * 5 / 4


def test_descales_are_powers_of_two_that_differ_between_neighbours():
    problem = Problem(batch=2, heads=4, kv_heads=4, query=5, kv=9, dtype="e4m3")
    descale = probes.inputs(probes.case("decode", problem)).descale
    for name in "qkv":
        scales = getattr(descale, name).double()
        assert (torch.frexp(scales)[0] == 0.5).all()
        assert (scales[:, 1:] != scales[:, :-1]).all()


def test_mean_probe_has_more_bits_than_out():
    problem = Problem(query=1, kv=100, dtype="bf16")
    inputs = probes.inputs(probes.case("mean", problem))

    def first_tied_rows(**errors):
        shown = torch.ones(1, 1, 1, 100, dtype=torch.bool)
        return next(iterate_tied_rows(inputs, lambda _: shown, errors=WeightErrors(**errors)))

    assert first_tied_rows().once.isinf().all()  # P of a tile may be 1/48
    sixteen_bits = Accumulator(name="fp16", format=FORMATS["fp16"])
    assert first_tied_rows(divides=False, values=sixteen_bits).once.isinf().all()
    rows = first_tied_rows(divides=False)
    assert rows.keys.tolist() == [[[64.0]]]
    mean = rows.sums / 64
    assert (mean != mean.to(torch.bfloat16).double()).double().mean() > 0.9
    assert (rows.once < 2.0**-8 * mean).all()


def test_isolated_probe_decides_most_rows_by_one_key():
    problem = Problem(heads=2, query=50, kv=77, head_dim=64, mask=Spec.of("causal"))
    shown = torch.arange(77) <= torch.arange(50)[:, None]
    for case in probes.cases("isolated", problem):
        inputs = probes.inputs(case)
        (rows,) = iterate_tied_rows(inputs, lambda rows: shown[rows.start : rows.stop][None, None])
        decided = rows.counts_out.sum()
        assert 10 * decided > 9 * rows.counts_out.numel()
        assert 4 * (rows.keys == 1)[rows.counts_out].sum() > 3 * decided  # the others have ties


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("negative", {"scale": 1e-9, "dtype": "fp16"}, "asks for q and k beyond fp16"),
        ("isolated", {"scale": 1e-9, "dtype": "fp16"}, "asks for q beyond fp16"),
        ("decode", {"score": Spec.of("alibi")}, "takes no score mod"),
        ("decode", {"distribution": "uniform"}, "takes no score mod"),
    ],
)
def test_probe_refuses_unsuitable_problem(name, changes, message):
    problem = Problem(query=4, **changes)
    probe = probes.PROBES[name]
    parameters = {key: numbers[0] for key, numbers in probe.allowed(problem).items()}
    with pytest.raises(ProblemError, match=message):
        probe.inputs(problem, parameters)


def test_probes_do_not_apply_to_softmax():
    rows = Problem(operation="softmax", query=4, kv=9)
    assert all(probe.unfit(rows) == "it is about attention" for probe in probes.PROBES.values())
    assert probes.cases("decode", rows) == []
    with pytest.raises(ProblemError, match="it is about attention"):
        probes.case("ones", rows)


@pytest.mark.parametrize("parameters", [{}, {"round": 1}, {"row": 0}])
def test_impossible_parameters_are_refused(parameters):
    with pytest.raises(ProblemError, match=r"decode has parameters|decode\.round=1 must be one of"):
        probes.case("decode", Problem(query=4), parameters)


def test_unknown_probe_lists_known_ones():
    with pytest.raises(UnknownName, match="decode, isolated"):
        probes.probe_named("compare")


def test_probe_replaces_score_mod_and_distribution():
    problem = Problem(query=4, score=Spec.of("alibi"), distribution="uniform", seed=3)
    case = probes.case("ramp", problem, {"rise": 1})
    assert case.problem == Problem(query=4, seed=3)
    assert case.to_json()["parameters"] == {"rise": 1}
