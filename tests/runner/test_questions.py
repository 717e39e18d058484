"""Variants of mods as typed, and what recordings become."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncheck.distributions import DISTRIBUTIONS
from attncheck.errors import ProblemError, UnknownName, UsageError
from attncheck.mods import library, own
from attncheck.mods.spec import Spec
from attncheck.runner import questions
from attncheck.runner.plan import Shape, plan
from attncheck.runner.questions import own_variant, recorded

SHAPE = Shape.parse("1x2x5x4")
FULL, NONE = Spec.of("full"), Spec.of("none")


RECORDING = Path(__file__).parents[1] / "data" / "trained.safetensors"


@pytest.fixture(autouse=True)
def _forgotten():
    """Other tests go through all distributions, masks and score mods there are."""
    registries = (DISTRIBUTIONS, library.MASKS, library.SCORES)
    before = [(registry, dict(registry)) for registry in registries]
    yield
    own._mod.cache_clear()
    for registry, known in before:
        registry.clear()
        registry.update(known)


@pytest.fixture
def mine(tmp_path):
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
def test_names_of_the_library(mask, score, name, specs):
    variant = own_variant(mask, score)
    assert variant.name == name
    assert variant.mods(SHAPE) == specs


def test_mods_of_a_file_are_planned_like_any(mine):
    variant = own_variant(f"{mine}::mask", f"{mine}::score")
    assert variant.name == "mine.py::mask mine.py::score"
    cells = plan(
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


def test_a_mask_of_a_file_beside_a_score_mod_of_the_library(mine):
    mask, score = own_variant(f"{mine}::mask", "alibi").mods(SHAPE)
    assert (mask.name, score) == ("mine.py::mask", Spec.of("alibi"))


@pytest.mark.parametrize(
    ("mask", "score", "error", "says"),
    [
        ("casual", None, UnknownName, "mask 'casual' is not known: choose from and, causal"),
        (None, "causal", UnknownName, "score mod 'causal' is not known: choose from alibi"),
        ("", None, UnknownName, "mask '' is not known: choose from "),
        (None, "", UnknownName, "score mod '' is not known: choose from "),
        ("mine.py", None, UnknownName, "mask 'mine.py' is not known"),
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
def test_what_cannot_be_a_mod_is_one_line(mask, score, error, says):
    with pytest.raises(error) as raised:
        own_variant(mask, score)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_recordings_are_measured_in_the_dtypes_that_kernels_have():
    with pytest.raises(UnknownName, match="dtype 'fp64' is not known: choose from bf16"):
        recorded("nowhere.safetensors", ["fp64"])
    with pytest.raises(UsageError, match=r"nowhere\.safetensors"):
        recorded("nowhere.safetensors", ["fp16"])


def test_recorded_calls_come_in_each_dtype_asked_for_or_their_own():
    its_own = recorded(str(RECORDING), ())
    names = [cell.variant for cell in its_own]
    assert len(set(names)) == len(names) > 0
    two = recorded(str(RECORDING), ["fp16", "e4m3"])
    assert [(c.variant, c.problem.dtype) for c in two] == [
        (name, dtype) for dtype in ("fp16", "e4m3") for name in names
    ]
    assert {c.problem.operation for c in two} == {"attention"}


def test_what_does_not_fit_into_memory_is_refused_beforehand(monkeypatch):
    def too_large(_):
        raise ProblemError("too large")

    monkeypatch.setattr(questions, "check_memory", too_large)
    with pytest.raises(ProblemError, match="too large"):
        recorded(str(RECORDING), ())
