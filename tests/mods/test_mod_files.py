"""Mods of a user's file: loading, tracing, digests, and finding the mods of a module."""

import json

import pytest
import torch
from tests.messages import one_line

from attncheck.core.errors import ProblemError, TraceError, UsageError
from attncheck.core.mod_spec import FULL, Spec
from attncheck.core.source_files import import_file
from attncheck.inputs.problem import Problem
from attncheck.mods import library, mod_files
from attncheck.mods.mod_files import (
    definition_line,
    is_mod_reference,
    kind_of_mod,
    load_mask,
    load_score,
    mods_in,
)

FILE = """
import torch

slope = {slope}
table = torch.linspace(-1, 1, 8)
whole = torch.arange(8)

def even(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0

def shown(b, h, q_idx, kv_idx):
    return table[kv_idx] >= 0

def plus(score, b, h, q_idx, kv_idx):
    return score + slope * table[kv_idx]

five = 5

class Window:
    def __init__(self, size):
        self.size = size

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.size

window = Window(3)
"""


@pytest.fixture(autouse=True)
def _library_as_before(library_as_before):
    """Restore the library after every test."""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE.format(slope=0.5))
    return path


def change_slope(path, slope):
    """Rewrite the file and forget its import, as a new process would."""
    path.write_text(FILE.format(slope=slope))
    mod_files._import_mod.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mine.py::even", True),
        ("some/where/mine.py::Class", True),
        ("causal", False),
        ("mine::even", False),
        ("mine.py", False),
        ("mine.py::", False),
        ("::even", False),
        ("mine.py::a::b", False),
        ("", False),
    ],
)
def test_is_mod_reference_recognises_file_and_name(text, expected):
    assert is_mod_reference(text) is expected


def test_loaded_mask_is_registered_as_file_name_and_function(file):
    spec = load_mask(f"{file}::even")
    assert spec.name == "mine.py::even"
    problem = Problem(query=5, kv=6, head_dim=4, mask=spec)
    i, j = torch.arange(5)[:, None], torch.arange(6)
    assert torch.equal(problem.mask_mod()(0, 0, i, j), (i - j) % 2 == 0)
    assert "%" in library.MASKS["mine.py::even"].summary
    window = Problem(query=9, mask=load_mask(f"{file}::window")).mask_mod()  # an object
    assert bool(window(0, 0, torch.tensor(5), torch.tensor(3)))


def test_loaded_score_mod_computes_its_formula(file):
    spec = load_score(f"{file}::plus")
    problem = Problem(query=5, kv=8, head_dim=4, score=spec)
    scores = problem.score_mod()(torch.tensor(1.0), 0, 0, 0, torch.arange(8))
    assert torch.equal(scores, 1 + 0.5 * torch.linspace(-1, 1, 8))
    assert (problem.mask, problem.score) == (FULL, spec)


def test_loaded_mods_can_be_composed(file):
    mask = Spec.of("and", Spec.of("causal"), load_mask(f"{file}::even"))
    problem = Problem(query=6, head_dim=4, mask=mask)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    assert torch.equal(problem.mask_mod()(0, 0, i, j), (i >= j) & ((i - j) % 2 == 0))
    score = Spec.of("chain", load_score(f"{file}::plus"), Spec.of("softcap", cap=2.0))
    assert Problem(query=6, score=score).score == score


def test_problem_with_loaded_mods_survives_json(file):
    problem = Problem(query=8, mask=load_mask(f"{file}::even"), score=load_score(f"{file}::plus"))
    read_back = Problem.from_json(json.loads(json.dumps(problem.to_json())))
    assert (read_back, read_back.id) == (problem, problem.id)
    assert load_score(f"{file}::plus") == problem.score


@pytest.mark.parametrize("slope", ["0.25", "torch.tensor(0.5)"])
def test_digest_depends_on_captured_values(file, slope):
    masks, scores = load_mask(f"{file}::even"), load_score(f"{file}::plus")
    before = Problem(query=8, score=scores).id
    change_slope(file, slope)
    assert load_mask(f"{file}::even") == masks  # it does not read the slope
    after = load_score(f"{file}::plus")
    assert after != scores
    assert Problem(query=8, score=after).id != before


def test_problem_of_changed_file_is_refused(file):
    old = Problem(query=8, score=load_score(f"{file}::plus"))
    change_slope(file, 0.25)
    new = load_score(f"{file}::plus")
    with one_line(
        ProblemError,
        whole="score mod 'mine.py::plus' has changed: the problem was made with digest "
        f"{old.score.values['digest']}, the file gives {new.values['digest']}.",
    ):
        Problem.from_json(old.to_json())


def test_problem_of_unloaded_file_names_the_option_to_load_it():
    for kind, option in (("mask", "--mask"), ("score", "--score")):
        with pytest.raises(ProblemError) as error:
            Problem.from_json({"query": 8, kind: {"name": "else.py::f", "digest": 5}})
        assert str(error.value).endswith(
            f"'else.py::f' is of a file: give that file with {option}."
        )


def test_problem_refuses_index_outside_captured_tensor(file):
    mask, score = load_mask(f"{file}::shown"), load_score(f"{file}::plus")
    assert Problem(query=9, kv=8, mask=mask, score=score)
    for fields, kind in (({"mask": mask}, "mask"), ({"score": score}, "score mod")):
        with pytest.raises(ProblemError) as error:
            Problem(query=8, kv=9, **fields)
        name = next(iter(fields.values())).name
        assert str(error.value).startswith(f"{kind} {name!r} indexes axis 0 of its tensor of shape")
        assert "with 8 at (b, h, q_idx, kv_idx) = (0, 0, 0, 8)" in str(error.value)
        assert "\n" not in str(error.value)


ADDITIVE = {
    "itself": ("score", True),
    "score + bias": ("score + table[kv_idx]", True),
    "bias + score": ("table[kv_idx] + score", True),
    "score - bias": ("score - table[kv_idx]", True),
    "bias - score": ("table[kv_idx] - score", False),
    "score + number": ("score + 2.5", True),
    "score + index": ("score + (q_idx - kv_idx)", True),
    "score + two biases": ("score + table[kv_idx] + table[q_idx]", True),
    "bias + score - bias": ("table[kv_idx] + score - whole[h]", True),
    "bias - (score + bias)": ("table[kv_idx] - (score + 1)", False),
    "score + score": ("score + score", False),
    "score - score": ("(score + 1) - score", False),
    "score + what it hides": ("score + torch.where(score > 0, 1.0, 2.0)", False),
    "softcap": ("20 * torch.tanh(score / 20)", False),
    "softcap + bias": ("20 * torch.tanh(score / 20) + table[kv_idx]", False),
    "twice": ("score * 2", False),
    "no score": ("table[kv_idx].double()", False),
    "where": ("torch.where(q_idx >= kv_idx, score, -1000.0)", False),
}


@pytest.mark.parametrize(("formula", "additive"), ADDITIVE.values(), ids=ADDITIVE)
def test_additive_score_mod_is_recognised(tmp_path, formula, additive):
    path = tmp_path / "mine.py"
    path.write_text(
        FILE.format(slope=1) + f"\ndef mod(score, b, h, q_idx, kv_idx):\n    return {formula}\n"
    )
    spec = load_score(f"{path}::mod")
    assert library.is_additive(spec) is additive
    _assert_callable_agrees(spec, additive)


def _assert_callable_agrees(spec, additive):
    """The mod adds one bias to the scores −1, 0, 1 and 4 if and only if it is ``additive``."""
    mod = Problem(query=8, kv=8, head_dim=4, score=spec).score_mod()
    i, j = torch.arange(8)[:, None], torch.arange(8)
    at = [mod(torch.full((8, 8), s).double(), 0, 0, i, j) for s in (-1.0, 0.0, 1.0, 4.0)]
    # float64 rounds score + bias of magnitudes below 16 by 2^-50 at most, twice.
    moves = all(
        bool(((a - at[1]) - s).abs().max() <= 2.0**-48)
        for a, s in zip(at, (-1.0, 0.0, 1.0, 4.0), strict=True)
    )
    assert moves is additive


BROKEN = {
    "decides": ("if q_idx > 3:\n        return kv_idx > 2\n    return kv_idx > 1", "torch.where"),
    "a number": ("return q_idx - kv_idx", "dtype int64"),
    "a Python bool": ("return True", "True"),
    "two": ("return q_idx > 1, kv_idx > 1", "a tuple of 2"),
    "nothing": ("pass", "None"),
    "unknown operation": ("return torch.erf(q_idx * 1.0) > 0", "erf"),
    "raises": ("raise ValueError('planted\\nmore')", "planted"),
}


@pytest.mark.parametrize(("body", "message"), BROKEN.values(), ids=BROKEN)
def test_untraceable_mask_is_refused_in_one_line(tmp_path, body, message):
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\ndef mod(b, h, q_idx, kv_idx):\n    {body}\n")
    with one_line(TraceError, message):
        load_mask(f"{path}::mod")
    assert "mine.py::mod" not in library.MASKS


def test_mask_loaded_as_score_mod_is_refused(file):
    with pytest.raises(TraceError, match="cannot be traced: it must take"):
        load_score(f"{file}::even")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{file}::odd", "has no 'odd'."),
        ("{file}::five", "is int: it must be a callable."),
        ("{file}::nested::name", "is not FILE.py::NAME."),
        ("nowhere.py::even", "there is no file nowhere.py."),
        ("causal", "mask 'causal' is not FILE.py::NAME."),
    ],
)
def test_bad_reference_is_refused_in_one_line(file, reference, message):
    with pytest.raises(UsageError) as error:
        load_mask(reference.format(file=file))
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["raise RuntimeError('planted')", "import nowhere", "def"])
def test_import_error_is_reported_in_one_line(tmp_path, line):
    (tmp_path / "mine.py").write_text(f"x = 1\n{line}\n")
    with one_line(UsageError, match=r"importing .*mine\.py raised \w+: "):
        load_mask(f"{tmp_path}/mine.py::even")


COUNTED = """
from pathlib import Path

counted = Path(__file__).with_suffix(".count")
counted.write_text("x" + (counted.read_text() if counted.exists() else ""))
"""


def test_file_is_imported_once(file):
    file.write_text(FILE.format(slope=1) + COUNTED)
    spec = load_mask(f"{file}::even")
    for _ in range(3):
        Problem(query=8, mask=spec).mask_mod()
    assert file.with_suffix(".count").read_text() == "x"


def test_captured_tensors_are_created_on_requested_device(file):
    """``meta`` stands for any other: the file is imported again with it as torch's default."""
    load_score(f"{file}::plus")
    build = library.SCORES["mine.py::plus"].build
    cpu, meta = (build({}, None, device).__globals__["table"] for device in ("cpu", "meta"))
    assert (cpu.device.type, meta.device.type) == ("cpu", "meta")
    assert torch.empty(0).device.type == "cpu"


CHANGING = """
import random
import torch

calls = 0
window = 3

def counts(b, h, q_idx, kv_idx):
    global calls
    calls += 1
    return q_idx - kv_idx < calls

def counts_late(score, b, h, q_idx, kv_idx):
    global calls
    calls += 1
    return score + float(calls > 2)

def draws(score, b, h, q_idx, kv_idx):
    return score + random.random()

def one_index_differs(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx if kv_idx.numel() == 1 else q_idx > kv_idx

def grows(b, h, q_idx, kv_idx):
    return (q_idx * 100003 * 100003) % 7 == 0

def divides(b, h, q_idx, kv_idx):
    return q_idx // (kv_idx - 5) > 0
"""


@pytest.fixture
def changing(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CHANGING)
    return path


def test_mod_that_changes_between_traces_is_refused(changing):
    for load, name in ((load_mask, "counts"), (load_score, "draws")):
        with pytest.raises(TraceError, match=f"'mine.py::{name}' gives other values when it is"):
            load(f"{changing}::{name}")


@pytest.mark.parametrize(
    ("kind", "name"), [("score", "counts_late"), ("mask", "one_index_differs")]
)
def test_problem_refuses_mod_that_disagrees_with_its_trace(changing, kind, name):
    """Some kernels trace nothing, so the problem itself must check."""
    spec = {"mask": load_mask, "score": load_score}[kind](f"{changing}::{name}")
    with one_line(ProblemError, f"'mine.py::{name}' gives other values than its trace at "):
        Problem(query=8, **{kind: spec})


@pytest.mark.parametrize(
    ("name", "message"),
    [("grows", "32 bits"), ("divides", "by 0 at (b, h, q_idx, kv_idx) = (0, 0, ")],
)
def test_problem_refuses_32_bit_overflow_and_division_by_zero(changing, name, message):
    mask = load_mask(f"{changing}::{name}")
    with one_line(ProblemError, message):
        Problem(query=8, mask=mask)


def test_file_changed_in_same_process_is_loaded_again(file):
    before = load_score(f"{file}::plus")
    file.write_text(FILE.format(slope=0.125))
    assert load_score(f"{file}::plus") != before
    with pytest.raises(ProblemError, match="has changed: the problem was made with digest"):
        Problem(query=8, score=before)


def test_loaded_mod_keeps_its_traced_version(file):
    """Another device needs a new import of the file, which must not bring in a changed mod."""
    problem = Problem(query=8, score=load_score(f"{file}::plus"))
    file.write_text(FILE.format(slope=0.125))
    score = torch.tensor(0.0)
    assert problem.score_mod()(score, 0, 0, 0, torch.tensor(7)) == 0.5
    with pytest.raises(UsageError, match=r"mine\.py has changed since the mod was traced\.$"):
        problem.score_mod("meta")


def test_two_files_of_same_name_are_distinguished(file, tmp_path):
    other_folder = tmp_path / "there"
    other_folder.mkdir()
    (other_folder / "mine.py").write_text(FILE.format(slope=0.125))
    first, second = load_score(f"{file}::plus"), load_score(f"{other_folder}/mine.py::plus")
    assert Problem(query=8, score=second)
    with pytest.raises(ProblemError, match="is of another file of that name now: give the files"):
        Problem(query=8, score=first)


def test_relative_reference_is_resolved_from_current_folder(file, tmp_path, monkeypatch):
    other_folder = tmp_path / "there"
    other_folder.mkdir()
    (other_folder / "mine.py").write_text(FILE.format(slope=0.125))
    monkeypatch.chdir(tmp_path)
    first = load_score("mine.py::plus")
    monkeypatch.chdir(other_folder)
    assert load_score("mine.py::plus") != first


# Mods of a module, recognised by their signatures.

MODULE = """
from functools import partial
import torch
from attncheck.mods.masks import causal, sliding_window
from torch.nn.functional import linear

TABLE = torch.arange(4)

def one(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def two(score, b, h, q_idx, kv_idx):
    return score

def with_default(b, h, q_idx, kv_idx, window=3):
    return q_idx - kv_idx < window

def factory(window):
    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < window
    return mask

def keywords_only(b, h, q_idx, *, kv_idx):
    return q_idx

def _private(b, h, q_idx, kv_idx):
    return q_idx

class FourToMake:
    def __init__(self, a, b, c, d): ...

class Callable:
    def __call__(self, b, h, q_idx, kv_idx):
        return b == h

made = factory(3)
there = sliding_window(2)
part = partial(with_default, window=9)
instance = Callable()
lam = lambda b, h, q, k: q == k
"""


def import_text(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return import_file(path, "mods")


def test_mods_are_recognised_by_signature(tmp_path):
    mods = mods_in(import_text(tmp_path, MODULE))
    assert {name: kind_of_mod(mod) for name, mod in mods.items()} == {
        "one": "mask",
        "two": "score mod",
        "with_default": "mask",
        "made": "mask",
        "there": "mask",
        "part": "mask",
        "instance": "mask",
        "lam": "mask",
    }


def test_all_lists_the_public_mods(tmp_path):
    mods = mods_in(import_text(tmp_path, MODULE + "\n__all__ = ['one', '_private']"))
    assert list(mods) == ["one", "_private"]


def test_definition_line_points_at_mod(tmp_path):
    mods = mods_in(import_text(tmp_path, MODULE))
    lines = MODULE.splitlines()
    for name, text in [
        ("one", "def one"),
        ("part", "def with_default"),
        ("made", "    def mask"),
        ("instance", "    def __call__"),
        ("lam", "lam ="),
    ]:
        assert lines[definition_line(mods[name]) - 1].startswith(text)


@pytest.mark.parametrize("value", [3, "mask", int, print, None])
def test_values_that_are_no_mods_have_no_kind_and_line(value):
    assert kind_of_mod(value) is None
    assert definition_line(value) is None


@pytest.mark.parametrize("public", ["5", "'one'", "{'one': 1}"])
def test_all_must_be_a_list(tmp_path, public):
    with pytest.raises(
        UsageError, match=r"^__all__ of mine\.py is \w+: it must be a list of names"
    ):
        mods_in(import_text(tmp_path, MODULE + f"\n__all__ = {public}"))


def test_module_getattr_is_not_called(tmp_path):
    text = MODULE + "\ndef __getattr__(name):\n    raise ValueError(name)"
    assert "one" in mods_in(import_text(tmp_path, text))


ODD = """
class Mod:
    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

class OfItself(Mod):
    def __init__(self):
        self.func = self

class Unsigned(Mod):
    @property
    def __signature__(self):
        raise RuntimeError("planted")

class Exits(Mod):
    @property
    def __signature__(self):
        raise SystemExit(0)

class Rude(Mod):
    def __getattr__(self, name):
        odd = name in {"__code__", "__module__", "func"}
        raise ValueError("planted") if odd else AttributeError

of_itself, unsigned, exits, rude = OfItself(), Unsigned(), Exits(), Rude()
"""


def test_objects_with_hostile_attributes_do_not_break_listing(tmp_path):
    """Objects that raise, exit or refer to themselves when they are inspected."""
    odd = import_text(tmp_path, ODD)
    assert list(mods_in(odd)) == ["of_itself"]
    for mod in (odd.of_itself, odd.unsigned, odd.exits, odd.rude):
        assert definition_line(mod) == 3
