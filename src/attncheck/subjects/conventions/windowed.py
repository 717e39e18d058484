"""What the two conventions of flash-attn have in common: causal, window, softcap, slopes, LSE.

Names and meanings are those of flash_attn_func and flash_attn_varlen_func (flash-attn 2.8, and the
interface of its Hopper kernels): https://github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attncheck.mods.library import alibi_slopes
from attncheck.subjects.conventions.arguments import (
    SINKS,
    Arguments,
    Asked,
    Made,
    needed,
    offered,
    spare,
)
from attncheck.subjects.conventions.diagonals import Band, Lengths, offset, window

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.inputs import Inputs
    from attncheck.mods.spec import Spec
    from attncheck.problem import Problem

__all__ = ["EMPTY_LSE", "LSE_FLAGS", "SPELLINGS", "windowed"]

SPELLINGS = {
    "softmax_scale": ("softmax_scale", "scale", "sm_scale"),
    "causal": ("causal", "is_causal"),
    "window_size": ("window_size",),
    "softcap": ("softcap",),
    "alibi_slopes": ("alibi_slopes",),
    "dropout_p": ("dropout_p",),
    "q_descale": ("q_descale",),
    "k_descale": ("k_descale",),
    "v_descale": ("v_descale",),
    "sinks": SINKS,
    "return_attn_probs": ("return_lse", "return_softmax_lse", "return_attn_probs"),
}
"""By meaning, the names that functions have for it."""

LSE_FLAGS = frozenset({"return_attn_probs"})
"""Meanings that ask for LSE."""

EMPTY_LSE = (float("-inf"), float("inf"))
"""flash-attn gives +∞ where it does not split the keys (``normalize_softmax_lse``), else -∞."""

_NO_WINDOW = (-1, -1)

# Score mods in the order in which flash-attn applies them, softcap before slopes.
_SCORES = {(), ("softcap",), ("alibi",), ("softcap", "alibi")}


def windowed(
    asked: Asked,
    seen: Band | None,
    sequences: list[Lengths],
    leads: list[int] | None = None,
) -> Arguments | str:
    """Arguments for a mask that is a band in each of ``sequences``, or why there are none.

    ``leads`` are as ``diagonals.window`` has them.
    """
    problem = asked.problem
    leads = leads or [0] * len(sequences)
    edges = None
    if seen is not None:
        edges = window(seen, sequences, bottom_right=asked.bottom_right, leads=leads)
    if edges is None:
        return f"no causal flag or window_size is the mask {problem.mask} at these lengths"
    scores = list(_flat(problem.score))
    if tuple(score.name for score in scores) not in _SCORES:
        return f"neither softcap nor alibi_slopes are the score mod {problem.score}"
    mods = {score.name: score for score in scores}
    offsets = {
        offset(lengths, bottom_right=asked.bottom_right) + lead
        for lengths, lead in zip(sequences, leads, strict=True)
        if min(lengths)
    }
    if "alibi" in mods and not _slopes_fit(edges, offsets):
        return "alibi_slopes are -slope·|i + kv - query - j|: not this bias without causal"
    softcap = mods.get("softcap")
    return {
        "dropout_p": offered(0.0),
        "softmax_scale": asked.scale(),
        "softcap": needed(softcap.values["cap"]) if softcap else spare(0.0),
        "alibi_slopes": needed(_slopes(problem)) if "alibi" in mods else spare(None),
        **_descales(problem),
        **_edges(edges, asked.able),
        "sinks": asked.sinks(),
        "return_attn_probs": asked.lse_flag(),
    }


def _edges(edges: tuple[int, int], able: frozenset[str]) -> Arguments:
    """The flag where the right edge is the diagonal and there is one; else the window."""
    left, right = edges
    causal = right == 0 and "causal" in able
    if edges == _NO_WINDOW or (causal and left < 0):
        return {"causal": offered(causal), "window_size": spare(_NO_WINDOW)}
    if right == 0 and left < 0 and "window_size" not in able:
        return {"causal": needed(value=True)}  # it takes neither
    return {"causal": offered(causal), "window_size": needed(edges)}


def _flat(score: Spec) -> Iterator[Spec]:
    if score.name not in {"chain", "none"}:
        yield score
    for part in score.parts:
        yield from _flat(part)


def _slopes_fit(edges: tuple[int, int], offsets: set[int]) -> bool:
    """Whether -slope·|i + offset - j| is alibi's slope·(j - i) wherever a key is seen.

    It is for j up to i + offset, but for slope·offset: out is the same then, and LSE is not.
    """
    return edges[1] == 0 and offsets <= {0}


def _slopes(problem: Problem) -> Made:
    slopes = alibi_slopes(problem.heads)

    def make(inputs: Inputs) -> torch.Tensor:
        return torch.tensor(slopes, dtype=torch.float32, device=inputs.device)

    return Made(make=make, text=f"torch.tensor({list(slopes)}, device=q.device)")


def _descales(problem: Problem) -> Arguments:
    """fp32 ``(batch, kv_heads)`` each."""
    if not problem.formats.scaled:
        return {f"{name}_descale": spare(None) for name in "qkv"}

    def made(name: str) -> Made:
        def make(inputs: Inputs) -> Any:
            return getattr(inputs.descale, name)

        return Made(make=make, text=f"{name}_descale")

    return {f"{name}_descale": needed(made(name)) for name in "qkv"}
