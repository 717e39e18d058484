"""Gradients of the tensors that a score mod captures: its trace agrees with torch's autograd."""

import functools
from pathlib import Path

import mpmath
import pytest
import torch

from attncheck.core.draws import Draws
from attncheck.core.errors import ProblemError, TraceError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.core.source_files import load_member
from attncheck.mods.ball_algebra import to_ball
from attncheck.mods.captured_gradients import captured_tensors, leaf_gradients
from attncheck.mods.captured_reads import count_read_numbers, read_tensors, trace_reads
from attncheck.mods.library import build_score
from attncheck.mods.mpmath_algebra import to_mpmath
from attncheck.mods.running_error import RunningError
from attncheck.mods.to_triton import to_triton

DIMENSIONS = Dimensions(batch=2, heads=3, query=5, kv=7)
UNITS = 8  # roundings by which formula and autograd may differ, for every mod here
SOFTCAP = Spec.of("softcap", cap=2.0)
LIBRARY = [
    Spec.of("alibi"),
    Spec.of("relative_bias", distance=2, seed=0),
    *(
        Spec.of("bias", seed=1, per_batch=batch, per_head=head)
        for batch in (0, 1)
        for head in (0, 1)
    ),
    Spec.of("chain", SOFTCAP, Spec.of("alibi")),
    Spec.of("chain", Spec.of("bias", seed=1, per_batch=0, per_head=1), SOFTCAP, Spec.of("alibi")),
    Spec.of("chain", Spec.of("alibi"), Spec.of("alibi")),
    Spec.of("offset", Spec.of("relative_bias", distance=3, seed=0), rows=2),
]

SLOPES = torch.tensor([0.5, -0.25, 2.0])
NARROW = torch.tensor([[1.5, -0.5, 0.25, 2.0, -3.0]] * 3, dtype=torch.bfloat16)
NUMBER = torch.tensor(1.25)
ONE = torch.tensor([-0.75])
BUCKETS = torch.tensor([0, 2, 1, 1, 0, 2, 2], dtype=torch.int32)
PARAMETER = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))


def cast(score, b, h, q_idx, kv_idx):
    """The captured number is cast to fp32: a gradient taken through that cast would be rounded."""
    return score + (NARROW[h, q_idx % 5].float() * 0.1).to(score.dtype) * score


def from_the_end(score, b, h, q_idx, kv_idx):
    return score * SLOPES[-1 - h].to(score.dtype).exp()


def by_bucket(score, b, h, q_idx, kv_idx):
    return score + SLOPES[BUCKETS[kv_idx]].to(score.dtype)


def of_one_number(score, b, h, q_idx, kv_idx):
    capped = NUMBER * torch.tanh(score / NUMBER)
    return capped + 2 * ONE * kv_idx + PARAMETER[h].to(score.dtype)


def twice(score, b, h, q_idx, kv_idx):
    compared = torch.where(score > ONE, score, 0.5 * score)
    return compared * SLOPES[h].to(score.dtype) + SLOPES[b].to(score.dtype) * q_idx


OWN = [cast, from_the_end, by_bucket, of_one_number, twice]
EXAMPLES = Path(__file__).parents[2] / "examples" / "mods.py"
# All score mods of examples/mods.py that read float tensors; the others have no gradient to test.
EXAMPLE_MODS = {
    name: load_member(f"{EXAMPLES}::{name}", name)
    for name in ("alibi", "relative_bias", "log_buckets", "temperature", "swin_bias")
}
MODS = [*(build_score(spec, DIMENSIONS) for spec in LIBRARY), *OWN, *EXAMPLE_MODS.values()]
NAMES = [
    *map(str, LIBRARY),
    *(mod.__name__ for mod in OWN),
    *(f"examples {n}" for n in EXAMPLE_MODS),
]


reads_of = functools.cache(trace_reads)  # tracing costs more than the tests do


def all_points():
    """Every index with a drawn score, flattened."""
    sizes = (DIMENSIONS.batch, DIMENSIONS.heads, DIMENSIONS.query, DIMENSIONS.kv)
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    scores = torch.from_numpy(2.0 * Draws(0).normal("score", sizes))
    return [values.reshape(1, 1, 1, -1) for values in (scores, *axes)]


def sum_by_number(read, count, at, slope):
    """Sum a read's slopes over all points that read the same number."""
    place = read.start + read.place.evaluate(*at).expand(at[0].shape)
    sums = torch.zeros(count, dtype=torch.float64)
    return sums.index_add_(0, place.flatten(), slope.double().expand(at[0].shape).flatten())


@pytest.mark.parametrize("mod", MODS, ids=NAMES)
def test_trace_gradients_match_autograd(mod):
    """Same tensors in the same order, and the same gradient of each of their numbers."""
    reads, at = reads_of(mod), all_points()
    assert list(map(id, read_tensors(reads))) == list(map(id, captured_tensors(mod)))
    count = sum(tensor.numel() for tensor in read_tensors(reads))
    traced = torch.zeros(count, dtype=torch.float64)
    size = torch.zeros_like(traced)
    for read in reads:
        slope = read.slope.evaluate(*at)
        traced += sum_by_number(read, count, at, slope)
        size += sum_by_number(read, count, at, slope.abs() + 1.0)  # 1 − tanh²
    order = {id(tensor): i for i, tensor in enumerate(read_tensors(reads))}
    gradients = [torch.zeros(tensor.shape, dtype=torch.float64) for tensor in read_tensors(reads)]
    for leaf, slope in leaf_gradients(mod, *at):
        if slope is not None:
            leaf.add(slope, gradients[order[id(leaf.tensor)]])
    expected = torch.cat([part.flatten() for part in gradients])
    excess = (traced - expected).abs() - UNITS * 2.0**-53 * at[0].numel() * size
    assert expected.any()
    assert excess.max() <= 0


def test_reads_are_numbered_tensor_after_tensor():
    """Each tensor starts where the previous one ends; a tensor that is read twice counts once."""
    mod = build_score(LIBRARY[7], DIMENSIONS)
    assert [(read.start, read.tensor.shape) for read in trace_reads(mod)] == [
        (0, (3, 5, 7)),
        (105, (3,)),
    ]
    assert [read.start for read in trace_reads(twice)] == [0, 0]
    assert count_read_numbers(twice) == 3


@pytest.mark.parametrize("spec", [Spec.of("none"), SOFTCAP], ids=str)
def test_mod_without_captured_tensors_has_no_reads(spec):
    mod = build_score(spec, DIMENSIONS)
    assert trace_reads(mod) == ()
    assert count_read_numbers(mod) == 0
    assert captured_tensors(mod) == ()


@pytest.mark.parametrize("mod", MODS, ids=NAMES)
def test_every_backend_evaluates_read_expressions(mod):
    """Triton, mpmath, Arb and the error analysis all take the place and slope of a read."""
    for read in reads_of(mod):
        for expression in (read.place, read.slope):
            assert "def score_mod(" in to_triton(expression).source
        axes = [axis[..., :3].numpy() for axis in all_points()]
        tensors = [torch.from_numpy(axis) for axis in axes]
        expected = read.slope.evaluate(*tensors).double().expand(tensors[0].shape)
        context = mpmath.MPContext()
        context.dps = 50
        digits = to_mpmath(read.slope, context)(*axes)
        rounded = torch.tensor([float(x) for x in digits.flat], dtype=torch.float64)
        assert torch.allclose(rounded.expand(3), expected.flatten(), rtol=1e-6, atol=1e-6)
        places = to_mpmath(read.place, context)(*axes)
        assert places.flatten().tolist() == read.place.evaluate(*tensors).flatten().tolist()
        assert to_ball(read.slope, 100)(*axes) is not None
        scores, *indices = (tensor[0] for tensor in tensors)
        error = RunningError(read.slope).at(scores, torch.zeros_like(scores), *indices)
        assert error.radius.isfinite().all()


def computed(score, b, h, q_idx, kv_idx):
    return score + (-SLOPES)[h].to(score.dtype)


def test_tensor_computed_from_captured_one_is_refused():
    with pytest.raises(
        TraceError, match=r"'computed' has no derivative to what it captures .* neg"
    ):
        trace_reads(computed)
    with pytest.raises(ProblemError, match=r"computes with a whole tensor of shape \(3,\)"):
        captured_tensors(computed)


def test_tensor_used_only_in_comparison_has_no_gradient():
    def step(score, b, h, q_idx, kv_idx):
        return torch.where(score > SLOPES[h], score, 0.5 * score)

    assert trace_reads(step) == ()
    assert captured_tensors(step) == ()


TABLE = torch.tensor([[0.5, 1.0], [2.0, -1.0], [0.25, 3.0]])
SCALAR = torch.nn.Parameter(torch.tensor(0.5))


def test_scalar_parameter_may_be_cast():
    def mod(score, b, h, q_idx, kv_idx):
        return score * SCALAR.to(score.dtype) + SLOPES[h].to(score.dtype)

    assert [id(tensor) for tensor in captured_tensors(mod)] == [id(SCALAR), id(SLOPES)]
    assert [id(tensor) for tensor in read_tensors(trace_reads(mod))] == [id(SCALAR), id(SLOPES)]


def test_constant_index_works_in_autograd_but_not_in_trace():
    def mod(score, b, h, q_idx, kv_idx):
        return score + TABLE[h, 1].to(score.dtype) * kv_idx

    at = all_points()
    ((leaf, slope),) = leaf_gradients(mod, *at)
    gradient = torch.zeros(TABLE.shape, dtype=torch.float64)
    leaf.add(slope, gradient)
    sums_by_head = [float(at[4][at[2] == head].sum()) for head in range(DIMENSIONS.heads)]
    assert gradient.tolist() == [[0.0, total] for total in sums_by_head]
    with pytest.raises(TraceError, match="select"):
        trace_reads(mod)


def test_mod_using_no_grad_is_refused():
    """The trace does not record that gradients were switched off, so its own would be wrong."""

    def mod(score, b, h, q_idx, kv_idx):
        with torch.no_grad():
            factor = SLOPES[h] * 2
        return score * factor + SLOPES[h] * kv_idx

    with pytest.raises(ProblemError, match=r"under torch\.no_grad"):
        captured_tensors(mod)


def test_tensors_in_other_order_than_trace_are_refused():
    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.mul(other=ONE, input=NUMBER) * SLOPES[h] * kv_idx

    with pytest.raises(TraceError, match="other tensors than its trace, or in another order"):
        trace_reads(mod)


def test_in_place_mod_is_applied_once():
    def mod(score, b, h, q_idx, kv_idx):
        score *= ONE
        return score

    at = all_points()
    ((_, slope),) = leaf_gradients(mod, *at)
    assert torch.equal(slope, at[0])
