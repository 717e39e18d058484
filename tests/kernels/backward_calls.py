"""Calls of FlashAttention-2's backward, and what tests of every backward ask."""

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
    """The TritonMods of a mask and a score mod; None of none."""
    return {
        "mask": mask and to_triton(trace_mask(mask)),
        "score": score and to_triton(trace_score(score.mod)),
        "slope": score and to_triton(trace_derivative(score.mod)),
    }


def lists(asked, launch=SMALL) -> dict[str, VisitList]:
    """Both lists of the tiles that are not hidden."""
    batch, heads, query, _ = asked.q.shape
    found = block_mask(
        asked.mask,
        Dimensions(batch=batch, heads=heads, query=query, kv=asked.k.shape[2]),
        block_query=launch.block_query,
        block_kv=launch.block_kv,
    )
    by_keys = VisitList(*list_visits(found.transposed()))
    return {"tiles": VisitList(*list_visits(found)), "by_keys": by_keys}


def wrong_list(fault: str, right: VisitList) -> VisitList:
    """A list with one fault: of three blocks of rows under a causal mask each is noticed."""
    runs, counts = right.runs.clone(), right.counts.clone()
    if fault == "last run dropped":
        counts[..., -1] -= 1
    elif fault == "last tile short":
        runs[..., -1, 0, 1] -= 1
    elif fault == "first run dropped":
        runs[:, :, 1, 0] = runs[:, :, 1, 1]
    elif fault == "one tile long":
        runs[..., 1, 0, 1] += 1  # full, so that the next is taken for full as well
    elif fault == "partial called full":
        runs[..., 0] += ((runs[..., 0] & 3) == 1).int()
    elif fault == "one twice":
        runs[..., 2, 1, :] = torch.tensor([1, 1])
        counts[..., 2] = 2
    elif fault == "of another head":
        runs, counts = runs.roll(1, 1), counts.roll(1, 1)
    return VisitList(runs, counts)


def run(asked, launch=SMALL, *, backward=flash2_backward, listed=False, **keywords):
    """out, lse and the gradients by name."""
    of_both = dict(mods(asked.mask, asked.score)) | {"scale": asked.scale, "sink": asked.sink}
    slope = of_both.pop("slope")
    precision = "tf32" if asked.dtype == "tf32" else "ieee"
    launch = replace(launch, precision=precision, free=asked.mask is masks.full)
    q, k, v = asked.q, asked.k, asked.v
    out, lse = flash2_forward(q, k, v, **of_both, launch=launch)
    if listed:
        keywords |= lists(asked, launch)
    found = backward(
        q, k, v, out, lse, asked.dout, asked.dlse, **of_both, slope=slope, launch=launch, **keywords
    )
    return out, lse, dict(zip(NAMES, found, strict=True))


def worst_of(asked, found) -> float:
    """The largest error of any gradient over what is allowed."""
    out, lse, gradients = found
    return max(worst_by_name(gradients, asked, out, lse).values())


def worst(asked, launch=SMALL, **keywords) -> float:
    return worst_of(asked, run(asked, launch, **keywords))


def same(one, other) -> bool:
    """Whether two runs gave the same bits of every gradient."""
    gradients, others = one[2], other[2]
    return gradients.keys() == others.keys() and all(
        others[name] is None if mine is None else torch.equal(mine, others[name])
        for name, mine in gradients.items()
    )


def scattered(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, no two of them beside each other."""
    wide = torch.full((*x.shape[:2], x.shape[3], 2 * x.shape[2]), math.nan, dtype=x.dtype)
    view = wide.mT[:, :, ::2]
    view.copy_(x)
    return view
