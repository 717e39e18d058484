"""Faults: their descriptions, how they are planted, and the catalogue of all of them by id.

The catalogue is read from the files in ``entries``.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, Literal

import msgspec

from attncheck.core.errors import look_up

CATEGORIES = (
    *("mask alignment", "sliding window", "tail tile", "fully masked rows", "sentinels"),
    *("online softmax", "scale and units", "softcap", "score mods", "gqa", "strides"),
    *("integer overflow", "head dim", "precision", "fp8", "split kv", "paged kv", "block mask"),
    *("documents", "degenerate shapes", "determinism", "backward", "sinks"),
)
"""Topics of faults, in the order of reports."""

HostName = Literal["ideal", "triton"]
HOSTS: tuple[HostName, ...] = ("ideal", "triton")


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel of attncheck's, and the changes that plant a fault in it."""

    kernel: str = "ideal"  # its name, as ``attncheck list`` has it
    patch: str = ""  # the change to a copy of its sources (see ``patching``)
    # first, last: names of shared patches that are applied before and after ``patch``.
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    # The fault model whose steps the ideal kernel gets, ``id`` or ``id:number``: one definition
    # serves both to predict the fault and to plant it.
    model: str = ""
    # The dtypes in which the change is a fault. The first is enough to catch it.
    dtypes: tuple[str, ...] = ("bf16",)
    # Why the changed kernel gives the same bits as a right one on every problem; empty for a
    # fault.
    equivalent: str = ""
    # The device that shows the fault: ``cuda``, where the interpreter cannot show it.
    needs: Literal["", "cuda"] = ""


class _Planted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    summary: str
    id: str = ""
    ideal: Host | None = None
    triton: Host | None = None

    @property
    def hosts(self) -> dict[HostName, Host]:
        """Return the hosts that it is planted in, by name."""
        both: dict[HostName, Host | None] = {"ideal": self.ideal, "triton": self.triton}
        return {name: host for name, host in both.items() if host is not None}


class Fault(_Planted, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that some published kernel had.

    Attributes:
        id: Words with hyphens.
        category: One of ``CATEGORIES``.
        summary: What the kernel does wrong, in one line.
        ideal, triton: How it is planted; None for both where ``unplanted`` gives the reason.
        when: The problems on which it shows.
        seen: Its effect on them.
        reports: Where it was reported, ``owner/repository#number #another …``, or another source.
        unplanted: Why no change to a kernel of attncheck's makes it.
        discrete: Whether it is present or absent, and not a matter of degree: a diagnosis may be
            expected to name it.
        named: Fault models that name it in a diagnosis, the best first.
    """

    when: str
    seen: str
    reports: str
    category: str = ""
    unplanted: str = ""
    discrete: bool = True
    named: tuple[str, ...] = ()


class Control(_Planted, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change to a kernel that leaves it right, so that no test may flag it.

    Attributes:
        id: Words with hyphens.
        summary: What the kernel does differently, in one line.
        why: Why that is no fault.
        ideal, triton: How it is planted.
    """

    why: str


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
