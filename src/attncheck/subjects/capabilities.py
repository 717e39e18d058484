"""What the author of a kernel declares of it: the capability table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from attncheck.formats import DTYPES, FORMATS, fp32
from attncheck.judge.arithmetic import default
from attncheck.mods.library import NONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.mods.spec import Spec
    from attncheck.problem import Problem

__all__ = [
    "ALIASES",
    "ALIGNMENTS",
    "ANY",
    "AUTOGRAD",
    "COMPOSITION",
    "DEVICES",
    "EMPTY_ROWS",
    "LSE_BASES",
    "PHASES",
    "Capabilities",
    "DeclaredArithmetic",
    "Limits",
    "Override",
    "When",
    "family",
]

ANY = "any"
AUTOGRAD = "autograd"
COMPOSITION = "composition"
ALIASES = {"none": "full", "window": "sliding_window"}
"""Masks as kernels call them → their names in the library."""
DEVICES = ("cpu", "cuda")
PHASES = ("forward", "backward")

LSE_BASES = ("natural", "base2")
"""Logarithms in which a kernel gives LSE."""

EMPTY_ROWS = ("zero", "nan", "mean", "unspecified")
"""What a kernel gives for a row that sees no key (``subjects.empty_rows``)."""

ALIGNMENTS = ("top_left", "bottom_right")
"""Where the diagonal of a causal mask ends when the lengths differ: at row and key 0, or at the
last row and the last key."""

Names = tuple[str, ...]
HeadDim = int | tuple[int, int]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds of every table here."""


class DeclaredArithmetic(_Strict, frozen=True, kw_only=True):
    """Fields of ``judge.arithmetic.Arithmetic`` that differ from the convention's; None: as there.

    ``p_in_sum`` is another name of ``sums_rounded_weights``; of ``rounds_value_products`` false
    says that dO · v is not rounded, and a name of ``formats.FORMATS`` to what.
    """

    weights_scale: float | None = None
    lazy_rescale: float | None = None
    sums_rounded_weights: bool | None = None
    p_in_sum: bool | None = None
    normalised_weights: bool | None = None
    exp2_ulps: float | None = None
    block_kv: int | None = None
    splits: int | None = None
    rounds_value_products: Literal["fp16", "bf16"] | bool | None = None
    sums_rounded_heads: bool | None = None
    rereads_weights: bool | None = None
    dkv_parts: int | None = None
    dq_parts: int | None = None

    def changes(self) -> dict[str, Any]:
        """What is declared, by the names of ``Arithmetic``."""
        said = {k: v for k, v in msgspec.structs.asdict(self).items() if v is not None}
        alias = said.pop("p_in_sum", None)
        if "rounds_value_products" in said:
            name = said["rounds_value_products"]
            said["rounds_value_products"] = FORMATS[name] if isinstance(name, str) else None
        return said if alias is None else {"sums_rounded_weights": alias} | said

    def looser(self) -> dict[str, Any]:
        """Those of ``changes`` that allow more than the default arithmetic does."""
        assumed = default(DTYPES["bf16"])
        return {k: v for k, v in self.changes().items() if _allows_more(k, v, assumed)}


def _allows_more(name: str, value: Any, assumed: Arithmetic) -> bool:
    if name == "rounds_value_products":
        return value is not None
    said: float = value
    usual: float = getattr(assumed, name)
    # Shorter steps are more roundings; under a smaller scale more of the small weights are lost.
    return said < usual if name in {"block_kv", "weights_scale"} else said > usual


class Limits(_Strict, frozen=True, kw_only=True):
    """Which Problems a kernel takes; None: not declared.

    Attributes:
        dtypes: Names of ``formats.DTYPES``.
        head_dims: Of q, k and v alike, or pairs (of q and k, of v); or ``any``.
        masks: Names of ``mods.library``, ``composition`` or ``any``.
        scores: Names of score mods, ``none``, ``composition`` or ``any``.
        gqa: Whether several query heads may share a key head.
        rectangular: Whether query and key lengths may differ.
        scale: Whether it takes a scale other than 1/√head_dim.
        length_multiple: Of what both lengths must be multiples; not declared: of nothing.
        max_query, max_kv: Longest lengths; not declared: any.
        arithmetic: What differs from the convention's.
    """

    dtypes: Names | None = None
    head_dims: tuple[HeadDim, ...] | Literal["any"] | None = None
    masks: Names | None = None
    scores: Names | None = None
    gqa: bool | None = None
    rectangular: bool | None = None
    scale: bool | None = None
    length_multiple: int | None = None
    max_query: int | None = None
    max_kv: int | None = None
    arithmetic: DeclaredArithmetic = DeclaredArithmetic()


class When(_Strict, frozen=True, kw_only=True):
    """For which Problems an override holds; several values: for each of them; all keys must fit."""

    dtype: str | Names | None = None
    mask: str | Names | None = None
    head_dim: int | tuple[int, ...] | None = None
    device: str | Names | None = None
    phase: str | Names | None = None

    def holds(self, problem: Problem, device: str) -> bool:
        """Whether ``problem``, computed on ``device``, is one of them; with gradients: backward."""
        asked = {
            "dtype": problem.dtype,
            "mask": family(problem.mask),
            "head_dim": problem.head_dim,
            "device": device,
            "phase": PHASES[problem.backward],
        }
        return all(_is_among(value, getattr(self, name)) for name, value in asked.items())


class Override(Limits, frozen=True, kw_only=True):
    """Limits that replace the table's, field by field."""

    when: When


class Capabilities(Limits, frozen=True, kw_only=True):
    """A kernel's whole table.

    Attributes:
        entry: ``pkg.module:name``, ``file.py::name``, or a kernel of attncheck's.
        convention: A name of ``conventions.CONVENTIONS``; None for the first that fits.
        causal: How its causal mask is aligned where lengths differ.
        lse: Whether it gives LSE, or with which logarithm (``true``: the convention's).
        empty_row: What rows that see no key give.
        promises: What it promises of its bits (``question.PROMISES``).
        backward: How gradients are had: by ``autograd``, or by a function, as ``entry`` names one;
            false: it has none. Not declared: by autograd, where it can be.
        sources: Files that it is made of, as patterns of ``source_patterns``.
        override: Exceptions; later ones win.
    """

    entry: str
    convention: str | None = None
    causal: Literal["top_left", "bottom_right"] | None = None
    lse: bool | Literal["natural", "base2"] | None = None
    empty_row: Literal["zero", "nan", "mean", "unspecified"] | None = None
    promises: Names | None = None
    backward: bool | str | None = None
    sources: Names = ()
    override: tuple[Override, ...] = ()

    def limits(self, problem: Problem, device: str = "cpu") -> Limits:
        """What holds for ``problem``: each field as the last override that has it says."""
        said = {name: getattr(self, name) for name in Limits.__struct_fields__}
        for override in self.override:
            if override.when.holds(problem, device):
                said |= _said(override)
        return Limits(**said)

    def arithmetic_changes(self, problem: Problem, device: str = "cpu") -> dict[str, Any]:
        """What differs from the convention's arithmetic, by the names of ``Arithmetic``."""
        found = self.arithmetic.changes()
        for override in self.override:
            if override.when.holds(problem, device):
                found |= override.arithmetic.changes()
        return found

    def refuses(self, problem: Problem, device: str = "cpu") -> str | None:
        """Why the table has no place for ``problem``, in one line; None if it has."""
        return next(
            (said for said in _answers(self.limits(problem, device), problem) if said), None
        )

    def declares(self, problem: Problem, device: str = "cpu") -> bool:
        """Whether the table says of everything in ``problem`` that the kernel takes it.

        What it is silent on the kernel may refuse.
        """
        # It has no place for a loss of LSE, for sinks, for what score mods read, or for empty rows
        # whose gradients are NaN.
        beyond = problem.dlse or problem.sink or problem.dcaptured
        silent = beyond or self.empty_row == "nan"
        gradients = not problem.backward or (bool(self.backward) and not silent)
        return gradients and all(
            said == "" for said in _answers(self.limits(problem, device), problem)
        )


def family(spec: Spec) -> str:
    """What a table calls a mask or score mod: its name, ``composition``, or ``any`` of a file's."""
    if spec.parts:
        return COMPOSITION
    return ANY if "::" in spec.name else spec.name


def _said(override: Override) -> dict[str, Any]:
    fields = {name: getattr(override, name) for name in Limits.__struct_fields__}
    return {k: v for k, v in fields.items() if v is not None and k != "arithmetic"}


def _is_among(value: object, allowed: object) -> bool:
    if allowed is None:
        return True
    listed = allowed if isinstance(allowed, tuple) else (allowed,)
    return value in {ALIASES.get(each, each) if isinstance(each, str) else each for each in listed}


def _answers(limits: Limits, problem: Problem) -> Iterator[str | None]:
    """Of each thing that ``problem`` asks: declared (""), not declared (None), or why not."""
    yield _listed(limits.dtypes, problem.dtype, "dtype")
    yield _head_dim(limits.head_dims, problem)
    if problem.operation == "attention":
        masks = None if limits.masks is None else [ALIASES.get(m, m) for m in limits.masks]
        yield _listed(masks, family(problem.mask), "mask", limits.masks)
        yield (
            ""
            if _plain(problem, limits)
            else _listed(limits.scores, family(problem.score), "score mod")
        )
    usual = problem.operation == "softmax" or problem.scale == fp32(problem.head_dim**-0.5)
    for name, asked, what in (
        ("gqa", problem.group > 1, f"{problem.group} query heads to a key head"),
        (
            "rectangular",
            problem.query != problem.kv and problem.operation == "attention",
            f"{problem.query} queries and {problem.kv} keys",
        ),
        ("scale", not usual, f"scale={problem.scale:g}, other than 1/√head_dim"),
    ):
        yield _flag(name, getattr(limits, name), what) if asked else ""
    multiple = limits.length_multiple or 1
    uneven = any(length % multiple for length in (problem.query, problem.kv))
    lengths = f"{problem.query} queries and {problem.kv} keys"
    yield f"{lengths}: its table says length_multiple = {multiple}" if uneven else ""
    for name, length in (("max_query", problem.query), ("max_kv", problem.kv)):
        most = getattr(limits, name)
        long = most is not None and length > most
        yield f"length {length}: its table says {name} = {most}" if long else ""


def _plain(problem: Problem, limits: Limits) -> bool:
    """Whether no score mod is asked for, and the table says nothing against none."""
    return problem.score == NONE and limits.scores is None


def _listed(
    allowed: list[str] | Names | None, name: str, what: str, shown: Names | None = None
) -> str | None:
    if allowed is None:
        return None
    if name in allowed or ANY in allowed:
        return ""
    return f"{what} {name} is not declared: its table has {', '.join(shown or allowed) or 'none'}"


def _head_dim(allowed: tuple[HeadDim, ...] | str | None, problem: Problem) -> str | None:
    if allowed is None:
        return None
    asked = (problem.head_dim, problem.value_dim)
    if allowed == ANY or problem.operation == "softmax":
        return ""
    pairs = [each if isinstance(each, tuple) else (each, each) for each in allowed if each != ANY]
    if asked in pairs:
        return ""
    listed = ", ".join("/".join(map(str, dict.fromkeys(pair))) for pair in pairs) or "none"
    dims = f"head_dim={problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        dims += f" value_dim={problem.value_dim}"
    return f"{dims} is not declared: its table has {listed}"


def _flag(name: str, declared: bool | None, what: str) -> str | None:  # noqa: FBT001  # a field
    if declared is None:
        return None
    return "" if declared else f"{what}: its table says {name} = false"
