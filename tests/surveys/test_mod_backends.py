"""Every mod of the examples means the same everywhere, and a backend that differs is found."""

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
FEW_HEADS = Dimensions(batch=1, heads=2, query=20, kv=64)  # score mods take their time
FILE = Path(__file__).parents[2] / "examples" / "mods.py"
EXAMPLES = mods_in(import_file(FILE, "the examples"))


def softcap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def one(mod, *subjects, dimensions=SMALL):
    return compare_backends("mod", mod, subjects, dimensions=dimensions)[1]


def agree(backends):
    return all(each.status == "equal" for each in backends)


def refused(mod):
    with pytest.raises(AttncheckError) as caught:
        one(mod, Ideal())
    return str(caught.value)


class Changed(Ideal):
    """The ideal kernel with what it is given, or gives, changed."""

    name = "changed"

    def __init__(self, *, score=None, lse=None, out=None):
        super().__init__()
        self._score, self._lse, self._given = score, lse, out

    def prepare(self, inputs):
        entry = Entry(summary="", build=lambda *_: self._score)
        changed = {} if self._score is None else {inputs.problem.score.name: entry}

        def call():
            with mock.patch.dict(library.SCORES, changed):
                outputs = Ideal.prepare(self, inputs)()
            lse = outputs.lse if self._lse is None else self._lse(outputs.lse)
            return Outputs(outputs.out if self._given is None else self._given(outputs.out), lse)

        return call


class OneKeyTooWide(Ideal):
    """Every row sees the key after its last one, too."""

    name = "one key too wide"

    def visible(self, mask, at):
        before = (at.kv_idx - 1).clamp(min=0)
        return mask(at.b, at.h, at.q_idx, at.kv_idx) | mask(at.b, at.h, at.q_idx, before)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_on_mpmath_numbers(name):
    is_score = kind_of_mod(EXAMPLES[name]) == "score mod"
    found = one(EXAMPLES[name], dimensions=FEW_HEADS if is_score else WHOLE)
    assert [backend.status for backend in found] == ["equal"], found


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_kernels(name):
    subjects = [subject_named("flex"), Ideal()]
    found = one(EXAMPLES[name], *subjects)
    assert [backend.status for backend in found] == ["equal"] * 3, found
    assert {backend.compared for backend in found} == {2 * 2 * 6 * 9}


@pytest.mark.parametrize("name", ["morton_neighborhood", "log_buckets"])
def test_an_example_in_our_triton_kernel(name):
    found = one(EXAMPLES[name], subject_named("triton-flash2"))
    assert [backend.status for backend in found] == ["equal"] * 2, found


def test_the_examples_are_many_and_of_both_kinds():
    kinds = [kind_of_mod(mod) for mod in EXAMPLES.values()]
    assert kinds.count("mask") >= 12
    assert kinds.count("score mod") >= 8


def test_the_examples_tensors_are_where_torch_is_told():
    with torch.device("meta"):
        module = import_file(FILE, "the examples")
    tensors = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 8
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_truncating_division_is_told_apart():
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


def test_a_mask_one_key_too_wide_is_found():
    found = one(causal, OneKeyTooWide(), Ideal())
    mpmath, wide, right = found
    assert (mpmath.status, wide.status, right.status) == ("equal", "different", "equal")
    assert wide.differing == 2 * 2 * 6
    assert wide.difference.q_idx + 1 == wide.difference.kv_idx


def test_a_key_that_is_lost_is_found():
    def lost(out):
        out = out.clone()
        out[1, 0, 4, 2] = 0.0
        return out

    backend = one(causal, Changed(out=lost))[1]
    assert (backend.status, backend.differing) == ("different", 1)
    at = backend.difference
    assert (at.b, at.h, at.q_idx, at.kv_idx, at.value, at.low) == (1, 0, 4, 2, 0.0, 1.0)


def test_nan_in_a_mask_is_no_hidden_key():
    backend = one(causal, Changed(out=lambda out: out * math.nan))[1]
    assert backend.status == "different"
    assert math.isnan(backend.difference.value)


def test_another_cap_is_found():
    def other(score, b, h, q_idx, kv_idx):
        return 20.2 * torch.tanh(score / 20.2)

    found = one(softcap, Changed(score=other), Changed(score=softcap), Ideal())
    assert [backend.status for backend in found] == [
        "equal",
        "different",
        "equal",
        "equal",
    ]
    assert found[1].difference.low <= found[1].difference.high


FAULTS = {
    "base 2": lambda lse: lse / math.log(2.0),
    "a row late": lambda lse: lse.roll(1, dims=2),
    "a head late": lambda lse: lse.roll(1, dims=1),
    "two parts in a million": lambda lse: lse * (1 + 2.0**-19),
    "NaN": lambda lse: lse * math.nan,
    "infinite": lambda lse: lse + math.inf,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_lse_is_found(fault):
    assert one(softcap, Changed(lse=fault))[1].status == "different"


def test_a_truth_that_depends_on_the_sequence_is_read_there():
    found = one(lambda b, h, q_idx, kv_idx: kv_idx < 2 * b + h + 1, Ideal())
    assert agree(found)


def test_a_score_of_minus_infinity_is_equal_where_it_should_be():
    assert agree(one(EXAMPLES["causal_as_score"], Ideal()))
    late = one(EXAMPLES["causal_as_score"], Changed(lse=lambda lse: lse.clamp(min=-1e6)))
    assert late[1].status == "different"
    assert late[1].difference.high == -math.inf


def test_what_cannot_be_said_is_neither_equal_nor_different():
    found = one(lambda score, b, h, q_idx, kv_idx: score / kv_idx, Ideal())
    assert found[0].status == "unknown"
    assert "places" in found[0].reason


def test_a_kernel_without_lse_has_no_score_to_be_read():
    backend = one(softcap, Changed(lse=lambda lse: None))[1]
    assert (backend.status, backend.reason) == (
        "unsupported",
        "it gives no LSE, from which a score could be read",
    )


def test_what_a_kernel_refuses_or_raises_is_said():
    class Refuses(Ideal):
        def unsupported(self, problem, device):
            return "not today"

    class Raises(Ideal):
        def prepare(self, inputs):
            raise RuntimeError("broken\nbadly")

    class Elsewhere(Ideal):
        def concerns(self, problem):
            return False

    found = one(causal, Refuses(), Raises(), Elsewhere())
    said = [(backend.status, without_place(backend.reason)) for backend in found[1:]]
    assert said == [
        ("unsupported", "not today"),
        ("error", "RuntimeError: broken"),
        ("unsupported", "attention in fp32 is no question for it"),
    ]


def test_a_mod_that_cannot_be_traced_is_refused():
    table = torch.zeros(3)
    by_value = refused(lambda b, h, q_idx, kv_idx: q_idx if q_idx > 0 else kv_idx)
    assert "decides on a tensor's value" in by_value
    outside = refused(lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])
    assert "indexes axis 0 of its tensor of shape (3,) with 3 at" in outside
    assert "does not take" in refused(lambda x, y: x)


def test_the_library_is_left_as_it_was():
    before = dict(library.MASKS), dict(library.SCORES)

    class Raises(Ideal):
        def prepare(self, inputs):
            raise KeyError("no")

    one(softcap, Raises(), Ideal())
    one(causal, Raises(), Ideal())
    assert before == (library.MASKS, library.SCORES)


def test_more_keys_than_one_value_holds():
    wide = Dimensions(batch=1, heads=1, query=5, kv=130)
    found = one(lambda b, h, q_idx, kv_idx: (kv_idx - q_idx) % 7 == 0, Ideal(), dimensions=wide)
    assert agree(found)
    assert found[1].compared == 5 * 130


def test_the_drawn_scores_are_exact_in_fp32_and_spread():
    drawn = ScoreInputs.draw(SMALL)
    again = drawn.q.float() @ drawn.k.float().mT
    assert torch.equal(again.double(), drawn.scores)
    assert torch.equal((drawn.scores * 16).round(), drawn.scores * 16)
    assert drawn.scores.unique().numel() > 50


def test_the_lse_of_a_score_is_a_few_units_wide():
    u = FORMATS["fp32"].unit_roundoff
    finite, hidden = lse_radius(torch.tensor([8.0, -math.inf]).double(), torch.zeros(2).double())
    assert 0 < finite < (8.0 * 7 + 12 + 1) * u
    assert hidden == 0


def test_a_mod_that_would_end_the_process_is_a_result():
    def leaves(b, h, q_idx, kv_idx):
        raise SystemExit(0)

    def leaves_late(b, h, q_idx, kv_idx):
        if kv_idx.numel() > 1:
            raise SystemExit(0)
        return q_idx >= kv_idx

    assert "it raised SystemExit: 0" in refused(leaves)
    found = one(leaves_late)
    assert [(w.status, w.reason) for w in found] == [("error", "SystemExit: 0")]


def test_whole_numbers_that_kernels_compute_otherwise_are_refused():
    def grows(b, h, q_idx, kv_idx):
        return (q_idx * 100003 * 100003) % 7 == 0

    def divides(b, h, q_idx, kv_idx):
        return q_idx // (kv_idx - 5) > 0

    assert "in 32 bits" in refused(grows)
    assert "by 0 at (b, h, q_idx, kv_idx) =" in refused(divides)


def test_a_captured_parameter_is_a_tensor_like_any():
    learned = torch.nn.Parameter(torch.linspace(-1, 1, 9))

    def bias(score, b, h, q_idx, kv_idx):
        return score + learned[kv_idx]

    def shown(b, h, q_idx, kv_idx):
        return learned[kv_idx] + q_idx > 0

    for mod in (bias, shown):
        found = one(mod, subject_named("flex"), Ideal())
        assert [backend.status for backend in found] == ["equal"] * 3, found


def test_a_table_in_float64_that_fp32_holds_is_a_tensor_like_any():
    table = torch.arange(9, dtype=torch.float64)

    def bias(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx]

    found = one(bias, subject_named("flex"))
    assert [backend.status for backend in found] == ["equal"] * 2, found
