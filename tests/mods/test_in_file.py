from __future__ import annotations

import pytest

from attncheck.core.errors import UsageError
from attncheck.core.source_files import import_file
from attncheck.mods.mod_files import definition_line, kind_of_mod, mods_in

FILE = """
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


def module(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return import_file(path, "mods")


def test_mods_are_told_by_their_signature(tmp_path):
    mods = mods_in(module(tmp_path, FILE))
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


def test_all_says_what_is_public(tmp_path):
    found = mods_in(module(tmp_path, FILE + "\n__all__ = ['one', '_private']"))
    assert list(found) == ["one", "_private"]


def test_where_a_mod_is_defined(tmp_path):
    mods = mods_in(module(tmp_path, FILE))
    lines = FILE.splitlines()
    for name, text in [
        ("one", "def one"),
        ("part", "def with_default"),
        ("made", "    def mask"),
        ("instance", "    def __call__"),
        ("lam", "lam ="),
    ]:
        assert lines[definition_line(mods[name]) - 1].startswith(text)


@pytest.mark.parametrize("value", [3, "mask", int, print, None])
def test_other_values_are_no_mods(value):
    assert kind_of_mod(value) is None
    assert definition_line(value) is None


@pytest.mark.parametrize("public", ["5", "'one'", "{'one': 1}"])
def test_all_that_is_no_list_is_refused(tmp_path, public):
    with pytest.raises(
        UsageError, match=r"^__all__ of mine\.py is \w+: it must be a list of names"
    ):
        mods_in(module(tmp_path, FILE + f"\n__all__ = {public}"))


def test_a_getattr_of_the_module_is_not_asked(tmp_path):
    text = FILE + "\ndef __getattr__(name):\n    raise ValueError(name)"
    assert "one" in mods_in(module(tmp_path, text))


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


def test_objects_that_answer_nothing_or_without_end(tmp_path):
    odd = module(tmp_path, ODD)
    assert list(mods_in(odd)) == ["of_itself"]
    for mod in (odd.of_itself, odd.unsigned, odd.exits, odd.rude):
        assert definition_line(mod) == 3
