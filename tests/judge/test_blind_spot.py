"""The smallest faults that inputs would show, against hand calculations and brute force."""

import math
from dataclasses import replace

import pytest
import torch
from tests.judge import small_conditions as make

from attncheck.core.conditions import Conditions, Rows
from attncheck.core.judgement import BlindSpot
from attncheck.judge import blind_spot as blind_spots
from attncheck.judge.allowance import Allowance, Sample
from attncheck.judge.blind_spot import blind_spot, cut, first_bits

LN2 = math.log(2.0)
ROUNDINGS = 64 * 2.0**-52  # of a few dozen float64 operations
LITTLE = 2.0**-18  # negligible, but far more than rounding and higher-order terms


def head_rows(*rows: list[float]) -> torch.Tensor:
    """A tensor of one head, ``(1, rows, dim)``."""
    return torch.tensor(rows, dtype=torch.float64)[None]


def allowance(known: Conditions, out: float, lse: float, probable: float = math.inf) -> Allowance:
    """Allows every element of out, and of LSE, the same error."""
    of_out, of_lse = torch.full_like(known.out, out), torch.full_like(known.lse, lse)
    sample = Sample(
        rows=known.rows,
        probable_out=torch.full_like(of_out, probable),
        probable_lse=torch.full_like(of_lse, probable),
        sd_out=of_out,
        sd_lse=of_lse,
    )
    return Allowance(out=of_out[None], lse=of_lse[None], samples=[sample])


def spot(
    known: Conditions,
    out: float = math.inf,
    lse: float | None = None,
    *,
    probable: float = math.inf,
    generic: bool = False,
) -> BlindSpot:
    """The blind spot under these allowances; without ``lse`` the kernel exposes no LSE."""
    allowances = allowance(known, out, math.inf if lse is None else lse, probable)
    result = blind_spot([(known, None)], allowances, generic=generic, exposes_lse=lse is not None)
    assert result is not None
    return result


# Two keys of weights ¼ and ¾: out = ¼·4 + ¾·0 = 1, LSE = log(1 + 3).
TWO = make.attention(
    q=head_rows([1.0]), k=head_rows([0.0], [math.log(3.0)]), v=head_rows([4.0], [0.0])
)


@pytest.mark.parametrize(
    ("out", "lse", "share"),
    [
        (0.9, None, 1.0),
        (1.1, None, 0.5),
        (3.1, None, 0.0),
        (math.inf, 0.28, 1.0),
        (math.inf, 0.29, 0.5),
        (math.inf, 1.38, 0.5),
        (math.inf, 1.39, 0.0),
        (100.0, None, 0.0),
    ],
)
def test_dropped_keys_match_hand_calculation(out, lse, share):
    """Without the first key out is 0 (1 less), without the second it is 4 (3 more).

    LSE moves by log(4/3) = 0.288 without the first and by log 4 = 1.386 without the second.
    """
    assert spot(TWO, out, lse).dropped_keys == share


def test_smallest_weight_change_matches_hand_calculation():
    """The second key lighter by η makes out 1 ÷ (1 − ¾η), which is 1 + ¼ where ¾η = 1/5.

    The first lighter by η makes it (1 − η) ÷ (1 − ¼η): 1 − ¼ where η is 4/13, which is more.
    """
    assert spot(TWO, 0.25).weight == pytest.approx(4 / 15, rel=ROUNDINGS)


def test_weight_changes_that_only_one_direction_can_show():
    """Large moves of out need one certain key lighter, or one heavier by more than its own weight.

    With weights ¾ of v = 0 and ¼ of v = 4, only the first key, when lighter, moves out (1) by 3/2:
    1 ÷ (1 − ¾η) = 5/2 where η = 4/5. No key moves it by 3: nothing but 4 itself is so far away.
    With 8 equal keys, one of 1 among zeros, ⅛ moves by ⅛ at most when one is dropped; heavier by η
    it is (1 + η) ÷ (8 + η), which is ⅛ + ¼ where η = 16/5.
    """
    assert spot(TWO, 1.5).weight == pytest.approx(0.8, rel=ROUNDINGS)
    assert spot(TWO, 3.5).weight == math.inf
    one = torch.zeros(1, 8, 1, dtype=torch.float64)
    one[0, 3] = 1.0
    known = make.attention(head_rows([0.0]), torch.zeros_like(one), one)
    assert spot(known, 0.25).weight == pytest.approx(3.2, rel=ROUNDINGS)


def test_smallest_weight_change_through_lse_matches_hand_calculation():
    """LSE moves by A where log(1 − ¾ η) = −A."""
    assert spot(TWO, lse=LN2).weight == pytest.approx(0.5 / 0.75, rel=ROUNDINGS)


def test_smallest_scale_error_matches_hand_calculation():
    """The derivatives are dO/dε = ¼·0·3 + ¾·log 3·(0 − 1) and dLSE/dε = ¾ log 3."""
    assert spot(TWO, 0.01).scale == pytest.approx(0.01 / (0.75 * math.log(3)), rel=ROUNDINGS)
    assert spot(TWO, lse=0.02).scale == pytest.approx(0.02 / (0.75 * math.log(3)), rel=ROUNDINGS)


@pytest.mark.parametrize(
    ("allowed", "half", "zeros"), [(0.4, True, True), (0.6, False, True), (1.0, False, False)]
)
def test_half_and_zeros_match_hand_calculation(allowed, half, zeros):
    result = spot(TWO, allowed)
    assert (result.half, result.zeros) == (half, zeros)
    assert result.mean_allowance == pytest.approx(allowed, rel=ROUNDINGS)


def random_conditions(rows: int, keys: int, dim: int, seed: int = 1) -> Conditions:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, n, dim, generator=generator, dtype=torch.float64) for n in (rows, keys, keys)
    )
    return make.attention(q, k, v, seen=torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows))


def test_equal_values_show_key_faults_only_through_lse():
    known = random_conditions(5, 9, 4)
    known = make.attention(known.q, known.k, torch.ones_like(known.v), seen=known.seen)
    result = spot(known, 2.0**-30)
    assert (result.dropped_keys, result.weight, result.scale) == (0.0, math.inf, math.inf)
    assert (result.half, result.zeros) == (True, True)
    assert spot(known, 2.0**-30, lse=2.0**-30).dropped_keys == 1.0


def test_zero_query_cannot_show_a_scale_error():
    known = random_conditions(5, 9, 4)
    known = make.attention(torch.zeros_like(known.q), known.k, known.v, seen=known.seen)
    result = spot(known, 2.0**-30, lse=2.0**-30)
    assert result.scale == math.inf
    assert result.dropped_keys == 1.0


def test_zero_values_show_no_fault_through_out():
    known = random_conditions(5, 9, 4)
    known = make.attention(known.q, known.k, torch.zeros_like(known.v), seen=known.seen)
    result = spot(known, 2.0**-30)
    assert (result.dropped_keys, result.weight, result.scale) == (0.0, math.inf, math.inf)
    assert (result.half, result.zeros, result.accumulator_bits) == (False, False, 0)
    assert result.mean_allowance == math.inf


def test_row_of_one_key_has_no_key_to_drop():
    known = make.attention(head_rows([1.0]), head_rows([2.0]), head_rows([3.0]))
    result = spot(known, 2.0**-30)
    assert result.dropped_keys is None
    assert (result.weight, result.scale) == (math.inf, math.inf)
    through_lse = spot(known, 2.0**-30, lse=LN2)
    assert through_lse.weight == pytest.approx(0.5, rel=ROUNDINGS)  # log(1 − η) = −log 2
    assert through_lse.scale == pytest.approx(LN2 / 2, rel=ROUNDINGS)


def test_row_without_keys_does_not_change_the_blind_spot():
    seen = torch.tensor([[True, True], [False, False]])
    known = make.attention(head_rows([1.0], [1.0]), TWO.k, TWO.v, seen=seen)
    assert spot(known, 0.25) == spot(TWO, 0.25)


def test_no_blind_spot_where_no_row_is_compared():
    known = make.attention(TWO.q, TWO.k, TWO.v, seen=torch.zeros(1, 2, dtype=torch.bool))
    allowances = allowance(known, 1.0, 1.0)
    assert blind_spot([(known, None)], allowances, generic=True, exposes_lse=True) is None


def test_dropping_a_key_of_weight_1_is_shown():
    """Its weight is 1 in float64, so v − O and 1 − P are 0; dropping it leaves the other."""
    known = make.attention(head_rows([1.0]), head_rows([800.0], [0.0]), head_rows([1.0], [-1.0]))
    result = spot(known, 1.0)
    assert result.dropped_keys == 0.5  # without the first −1 is left, without the second 1
    assert spot(known, 2.5).dropped_keys == 0.0
    assert spot(known, lse=799.0).dropped_keys == 0.5
    assert spot(known, lse=801.0).dropped_keys == 0.0


def test_weight_change_of_a_key_of_weight_nearly_1_is_not_lost_in_rounding():
    """The first key's v − O is 4 e^-34, some 30 units of float64's last place of O itself.

    With that key lighter by η the others are heavier: out moves by 4 e^-34 · η ÷ (1 − η).
    """
    known = make.attention(
        head_rows([1.0]), head_rows([34.0], [0.0], [0.0]), head_rows([1.0], [-1.0], [-1.0])
    )
    allowed = math.ldexp(math.exp(-34.0), -10)
    assert spot(known, allowed).weight == pytest.approx(1 / (2**12 + 1), rel=LITTLE)


@pytest.mark.parametrize("allowed", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("exposes_lse", [False, True])
def test_dropped_keys_match_brute_force(allowed, exposes_lse):
    known = random_conditions(6, 11, 3)
    seen_pairs, noticed = 0, 0
    for head, row, key in torch.nonzero(known.seen).tolist():
        if int(known.seen[head, row].sum()) < 2:
            continue
        less = known.seen[head, row].clone()
        less[key] = False
        scores = known.products[head, row, less]
        out = torch.softmax(scores, 0) @ known.v[head, less]
        moved = bool(((out - known.out[head, row]).abs() > allowed).any())
        lse = float(torch.logsumexp(scores, 0))
        moved |= exposes_lse and abs(lse - float(known.lse[head, row])) > allowed / 4
        seen_pairs += 1
        noticed += moved
    result = spot(known, allowed, lse=allowed / 4 if exposes_lse else None)
    assert result.dropped_keys == noticed / seen_pairs


@pytest.mark.parametrize("allowed", [0.02, 0.4, 1.5])
def test_smallest_weight_change_matches_brute_force(allowed):
    """A slightly smaller change shows nowhere, a slightly larger one does."""
    known = random_conditions(4, 7, 3)
    eta = spot(known, allowed).weight
    assert math.isfinite(eta)
    assert not _weight_change_shows(known, eta * (1 - LITTLE), allowed)
    assert _weight_change_shows(known, eta * (1 + LITTLE), allowed)


def _weight_change_shows(known: Conditions, eta: float, allowed: float) -> bool:
    weights = torch.softmax(torch.where(known.seen, known.products, -math.inf), -1)
    for sign in (-1, 1):
        if sign * eta <= -1:
            continue
        for key in range(weights.shape[-1]):
            factor = torch.ones(weights.shape[-1], dtype=torch.float64)
            factor[key] += sign * eta
            other = weights * factor
            out = other @ known.v / other.sum(-1, keepdim=True)
            if bool(((out - known.out).abs() > allowed).any()):
                return True
    return False


@pytest.mark.parametrize("exposes_lse", [False, True])
def test_smallest_scale_error_matches_brute_force(exposes_lse):
    known, allowed = (
        random_conditions(4, 7, 3),
        2.0**-24,
    )  # so small that the first order is all of it
    result = spot(known, allowed, lse=allowed / 8 if exposes_lse else None)
    assert _scale_error_shows(known, result.scale * (1 + LITTLE), allowed, exposes_lse)
    assert not _scale_error_shows(known, result.scale * (1 - LITTLE), allowed, exposes_lse)


def _scale_error_shows(known: Conditions, eps: float, allowed: float, exposes_lse: bool) -> bool:
    other = make.attention(known.q * (1 + eps), known.k, known.v, seen=known.seen)
    moved = bool(((other.out - known.out).abs() > allowed).any())
    return moved or (exposes_lse and bool(((other.lse - known.lse).abs() > allowed / 8).any()))


# Probabilistic bound


def test_probabilistic_bound_counts_only_on_generic_inputs():
    assert spot(TWO, 1.1, probable=0.9).dropped_keys == 0.5
    assert spot(TWO, 1.1, probable=0.9, generic=True).dropped_keys == 1.0
    assert spot(TWO, 0.9, probable=1.1, generic=True).dropped_keys == 1.0


def test_nan_allowance_of_out_leaves_lse_alone_to_show_faults():
    result = spot(TWO, math.nan, lse=LN2)
    assert not result.zeros
    assert result.dropped_keys == 0.5
    assert result.weight == pytest.approx(0.5 / 0.75, rel=ROUNDINGS)


# Score mods


def test_score_mod_hides_the_scale_unless_its_slope_is_known():
    known = random_conditions(4, 7, 3)
    modded = replace(known, has_score_mod=True)
    assert spot(modded, 2.0**-20).scale == math.inf
    allowances = allowance(known, 2.0**-20, math.inf)
    for slope in (1.0, 0.5):
        rows = [(modded, torch.full_like(modded.products, slope))]
        result = blind_spot(rows, allowances, generic=False, exposes_lse=False)
        assert result is not None
        assert result.scale == pytest.approx(spot(known, 2.0**-20).scale / slope, rel=ROUNDINGS)


# Accumulators


def test_cut_truncates_toward_zero():
    values = torch.tensor([1.75, -1.75, 3.0, 0.0, 2.0**-300, 5.5], dtype=torch.float64)
    assert cut(values, first_bits(2)).tolist() == [1.5, -1.5, 3.0, 0.0, 2.0**-300, 4.0]
    assert cut(values, first_bits(53)).tolist() == values.tolist()


def test_accumulator_bits_of_values_match_hand_calculation():
    """With 64 equal keys of v = 1 the sum grows by ¼ a step of 16 and fits into two bits up to ¾.

    In one bit ½ + ¼ becomes ½ again, and the sum ends there.
    """
    known = make.attention(
        torch.zeros(1, 1, 1).double(), torch.zeros(1, 64, 1).double(), torch.ones(1, 64, 1).double()
    )
    assert spot(known, 0.4).accumulator_bits == 1
    assert spot(known, 0.6).accumulator_bits == 0


def test_accumulator_bits_of_scores_match_hand_calculation():
    """q·k = 7 in one step is 6 in two bits and 4 in one; with a single key only LSE shows it."""
    known = make.attention(head_rows([1.0]), head_rows([7.0]), head_rows([0.0]))
    assert spot(known, 1.0, lse=0.5).accumulator_bits == 2
    assert spot(known, 1.0, lse=1.0).accumulator_bits == 1
    assert spot(known, 1.0, lse=3.0).accumulator_bits == 0
    assert spot(known, 1.0).accumulator_bits == 0


def test_tighter_allowances_need_more_accumulator_bits():
    known = random_conditions(8, 200, 32)
    bits = [spot(known, 2.0**-e, lse=2.0**-e).accumulator_bits for e in (4, 8, 12, 16)]
    assert bits == sorted(bits)
    assert 0 < bits[0] < bits[-1] < 24


# Softmax


@pytest.mark.parametrize("allowed", [0.01, 0.1, 0.3, 0.6])
def test_softmax_has_the_blind_spot_of_attention_to_one_hot_values(allowed):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(1, 4, 6, generator=generator, dtype=torch.float64)
    values = torch.eye(6, dtype=torch.float64)[None]
    attention = make.attention(scores, values, values)
    result, other = spot(make.softmax(scores), allowed), spot(attention, allowed)
    assert result.dropped_keys == other.dropped_keys
    assert result.weight == pytest.approx(other.weight, rel=ROUNDINGS)
    assert result.scale == pytest.approx(other.scale, rel=ROUNDINGS)
    assert (result.half, result.zeros) == (other.half, other.zeros)
    assert result.accumulator_bits == 0


def test_cut_sums_are_computed_once_for_many_allowances(monkeypatch):
    """A shared cache truncates each sum once per number of bits and changes no result."""
    cuts = []
    cut_sums = blind_spots._cut_sums

    def recording_cut_sums(steps, bits):
        cuts.append((steps.shape, *bits))
        return cut_sums(steps, bits)

    monkeypatch.setattr(blind_spots, "_cut_sums", recording_cut_sums)
    # Few sums would try every number of bits in a single call.
    monkeypatch.setattr(blind_spots, "_FEW_SUMS", 0)
    known, cache = random_conditions(4, 40, 3), {}
    for out in (2.0**-10, 2.0**-16, 2.0**-10, math.inf):
        each = allowance(known, out, 2.0**-14)
        options = {"generic": False, "exposes_lse": True}
        first = len(cuts)
        alone = blind_spot([(known, None)], each, **options)
        del cuts[first:]
        assert blind_spot([(known, None)], each, **options, cut_sums=cache) == alone
    # Count only the sums of P·V: there are few steps of q·k.
    of_values = [cut for cut in cuts if cut[0] == (3, 2, 4, 3)]
    assert len(of_values) > 4
    assert len(of_values) == len({*of_values})


# Many rows


def test_rows_in_pieces_have_the_blind_spot_of_all_rows_together():
    known = random_conditions(6, 11, 3)
    allowances = allowance(known, 0.1, 0.05)
    whole = blind_spot([(known, None)], allowances, generic=False, exposes_lse=True)
    parts, samples = [], []
    for query in (torch.arange(2), torch.arange(2, 6)):
        sample = allowances.samples[0]
        parts.append(make.attention(known.q[:, query], known.k, known.v, seen=known.seen[0, query]))
        samples.append(
            Sample(
                rows=Rows(range(2), query),
                probable_out=sample.probable_out[:, query],
                probable_lse=sample.probable_lse[:, query],
                sd_out=sample.sd_out[:, query],
                sd_lse=sample.sd_lse[:, query],
            )
        )
    pieces = Allowance(out=allowances.out, lse=allowances.lse, samples=samples)
    result = blind_spot([(part, None) for part in parts], pieces, generic=False, exposes_lse=True)
    assert whole is not None
    assert result is not None
    assert result.mean_allowance == pytest.approx(whole.mean_allowance, rel=ROUNDINGS)
    assert result.scale == pytest.approx(whole.scale, rel=ROUNDINGS)
    assert result.weight == pytest.approx(whole.weight, rel=ROUNDINGS)
    assert (result.dropped_keys, result.accumulator_bits) == (
        whole.dropped_keys,
        whole.accumulator_bits,
    )


def test_key_faults_of_many_rows_are_examined_in_a_sample(monkeypatch):
    """With room for two of six rows, only the first and last are examined; for the scale, all."""
    known = random_conditions(6, 11, 3)
    monkeypatch.setattr("attncheck.judge.blind_spot.EXAMINED", 2 * (2 * 11 * 3))
    ends = torch.tensor([0, 5])
    end_conditions = make.attention(known.q[:, ends], known.k, known.v, seen=known.seen[0, ends])
    result, ends_result = spot(known, 0.1), spot(end_conditions, 0.1)
    assert result.dropped_keys == ends_result.dropped_keys
    assert result.weight == pytest.approx(ends_result.weight, rel=ROUNDINGS)
    monkeypatch.undo()
    assert result.scale == spot(known, 0.1).scale
