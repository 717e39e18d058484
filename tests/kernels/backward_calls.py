"""Calls of FlashAttention-2's backward, and helpers shared by the tests of all backwards."""

import functools
import math
from dataclasses import replace

import torch
from tests.kernels.gradient_reference import worst as worst_by_name

from attncheck.core.mod_spec import Dimensions
from attncheck.mods import masks
from attncheck.mods.block_mask import block_mask, list_visits
from attncheck.mods.trace import trace_derivative, trace_mask, trace_score
from attncheck.verify.environment import prepare

if not torch.cuda.is_available():
    prepare("cpu")

from attncheck.kernels.flash2_backward import flash2_backward
from attncheck.kernels.flash2_forward import flash2_forward
from attncheck.kernels.launch import Launch, VisitList
from attncheck.mods.to_triton import to_triton

NAMES = ("dq", "dk", "dv", "dsink", "dcaptured")
SMALL = Launch(block_query=32, block_kv=32)


@functools.cache
def mods(mask, score):
    """The TritonMods of a mask, a score mod and its slope; None for what is None."""
    return {
        "mask": mask and to_triton(trace_mask(mask)),
        "score": score and to_triton(trace_score(score.mod)),
        "slope": score and to_triton(trace_derivative(score.mod)),
    }


def visit_lists(question, launch=SMALL) -> dict[str, VisitList]:
    """The visible tiles, listed by rows (``tiles``) and by keys (``by_keys``)."""
    batch, heads, query, _ = question.q.shape
    blocks = block_mask(
        question.mask,
        Dimensions(batch=batch, heads=heads, query=query, kv=question.k.shape[2]),
        block_query=launch.block_query,
        block_kv=launch.block_kv,
    )
    by_keys = VisitList(*list_visits(blocks.transposed()))
    return {"tiles": VisitList(*list_visits(blocks)), "by_keys": by_keys}


def wrong_list(fault: str, right: VisitList) -> VisitList:
    """Plant a fault in a list that shows in three blocks of rows under a causal mask."""
    runs, counts = right.runs.clone(), right.counts.clone()
    if fault == "last run dropped":
        counts[..., -1] -= 1
    elif fault == "last tile short":
        runs[..., -1, 0, 1] -= 1
    elif fault == "first run dropped":
        runs[:, :, 1, 0] = runs[:, :, 1, 1]
    elif fault == "one tile long":
        runs[..., 1, 0, 1] += 1  # a run of full tiles, so a partial one is taken for full
    elif fault == "partial called full":
        runs[..., 0] += ((runs[..., 0] & 3) == 1).int()
    elif fault == "one twice":
        runs[..., 2, 1, :] = torch.tensor([1, 1])
        counts[..., 2] = 2
    elif fault == "of another head":
        runs, counts = runs.roll(1, 1), counts.roll(1, 1)
    return VisitList(runs, counts)


def run(question, launch=SMALL, *, backward=flash2_backward, listed=False, **keywords):
    """Run forward and backward; return out, lse and the gradients by name."""
    common = dict(mods(question.mask, question.score)) | {
        "scale": question.scale,
        "sink": question.sink,
    }
    slope = common.pop("slope")
    precision = "tf32" if question.dtype == "tf32" else "ieee"
    launch = replace(launch, precision=precision, free=question.mask is masks.full)
    q, k, v = question.q, question.k, question.v
    out, lse = flash2_forward(q, k, v, **common, launch=launch)
    if listed:
        keywords |= visit_lists(question, launch)
    gradients = backward(
        q,
        k,
        v,
        out,
        lse,
        question.dout,
        question.dlse,
        **common,
        slope=slope,
        launch=launch,
        **keywords,
    )
    return out, lse, dict(zip(NAMES, gradients, strict=True))


def worst_of(question, results) -> float:
    """The largest error of any gradient in units of its allowance."""
    out, lse, gradients = results
    return max(worst_by_name(gradients, question, out, lse).values())


def worst(question, launch=SMALL, **keywords) -> float:
    return worst_of(question, run(question, launch, **keywords))


def same(one, other) -> bool:
    """Whether all gradients of two runs are bitwise equal."""
    gradients, others = one[2], other[2]
    return gradients.keys() == others.keys() and all(
        others[name] is None if gradient is None else torch.equal(gradient, others[name])
        for name, gradient in gradients.items()
    )


def scattered(x: torch.Tensor) -> torch.Tensor:
    """A view of the same numbers in which no two are adjacent in memory."""
    wide = torch.full((*x.shape[:2], x.shape[3], 2 * x.shape[2]), math.nan, dtype=x.dtype)
    view = wide.mT[:, :, ::2]
    view.copy_(x)
    return view
