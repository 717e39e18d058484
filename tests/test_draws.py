"""The random generator: the same bits everywhere, and the distributions that it claims."""

import hashlib
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.core import draws
from attncheck.core.draws import Draws, TensorDraws, philox
from attncheck.core.mod_spec import GENERATOR

# Relative error that Acklam states for his approximation; its reference here, Wichura's AS241 in
# the standard library, is good to about 1e-16.
ACKLAM = 1.15e-9
QUANTILE = statistics.NormalDist().inv_cdf

GOLDEN = {
    "uniform": "ac5dec78a85c3c32",
    "normal": "ee79a505d2fb2db2",
    "integers": "b225ded03efc32f7",
}


def digest(numbers: np.ndarray) -> str:
    little = numbers.astype(numbers.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()[:16]


def first_thousand() -> dict[str, str]:
    d = Draws(2026)
    return {
        "uniform": digest(d.uniform("golden", (1000,))),
        "normal": digest(d.normal("golden", (1000,))),
        "integers": digest(d.integers("golden", (1000,), 1000)),
    }


def normal_of(multiples: list[int]) -> np.ndarray:
    """Return the generator's normal numbers for the probabilities ``multiples`` · 2**-53."""
    out = np.array(multiples, np.float64) * 2.0**-53
    draws._to_normal(out, np)
    return out


def test_draws_have_the_golden_bits():
    assert GENERATOR == 1, "another generator needs other golden values"
    assert first_thousand() == GOLDEN


def test_golden_bits_detect_a_change_in_the_last_bit_of_a_coefficient(monkeypatch):
    last = draws._CENTRE_TOP[-1]
    monkeypatch.setattr(draws, "_CENTRE_TOP", (*draws._CENTRE_TOP[:-1], math.nextafter(last, 9)))
    assert first_thousand() != GOLDEN


def test_bits_are_the_same_without_vector_instructions(without_vectors):
    code = "from tests.test_draws import first_thousand\nprint(first_thousand())"
    assert without_vectors(code) == str(GOLDEN)


def test_numpys_logarithm_has_other_bits_without_vector_instructions(
    without_vectors, vector_features
):
    """So the generator needs a logarithm of its own."""
    if not any(name.startswith(("AVX512", "X86_V4")) for name in vector_features):
        pytest.skip("NumPy's own vector logarithm is known to differ on AVX-512 only")
    logarithm = (
        "import hashlib, numpy as np\nfrom attncheck.core.draws import Draws\n"
        "logs = np.log(Draws(2026).uniform('golden', (100_000,)))\n"
        "print(hashlib.sha256(logs.tobytes()).hexdigest()[:16])"
    )
    logs = np.log(Draws(2026).uniform("golden", (100_000,)))
    assert without_vectors(logarithm) != digest(logs)


@given(st.integers(0, 2**64), st.text(max_size=8), st.integers(0, 20_000), st.integers(1, 20_000))
def test_longer_draw_begins_with_the_shorter_one(seed, stream, short, more):
    d = Draws(seed)
    longer = d.normal(stream, (short + more,))
    np.testing.assert_array_equal(longer[:short], d.normal(stream, (short,)))


def test_shapes_are_filled_in_c_order():
    d = Draws(0)
    flat, shaped = d.uniform("a", (24,)), d.uniform("a", (2, 3, 4))
    np.testing.assert_array_equal(flat.reshape(2, 3, 4), shaped)
    assert d.integers("a", (2, 0, 4), 5).shape == (2, 0, 4)


def test_streams_and_seeds_differ():
    names = [(0, "a"), (0, "b"), (1, "a"), (0, "aa"), (10, "a"), (1, "0/a")]
    hashes = {digest(Draws(seed).uniform(stream, (8,))) for seed, stream in names}
    assert len(hashes) == len(names)


@given(st.integers(1, 2**53 - 1))
def test_normal_is_the_quantile_within_acklams_error(multiple):
    (number,) = normal_of([multiple])
    exact = QUANTILE(multiple * 2.0**-53)
    assert abs(number - exact) <= ACKLAM * abs(exact)


def test_normal_is_accurate_and_symmetric_in_the_tails():
    multiples = [2**e + o for e in range(48) for o in (0, 1)]
    numbers = normal_of(multiples)
    exact = np.array([QUANTILE(m * 2.0**-53) for m in multiples])
    assert (abs(numbers - exact) <= ACKLAM * abs(exact)).all()
    assert abs(numbers).max() < 8.3
    np.testing.assert_array_equal(normal_of([2**53 - m for m in multiples]), -numbers)


def test_wrong_digit_of_a_coefficient_exceeds_acklams_error(monkeypatch):
    first, *rest = draws._CENTRE_TOP
    monkeypatch.setattr(draws, "_CENTRE_TOP", (first * (1 + 1e-6), *rest))
    with pytest.raises(AssertionError):
        test_normal_is_the_quantile_at_the_break_points(0.02425)


def test_logarithm_is_within_8_units_of_the_last_place():
    """The bound counts roundings.

    2 of s, 1 of the series' last sum, 1 of the product, on a part of at most ln(√2) = 0.35; 1
    of ln 2 and 1 of its product; 1 of the sum; 1 of math.log. For x ≤ 1/2, where |ln x| ≥ 0.69,
    that is below 8·2**-53 of the result.
    """
    x = np.concatenate([Draws(0).uniform("x", (20_000,)) / 2, 2.0 ** np.arange(-1000, -1)])
    exact = np.array([math.log(number) for number in x])
    assert (abs(draws._log(x, np) - exact) <= 8 * 2.0**-53 * abs(exact)).all()


def test_uniform_numbers_are_odd_multiples_inside_the_unit_interval():
    raw = np.array([0, 2**64 - 1, 2**12, 2**63], np.uint64)
    out = np.empty(4)
    draws._to_uniform(raw, out)
    assert (out * 2.0**53).tolist() == [1, 2**53 - 1, 3, 2**52 + 1]


@pytest.mark.parametrize("power", [0, 1, 8, 31])
def test_integers_below_a_power_of_two_are_the_leading_bits(power):
    d = Draws(5)
    uniform = d.uniform("a", (5000,))
    np.testing.assert_array_equal(d.integers("a", (5000,), 2**power), uniform * 2.0**power // 1)


@given(st.integers(1, 2**32 - 1))
def test_integers_are_the_high_half_of_the_product(bound):
    raw = Draws(7)._fill("a", np.empty(16, np.uint64), lambda bits, part: np.copyto(part, bits))
    expected = [int(number) * bound >> 64 for number in raw]
    assert Draws(7).integers("a", (16,), bound).tolist() == expected


def test_moments_are_within_six_standard_errors():
    n = 1_000_000
    d = Draws(11)
    normal, uniform, die = d.normal("n", (n,)), d.uniform("u", (n,)), d.integers("i", (n,), 6)
    assert abs(normal.mean()) < 6 / math.sqrt(n)
    assert abs((normal**2).mean() - 1) < 6 * math.sqrt(2 / n)
    assert abs(uniform.mean() - 0.5) < 6 * math.sqrt(1 / 12 / n)
    faces = np.bincount(die, minlength=6)
    assert (abs(faces - n / 6) < 6 * math.sqrt(n * 5 / 36)).all()
    assert abs((normal[1:] * normal[:-1]).mean()) < 6 / math.sqrt(n)


@pytest.mark.parametrize("break_point", [0.02425, 1 - 0.02425])
def test_normal_is_the_quantile_at_the_break_points(break_point):
    at = round(break_point * 2**53)
    numbers = normal_of(list(range(at - 50, at + 50)))
    exact = np.array([QUANTILE(m * 2.0**-53) for m in range(at - 50, at + 50)])
    assert (abs(numbers - exact) <= ACKLAM * abs(exact)).all()


@pytest.mark.parametrize("size", [draws.SPAN + 1, 3 * draws.SPAN - 5])
def test_numbers_drawn_in_threads_have_the_bits_of_one_thread(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread draws a span, whose generator starts where that of the previous span ends."""
    in_threads = Draws(7).normal("q", (size,)), Draws(7).integers("k", (size,), 1000)
    monkeypatch.setattr(draws, "SPAN", size)
    in_one_thread = Draws(7).normal("q", (size,)), Draws(7).integers("k", (size,), 1000)
    for numbers, expected in zip(in_threads, in_one_thread, strict=True):
        assert (numbers == expected).all()


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**62))
def test_philox_in_torch_gives_numpys_numbers(key, first):
    generator = np.random.Philox(key=key)
    generator.advance(first)
    expected = generator.random_raw(20).view(np.int64)
    ours = philox(key, torch.arange(first, first + 5)).flatten()
    np.testing.assert_array_equal(ours.numpy(), expected)


@pytest.fixture
def ieee_root(monkeypatch):
    """Replace torch's square root, which on a CPU may be MKL's, off in the last bit."""
    monkeypatch.setattr(torch, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))


@pytest.mark.parametrize("counts", [7, 2**21])
@pytest.mark.usefixtures("ieee_root")
def test_numbers_drawn_by_torch_have_the_bits_of_numpy(counts, monkeypatch):
    monkeypatch.setattr(draws, "SPAN", 16)
    monkeypatch.setattr(draws, "_COUNTS", counts)
    by_torch, by_numpy = TensorDraws(2026, "cpu"), Draws(2026)
    for shape in ((3, 5, 1), (3, 5, 7), (4001,)):
        for numbers in ("uniform", "normal"):
            drawn = getattr(by_torch, numbers)("golden", shape)
            expected = getattr(by_numpy, numbers)("golden", shape)
            np.testing.assert_array_equal(drawn.numpy().view(np.int64), expected.view(np.int64))


@pytest.mark.usefixtures("ieee_root")
def test_normal_tails_by_torch_have_the_bits_of_numpy():
    odd = torch.tensor([2.0**-53 * (2**e + o) for e in range(53) for o in (1, 3)])
    odd = torch.cat([odd.double(), 1 - odd.double()]).clamp(2.0**-53, 1 - 2.0**-53)
    by_numpy, by_torch = odd.numpy().copy(), odd.clone()
    draws._to_normal(by_numpy, np)
    draws._to_normal(by_torch, torch)
    np.testing.assert_array_equal(by_torch.numpy().view(np.int64), by_numpy.view(np.int64))
