"""Faults of where a backward reads: strides, columns, and heads that share a key head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.backward import summed
from attncheck.hypotheses.gradients import slip
from attncheck.hypotheses.model import Variant
from attncheck.hypotheses.reading import contiguous, read_as, wider

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.backward import Backward
    from attncheck.outputs import Outputs


@slip("dout-strides", "dO is read with other strides than its own", order=1)
def _strides(of: Backward) -> Iterator[Outputs]:
    dout = of.given.inputs.dout
    assert dout is not None, "asked of a backward"
    _, h, i, d = dout.shape
    for stride in (contiguous(dout.shape), (h * i * d, d, h * d, 1)):
        if stride != dout.stride():
            for found in read_as(dout, stride):
                yield from _of_dout(of, found.double())


def _of_dout(of: Backward, dout: Tensor) -> Iterator[Outputs]:
    """With another dO, and the delta of it, or the right one."""
    for delta in ((dout * of.given.parts.out).sum(-1), of.delta):
        yield of.gradients(dout=dout, dp=dout @ of.given.v.mT, delta=delta)


@slip(
    "backward-columns",
    "the backward reads as many columns of V and dO as q has, not as they have",
    lambda problem: problem.head_dim != problem.value_dim,
)
def _columns(of: Backward) -> Iterator[Variant]:
    inputs, problem = of.given.inputs, of.given.problem
    assert inputs.dout is not None, "asked of a backward"
    if inputs.descale is not None:
        return
    own, most = problem.value_dim, problem.head_dim
    # Of a tile that is as wide as a power of two no more than that.
    for columns in dict.fromkeys((most, min(most, 1 << (own - 1).bit_length()))):
        both = (wider(x, 3, columns) for x in (inputs.dout, inputs.v))
        for read in zip(*both, strict=False):
            dout, v = (x.double() for x in read)
            dp = dout @ of.given.by_query_head(v).mT
            parameters = {"columns": columns}
            yield Variant(outputs=of.gradients(dp=dp), parameters=parameters)
            if columns < own:
                there = torch.nn.functional.pad(dout, (0, own - columns))
                delta = (there * of.given.parts.out).sum(-1)
                fewer = of.gradients(dp=dp, dout=there, delta=delta)
                yield Variant(outputs=fewer, parameters=parameters)


@slip(
    "group-other-heads",
    "dK and dV of a key head are summed over other query heads than those that share it",
    lambda problem: problem.kv_heads > 1,
)
def _group(of: Backward) -> Iterator[Variant]:
    given, problem = of.given, of.given.problem
    p, exact = of.weights(), of.gradients()
    dx = p * (of.dp - (of.delta - of.dlse)[..., None]) * of.slopes
    each = {"dk": dx.mT @ given.q * given.scale, "dv": p.mT @ of.dout}
    head = torch.arange(problem.kv_heads)[:, None]
    member = torch.arange(problem.group)
    for name, heads in {
        "by the number of key heads": head * problem.kv_heads + member,
        "interleaved": member * problem.kv_heads + head,
        "the first": member + 0 * head,
        "the next": (head + 1) * problem.group + member,
        "as key heads": head + 0 * member,
    }.items():
        of_heads = (heads % problem.heads).flatten()
        sums = {n: summed(x[:, of_heads], problem.group) for n, x in each.items()}
        yield Variant(outputs=replace(exact, **sums), parameters={"heads": name})
        met = _of_other_heads(of, of_heads)
        yield Variant(outputs=replace(exact, **met), parameters={"heads": name})


def _of_other_heads(of: Backward, heads: Tensor) -> dict[str, Tensor]:
    """DK and dV of each key head with rows of ``heads``: what they give with its own keys.

    Their LSE and delta are of keys that they have seen: these weights are no softmax.
    """
    given, index = of.given, heads.view(1, -1, 1, 1)
    q, dout = given.q[:, heads], of.dout[:, heads]
    x = q @ given.k.mT * given.scale
    seen = given.visible(given.mask, h=index)
    lse = given.parts.lse[:, heads]
    p = of.weights(s=given.modified(x, h=index), seen=seen, lse=lse)
    off = (of.delta - of.dlse)[:, heads]
    dx = p * (dout @ given.v.mT - off[..., None]) * of.slopes_at(x, index)
    dx = torch.where(p == 0, 0.0, dx)
    sums = {"dk": dx.mT @ q * given.scale, "dv": p.mT @ dout}
    return {name: summed(each, given.problem.group) for name, each in sums.items()}
