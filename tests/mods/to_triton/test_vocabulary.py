"""Each operation of the vocabulary: torch's callable, its trace and interpreted Triton agree."""

import functools

import pytest
import torch

from attncheck.mods.expression import OPERATIONS
from attncheck.mods.to_triton import to_triton
from attncheck.mods.trace import count_disagreements, trace_mask, trace_score

BIAS = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
TABLE = torch.arange(4 * 80, dtype=torch.float32).sin().reshape(4, 80)
CUBE = torch.arange(2 * 3 * 32).reshape(2, 3, 32)
DOCUMENT = torch.tensor([0] * 5 + [1] * 9 + [3] * 18)
FLAGS = torch.tensor([True, False, True])
OFFSET = torch.tensor(7)
FACTOR = torch.tensor(0.75)
STARTS = torch.tensor([0, 5, 14, 20])

NARROW = {
    dtype: torch.tensor([0, 1, 100]).to(dtype)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
} | {
    dtype: torch.tensor([-1.5, 0.1, 1000.0]).to(torch.float32).to(dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
}

MASKS = {
    "and": lambda b, h, q, k: (q >= k) & (k > 3),
    "or with a constant": lambda b, h, q, k: (q >= k) | False,
    "xor": lambda b, h, q, k: (q >= k) ^ (k % 3 == 0),
    "not": lambda b, h, q, k: ~(q >= k) & ~FLAGS[h],
    "equality of truth": lambda b, h, q, k: (q >= 5) == (k >= 5),
    "difference of truth": lambda b, h, q, k: (q >= 5) != FLAGS[h],
    "order of truth": lambda b, h, q, k: (q >= 5) > (k >= 5),
    "sum of truth": lambda b, h, q, k: (q > k) + (k > 9),
    "product of truth": lambda b, h, q, k: (q > k) * (k > 2),
    "minimum of truth": lambda b, h, q, k: torch.minimum(q > k, k > 2),
    "maximum of truth": lambda b, h, q, k: torch.maximum(q > k, k > 12),
    "where of truth": lambda b, h, q, k: torch.where(FLAGS[h], q > k, k > 9),
    "logical": lambda b, h, q, k: torch.logical_or(torch.logical_and(q, k - 3), h).logical_not(),
    "truth of a number": lambda b, h, q, k: (q - k).bool() & (q / 4 - 1).to(torch.bool),
    "isnan": lambda b, h, q, k: torch.isnan((q - k) / (q - k)) | torch.isinf(q / k),
    "isfinite": lambda b, h, q, k: torch.isfinite(q / (k - 3)),
    "mask of three": lambda b, h, q, k: (q >= k) & (q - k < 8) | (k < 4) & (h != 1),
    "documents": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
    "position in a document": lambda b, h, q, k: k - STARTS[DOCUMENT[q]] < 4,
    "computed columns": lambda b, h, q, k: TABLE[DOCUMENT[q], k - q + 32] > 0,
    "negative columns": lambda b, h, q, k: TABLE[DOCUMENT[q], q - k] > 0,
    "dilated": lambda b, h, q, k: (torch.abs(q - k) % 3 == 0) & ((q - k).abs() <= 9),
    "strided blocks": lambda b, h, q, k: (q // 4 == k // 4) | (k % 4 == 3),
    "natten": lambda b, h, q, k: ((q // 5 - k // 5).abs() <= 1) & ((q % 5 - k % 5).abs() <= 1),
    "0-d tensor": lambda b, h, q, k: q + OFFSET >= k * 2,
    "element of a tensor": lambda b, h, q, k: q + STARTS[1] >= k,
    "number of a tensor": lambda b, h, q, k: q + STARTS[1].item() >= k,
    "constant": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool),
}

WHOLE = {
    "shifts": lambda h, q, k: (q << h) + (k << 2) + (q >> 1) + ((q - k) >> 2) + (1 << h),
    "torch's shifts": lambda h, q, k: (
        torch.bitwise_left_shift(q, h) - torch.bitwise_right_shift(q - k, h)
    ),
    "shifts out of the word": lambda h, q, k: (
        (q << (h - 2)) + ((q - k) >> (k + 20)) + (q >> (h - 1))
    ),
    "logic of bits": lambda h, q, k: (q & k) + 2 * (q | k) + 4 * (q ^ 5) + ~k,
    "logic with truth": lambda h, q, k: (q & (k > 3)) + ((q > 2) | k) + ((q > k) ^ 1),
    "floor division": lambda h, q, k: (q - k) // 3 + (q - k) // -4 + 100 // (k + 1) + (q - k) // 1,
    "remainder": lambda h, q, k: (q - k) % 3 + (q - k) % -4 + 100 % (k + 1),
    "cut division": lambda h, q, k: (
        torch.div(q - k, 3, rounding_mode="trunc") + torch.div(k - q, h - 4, rounding_mode="trunc")
    ),
    "fmod": lambda h, q, k: torch.fmod(q - k, 3) + torch.fmod(k - q, h - 4),
    "sign": lambda h, q, k: torch.sign(q - k) + (k - q).sgn() * 3,
    "powers": lambda h, q, k: q**2 + (q - k) ** 3 + k.square() + 2**h + q**1,
    "clamps": lambda h, q, k: (q - k).clamp(-3, 3) + torch.clamp(q, h, k) + torch.relu(q - k),
    "rounded already": lambda h, q, k: q.floor() + k.ceil() + (q - k).trunc(),
    "extrema": lambda h, q, k: torch.minimum(q, k) - torch.maximum(h, q) + torch.max(q, k),
    "choices": lambda h, q, k: torch.where(q > k, q, 1) + torch.where(q == k, -2, k),
    "casts": lambda h, q, k: ((q - k) / 3).to(torch.int64) + (q > k).long() + q.int(),
    "filled": lambda h, q, k: (q - k).masked_fill(q > k, -1),
    "rsub": lambda h, q, k: (1 - q) * (3 - k) - -q + abs(q - k),
}

SCORES = {
    **{
        f"whole: {name}": lambda s, b, h, q, k, whole=whole: s + whole(h, q, k)
        for name, whole in WHOLE.items()
    },
    **{
        f"captured {dtype}": lambda s, b, h, q, k, table=table: s + table[h]
        for dtype, table in NARROW.items()
    },
    "captured float64": lambda s, b, h, q, k: s + BIAS.double()[h, b],
    "captured flags": lambda s, b, h, q, k: s + FLAGS[h] * 2,
    "two-dimensional": lambda s, b, h, q, k: s + TABLE[DOCUMENT[q], k - q + 32],
    "a row": lambda s, b, h, q, k: s + BIAS[1][h] + BIAS[:, 2][h] + BIAS.T[3, h],
    "real floor division": lambda s, b, h, q, k: s // 0.75 + s // -2 + 5 // s + s // (h + 1),
    "real remainder": lambda s, b, h, q, k: s % 0.75 + s % -2 + (q % 2.5) + s % (h + 1),
    "real fmod": lambda s, b, h, q, k: torch.fmod(s, 0.75) + torch.fmod(s, -2),
    "real rounding": lambda s, b, h, q, k: (s * 3).floor() + (s * 3).ceil() - torch.trunc(s * 3),
    "frac": lambda s, b, h, q, k: (s * 3).frac() + torch.fix(s * 5),
    "real sign": lambda s, b, h, q, k: torch.sign(s) * 2 + s.sgn(),
    "real powers": lambda s, b, h, q, k: s**2 + s**3 + s.square() + torch.pow(s, 1) + q**2.0,
    "roots": lambda s, b, h, q, k: s + (q * q).sqrt() + (k * k * 1.0) ** 0.5 + (q * 0 + 4) ** -0.5,
    "real extrema": lambda s, b, h, q, k: torch.minimum(s, q) + torch.max(s, BIAS[h, b]),
    "tensor clamps": lambda s, b, h, q, k: torch.clamp(s, BIAS[h, 0], BIAS[h, 1]) + s.relu(),
    "0-d tensor": lambda s, b, h, q, k: s * FACTOR + OFFSET,
    "number of a tensor": lambda s, b, h, q, k: s * FACTOR.item() + float(BIAS[1, 1]),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, float("-inf")).masked_fill(k == 0, 0),
    "smallest number": lambda s, b, h, q, k: torch.where(q < k, torch.finfo(torch.float32).min, s),
    "nan": lambda s, b, h, q, k: torch.where(torch.isnan(s / 0 * (q > k)), s, float("nan")),
    "full": lambda s, b, h, q, k: torch.where(q > k, torch.full_like(s, 2.0), torch.zeros_like(s)),
    "truth as numbers": lambda s, b, h, q, k: s + (q > k) * s - (h == 1) * 2 + FLAGS[h],
    "minus infinity": lambda s, b, h, q, k: torch.where(q > k, s, -float("inf")),
    "where of numbers": lambda s, b, h, q, k: s * torch.where(q > k, 1.0, 2.0),
    "clamped nan": lambda s, b, h, q, k: torch.where(q == k, float("nan"), s).clamp(-1, 1),
    "rsub": lambda s, b, h, q, k: s + (1 - q) - (2.5 - s),
    "true division": lambda s, b, h, q, k: s + q / (k + 1) + (q - 3) / 4,
    "negative index": lambda s, b, h, q, k: s + BIAS[h, -1 - h] + BIAS[h, 2],
    "3-d table": lambda s, b, h, q, k: s + CUBE[b, h, k],
    "tensor in the mod": lambda s, b, h, q, k: s + torch.tensor([0.5, 0.25, 4.0])[h],
    "views": lambda s, b, h, q, k: s.unsqueeze(-1).squeeze(-1) + torch.ones_like(s) * BIAS[h, b],
    "a number of 40 bits": lambda s, b, h, q, k: s + (q < 2**40),
    "to score's dtype": lambda s, b, h, q, k: s + (q - k).to(s.dtype) + k.type_as(s) + q.float(),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mod_has_bits_of_fp32_torch(name, grid):
    mod = SCORES[name]
    assert count_disagreements(trace_score(mod), mod, grid.dimensions) == 0
    start = grid.start()
    result, expected = grid.scored(mod, start)[grid.existing], grid.inside(mod, start).float()
    assert ((result == expected) | (result.isnan() & expected.isnan())).all()


TENTH = torch.tensor([0.1], dtype=torch.float64)


# A tensor of one element promotes fp32 to float64, one of no dimension does not.
@pytest.mark.parametrize("tenth", [TENTH, TENTH[0]], ids=["1-d", "0-d"])
def test_captured_float64_promotes_as_in_torch(tenth, grid):
    def mod(s, b, h, q, k):
        return s + BIAS[h, b] * tenth

    assert count_disagreements(trace_score(mod), mod, grid.dimensions) == 0


SIMILAR = [
    (lambda s, b, h, q, k: s // 0.75, lambda s, b, h, q, k: torch.trunc(s / 0.75)),
    (lambda s, b, h, q, k: s % 0.75, lambda s, b, h, q, k: torch.fmod(s, 0.75)),
    (lambda s, b, h, q, k: s + (q - k) // 3, lambda s, b, h, q, k: s + ((q - k) / 3).long()),
    (lambda s, b, h, q, k: s + (q - k) % 3, lambda s, b, h, q, k: s + torch.fmod(q - k, 3)),
    (lambda s, b, h, q, k: s + ((q - k) >> 1), lambda s, b, h, q, k: s + ((q - k) / 2).long()),
    (lambda s, b, h, q, k: s + ~q, lambda s, b, h, q, k: s + (q == 0)),
    (lambda s, b, h, q, k: s + ((q > 5) ^ (k > 5)), lambda s, b, h, q, k: s + ((q > 5) | (k > 5))),
    (lambda s, b, h, q, k: s.ceil(), lambda s, b, h, q, k: (s + 0.5).floor()),
]


@pytest.mark.parametrize("pair", range(len(SIMILAR)))
def test_common_mistake_is_detected(pair, grid):
    """Truncation for floor, or for xor, and so on: they differ on this grid."""
    right, wrong = SIMILAR[pair]
    assert count_disagreements(trace_score(wrong), right, grid.dimensions) > 0
    result = grid.scored(wrong, grid.start())[grid.existing]
    assert not torch.equal(result, grid.inside(right, grid.start()))


def test_every_operation_is_covered_here_or_in_ulp_tests():
    mods = [trace_mask(mod) for mod in MASKS.values()]
    mods += [trace_score(mod) for mod in SCORES.values()]
    used = {node.op for expression in mods for node in expression.structure.nodes}
    elsewhere = {"tanh", "sigmoid", "exp", "exp2", "log", "log2", "sin", "cos"}
    assert set(OPERATIONS) - used == elsewhere


def test_captured_tensors_are_passed_as_fp32_or_int32():
    for dtype, table in NARROW.items():
        mod = to_triton(trace_score(lambda s, b, h, q, k: s + table[h]))  # noqa: B023  (traced now)
        captured = mod.captured[0]
        assert captured.dtype is (torch.float32 if dtype.is_floating_point else torch.int32)
        assert torch.equal(captured, table.to(captured.dtype))
    double = to_triton(trace_score(lambda s, b, h, q, k: s + BIAS.double()[h, b]))
    assert double.captured[0].dtype is torch.float32


class Alibi(torch.nn.Module):
    """A mod with state, as model code has it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125]))
        self.scale = torch.nn.Parameter(torch.tensor([1.5, 2.0]))

    def forward(self, score, b, h, q, k):
        return score + self.slopes[h] * (k - q) * self.scale[b]


class Window:
    """A callable object."""

    def __init__(self, width):
        self.width = width

    def __call__(self, b, h, q, k):
        return self.inside(q - k) & (q >= k)

    def inside(self, distance):
        return distance < self.width


def windowed(width, b, h, q, k, *, ahead=0):
    return (q - k < width) & (k - q <= ahead)


def shadowing(b, h, q, k):
    q = q + OFFSET
    ahead = q - k

    def q_(k):
        b = k * 2
        return b - q

    k, q = q, k
    return (q_(k) > ahead) | (q > 3)


# Masks that are other forms of callables than a lambda of four arguments.
FORMS = {
    "object": Window(5),
    "method": Window(3).__call__,
    "partial": functools.partial(windowed, 5),
    "partial with keyword": functools.partial(windowed, 5, ahead=2),
    "partial of a partial": functools.partial(functools.partial(windowed, 5), ahead=1),
    "shadowing": shadowing,
    "keyword names": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "star": lambda *indices: indices[2] >= indices[3],
    "defaults": lambda b, h, q, k, width=4: q - k < width,
    "nested": lambda b, h, q, k: shadowing(h, b, *reversed([q, k])),
    "generator": lambda b, h, q, k: functools.reduce(
        torch.logical_or, (q - k == d for d in (0, 2, 5))
    ),
    "table in the mod": lambda b, h, q, k: torch.tensor([3, 0, 9])[h] <= k,
    "arange in the mod": lambda b, h, q, k: torch.arange(32)[k] > q,
}


@pytest.mark.parametrize("mod", [*MASKS.values(), *FORMS.values()], ids=[*MASKS, *FORMS])
def test_mask_agrees_in_trace_and_triton(mod, grid):
    assert count_disagreements(trace_mask(mod), mod, grid.dimensions) == 0
    assert torch.equal(grid.seen(mod)[grid.existing], grid.inside(mod).to(torch.int32))


def test_score_mod_may_be_module_with_buffers_and_parameters(grid):
    mod = Alibi()
    with torch.no_grad():
        assert count_disagreements(trace_score(mod), mod, grid.dimensions) == 0
        result = grid.scored(mod, grid.start())[grid.existing]
        assert torch.equal(result, grid.inside(mod, grid.start()))
    assert not any(t.requires_grad for t in trace_score(mod).captured if torch.is_tensor(t))
