"""Variants of masks and score mods that the user names, and cells of recorded calls."""

import math
from pathlib import Path

import pytest
import torch
from tests.messages import one_line

import attncheck
from attncheck.cases import variants
from attncheck.cases.variants import Shape, own_variant, plan_cells, recorded_cells
from attncheck.core.errors import ProblemError, UnknownName, UsageError
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs

pytestmark = pytest.mark.usefixtures("library_as_before")

SHAPE = Shape.parse("1x2x5x4")
FULL, NONE = Spec.of("full"), Spec.of("none")


COMPLETE_MASKS = "choose from causal, causal_bottom_right, full."
COMPLETE_SCORES = "choose from alibi, alibi_by_sequence, none."

RECORDING = Path(__file__).parents[1] / "data" / "trained.safetensors"


@pytest.fixture
def record(tmp_path):
    """``record(*calls)``: a file with one call of torch's function per tuple of arguments."""

    def write(*calls):
        file = tmp_path / "recorded.safetensors"
        with attncheck.capture(file):
            for arguments in calls:
                torch.nn.functional.scaled_dot_product_attention(*arguments)
        return str(file)

    return write


@pytest.fixture
def mod_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def mask(b, h, q_idx, kv_idx):\n    return q_idx > kv_idx\n"
        "def score(score, b, h, q_idx, kv_idx):\n    return score + kv_idx\n"
    )
    return path


@pytest.mark.parametrize(
    ("mask", "score", "name", "specs"),
    [
        ("causal", None, "causal", (Spec.of("causal"), NONE)),
        (None, "alibi", "full alibi", (FULL, Spec.of("alibi"))),
        ("causal", "alibi", "causal alibi", (Spec.of("causal"), Spec.of("alibi"))),
        ("full", "none", "full", (FULL, NONE)),
        (None, None, "full", (FULL, NONE)),
    ],
)
def test_own_variant_of_library_names(mask, score, name, specs):
    variant = own_variant(mask, score)
    assert variant.name == name
    assert variant.mods(SHAPE) == specs


def test_mods_of_a_file_are_planned_in_every_dtype(mod_file):
    variant = own_variant(f"{mod_file}::mask", f"{mod_file}::score")
    assert variant.name == "mine.py::mask mine.py::score"
    cells = plan_cells(
        dtypes=["fp16", "e4m3"],
        variants=[],
        own=variant,
        shapes=["1x2x5x4"],
        distributions=["normal"],
        seed=0,
    )
    assert [(c.variant, c.problem.dtype, c.problem.kv_heads) for c in cells] == [
        (variant.name, dtype, kv_heads) for dtype in ("fp16", "e4m3") for kv_heads in (2, 1)
    ]
    assert {c.problem.mask.name for c in cells} == {"mine.py::mask"}
    assert {c.problem.score.name for c in cells} == {"mine.py::score"}


def test_mask_of_a_file_combines_with_a_score_mod_of_the_library(mod_file):
    mask, score = own_variant(f"{mod_file}::mask", "alibi").mods(SHAPE)
    assert (mask.name, score) == ("mine.py::mask", Spec.of("alibi"))


@pytest.mark.parametrize(
    ("mask", "score", "error", "message"),
    [
        ("casual", None, UnknownName, "mask 'casual' is not known: did you mean 'causal'?"),
        (None, "causal", UnknownName, f"score mod 'causal' is not known: {COMPLETE_SCORES}"),
        ("", None, UnknownName, f"mask '' is not known: {COMPLETE_MASKS}"),
        (None, "", UnknownName, f"score mod '' is not known: {COMPLETE_SCORES}"),
        ("mine.py", None, UsageError, "mask 'mine.py' is not FILE.py::NAME."),
        ("mine.py::", None, UsageError, "mask 'mine.py::' is not FILE.py::NAME."),
        ("mine::mask", None, UsageError, "mask 'mine::mask' is not FILE.py::NAME."),
        (None, ".py", UsageError, "score mod '.py' is not FILE.py::NAME."),
        (None, "::", UsageError, "score mod '::' is not FILE.py::NAME."),
        (
            "sliding_window",
            None,
            ProblemError,
            "mask 'sliding_window' needs numbers or parts: write it as FILE.py::NAME.",
        ),
        ("and", None, ProblemError, "mask 'and' needs numbers or parts"),
        (None, "softcap", ProblemError, "score mod 'softcap' needs numbers or parts"),
        (None, "chain", ProblemError, "score mod 'chain' needs numbers or parts"),
        ("nowhere.py::mask", None, UsageError, "there is no file nowhere.py."),
    ],
)
def test_invalid_mod_name_is_refused_in_one_line(mask, score, error, message):
    with one_line(error, message):
        own_variant(mask, score)


def test_mods_of_files_and_recordings_are_not_offered_as_choices(mod_file, record):
    own_variant(f"{mod_file}::mask", f"{mod_file}::score")
    q, hidden = torch.ones(1, 2, 3, 4), torch.zeros(3, 3).masked_fill_(torch.eye(3) > 0, -math.inf)
    recorded_cells(record((q, q, q, hidden), (q, q, q, hidden + 0.5)), ())
    for mask, score, choices in (("a", None, COMPLETE_MASKS), (None, "a", COMPLETE_SCORES)):
        with pytest.raises(UnknownName, match=choices):
            own_variant(mask, score)


def test_unknown_dtype_is_refused_before_the_recording_is_read():
    with pytest.raises(UnknownName, match="dtype 'fp64' is not known: choose from bf16"):
        recorded_cells("nowhere.safetensors", ["fp64"])
    with pytest.raises(UsageError, match=r"nowhere\.safetensors"):
        recorded_cells("nowhere.safetensors", ["fp16"])


def test_recorded_calls_are_planned_in_each_dtype_asked_for_or_their_own():
    names = [cell.variant for cell in recorded_cells(str(RECORDING), ())]
    assert len(set(names)) == len(names) > 0
    two = recorded_cells(str(RECORDING), ["fp16", "e4m3"])
    assert [(c.variant, c.problem.dtype) for c in two] == [
        (name, dtype) for dtype in ("fp16", "e4m3") for name in names
    ]
    assert {c.problem.operation for c in two} == {"attention"}


def test_repeated_dtype_of_a_recording_is_planned_once():
    once = recorded_cells(str(RECORDING), ["bf16", "fp16"])
    assert recorded_cells(str(RECORDING), ["bf16", "fp16", "bf16"]) == once


@pytest.mark.parametrize(
    ("dtype", "number", "message"),
    [
        ("fp16", 65504.0, None),
        ("fp16", 65519.0, None),  # rounds to 65504
        ("fp16", 65520.0, "beyond fp16's 65504"),
        ("bf16", FORMATS["bf16"].max, None),
        ("bf16", FORMATS["fp32"].max, "beyond bf16's 3.38953e+38"),
        ("tf32", FORMATS["tf32"].max, None),
        ("tf32", FORMATS["fp32"].max, "beyond tf32's 3.40116e+38"),
        ("fp32", FORMATS["fp32"].max, None),
        (None, FORMATS["fp32"].max, None),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_recorded_numbers_beyond_the_range_of_a_dtype_are_refused(
    dtype, number, message, sign, record
):
    for name in ("q", "k", "v"):
        tensors = {n: torch.ones(1, 2, 3, 4) for n in ("q", "k", "v")}
        tensors[name][0, 1, 2, :3] = sign * number
        one = torch.ones(1, 2, 3, 4)
        file = record((one, one, one), tuple(tensors.values()))
        if message is None:
            inputs = draw_inputs(recorded_cells(file, [dtype] if dtype else [])[1].problem)
            fmt = inputs.problem.formats.products
            assert round_to(getattr(inputs, name).double(), fmt).isfinite().all()
            continue
        with pytest.raises(UsageError) as error:
            recorded_cells(file, [dtype])
        assert str(error.value) == (
            f"{name} of call 'call-1' has 3 numbers {message}: "
            "choose another dtype, such as its own, fp32."
        )


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [FORMATS["fp32"].max, 2.0**-126, 2.0**-149, 0.0])
def test_recorded_numbers_of_any_size_are_scaled_into_fp8(dtype, size, record):
    q = torch.full((1, 2, 3, 4), size)
    (cell,) = recorded_cells(record((q, -q, q)), [dtype])
    tensors = draw_inputs(cell.problem).tensors()
    assert all(tensor.float().isfinite().all() for tensor in tensors.values())


def test_recording_beyond_memory_is_refused(monkeypatch):
    def refuse(*_):
        raise ProblemError("too large")

    monkeypatch.setattr(variants, "check_size", refuse)
    with pytest.raises(ProblemError, match="too large"):
        recorded_cells(str(RECORDING), ())
