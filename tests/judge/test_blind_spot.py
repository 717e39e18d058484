"""What hand-made problems would and would not have shown, computed by hand or by brute force."""

import math
from dataclasses import replace

import pytest
import torch

from attncheck.core.conditions import Conditions, Rows
from attncheck.core.judgement import BlindSpot
from attncheck.judge import blind_spot as blind_spots
from attncheck.judge.allowance import Allowance, Sample
from attncheck.judge.blind_spot import blind_spot, cut, first_bits

LN2 = math.log(2.0)
ROUNDINGS = 64 * 2.0**-52  # a few dozen float64 operations stand between the numbers below
LITTLE = 2.0**-18  # far more than rounding and what is beyond the first order, and next to nothing
ALL_SEEN = torch.ones(1, 1, dtype=torch.bool)


def numbers(*rows: list[float]) -> torch.Tensor:
    """One head's ``(1, rows, dim)``."""
    return torch.tensor(rows, dtype=torch.float64)[None]


def conditions(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor = ALL_SEEN
) -> Conditions:
    """Exact attention at scale 1 without a score mod."""
    products = q @ k.mT
    seen = seen.expand_as(products)
    hidden = torch.where(seen, products, -math.inf)
    alive = seen.any(-1)
    maximum = torch.where(alive, hidden.amax(-1), 0.0)
    powers = torch.exp(hidden - maximum[..., None])
    total = powers.sum(-1)
    weights = powers / torch.where(alive, total, 1.0)[..., None]
    return Conditions(
        rows=Rows(range(len(q)), torch.arange(q.shape[1])),
        q=q,
        k=k,
        v=v,
        scale=1.0,
        products=torch.where(seen, products, 0.0),
        scores=torch.where(seen, products, 0.0),
        seen=seen,
        maximum=maximum,
        total=total,
        out=weights @ v,
        lse=torch.where(alive, maximum + torch.log(total), -math.inf),
    )


def allowance(known: Conditions, out: float, lse: float, probable: float = math.inf) -> Allowance:
    """Every element of out, and of LSE, may be off by so much."""
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
    """The blind spot with these allowances; without that of LSE it is not exposed."""
    asked = allowance(known, out, math.inf if lse is None else lse, probable)
    found = blind_spot([(known, None)], asked, generic=generic, exposes_lse=lse is not None)
    assert found is not None
    return found


# Two keys of weights ¼ and ¾: out = ¼·4 + ¾·0 = 1, LSE = log(1 + 3).
TWO = conditions(q=numbers([1.0]), k=numbers([0.0], [math.log(3.0)]), v=numbers([4.0], [0.0]))


@pytest.mark.parametrize(("allowed", "share"), [(0.9, 1.0), (1.1, 0.5), (3.1, 0.0)])
def test_a_dropped_key_by_hand(allowed, share):
    """Without the first out is 0 (1 less), without the second it is 4 (3 more)."""
    assert spot(TWO, allowed).dropped_keys == share


@pytest.mark.parametrize(("allowed", "share"), [(0.28, 1.0), (0.29, 0.5), (1.38, 0.5), (1.39, 0.0)])
def test_a_dropped_key_through_lse_by_hand(allowed, share):
    """log(4/3) = 0.288 without the first, log 4 = 1.386 without the second."""
    assert spot(TWO, lse=allowed).dropped_keys == share
    assert spot(TWO, 100.0).dropped_keys == 0.0


def test_a_weight_by_hand():
    """The second key lighter by η makes out 1 ÷ (1 − ¾η), which is 1 + ¼ where ¾η = 1/5.

    The first lighter by η makes it (1 − η) ÷ (1 − ¼η): 1 − ¼ where η is 4/13, which is more.
    """
    assert spot(TWO, 0.25).weight == pytest.approx(4 / 15, rel=ROUNDINGS)


def test_a_weight_that_can_only_be_too_large():
    """Weights ¾ of v = 0 and ¼ of v = 4. No lighter key moves out, 1, by 3/2 but the first:

    1 ÷ (1 − ¾η) = 5/2 where η = 4/5. None moves it by 3: nothing but 4 itself is so far away. With
    8 equal keys, one of 1 among zeros, ⅛ moves by ⅛ at most when one is dropped; heavier by η it is
    (1 + η) ÷ (8 + η), which is ⅛ + ¼ where η = 16/5.
    """
    assert spot(TWO, 1.5).weight == pytest.approx(0.8, rel=ROUNDINGS)
    assert spot(TWO, 3.5).weight == math.inf
    one = torch.zeros(1, 8, 1, dtype=torch.float64)
    one[0, 3] = 1.0
    known = conditions(numbers([0.0]), torch.zeros_like(one), one)
    assert spot(known, 0.25).weight == pytest.approx(3.2, rel=ROUNDINGS)


def test_a_weight_through_lse_by_hand():
    """log(1 − ¾ η) = −A."""
    assert spot(TWO, lse=LN2).weight == pytest.approx(0.5 / 0.75, rel=ROUNDINGS)


def test_a_scale_by_hand():
    """dO/dε = ¼·0·3 + ¾·log 3·(0 − 1), dLSE/dε = ¾ log 3."""
    assert spot(TWO, 0.01).scale == pytest.approx(0.01 / (0.75 * math.log(3)), rel=ROUNDINGS)
    assert spot(TWO, lse=0.02).scale == pytest.approx(0.02 / (0.75 * math.log(3)), rel=ROUNDINGS)


@pytest.mark.parametrize(
    ("allowed", "half", "zeros"), [(0.4, True, True), (0.6, False, True), (1.0, False, False)]
)
def test_half_and_zeros_by_hand(allowed, half, zeros):
    found = spot(TWO, allowed)
    assert (found.half, found.zeros) == (half, zeros)
    assert found.mean_allowance == pytest.approx(allowed, rel=ROUNDINGS)


def random(rows: int, keys: int, dim: int, seed: int = 1) -> Conditions:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, n, dim, generator=generator, dtype=torch.float64) for n in (rows, keys, keys)
    )
    return conditions(q, k, v, torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows))


def test_equal_values_never_notice_a_key_through_out():
    known = random(5, 9, 4)
    known = conditions(known.q, known.k, torch.ones_like(known.v), known.seen)
    found = spot(known, 2.0**-30)
    assert (found.dropped_keys, found.weight, found.scale) == (0.0, math.inf, math.inf)
    assert (found.half, found.zeros) == (True, True)
    assert spot(known, 2.0**-30, lse=2.0**-30).dropped_keys == 1.0


def test_a_zero_query_never_notices_a_scale():
    known = random(5, 9, 4)
    known = conditions(torch.zeros_like(known.q), known.k, known.v, known.seen)
    found = spot(known, 2.0**-30, lse=2.0**-30)
    assert found.scale == math.inf
    assert found.dropped_keys == 1.0


def test_values_of_zero_never_notice_anything_through_out():
    known = random(5, 9, 4)
    known = conditions(known.q, known.k, torch.zeros_like(known.v), known.seen)
    found = spot(known, 2.0**-30)
    assert (found.dropped_keys, found.weight, found.scale) == (0.0, math.inf, math.inf)
    assert (found.half, found.zeros, found.accumulator_bits) == (False, False, 0)
    assert found.mean_allowance == math.inf


def test_a_row_of_one_key_has_no_key_to_drop():
    known = conditions(numbers([1.0]), numbers([2.0]), numbers([3.0]))
    found = spot(known, 2.0**-30)
    assert found.dropped_keys is None
    assert (found.weight, found.scale) == (math.inf, math.inf)
    through_lse = spot(known, 2.0**-30, lse=LN2)
    assert through_lse.weight == pytest.approx(0.5, rel=ROUNDINGS)  # log(1 − η) = −log 2
    assert through_lse.scale == pytest.approx(LN2 / 2, rel=ROUNDINGS)


def test_a_row_without_keys_says_nothing():
    seen = torch.tensor([[True, True], [False, False]])
    known = conditions(numbers([1.0], [1.0]), TWO.k, TWO.v, seen)
    assert spot(known, 0.25) == spot(TWO, 0.25)


def test_nothing_compared_is_no_blind_spot():
    known = conditions(TWO.q, TWO.k, TWO.v, torch.zeros(1, 2, dtype=torch.bool))
    asked = allowance(known, 1.0, 1.0)
    assert blind_spot([(known, None)], asked, generic=True, exposes_lse=True) is None


def test_one_key_that_takes_all_the_weight_is_noticed():
    """Its weight is 1 in float64, and v − O and 1 − P are 0; dropping it leaves the other."""
    known = conditions(numbers([1.0]), numbers([800.0], [0.0]), numbers([1.0], [-1.0]))
    found = spot(known, 1.0)
    assert found.dropped_keys == 0.5  # without the first −1 is left, without the second 1
    assert spot(known, 2.5).dropped_keys == 0.0
    assert spot(known, lse=799.0).dropped_keys == 0.5
    assert spot(known, lse=801.0).dropped_keys == 0.0


def test_a_weight_of_nearly_1_is_not_lost_in_rounding():
    """v − O of the first key is 4 e^-34, some 30 units of float64's last place of O itself.

    It lighter by η is the others heavier: out moves by 4 e^-34 · η ÷ (1 − η).
    """
    known = conditions(
        numbers([1.0]), numbers([34.0], [0.0], [0.0]), numbers([1.0], [-1.0], [-1.0])
    )
    allowed = math.ldexp(math.exp(-34.0), -10)
    assert spot(known, allowed).weight == pytest.approx(1 / (2**12 + 1), rel=LITTLE)


@pytest.mark.parametrize("allowed", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("exposes_lse", [False, True])
def test_dropped_keys_by_brute_force(allowed, exposes_lse):
    known = random(6, 11, 3)
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
    found = spot(known, allowed, lse=allowed / 4 if exposes_lse else None)
    assert found.dropped_keys == noticed / seen_pairs


@pytest.mark.parametrize("allowed", [0.02, 0.4, 1.5])
def test_the_smallest_weight_by_brute_force(allowed):
    """A little less of it is not seen anywhere, a little more is."""
    known = random(4, 7, 3)
    eta = spot(known, allowed).weight
    assert math.isfinite(eta)
    assert not _weight_seen(known, eta * (1 - LITTLE), allowed)
    assert _weight_seen(known, eta * (1 + LITTLE), allowed)


def _weight_seen(known: Conditions, eta: float, allowed: float) -> bool:
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
def test_the_smallest_scale_by_brute_force(exposes_lse):
    known, allowed = random(4, 7, 3), 2.0**-24  # so small that the first order is all of it
    found = spot(known, allowed, lse=allowed / 8 if exposes_lse else None)
    assert _scale_seen(known, found.scale * (1 + LITTLE), allowed, exposes_lse)
    assert not _scale_seen(known, found.scale * (1 - LITTLE), allowed, exposes_lse)


def _scale_seen(known: Conditions, eps: float, allowed: float, exposes_lse: bool) -> bool:
    other = conditions(known.q * (1 + eps), known.k, known.v, known.seen)
    moved = bool(((other.out - known.out).abs() > allowed).any())
    return moved or (exposes_lse and bool(((other.lse - known.lse).abs() > allowed / 8).any()))


# What the judge applied


def test_generic_inputs_are_judged_by_the_probable_bound_too():
    assert spot(TWO, 1.1, probable=0.9).dropped_keys == 0.5
    assert spot(TWO, 1.1, probable=0.9, generic=True).dropped_keys == 1.0
    assert spot(TWO, 0.9, probable=1.1, generic=True).dropped_keys == 1.0


def test_an_allowance_that_is_nan_shows_nothing():
    found = spot(TWO, math.nan, lse=LN2)
    assert not found.zeros
    assert found.dropped_keys == 0.5
    assert found.weight == pytest.approx(0.5 / 0.75, rel=ROUNDINGS)


# Score mods


def test_without_its_slope_a_score_mod_hides_the_scale():
    known = random(4, 7, 3)
    modded = replace(known, has_score_mod=True)
    assert spot(modded, 2.0**-20).scale == math.inf
    asked = allowance(known, 2.0**-20, math.inf)
    for slope in (1.0, 0.5):
        rows = [(modded, torch.full_like(modded.products, slope))]
        found = blind_spot(rows, asked, generic=False, exposes_lse=False)
        assert found is not None
        assert found.scale == pytest.approx(spot(known, 2.0**-20).scale / slope, rel=ROUNDINGS)


# Accumulators


def test_cut_is_toward_zero():
    values = torch.tensor([1.75, -1.75, 3.0, 0.0, 2.0**-300, 5.5], dtype=torch.float64)
    assert cut(values, first_bits(2)).tolist() == [1.5, -1.5, 3.0, 0.0, 2.0**-300, 4.0]
    assert cut(values, first_bits(53)).tolist() == values.tolist()


def test_accumulator_bits_by_hand():
    """64 equal keys of v = 1: the sum grows by ¼ a step of 16 and fits into two bits until ¾ does.

    In one bit ½ + ¼ becomes ½ again, and the sum ends there.
    """
    known = conditions(
        torch.zeros(1, 1, 1).double(), torch.zeros(1, 64, 1).double(), torch.ones(1, 64, 1).double()
    )
    assert spot(known, 0.4).accumulator_bits == 1
    assert spot(known, 0.6).accumulator_bits == 0


def test_accumulator_bits_of_scores_by_hand():
    """q·k = 7 in one step: in two bits 6, in one 4. One key alone, so that LSE shows it alone."""
    known = conditions(numbers([1.0]), numbers([7.0]), numbers([0.0]))
    assert spot(known, 1.0, lse=0.5).accumulator_bits == 2
    assert spot(known, 1.0, lse=1.0).accumulator_bits == 1
    assert spot(known, 1.0, lse=3.0).accumulator_bits == 0
    assert spot(known, 1.0).accumulator_bits == 0


def test_fewer_bits_are_allowed_by_less():
    known = random(8, 200, 32)
    bits = [spot(known, 2.0**-e, lse=2.0**-e).accumulator_bits for e in (4, 8, 12, 16)]
    assert bits == sorted(bits)
    assert 0 < bits[0] < bits[-1] < 24


# Softmax


def softmax_conditions(scores: torch.Tensor) -> Conditions:
    """Of a softmax of given scores: out is the weights."""
    keys = scores.shape[-1]
    nothing = torch.zeros(1, keys, 0, dtype=torch.float64)
    maximum = scores.amax(-1)
    powers = torch.exp(scores - maximum[..., None])
    return Conditions(
        rows=Rows(range(1), torch.arange(scores.shape[1])),
        q=nothing[:, : scores.shape[1]],
        k=nothing,
        v=nothing,
        scale=1.0,
        products=scores,
        scores=scores,
        seen=torch.ones_like(scores, dtype=torch.bool),
        maximum=maximum,
        total=powers.sum(-1),
        out=torch.softmax(scores, -1),
        lse=torch.logsumexp(scores, -1),
        given_scores=True,
    )


@pytest.mark.parametrize("allowed", [0.01, 0.1, 0.3, 0.6])
def test_a_softmax_is_attention_to_one_hot_values(allowed):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(1, 4, 6, generator=generator, dtype=torch.float64)
    values = torch.eye(6, dtype=torch.float64)[None]
    attention = conditions(scores, values, values)
    found, other = spot(softmax_conditions(scores), allowed), spot(attention, allowed)
    assert found.dropped_keys == other.dropped_keys
    assert found.weight == pytest.approx(other.weight, rel=ROUNDINGS)
    assert found.scale == pytest.approx(other.scale, rel=ROUNDINGS)
    assert (found.half, found.zeros) == (other.half, other.zeros)
    assert found.accumulator_bits == 0


def test_sums_are_cut_once_for_many_allowances_and_show_what_they_show_alone(monkeypatch):
    tried = []
    cut_sums = blind_spots._cut_sums

    def noting(steps, bits):
        tried.append((steps.shape, *bits))
        return cut_sums(steps, bits)

    monkeypatch.setattr(blind_spots, "_cut_sums", noting)
    # With few sums at once every number of bits is tried at once.
    monkeypatch.setattr(blind_spots, "_FEW_SUMS", 0)
    known, kept = random(4, 40, 3), {}
    for out in (2.0**-10, 2.0**-16, 2.0**-10, math.inf):
        each = allowance(known, out, 2.0**-14)
        how = {"generic": False, "exposes_lse": True}
        first = len(tried)
        alone = blind_spot([(known, None)], each, **how)
        del tried[first:]
        assert blind_spot([(known, None)], each, **how, cut_sums=kept) == alone
    # Those of P·V alone: there are few steps of q·k.
    of_values = [each for each in tried if each[0] == (3, 2, 4, 3)]
    assert len(of_values) > 4
    assert len(of_values) == len({*of_values})


# Many rows


def test_rows_in_pieces_show_what_they_show_together():
    known, asked = random(6, 11, 3), allowance(random(6, 11, 3), 0.1, 0.05)
    whole = blind_spot([(known, None)], asked, generic=False, exposes_lse=True)
    parts, samples = [], []
    for query in (torch.arange(2), torch.arange(2, 6)):
        sample = asked.samples[0]
        parts.append(conditions(known.q[:, query], known.k, known.v, known.seen[0, query]))
        samples.append(
            Sample(
                rows=Rows(range(2), query),
                probable_out=sample.probable_out[:, query],
                probable_lse=sample.probable_lse[:, query],
                sd_out=sample.sd_out[:, query],
                sd_lse=sample.sd_lse[:, query],
            )
        )
    pieces = Allowance(out=asked.out, lse=asked.lse, samples=samples)
    found = blind_spot([(part, None) for part in parts], pieces, generic=False, exposes_lse=True)
    assert whole is not None
    assert found is not None
    assert found.mean_allowance == pytest.approx(whole.mean_allowance, rel=ROUNDINGS)
    assert found.scale == pytest.approx(whole.scale, rel=ROUNDINGS)
    assert found.weight == pytest.approx(whole.weight, rel=ROUNDINGS)
    assert (found.dropped_keys, found.accumulator_bits) == (
        whole.dropped_keys,
        whole.accumulator_bits,
    )


def test_of_many_rows_keys_are_examined_in_some(monkeypatch):
    """The first and the last of six; the scale is examined in all."""
    known = random(6, 11, 3)
    monkeypatch.setattr("attncheck.judge.blind_spot.EXAMINED", 2 * (2 * 11 * 3))
    ends = torch.tensor([0, 5])
    less = conditions(known.q[:, ends], known.k, known.v, known.seen[0, ends])
    found, of_ends = spot(known, 0.1), spot(less, 0.1)
    assert found.dropped_keys == of_ends.dropped_keys
    assert found.weight == pytest.approx(of_ends.weight, rel=ROUNDINGS)
    monkeypatch.undo()
    assert found.scale == spot(known, 0.1).scale
