"""Kernels that compute another problem than they were asked, and that one exactly."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from attncheck.cases.strategies.mask_strategies import NEIGHBORHOODS
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.inputs.input_tensors import Descale
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.subjects.capabilities.subject import Call

SMALL = Tiling(block_query=16, block_kv=16)
"""Tiles of which several fit a small problem."""


class Misreading(Ideal):
    """Answers ``misread`` of its inputs."""

    def __init__(self) -> None:
        super().__init__(SMALL)
        self.name = f"planted-{type(self).__name__}"

    def misread(self, inputs: Inputs) -> Inputs:
        return inputs.replace(problem=self.other(inputs.problem))

    def other(self, problem: Problem) -> Problem:
        return problem

    def prepare(self, inputs: Inputs) -> Call:
        return super().prepare(self.misread(inputs))


def remade(spec: Spec, **changes) -> Spec:
    """``spec`` with each part called a name of ``changes`` made anew by it."""
    if spec.name in changes:
        return changes[spec.name](spec)
    return Spec.of(spec.name, *(remade(part, **changes) for part in spec.parts), **spec.values)


class OtherMask(Misreading):
    """Another mask of that name; ``remade`` in compositions too."""

    def masks(self, problem: Problem) -> dict:
        raise NotImplementedError

    def other(self, problem: Problem) -> Problem:
        return problem.replace(mask=remade(problem.mask, **self.masks(problem)))


class TopLeft(OtherMask):
    """Bottom-right causal aligned top-left: the same where query and kv are equal."""

    def masks(self, problem: Problem) -> dict:
        return {"causal_bottom_right": lambda _: Spec.of("causal")}


class BottomRight(OtherMask):
    """Causal aligned bottom-right."""

    def masks(self, problem: Problem) -> dict:
        return {"causal": lambda _: Spec.of("causal_bottom_right")}


class WindowWider(OtherMask):
    """A window with its left end inside."""

    def masks(self, problem: Problem) -> dict:
        return {
            "sliding_window": lambda s: Spec.of("sliding_window", window=s.values["window"] + 1)
        }


class WindowWraps(OtherMask):
    """A window beyond every key is one modulo kv."""

    def masks(self, problem: Problem) -> dict:
        return {
            "sliding_window": lambda s: Spec.of(
                "sliding_window", window=s.values["window"] % (problem.kv + 1)
            )
        }


class PrefixShorter(OtherMask):
    """``j < prefix − 1``."""

    def masks(self, problem: Problem) -> dict:
        return {"prefix_lm": lambda s: Spec.of("prefix_lm", prefix=max(0, s.values["prefix"] - 1))}


class PrefixAtLeastTwo(OtherMask):
    """No prefix is one of two keys."""

    def masks(self, problem: Problem) -> dict:
        return {"prefix_lm": lambda s: Spec.of("prefix_lm", prefix=max(2, s.values["prefix"]))}


class DocumentsIgnored(OtherMask):
    """Packed documents see each other."""

    def masks(self, problem: Problem) -> dict:
        return {"document": lambda _: FULL, "documents": lambda _: FULL}


class SameLengths(OtherMask):
    """A document's keys are where its rows are, and as many."""

    def masks(self, problem: Problem) -> dict:
        def rows_alone(spec: Spec) -> Spec:
            lengths = spec.values["query_lengths"]
            return Spec.of("document", lengths=[*lengths[:-1], lengths[-1] + problem.kv])

        return {"documents": rows_alone}


class EmptyOneShifts(OtherMask):
    """Where a document or sequence has no keys, the keys of the next are taken for its."""

    def masks(self, problem: Problem) -> dict:
        def moved(lengths: tuple[int, ...]) -> list[int]:
            kept = [length for length in lengths if length]
            return kept + [0] * (len(lengths) - len(kept))

        return {
            "padding": lambda s: Spec.of("padding", lengths=moved(s.values["lengths"])),
            "documents": lambda s: Spec.of(
                "documents",
                query_lengths=list(s.values["query_lengths"]),
                kv_lengths=moved(s.values["kv_lengths"]),
            ),
        }


class WindowSmaller(OtherMask):
    """A neighborhood without its last line of cells."""

    def masks(self, problem: Problem) -> dict:
        def smaller(spec: Spec) -> Spec:
            kernel = [max(1, side - 1) for side in spec.values["kernel"]]
            return Spec.of(spec.name, **{**spec.values, "kernel": kernel})

        return dict.fromkeys(NEIGHBORHOODS, smaller)


class CellsRowByRow(OtherMask):
    """Whatever order cells are in, they are taken row by row."""

    def masks(self, problem: Problem) -> dict:
        def plain(spec: Spec) -> Spec:
            sides = {name: spec.values[name] for name in ("canvas", "kernel")}
            return Spec.of("neighborhood", **sides)

        return dict.fromkeys(NEIGHBORHOODS, plain)


class CanvasIgnored(OtherMask):
    """Every cell sees every key."""

    def masks(self, problem: Problem) -> dict:
        return dict.fromkeys(NEIGHBORHOODS, lambda _: FULL)


class PaddingSeen(OtherMask):
    """One key of padding is seen."""

    def masks(self, problem: Problem) -> dict:
        def longer(spec: Spec) -> Spec:
            return Spec.of(
                "padding", lengths=[min(problem.kv, n + 1) for n in spec.values["lengths"]]
            )

        return {"padding": longer}


class LastPartIgnored(OtherMask):
    """A composition without its last part."""

    def masks(self, problem: Problem) -> dict:
        def fewer(spec: Spec) -> Spec:
            return Spec.of(spec.name, *spec.parts[:-1]) if len(spec.parts) > 1 else spec

        return {"and": fewer, "or": fewer}


class _Moved(Problem):
    """The mask as the row below sees it."""

    __slots__ = ()

    def mask_mod(self, device: str = "cpu") -> MaskMod:
        right = super().mask_mod(device)
        return lambda b, h, q_idx, kv_idx: right(b, h, q_idx + 1, kv_idx)


class _Steeper(Problem):
    """What a score mod adds enters base-2 scores as it is."""

    __slots__ = ()

    def score_mod(self, device: str = "cpu") -> ScoreMod:
        right = super().score_mod(device)
        ln2 = torch.log(torch.tensor(2.0)).item()
        return lambda s, b, h, i, j: s + (right(s, b, h, i, j) - s) * ln2


def as_class(kind: type[Problem], problem: Problem) -> Problem:
    """``problem`` with other mods than it says."""
    return kind(**{f.name: getattr(problem, f.name) for f in dataclasses.fields(Problem)})


class RowBelow(Misreading):
    """Every mask is off by a row: one key too many where it is causal."""

    def other(self, problem: Problem) -> Problem:
        return as_class(_Moved, problem)


class BiasNotScaled(Misreading):
    """What a score mod changes is not multiplied by log2 e."""

    def other(self, problem: Problem) -> Problem:
        return problem if problem.score == NONE else as_class(_Steeper, problem)


class ScoreModIgnored(Misreading):
    """No score mod."""

    def other(self, problem: Problem) -> Problem:
        return problem.replace(score=NONE)


class SoftcapAtMost50(Misreading):
    """A cap beyond 50 is 50."""

    def other(self, problem: Problem) -> Problem:
        def capped(spec: Spec) -> Spec:
            return Spec.of("softcap", cap=min(50.0, spec.values["cap"]))

        return problem.replace(score=remade(problem.score, softcap=capped))


class ScaleIgnored(Misreading):
    """1/√head_dim, whatever the scale."""

    def other(self, problem: Problem) -> Problem:
        return problem.replace(scale=0.0)


class DescaleIgnored(Misreading):
    """Stored fp8 numbers of V as if they were the numbers meant."""

    def misread(self, inputs: Inputs) -> Inputs:
        if inputs.descale is None:
            return inputs
        given = inputs.descale
        return inputs.replace(descale=Descale(q=given.q, k=given.k, v=torch.ones_like(given.v)))


class Interleaved(Misreading):
    """Head h reads kv head h % kv_heads instead of h // group."""

    def misread(self, inputs: Inputs) -> Inputs:
        problem = inputs.problem
        order = torch.arange(problem.heads) % problem.kv_heads
        # Every head gets a key head of its own, in the order of the group that it should be of.
        kept = problem.replace(kv_heads=problem.heads)
        descale = inputs.descale
        if descale is not None:
            q = descale.q.repeat_interleave(problem.group, 1)
            descale = Descale(q=q, k=descale.k[:, order], v=descale.v[:, order])
        return dataclasses.replace(
            inputs, problem=kept, k=inputs.k[:, order], v=inputs.v[:, order], descale=descale
        )


class AsContiguous(Misreading):
    """Offsets from shapes, not from strides."""

    def misread(self, inputs: Inputs) -> Inputs:
        return inputs.replace(**{n: _as_contiguous(getattr(inputs, n)) for n in "qkv"})


def _as_contiguous(x: torch.Tensor) -> torch.Tensor:
    memory = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if memory < x.numel():  # an expanded view: it would read beyond its memory
        return torch.zeros_like(x)
    dense = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, dense, x.storage_offset())


class WrappedOffsets(Misreading):
    """A row's number times the stride between rows is a 32-bit integer."""

    def misread(self, inputs: Inputs) -> Inputs:
        return inputs.replace(**{n: _wrapped(getattr(inputs, n)) for n in "qkv"})


def _wrapped(x: torch.Tensor) -> torch.Tensor:
    at = torch.tensor(x.storage_offset())
    for axis, (length, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        steps = torch.arange(length) * stride
        steps = steps.to(torch.int32).long() if axis == 2 else steps
        at = at + steps.view([-1 if each == axis else 1 for each in range(4)])
    size = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((size,), (1,), 0)[at]


class OffsetIgnored(Misreading):
    """Reads from the first element of the memory that its tensors are views of."""

    def misread(self, inputs: Inputs) -> Inputs:
        return inputs.replace(
            **{n: x.as_strided(x.shape, x.stride(), 0) for n in "qkv" for x in [getattr(inputs, n)]}
        )


class GarbageDims(Misreading):
    """Head dims padded to a power of two, and what lies behind a row is read with it."""

    def misread(self, inputs: Inputs) -> Inputs:
        dim = inputs.problem.head_dim
        wide = 1 << (dim - 1).bit_length()
        if wide == dim:
            return inputs
        q, k = (self._behind(x, wide - dim) for x in (inputs.q, inputs.k))
        return inputs.replace(problem=inputs.problem.replace(head_dim=wide), q=q, k=k)

    def _behind(self, x: torch.Tensor, more: int) -> torch.Tensor:
        index = torch.arange(more) % x.shape[-1]
        return torch.cat([x, x.roll(-1, 2)[..., index]], -1)


class ValuesClamped(Misreading):
    """Values beyond ±2 are cut off."""

    def misread(self, inputs: Inputs) -> Inputs:
        return inputs.replace(v=inputs.v.float().clamp(-2.0, 2.0).to(inputs.v.dtype))


class NextKeysValue(Misreading):
    """Key j weighs the value of key j + 1."""

    def misread(self, inputs: Inputs) -> Inputs:
        return inputs.replace(v=inputs.v.roll(1, 2))
