"""Kernels with one fault each, by name: what relations must find."""

from __future__ import annotations

import dataclasses
import math

import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.ideal import Ideal


def kernel(name: str) -> Ideal:
    """The kernel with the fault ``name``: one of the tables below, or a class of this file."""
    if name in BEFORE:
        return _kind(name, prepare=_reading(BEFORE[name]))
    if name in AFTER:
        return _kind(name, prepare=_spoiling(AFTER[name]))
    if name in ATTRIBUTES:
        return _kind(name, **ATTRIBUTES[name])
    return globals()[name]()


def _kind(name, **attributes):
    return type(name, (Ideal,), {"name": f"planted-{name}"} | attributes)()


def _reading(change):
    return lambda self, inputs: Ideal.prepare(self, change(inputs, inputs.problem))


def _spoiling(change):
    def prepare(self, inputs):
        call = Ideal.prepare(self, inputs)
        return lambda: change(inputs, call())

    return prepare


# ------------------------------------------------------------------ what is read


def _with(inputs, **changes):
    return inputs.replace(problem=inputs.problem.replace(**changes))


def _if_mask(name, change):
    """Another mask in place of one called ``name``."""

    def read(inputs, problem):
        mask = problem.mask
        return _with(inputs, mask=change(mask, problem)) if mask.name == name else inputs

    return read


def _modulo_head(inputs, problem):
    order, scales = torch.arange(problem.heads) % problem.kv_heads, inputs.descale
    if scales is not None:
        scales = type(scales)(q=scales.q[:, order], k=scales.k[:, order], v=scales.v[:, order])
    return inputs.replace(
        problem=problem.replace(kv_heads=problem.heads),
        k=inputs.k[:, order],
        v=inputs.v[:, order],
        descale=scales,
    )


def _neighbours_values(inputs, problem):
    pair = (torch.arange(problem.kv) ^ 1).clamp(max=problem.kv - 1)
    return inputs.replace(v=inputs.v[:, :, pair])


def _same_lengths(mask, problem):
    lengths = list(mask.values["query_lengths"])
    return Spec.of("document", lengths=[*lengths[:-1], lengths[-1] + problem.kv])


def _prefix(by):
    return _if_mask(
        "prefix_lm", lambda m, _: Spec.of("prefix_lm", prefix=max(0, m.values["prefix"] + by))
    )


def _first_heads_mod(inputs, problem):
    if problem.score.name != "expression":
        return inputs
    return _with(
        inputs, score=Spec.of("expression", text=problem.score.values["text"].replace("h", "0"))
    )


def _scored_from_row_zero(inputs, problem):
    score = problem.score
    return _with(inputs, score=score.parts[0]) if score.name == "offset" else inputs


class _TanhOfExponentials(Problem):
    __slots__ = ()

    def score_mod(self, device="cpu"):
        cap = self.score.values["cap"]
        return lambda score, *_: cap * (1 - 2 / ((2 * score / cap).exp() + 1))


def _cancelling_tanh(inputs, problem):
    """tanh x = 1 − 2/(e^2x + 1), which is 0 for small x."""
    if problem.score.name != "softcap":
        return inputs
    fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(Problem)}
    return inputs.replace(problem=_TanhOfExponentials(**fields))


def _fixed_cap(inputs, problem):
    capped = problem.score.name == "softcap"
    return _with(inputs, score=Spec.of("softcap", cap=1.0)) if capped else inputs


def _without_descale(name):
    def read(inputs, _):
        ones = {name: torch.ones_like(getattr(inputs.descale, name))}
        return inputs.replace(descale=dataclasses.replace(inputs.descale, **ones))

    return read


def memory(tensor):
    """All that a tensor is a view of, in one row."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def _elsewhere(change):
    """Every tensor read by ``change``."""

    def read(inputs, _):
        tensors = {name: change(getattr(inputs, name)) for name in "qkv"}
        if inputs.dout is not None:
            tensors["dout"] = change(inputs.dout)
        return inputs.replace(**tensors)

    return read


def _flat(tensor):
    """As if contiguous; after the end of memory there are zeros."""
    read = tensor.new_zeros(tensor.numel())
    there = memory(tensor)[: tensor.numel()]
    read[: len(there)] = there
    return read.view(tensor.shape)


def _wrapped(tensor):
    """Rows' elements counted in an int32."""
    at = torch.tensor(tensor.storage_offset())
    for axis, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = (torch.arange(length) * stride).int().long()
        at = at + steps.view([-1 if each == axis else 1 for each in range(4)])
    return memory(tensor)[at]


def _whole_vectors(tensor):
    """What follows a row is multiplied by 0, and added to the row."""
    there = memory(tensor).float()
    index = torch.arange(len(there)).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    after = there[(index[..., -1:] + 1).clamp(max=len(there) - 1)]
    return (tensor.float() + 0.0 * after).to(tensor.dtype)


BEFORE = {
    # orders
    "LaterKeysWeighMore": lambda inputs, _: _with(
        inputs, score=Spec.of("expression", text="score + 0.25 * kv_idx")
    ),
    "ValueOfNeighbour": _neighbours_values,
    "ModuloHead": _modulo_head,
    "NextKeyHead": lambda inputs, _: inputs.replace(v=inputs.v.roll(-1, dims=1)),
    "NextLength": _if_mask(
        "padding",
        lambda m, _: Spec.of("padding", lengths=[*m.values["lengths"][1:], m.values["lengths"][0]]),
    ),
    "FirstKeys": lambda inputs, _: inputs.replace(k=inputs.k[:1].expand_as(inputs.k)),
    # values and scores
    "ClippedValues": lambda inputs, _: inputs.replace(
        v=inputs.v.float().clamp(-1, 1).to(inputs.v.dtype)
    ),
    "FirstHeadsMod": _first_heads_mod,
    "ScaleOfItsOwn": lambda inputs, p: _with(inputs, scale=1 / math.sqrt(p.head_dim)),
    "FixedCap": _fixed_cap,
    "CancellingTanh": _cancelling_tanh,
    "WithoutQueryDescale": _without_descale("q"),
    "WithoutKeyDescale": _without_descale("k"),
    "WithoutValueDescale": _without_descale("v"),
    # masks
    "ShortWindow": _if_mask(
        "sliding_window", lambda m, _: Spec.of(m.name, window=m.values["window"] - 1)
    ),
    "LongPrefix": _prefix(1),
    "ShortPrefix": _prefix(-1),
    "TopLeft": _if_mask("causal_bottom_right", lambda *_: Spec.of("causal")),
    "FromRowZero": _if_mask("offset", lambda m, _: m.parts[0]),
    "ScoredFromRowZero": _scored_from_row_zero,
    "SameLengths": _if_mask("documents", _same_lengths),
    "OrderIgnored": lambda inputs, p: _with(
        inputs,
        mask=Spec.of("neighborhood", **{k: p.mask.values[k] for k in ("canvas", "kernel")}),
    ),
    "TilesOfTheOtherSide": _if_mask(
        "neighborhood_tiled", lambda m, _: Spec.of(m.name, **(dict(m.values) | {"tile": [1, 4]}))
    ),
    # memory
    "Flat": _elsewhere(_flat),
    "FromTheStart": _elsewhere(lambda x: x.as_strided(x.shape, x.stride(), 0)),
    "Wrapped": _elsewhere(_wrapped),
    "WholeVectors": _elsewhere(_whole_vectors),
}

# ------------------------------------------------------------------ what is given


def _out(change):
    """Right but for out, which is ``change`` of (inputs, right)."""
    return lambda inputs, right: Outputs(change(inputs, right).to(right.out.dtype), right.lse)


def _lse(change):
    return lambda inputs, right: Outputs(right.out, change(inputs, right))


def _last_head_off(_, right):
    out = right.out.clone()
    out[:, -1] += out[:, -1].abs() * torch.finfo(out.dtype).eps
    return out


def _dead(right):
    return torch.isneginf(right.lse)[..., None]


def _mean_of_nothing(inputs, right):
    mean = inputs.v.float().mean(2, keepdim=True).repeat_interleave(inputs.problem.group, 1)
    return torch.where(_dead(right), mean, right.out.float())


def _leaky(inputs, right):
    leak = (inputs.v.float() * 0.0).sum(2, keepdim=True)
    return right.out + leak.repeat_interleave(inputs.problem.group, 1)


def _overflowing(inputs, right):
    """q · k of every key in fp32 before the mask is multiplied: inf · 0 is NaN."""
    largest = inputs.k.float().abs().amax((2, 3)) * 2.0**100
    return right.lse + (largest * 0.0).repeat_interleave(inputs.problem.group, 1)[..., None]


def _divided_by_all(inputs, right):
    share = right.lse.exp().clamp(max=inputs.problem.kv) / inputs.problem.kv
    return right.out * share[..., None]


def _lse_of_padding(inputs, right):
    """Counts the zeros up to a whole tile of 16 keys."""
    zeros = -inputs.problem.kv % 16
    nothing = torch.full_like(right.lse, math.log(zeros) if zeros else -math.inf)
    return torch.logaddexp(right.lse, nothing)


def _large_batch(inputs, right):
    """Another last bit where there are several sequences."""
    if inputs.problem.batch == 1:
        return right.lse
    return torch.nextafter(right.lse, torch.full_like(right.lse, math.inf))


def _trace(_, right):
    """A trace of the first column in the last one."""
    out = right.out.clone()
    out[..., -1] += out[..., 0] * 2.0**-30
    return out


def _softmax(e):
    return e / e.sum(-1, keepdim=True)


def _pairs_share_a_maximum(inputs, right):
    """Rows 2m and 2m + 1 of a tile: right, but to the last bit."""
    rows = inputs.x.float().flatten(0, 2)
    first = torch.arange(len(rows)) // 2 * 2
    second = (first + 1).clamp(max=len(rows) - 1)
    top = torch.maximum(rows[first], rows[second]).amax(-1, keepdim=True)
    return _softmax((rows - top).exp()).view(right.out.shape)


def _previous_row(_, right):
    """The last row of a head is that of the head before."""
    out = right.out.clone()
    out[:, 1:, -1] = right.out[:, :-1, -1]
    return out


AFTER = {
    "LastHeadOff": _out(_last_head_off),
    "Biased": _out(lambda _, right: right.out + 2.0**-6),
    "FixedPoint": _out(lambda _, right: (right.out * 256).round() / 256),
    "NoMaximum": _out(
        lambda _, right: right.out.masked_fill((right.lse > 89)[..., None], math.nan)
    ),
    "Leaky": _out(_leaky),
    "Overflowing": _lse(_overflowing),
    "MeanOfNothing": _out(_mean_of_nothing),
    "NothingIsNan": _out(lambda _, right: right.out.masked_fill(_dead(right), math.nan)),
    "LowestLse": _lse(lambda _, right: right.lse.clamp(min=-1e9)),
    "DividedByAll": _out(_divided_by_all),
    "BaseTwo": _lse(lambda _, right: right.lse / math.log(2.0)),
    "OutThroughBf16": _out(lambda _, right: right.out.bfloat16()),
    "LseOfPadding": _lse(_lse_of_padding),
    "WithoutLse": lambda _, right: Outputs(right.out),
    "LargeBatch": _lse(_large_batch),
    "Trace": _out(_trace),
    # softmax
    "OverflowingSoftmax": _out(lambda inputs, _: _softmax(inputs.x.float().exp())),
    "RelativeLse": _lse(lambda inputs, right: right.lse - inputs.x.float().amax(-1)),
    "LastColumnTwice": _out(lambda _, right: right.out.float() / (1 + right.out[..., -1:].float())),
    "PairsShareAMaximum": _out(_pairs_share_a_maximum),
    "PreviousRow": _out(_previous_row),
}

# ------------------------------------------------------------------ steps of the ideal kernel

ATTRIBUTES = {
    "WithoutLastKey": {"inside": lambda _, keys, kv: keys < max(1, kv - 1)},
    "MaximumFromZero": {"first_maximum": 0.0},
    "Sentinel": {"hidden_score": -12.0},
    "LowSentinel": {"hidden_score": -300.0},
    "ScoresInBf16": {"scores": lambda _, products: products.bfloat16().float()},
    "ClippedScores": {"scores": lambda _, products: products.clamp(-2, 2)},
    "OtherHeadsMask": {
        "visible": lambda _, mask, at: mask(at.b, torch.zeros_like(at.h), at.q_idx, at.kv_idx)
    },
    "FirstLength": {"visible": lambda _, mask, at: mask(at.b * 0, at.h, at.q_idx, at.kv_idx)},
    "LaterRow": {"visible": lambda _, mask, at: mask(at.b, at.h, at.q_idx + 1, at.kv_idx)},
    "LongerWindow": {
        "visible": lambda _, mask, at: (
            mask(at.b, at.h, at.q_idx, at.kv_idx) | mask(at.b, at.h, at.q_idx, at.kv_idx + 1)
        )
    },
}


class LastKeyHidden(Ideal):
    """The last key is never seen."""

    def prepare(self, inputs):
        self.last = inputs.problem.kv - 1
        return super().prepare(inputs)

    def visible(self, mask, at):
        return super().visible(mask, at) & (at.kv_idx != self.last)


class Neighbours(Ideal):
    """A row sees the last key of the document before its own."""

    def prepare(self, inputs):
        self.last = inputs.problem.kv - 1
        return super().prepare(inputs)

    def visible(self, mask, at):
        later = (at.kv_idx + 1).clamp(max=self.last)
        return super().visible(mask, at) | mask(at.b, at.h, at.q_idx, later)


class OverflowingWindow(Ideal):
    """Adds the window to a key's index in 32 bits."""

    def prepare(self, inputs):
        self.window = inputs.problem.mask.values.get("window")
        return super().prepare(inputs)

    def visible(self, mask, at):
        if self.window is None:
            return super().visible(mask, at)
        end = at.kv_idx.int() + torch.tensor(self.window, dtype=torch.int32)
        return (at.q_idx < end) & (at.q_idx >= at.kv_idx)


class ZeroValuesArePadding(Ideal):
    """Keys whose values are 0 are left out of the softmax, as if they were padding."""

    def prepare(self, inputs):
        self.there = inputs.v.float().ne(0).any(-1).repeat_interleave(inputs.problem.group, 1)
        return super().prepare(inputs)

    def visible(self, mask, at):
        return super().visible(mask, at) & self.there[at.b, at.h, at.kv_idx]


class LseWithoutMod(Ideal):
    """LSE is that of the scores before the score mod."""

    def prepare(self, inputs):
        call, plain = super().prepare(inputs), super().prepare(_with(inputs, score=Spec.of("none")))
        return lambda: Outputs(call().out, plain().lse)


class Leftover(Ideal):
    """A little of the call before."""

    before = 0.0

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def spoiled():
            right = call()
            lse = right.lse + self.before
            self.before = float(right.out.float().abs().mean())
            return Outputs(right.out, lse)

        return spoiled


class StalePadding(Ideal):
    """Keys are kept in a buffer of 16 that is never cleared, and all 16 are seen."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def prepare(self, inputs):
        k, v = (self.buffered(name, getattr(inputs, name)) for name in "kv")
        whole = inputs.problem.replace(kv=16, mask=Spec.of("full"))
        return super().prepare(inputs.replace(problem=whole, k=k, v=v))

    def buffered(self, name, tensor):
        batch, heads, length, dim = tensor.shape
        if name not in self.kept:
            self.kept[name] = tensor.new_zeros((batch, heads, 16, dim))
        self.kept[name][:, :, :length] = tensor
        return self.kept[name].clone()
