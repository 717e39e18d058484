"""The library of masks and score mods by name: checks a Spec and builds its callable."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from attncheck.errors import ProblemError, UnknownName
from attncheck.formats import fp32
from attncheck.mods import arguments as check
from attncheck.mods import compose, masks, scores, written
from attncheck.mods.signatures import MaskMod, ScoreMod
from attncheck.mods.spec import Argument, Dimensions, Spec
from attncheck.recorded_names import refuse_recorded, without_recorded

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BUILT_IN",
    "FULL",
    "MASKS",
    "NONE",
    "SCORES",
    "Entry",
    "MaskMod",
    "ScoreMod",
    "alibi_slopes",
    "build_mask",
    "build_score",
    "check_mask",
    "check_score",
    "in_fp32",
    "is_additive",
]

FULL = Spec.of("full")
NONE = Spec.of("none")

Mod = TypeVar("Mod")
Values = Mapping[str, Argument]

_INT32_LARGEST = 2**31 - 1
_LARGEST_DISTANCE = 2**20
_LARGEST_SEED = 2**63 - 1
_ANY_NUMBER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[Mod]):
    """One mask or score mod of the library, or one way to compose them.

    Attributes:
        summary: What it does, in a line.
        build: (arguments by name, dimensions, device) → callable; None for a composition.
        compose: The callables of the parts → callable; None for anything else.
        arguments: Its numbers, or its text, by name, each with the check that it must pass.
        most_parts: How many parts a composition takes at most (at least one).
        additive: Scores only: what is added does not depend on the score. A composition is
            additive when its parts are (``is_additive``).
    """

    summary: str
    build: Callable[[Values, Dimensions, str], Mod] | None = None
    compose: Callable[..., Mod] | None = None
    arguments: Mapping[str, check.Check] = field(default_factory=dict)
    most_parts: int = _ANY_NUMBER
    additive: bool = True


def check_mask(spec: Spec, dimensions: Dimensions) -> None:
    """Raises UnknownName or ProblemError unless ``spec`` is a mask for these dimensions."""
    _check("mask", MASKS, spec, dimensions)


def check_score(spec: Spec, dimensions: Dimensions) -> None:
    """Raises UnknownName or ProblemError unless ``spec`` is a score mod for these dimensions."""
    _check("score mod", SCORES, spec, dimensions)


def in_fp32(spec: Spec) -> Spec:
    """A checked score mod with its real numbers as a kernel receives them; 50 becomes 50.0."""
    real = {
        name for name, passes in SCORES[spec.name].arguments.items() if passes is check.positive
    }
    arguments = {k: fp32(float(cast("float", v))) if k in real else v for k, v in spec.arguments}
    return Spec.of(spec.name, *map(in_fp32, spec.parts), **arguments)


def build_mask(spec: Spec, dimensions: Dimensions, device: str = "cpu") -> MaskMod:
    """The mask as a FlexAttention callable, tensors on ``device``; raises as check_mask."""
    check_mask(spec, dimensions)
    return _build(MASKS, spec, dimensions, device)


def build_score(spec: Spec, dimensions: Dimensions, device: str = "cpu") -> ScoreMod:
    """The score mod as a FlexAttention callable, tensors on ``device``; raises as check_score."""
    check_score(spec, dimensions)
    return _build(SCORES, spec, dimensions, device)


def is_additive(spec: Spec) -> bool:
    """Whether the score mod adds something that does not depend on the score."""
    return all(SCORES[part.name].additive for part in spec.walk())


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """2^(−8(h+1)/heads) for each head, as fp32 numbers (Press et al. 2022, for any head count).

    Through ``decimal``, so that the bits are the same on every machine.
    """
    context = decimal.Context(prec=50)
    exponents = [context.divide(decimal.Decimal(-8 * (h + 1)), heads) for h in range(heads)]
    return tuple(fp32(float(context.power(2, exponent))) for exponent in exponents)


def _check(kind: str, entries: Mapping[str, Entry[Mod]], spec: Spec, dims: Dimensions) -> None:
    if spec.name not in entries:
        refuse_recorded(kind, spec.name)
        if "::" in spec.name:  # a Case from elsewhere
            option = "--mask" if entries is MASKS else "--score"
            raise ProblemError(f"{kind} {spec.name!r} is of a file: give that file with {option}.")
        raise UnknownName(kind, spec.name, without_recorded(entries))
    entry = entries[spec.name]
    _check_arguments(spec, entry.arguments, dims)
    if entry.compose is None and spec.parts:
        raise ProblemError(f"{spec.name} takes no parts: only a composition does.")
    if entry.compose is not None and not 1 <= len(spec.parts) <= entry.most_parts:
        wanted = "exactly one part" if entry.most_parts == 1 else "at least one part"
        raise ProblemError(f"{spec.name} has {len(spec.parts)} parts: it takes {wanted}.")
    for part in spec.parts:
        _check(kind, entries, part, dims)


def _check_arguments(spec: Spec, checks: Mapping[str, check.Check], dims: Dimensions) -> None:
    allowed = ", ".join(checks) or "none"
    for name in spec.values:
        if name not in checks:
            raise ProblemError(f"{spec.name} has no argument {name!r}: its arguments: {allowed}.")
    for name, passes in checks.items():
        if name not in spec.values:
            raise ProblemError(f"{spec.name} needs its argument {name!r}.")
        passes(f"{spec.name}.{name}", spec.values[name], dims)


def _build(entries: Mapping[str, Entry[Mod]], spec: Spec, dims: Dimensions, device: str) -> Mod:
    entry = entries[spec.name]
    if entry.compose is not None:
        return entry.compose(*(_build(entries, part, dims, device) for part in spec.parts))
    assert entry.build is not None
    return entry.build(spec.values, dims, device)


def _whole(values: Values, name: str) -> int:
    return cast("int", values[name])  # checked at the door


def _real(values: Values, name: str) -> float:
    return fp32(float(cast("float", values[name])))


def _text(values: Values) -> str:
    return cast("str", values["text"])


def _documents(values: Values, dims: Dimensions, device: str) -> Tensor:
    import torch

    lengths = torch.tensor(values["lengths"])
    document_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return document_of[: max(dims.query, dims.kv)].to(device, torch.int32)


def _lengths(values: Values, device: str) -> Tensor:
    import torch

    return torch.tensor(values["lengths"], dtype=torch.int32, device=device)


def _slopes(heads: int, device: str) -> Tensor:
    import torch

    return torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=device)


def _bias_table(values: Values, heads: int, device: str) -> Tensor:
    import numpy as np
    import torch

    from attncheck.draws import Draws

    shape = (heads, 2 * _whole(values, "distance") + 1)
    table = Draws(_whole(values, "seed")).normal("relative_bias", shape)
    return torch.from_numpy(table.astype(np.float32)).to(device)


MASKS: dict[str, Entry[MaskMod]] = {
    "full": Entry(
        summary="every row sees every key",
        build=lambda _values, _dims, _device: masks.full,
    ),
    "causal": Entry(
        summary="row i sees keys up to i (aligned top-left)",
        build=lambda _values, _dims, _device: masks.causal,
    ),
    "causal_bottom_right": Entry(
        summary="row i sees keys up to i + kv − query: the last row sees every key",
        build=lambda _values, dims, _device: masks.causal_bottom_right(dims.kv - dims.query),
    ),
    "sliding_window": Entry(
        summary="row i sees the last `window` keys up to its own",
        arguments={"window": check.whole(0, _INT32_LARGEST)},
        build=lambda values, _dims, _device: masks.sliding_window(_whole(values, "window")),
    ),
    "prefix_lm": Entry(
        summary="row i sees the first `prefix` keys and keys up to i",
        arguments={"prefix": check.whole(0, _INT32_LARGEST)},
        build=lambda values, _dims, _device: masks.prefix_lm(_whole(values, "prefix")),
    ),
    "document": Entry(
        summary="row i sees the keys of its own document; `lengths` one after another",
        arguments={"lengths": check.document_lengths},
        build=lambda values, dims, device: masks.document(_documents(values, dims, device)),
    ),
    "padding": Entry(
        summary="rows of sequence b see its first `lengths[b]` keys",
        arguments={"lengths": check.padding_lengths},
        build=lambda values, _dims, device: masks.padding(_lengths(values, device)),
    ),
    "expression": Entry(
        summary="keys at which `text` is true, as q_idx % 3 <= kv_idx",
        arguments={"text": check.text(written.read_mask)},
        build=lambda values, dims, _device: written.mask(_text(values), dims),
    ),
    "and": Entry(summary="keys that every part shows", compose=compose.and_masks),
    "or": Entry(summary="keys that any part shows", compose=compose.or_masks),
    "not": Entry(summary="keys that its part hides", compose=compose.not_mask, most_parts=1),
}

SCORES: dict[str, Entry[ScoreMod]] = {
    "none": Entry(
        summary="the score itself",
        build=lambda _values, _dims, _device: scores.none,
    ),
    "alibi": Entry(
        summary="adds 2^(−8(h+1)/heads) · (j − i)",
        build=lambda _values, dims, device: scores.alibi(_slopes(dims.heads, device)),
    ),
    "softcap": Entry(
        summary="cap · tanh(score / cap)",
        arguments={"cap": check.positive},
        build=lambda values, _dims, _device: scores.softcap(_real(values, "cap")),
        additive=False,
    ),
    "relative_bias": Entry(
        summary="adds a learned number for each head and j − i clamped to ±distance",
        arguments={
            "distance": check.whole(0, _LARGEST_DISTANCE),
            "seed": check.whole(0, _LARGEST_SEED),
        },
        build=lambda values, dims, device: scores.relative_bias(
            _bias_table(values, dims.heads, device)
        ),
    ),
    "temperature": Entry(
        summary="divides every score by `temperature`",
        arguments={"temperature": check.positive},
        build=lambda values, _dims, _device: scores.temperature(_real(values, "temperature")),
        additive=False,
    ),
    "expression": Entry(
        summary="what `text` gives, as where(q_idx % 2 == 0, score, score * 0.5)",
        arguments={"text": check.text(written.read_score)},
        build=lambda values, dims, _device: written.score(_text(values), dims),
        additive=False,  # or is: only its text says so
    ),
    "chain": Entry(summary="applies its parts from left to right", compose=compose.chain),
}

BUILT_IN = frozenset({*MASKS, *SCORES})
"""Names that mean the same for good: others come and go, of files, recordings and given tensors."""
