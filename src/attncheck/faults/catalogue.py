"""The catalogue: all faults and controls by id, read from the files in ``entries``."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import msgspec

from attncheck.core.errors import look_up
from attncheck.faults.fault import Control, Fault

CATEGORIES = (
    *("mask alignment", "sliding window", "tail tile", "fully masked rows", "sentinels"),
    *("online softmax", "scale and units", "softcap", "score mods", "gqa", "strides"),
    *("integer overflow", "head dim", "precision", "fp8", "split kv", "paged kv", "block mask"),
    *("documents", "degenerate shapes", "determinism", "backward", "sinks"),
)
"""Topics of faults, in the order of reports."""


def _entries(name: str) -> dict[str, Any]:
    file = files("attncheck.faults") / "entries" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _faults() -> dict[str, Fault]:
    # A file holds the entries of several categories, in a table for each.
    by_category: dict[str, Any] = {}
    for name in ("mask", "shape", "softmax", "score", "memory", "precision", "execution"):
        by_category |= _entries(f"{name}_faults")
    return {
        name: msgspec.convert(entry | {"id": name, "category": category}, Fault)
        for category in CATEGORIES
        for name, entry in by_category[category].items()
    }


FAULTS: dict[str, Fault] = _faults()  # every fault, category by category

CONTROLS: dict[str, Control] = {
    name: msgspec.convert(entry | {"id": name}, Control)
    for name, entry in _entries("control_changes").items()
}
"""Changes that leave a kernel right, so that no test may flag them."""

SHARED_PATCHES: dict[str, str] = _entries("shared_patches")
"""Patches that several faults share, by the names used in ``Host.first`` and ``last``."""


def fault_named(name: str) -> Fault | Control:
    """Return the fault or control called ``name``; raise UnknownName with the valid ones."""
    everything: dict[str, Fault | Control] = {**FAULTS, **CONTROLS}
    return look_up("fault", name, everything)
