"""A fault: what it is, who had it, and how it is planted in a kernel of ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

__all__ = [
    "HOSTS",
    "Control",
    "Fault",
    "Host",
    "HostName",
    "decode",
    "flash1",
    "flash2",
    "ideal",
    "paged",
    "varlen",
]

HostName = Literal["ideal", "triton"]
HOSTS: tuple[HostName, ...] = ("ideal", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A kernel of ours and what is done to it.

    Attributes:
        kernel: Its name, as ``attncheck list`` has it.
        patches: What is changed in a copy of its sources, one after the other (``patching``): what
            faults share comes first.
        model: Of the ideal kernel, the fault model whose steps it gets, ``id`` or ``id:number``:
            such a fault is written once, and its prediction is its planting.
        dtypes: In which it is asked: those in which the fault is one. The first is enough to catch
            it.
        equivalent: Why the changed kernel gives the same bits as a right one whatever it is asked;
            empty of a fault.
        needs: What it cannot be asked without: ``cuda``, where the interpreter cannot show it.
    """

    kernel: str
    patches: tuple[str, ...] = ()
    model: str = ""
    dtypes: tuple[str, ...] = ("bf16",)
    equivalent: str = ""
    needs: Literal["", "cuda"] = ""


def ideal(
    *patches: str,
    model: str = "",
    dtypes: tuple[str, ...] = ("bf16",),
    needs: Literal["", "cuda"] = "",
) -> Host:
    """Return how the ideal kernel gets a fault: the steps of ``model``, or ``patches``."""
    return Host(kernel="ideal", patches=patches, model=model, dtypes=dtypes, needs=needs)


def _triton(
    kernel: str,
    *patches: str,
    dtypes: tuple[str, ...] = ("bf16",),
    needs: Literal["", "cuda"] = "",
) -> Host:
    return Host(kernel=kernel, patches=patches, dtypes=dtypes, needs=needs)


# How a Triton kernel of ours gets a fault: by patches of its sources.
flash1 = partial(_triton, "triton-flash1")
flash2 = partial(_triton, "triton-flash2")
varlen = partial(_triton, "triton-varlen")
decode = partial(_triton, "triton-decode")
paged = partial(_triton, "triton-paged")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planted:
    id: str
    summary: str
    ideal: Host | None = None
    triton: Host | None = None

    @property
    def hosts(self) -> dict[HostName, Host]:
        """How it is planted, by host."""
        both: dict[HostName, Host | None] = {"ideal": self.ideal, "triton": self.triton}
        return {name: host for name, host in both.items() if host is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(_Planted):
    """A fault that some published kernel had.

    Attributes:
        id: Words with hyphens.
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
        category: What it is about; set by the catalogue.
    """

    when: str
    seen: str
    reports: str
    unplanted: str = ""
    discrete: bool = True
    named: tuple[str, ...] = ()
    category: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(_Planted):
    """A change to a kernel that leaves it right: nothing may flag it.

    Attributes:
        id: Words with hyphens.
        summary: What the kernel does otherwise, in one line.
        why: Why that is no fault.
        ideal, triton: How it is planted.
    """

    why: str
