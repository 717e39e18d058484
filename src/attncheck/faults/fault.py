"""A fault: what it is, who had it, and how it is planted in a kernel of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["CATEGORIES", "HOSTS", "Category", "Control", "Edit", "Fault", "Host", "HostName"]

HostName = Literal["ideal", "triton"]
HOSTS: tuple[HostName, ...] = ("ideal", "triton")

Category = Literal[
    "mask alignment",
    "sliding window",
    "tail tile",
    "fully masked rows",
    "sentinels",
    "online softmax",
    "scale and units",
    "softcap",
    "score mods",
    "gqa",
    "strides",
    "integer overflow",
    "head dim",
    "precision",
    "fp8",
    "split kv",
    "paged kv",
    "block mask",
    "documents",
    "degenerate shapes",
    "determinism",
    "backward",
    "sinks",
]
CATEGORIES: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]  # a Literal's


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change to a copy of a source.

    Attributes:
        module: Below attncheck: ``kernels.tile``.
        old: Text of it, found exactly once.
        new: What stands there instead.
    """

    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A kernel of ours and what is done to a copy of it.

    Attributes:
        kernel: Its name, as ``attncheck list`` has it.
        edits: What is changed.
        dtypes: In which it is asked: those in which the fault is one. The first is enough to catch
            it.
        equivalent: Why the changed kernel gives the same bits as a right one whatever it is asked;
            empty of a fault.
        needs: What it cannot be asked without: ``cuda``, where the interpreter cannot show it.
    """

    kernel: str
    edits: tuple[Edit, ...]
    dtypes: tuple[str, ...] = ("bf16",)
    equivalent: str = ""
    needs: Literal["", "cuda"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that some published kernel had.

    Attributes:
        id: Words with hyphens.
        category: What it is about.
        summary: What the kernel does wrong, in one line.
        when: On which problems.
        seen: What comes of it there.
        sources: Where it was reported: ``owner/repository#number``, or what else is said of it.
        hosts: How it is planted, by host; none where ``unplanted`` says why.
        unplanted: Why no change to a kernel of ours makes it.
        discrete: Whether it is there or not, rather than larger or smaller: a diagnosis may be
            expected to name it.
        named: Fault models of a diagnosis that name it, the best first.
    """

    id: str
    category: Category
    summary: str
    when: str
    seen: str
    sources: tuple[str, ...]
    hosts: dict[HostName, Host] = field(default_factory=dict)
    unplanted: str = ""
    discrete: bool = True
    named: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A change to a kernel that leaves it right: nothing may flag it.

    Attributes:
        id: Words with hyphens.
        summary: What the kernel does otherwise, in one line.
        why: Why that is no fault.
        hosts: How it is planted.
    """

    id: str
    summary: str
    why: str
    hosts: dict[HostName, Host] = field(default_factory=dict)
