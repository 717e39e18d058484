"""Codes tell keys, in columns that rounding cannot blur, and tell heads and batches apart."""

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


def codes(problem):
    return [key_code(problem, number) for number in range(count_rounds(problem))]


def exactly(*numbers):
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
def test_the_first_code_that_there_is_room_for(kv, value_dim, names):
    problem = Problem(query=1, kv=kv, head_dim=8, value_dim=value_dim, dtype="bf16")
    assert [one.name for one in codes(problem)] == names


@pytest.mark.parametrize(("kv", "value_dim"), [(64, 64), (100, 32), (77, 12), (9, 3), (33, 16)])
def test_all_digits_together_tell_every_key(kv, value_dim):
    problem = Problem(query=1, kv=kv, head_dim=8, value_dim=value_dim, dtype="fp32")
    found = codes(problem)
    digits = torch.cat([one.digits for one in found])
    assert len(set(map(tuple, digits.T.tolist()))) == kv
    for one in found:
        for digit in one.digits:
            assert digit.min() >= 0
            assert digit.max() < one.base
            assert torch.bincount(digit).max() <= -(-kv // one.base)


def test_two_digits_are_undone_as_the_page_says():
    x, y = codes(Problem(query=1, kv=50, head_dim=16, dtype="fp32"))[0].digits
    assert torch.equal(x + 8 * ((y - x) % 8), torch.arange(50))


def test_marked_rounds_mark_boundaries_first_and_then_every_key():
    problem = Problem(query=1, kv=300, head_dim=8, value_dim=16, dtype="bf16")
    first, *others = codes(problem)
    marked = (first.digits[0] >= 0).nonzero().flatten().tolist()
    assert {0, 63, 64, 127, 128, 255, 256, 299} <= set(marked)
    assert torch.stack([one.digits[0] >= 0 for one in others]).sum(0).tolist() == [1] * 300


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
def test_edges_of_masks_come_first(mask, keys):
    found = boundary_keys(Problem(batch=2, query=40, kv=100, mask=mask))
    assert found[:2] == [0, 99]
    assert set(keys) <= set(found[:12])
    assert sorted(found) == list(range(100))


def test_neighbours_have_other_amplitudes():
    problem = Problem(batch=3, heads=4, query=1)
    found = amplitudes(problem)
    assert (found[1:] != found[:-1]).all()
    assert (found[:, 1:] != found[:, :-1]).all()
    assert (found[1:, 1:] != found[:-1, :-1]).all()
    assert (found[1:, :-1] != found[:-1, 1:]).all()
    ratio = found[:, 1:] / found[:, :-1]
    assert ((ratio >= 4) | (ratio <= 1 / 4)).all()
    assert len(set(column_shifts(problem).flatten().tolist())) == 12


def test_values_are_turned_by_head_and_batch():
    problem = Problem(batch=2, heads=2, query=1, kv=5, head_dim=8)
    v = code_values(problem, key_code(problem))
    assert v[0, 0, :, :5].tolist() == torch.eye(5).tolist()
    assert (v[1, 0].argmax(-1) - v[0, 0].argmax(-1)).tolist() == [2] * 5
    assert torch.equal(v.amax((-1, -2)), amplitudes(problem))


def test_what_can_be_counted_by_hand():
    """Bf16 at score 0 and 2 keys: C·2^-8 and a little is below a quarter up to C = 63."""
    problem = Problem(query=1, kv=2, dtype="bf16")
    n, zero = exactly(3.0, 0.0)
    assert is_countable(problem, exactly(1, 63, 64, 65), n, zero).tolist() == [
        True,
        True,
        False,
        False,
    ]
    # e4m3's weights have four bits: a kernel that divides P first is off by C·(2^-4 + 2^-8).
    fp8 = Problem(query=1, kv=2, dtype="e4m3")
    assert is_countable(fp8, exactly(7, 8), n, zero).tolist() == [True, False]
    # 1/2 is exact; 1/4 may have been reached through 1/3, unless nothing is divided.
    for keys, errors in ((2.0, WeightErrors()), (4.0, WeightErrors(divides=False))):
        counts = is_countable(fp8, exactly(7, 8, 63), exactly(keys), zero, errors=errors)
        assert counts.tolist() == [True] * 3
    assert is_countable(fp8, exactly(7, 8), exactly(4.0), zero).tolist() == [True, False]
    # Of 100 keys P is 0.01, and unscaled a subnormal number of e4m3: within 2^-10, a tenth.
    for scale, counts in ((1.0, [True, False]), (256.0, [True, True])):
        errors = WeightErrors(scale=scale)
        asked = is_countable(fp8, exactly(4, 5), exactly(100.0), zero, errors=errors)
        assert asked.tolist() == counts
    assert not is_countable(problem, exactly(1), n, zero, others=0.25).any()


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 80])
def test_inputs_are_exact_and_what_they_say(dtype, scale, head_dim):
    """Nothing is rounded, and rows are decided by counting wherever a probe is about that."""
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


def test_descales_are_powers_of_two_unlike_their_neighbours():
    problem = Problem(batch=2, heads=4, kv_heads=4, query=5, kv=9, dtype="e4m3")
    descale = probes.inputs(probes.case("decode", problem)).descale
    for name in "qkv":
        found = getattr(descale, name).double()
        assert (torch.frexp(found)[0] == 0.5).all()
        assert (found[:, 1:] != found[:, :-1]).all()


def test_mean_has_more_bits_than_out():
    problem = Problem(query=1, kv=100, dtype="bf16")
    inputs = probes.inputs(probes.case("mean", problem))

    def tied(**errors):
        shown = torch.ones(1, 1, 1, 100, dtype=torch.bool)
        return next(iterate_tied_rows(inputs, lambda _: shown, errors=WeightErrors(**errors)))

    assert tied().once.isinf().all()  # P of a tile may be 1/48
    sixteen_bits = Accumulator(name="fp16", format=FORMATS["fp16"])
    assert tied(divides=False, values=sixteen_bits).once.isinf().all()
    rows = tied(divides=False)
    assert rows.keys.tolist() == [[[64.0]]]
    mean = rows.sums / 64
    assert (mean != mean.to(torch.bfloat16).double()).double().mean() > 0.9
    assert (rows.once < 2.0**-8 * mean).all()


def test_isolated_rows_are_decided_by_one_key():
    problem = Problem(heads=2, query=50, kv=77, head_dim=64, mask=Spec.of("causal"))
    shown = torch.arange(77) <= torch.arange(50)[:, None]
    for case in probes.cases("isolated", problem):
        inputs = probes.inputs(case)
        (rows,) = iterate_tied_rows(inputs, lambda rows: shown[rows.start : rows.stop][None, None])
        asked = rows.counts_out.sum()
        assert 10 * asked > 9 * rows.counts_out.numel()
        assert 4 * (rows.keys == 1)[rows.counts_out].sum() > 3 * asked  # the others have ties


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("negative", {"scale": 1e-9, "dtype": "fp16"}, "asks for q and k beyond fp16"),
        ("isolated", {"scale": 1e-9, "dtype": "fp16"}, "asks for q beyond fp16"),
        ("decode", {"score": Spec.of("alibi")}, "takes no score mod"),
        ("decode", {"distribution": "uniform"}, "takes no score mod"),
    ],
)
def test_what_cannot_be_asked_is_refused(name, changes, says):
    problem = Problem(query=4, **changes)
    probe = probes.PROBES[name]
    parameters = {key: numbers[0] for key, numbers in probe.allowed(problem).items()}
    with pytest.raises(ProblemError, match=says):
        probe.inputs(problem, parameters)


def test_a_softmax_is_not_asked():
    rows = Problem(operation="softmax", query=4, kv=9)
    assert all(probe.unfit(rows) == "it is about attention" for probe in probes.PROBES.values())
    assert probes.cases("decode", rows) == []
    with pytest.raises(ProblemError, match="it is about attention"):
        probes.case("ones", rows)


@pytest.mark.parametrize("parameters", [{}, {"round": 1}, {"row": 0}])
def test_impossible_parameters_are_refused(parameters):
    with pytest.raises(ProblemError, match=r"decode has parameters|decode\.round=1 must be one of"):
        probes.case("decode", Problem(query=4), parameters)


def test_an_unknown_probe_lists_the_probes():
    with pytest.raises(UnknownName, match="decode, isolated"):
        probes.probe_named("compare")


def test_a_probe_takes_the_place_of_score_mod_and_distribution():
    problem = Problem(query=4, score=Spec.of("alibi"), distribution="uniform", seed=3)
    case = probes.case("ramp", problem, {"rise": 1})
    assert case.problem == Problem(query=4, seed=3)
    assert case.to_json()["parameters"] == {"rise": 1}
