"""A fault: what it is, who had it, and how it is planted in a kernel of ours."""

from __future__ import annotations

from typing import Literal

import msgspec

HostName = Literal["ideal", "triton"]
HOSTS: tuple[HostName, ...] = ("ideal", "triton")


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel of ours and what is done to it."""

    kernel: str = "ideal"  # its name, as ``attncheck list`` has it
    patch: str = ""  # what is changed in a copy of its sources (``patching``)
    # first, last: names of shared patches that are applied before and after.
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    # Of the ideal kernel, the fault model whose steps it gets, ``id`` or ``id:number``: such a
    # fault is written once, and its prediction is its planting.
    model: str = ""
    # In which it is asked: those in which the fault is one. The first is enough to catch it.
    dtypes: tuple[str, ...] = ("bf16",)
    # Why the changed kernel gives the same bits as a right one whatever it is asked; empty of a
    # fault.
    equivalent: str = ""
    # What it cannot be asked without: ``cuda``, where the interpreter cannot show it.
    needs: Literal["", "cuda"] = ""


class _Planted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    summary: str
    id: str = ""
    ideal: Host | None = None
    triton: Host | None = None

    @property
    def hosts(self) -> dict[HostName, Host]:
        """Return how it is planted, by host."""
        both: dict[HostName, Host | None] = {"ideal": self.ideal, "triton": self.triton}
        return {name: host for name, host in both.items() if host is not None}


class Fault(_Planted, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that some published kernel had.

    Attributes:
        id: Words with hyphens.
        category: What it is about.
        summary: What the kernel does wrong, in one line.
        ideal, triton: How it is planted; in neither where ``unplanted`` says why.
        when: On which problems.
        seen: What comes of it there.
        reports: Where it was reported, ``owner/repository#number #another …``, or what else is said
            of it.
        unplanted: Why no change to a kernel of ours makes it.
        discrete: Whether it is there or not, rather than larger or smaller: a diagnosis may be
            expected to name it.
        named: Fault models of a diagnosis that name it, the best first.
    """

    when: str
    seen: str
    reports: str
    category: str = ""
    unplanted: str = ""
    discrete: bool = True
    named: tuple[str, ...] = ()


class Control(_Planted, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change to a kernel that leaves it right: nothing may flag it.

    Attributes:
        id: Words with hyphens.
        summary: What the kernel does otherwise, in one line.
        why: Why that is no fault.
        ideal, triton: How it is planted.
    """

    why: str
