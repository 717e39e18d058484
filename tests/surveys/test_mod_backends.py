"""Every example mod means the same in every backend, and a backend that differs is found."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch

from attncheck.core.errors import AttncheckError
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Dimensions, Entry
from attncheck.core.outputs import Outputs
from attncheck.core.source_files import import_file
from attncheck.mods import library
from attncheck.mods.mod_files import kind_of_mod, mods_in
from attncheck.mods.trace import trace_mask
from attncheck.records.failure_causes import without_place
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.subjects.ideal import Ideal
from attncheck.surveys.applied_mods import ScoreInputs, lse_radius
from attncheck.surveys.mod_survey import compare_backends, mpmath_backend

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = Dimensions(batch=2, heads=2, query=6, kv=9)
WHOLE = Dimensions(batch=2, heads=4, query=64, kv=64)
FEW_HEADS = Dimensions(batch=1, heads=2, query=20, kv=64)  # score mods are slow
FILE = Path(__file__).parents[2] / "examples" / "mods.py"
EXAMPLES = mods_in(import_file(FILE, "the examples"))


def softcap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def compare(mod, *subjects, dimensions=SMALL):
    return compare_backends("mod", mod, subjects, dimensions=dimensions)[1]


def all_equal(backends):
    return all(backend.status == "equal" for backend in backends)


def rejection(mod):
    with pytest.raises(AttncheckError) as caught:
        compare(mod, Ideal())
    return str(caught.value)


class Changed(Ideal):
    """The ideal kernel with its score mod, LSE or out replaced."""

    name = "changed"

    def __init__(self, *, score=None, lse=None, out=None):
        super().__init__()
        self._score, self._lse, self._out = score, lse, out

    def prepare(self, inputs):
        entry = Entry(summary="", build=lambda *_: self._score)
        replaced = {} if self._score is None else {inputs.problem.score.name: entry}

        def call():
            with mock.patch.dict(library.SCORES, replaced):
                outputs = Ideal.prepare(self, inputs)()
            lse = outputs.lse if self._lse is None else self._lse(outputs.lse)
            return Outputs(outputs.out if self._out is None else self._out(outputs.out), lse)

        return call


class OneKeyTooWide(Ideal):
    """Every row also sees the key after its last one."""

    name = "one key too wide"

    def visible(self, mask, at):
        before = (at.kv_idx - 1).clamp(min=0)
        return mask(at.b, at.h, at.q_idx, at.kv_idx) | mask(at.b, at.h, at.q_idx, before)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_agrees_with_mpmath(name):
    is_score = kind_of_mod(EXAMPLES[name]) == "score mod"
    backends = compare(EXAMPLES[name], dimensions=FEW_HEADS if is_score else WHOLE)
    assert [backend.status for backend in backends] == ["equal"], backends


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_agrees_in_flex_and_the_ideal_kernel(name):
    subjects = [subject_named("flex"), Ideal()]
    backends = compare(EXAMPLES[name], *subjects)
    assert [backend.status for backend in backends] == ["equal"] * 3, backends
    assert {backend.compared for backend in backends} == {2 * 2 * 6 * 9}


@pytest.mark.parametrize("name", ["morton_neighborhood", "log_buckets"])
def test_example_agrees_in_the_triton_kernel(name):
    backends = compare(EXAMPLES[name], subject_named("triton-flash2"))
    assert [backend.status for backend in backends] == ["equal"] * 2, backends


def test_there_are_many_examples_of_both_kinds():
    kinds = [kind_of_mod(mod) for mod in EXAMPLES.values()]
    assert kinds.count("mask") >= 12
    assert kinds.count("score mod") >= 8


def test_example_tensors_are_created_on_the_default_device():
    with torch.device("meta"):
        module = import_file(FILE, "the examples")
    tensors = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 8
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_truncating_division_differs_from_floor_division():
    def floors(b, h, q, k):
        return (q - k) // 3 >= 0

    def truncates(b, h, q, k):
        return torch.div(q - k, 3, rounding_mode="trunc") >= 0

    assert mpmath_backend(trace_mask(floors), floors, SMALL).status == "equal"
    backend = mpmath_backend(trace_mask(floors), truncates, SMALL)
    assert backend.status == "different"
    difference = backend.difference
    assert difference is not None
    assert (difference.b, difference.h, difference.q_idx, difference.kv_idx) == (0, 0, 0, 1)
    assert (difference.value, difference.low, difference.high) == (1.0, 0.0, 0.0)
    assert backend.differing == 4 * 6 * 2  # the first two keys after the row's own
    assert "(0, 0, 0, 1): 1.0, but should be 0.0" in str(difference)


def test_kernel_with_a_mask_one_key_too_wide_differs():
    backends = compare(causal, OneKeyTooWide(), Ideal())
    mpmath, wide, right = backends
    assert (mpmath.status, wide.status, right.status) == ("equal", "different", "equal")
    assert wide.differing == 2 * 2 * 6
    assert wide.difference.q_idx + 1 == wide.difference.kv_idx


def test_kernel_that_drops_a_key_differs():
    def lost(out):
        out = out.clone()
        out[1, 0, 4, 2] = 0.0
        return out

    backend = compare(causal, Changed(out=lost))[1]
    assert (backend.status, backend.differing) == ("different", 1)
    at = backend.difference
    assert (at.b, at.h, at.q_idx, at.kv_idx, at.value, at.low) == (1, 0, 4, 2, 0.0, 1.0)


def test_nan_out_does_not_count_as_a_hidden_key():
    backend = compare(causal, Changed(out=lambda out: out * math.nan))[1]
    assert backend.status == "different"
    assert math.isnan(backend.difference.value)


def test_kernel_with_another_softcap_differs():
    def other(score, b, h, q_idx, kv_idx):
        return 20.2 * torch.tanh(score / 20.2)

    backends = compare(softcap, Changed(score=other), Changed(score=softcap), Ideal())
    assert [backend.status for backend in backends] == [
        "equal",
        "different",
        "equal",
        "equal",
    ]
    assert backends[1].difference.low <= backends[1].difference.high


FAULTS = {
    "base 2": lambda lse: lse / math.log(2.0),
    "a row late": lambda lse: lse.roll(1, dims=2),
    "a head late": lambda lse: lse.roll(1, dims=1),
    "two parts in a million": lambda lse: lse * (1 + 2.0**-19),
    "NaN": lambda lse: lse * math.nan,
    "infinite": lambda lse: lse + math.inf,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_kernel_with_a_wrong_lse_differs(fault):
    assert compare(softcap, Changed(lse=fault))[1].status == "different"


def test_mask_that_depends_on_batch_and_head_is_compared_there():
    backends = compare(lambda b, h, q_idx, kv_idx: kv_idx < 2 * b + h + 1, Ideal())
    assert all_equal(backends)


def test_score_of_minus_infinity_must_be_minus_infinity():
    assert all_equal(compare(EXAMPLES["causal_as_score"], Ideal()))
    late = compare(EXAMPLES["causal_as_score"], Changed(lse=lambda lse: lse.clamp(min=-1e6)))
    assert late[1].status == "different"
    assert late[1].difference.high == -math.inf


def test_undefined_score_is_unknown():
    backends = compare(lambda score, b, h, q_idx, kv_idx: score / kv_idx, Ideal())
    assert backends[0].status == "unknown"
    assert "places" in backends[0].reason


def test_score_mod_comparison_needs_lse():
    backend = compare(softcap, Changed(lse=lambda lse: None))[1]
    assert (backend.status, backend.reason) == (
        "unsupported",
        "it gives no LSE, from which a score could be read",
    )


def test_refusals_and_errors_of_kernels_are_reported():
    class Refuses(Ideal):
        def unsupported(self, problem, device):
            return "not today"

    class Raises(Ideal):
        def prepare(self, inputs):
            raise RuntimeError("broken\nbadly")

    class Elsewhere(Ideal):
        def concerns(self, problem):
            return False

    backends = compare(causal, Refuses(), Raises(), Elsewhere())
    outcomes = [(backend.status, without_place(backend.reason)) for backend in backends[1:]]
    assert outcomes == [
        ("unsupported", "not today"),
        ("error", "RuntimeError: broken"),
        ("unsupported", "attention in fp32 is no question for it"),
    ]


def test_untraceable_mod_is_rejected():
    table = torch.zeros(3)
    by_value = rejection(lambda b, h, q_idx, kv_idx: q_idx if q_idx > 0 else kv_idx)
    assert "decides on a tensor's value" in by_value
    outside = rejection(lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])
    assert "indexes axis 0 of its tensor of shape (3,) with 3 at" in outside
    assert "does not take" in rejection(lambda x, y: x)


def test_comparison_leaves_the_mod_library_unchanged():
    before = dict(library.MASKS), dict(library.SCORES)

    class Raises(Ideal):
        def prepare(self, inputs):
            raise KeyError("no")

    compare(softcap, Raises(), Ideal())
    compare(causal, Raises(), Ideal())
    assert before == (library.MASKS, library.SCORES)


def test_masks_longer_than_one_value_row_are_compared():
    wide = Dimensions(batch=1, heads=1, query=5, kv=130)
    backends = compare(
        lambda b, h, q_idx, kv_idx: (kv_idx - q_idx) % 7 == 0, Ideal(), dimensions=wide
    )
    assert all_equal(backends)
    assert backends[1].compared == 5 * 130


def test_drawn_scores_are_exact_in_fp32_and_distinct():
    inputs = ScoreInputs.draw(SMALL)
    scores = inputs.q.float() @ inputs.k.float().mT
    assert torch.equal(scores.double(), inputs.scores)
    assert torch.equal((inputs.scores * 16).round(), inputs.scores * 16)
    assert inputs.scores.unique().numel() > 50


def test_lse_radius_is_a_few_units_and_zero_for_hidden_keys():
    u = FORMATS["fp32"].unit_roundoff
    finite, hidden = lse_radius(torch.tensor([8.0, -math.inf]).double(), torch.zeros(2).double())
    assert 0 < finite < (8.0 * 7 + 12 + 1) * u
    assert hidden == 0


def test_system_exit_in_a_mod_is_reported():
    def leaves(b, h, q_idx, kv_idx):
        raise SystemExit(0)

    def leaves_late(b, h, q_idx, kv_idx):
        if kv_idx.numel() > 1:
            raise SystemExit(0)
        return q_idx >= kv_idx

    assert "it raised SystemExit: 0" in rejection(leaves)
    backends = compare(leaves_late)
    assert [(w.status, w.reason) for w in backends] == [("error", "SystemExit: 0")]


def test_integer_overflow_and_division_by_zero_are_rejected():
    def grows(b, h, q_idx, kv_idx):
        return (q_idx * 100003 * 100003) % 7 == 0

    def divides(b, h, q_idx, kv_idx):
        return q_idx // (kv_idx - 5) > 0

    assert "in 32 bits" in rejection(grows)
    assert "by 0 at (b, h, q_idx, kv_idx) =" in rejection(divides)


def test_captured_parameters_and_float64_tables_are_supported():
    """A float64 table is accepted because fp32 holds each of its numbers."""
    learned = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    table = torch.arange(9, dtype=torch.float64)

    def bias(score, b, h, q_idx, kv_idx):
        return score + learned[kv_idx]

    def shown(b, h, q_idx, kv_idx):
        return learned[kv_idx] + q_idx > 0

    def table_bias(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx]

    for mod in (bias, shown, table_bias):
        backends = compare(mod, subject_named("flex"), Ideal())
        assert [backend.status for backend in backends] == ["equal"] * 3, backends
