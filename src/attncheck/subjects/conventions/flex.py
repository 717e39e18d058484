"""Any function in the convention of torch's ``flex_attention``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch.nn.attention.flex_attention import AuxRequest

from attncheck.mods import library
from attncheck.subjects.conventions.arguments import (
    Argument,
    Arguments,
    Asked,
    Made,
    needed,
    offered,
    spare,
)
from attncheck.subjects.conventions.calling import Calling, convention_of
from attncheck.subjects.conventions.layouts import bhsd
from attncheck.subjects.conventions.score_text import score_text
from attncheck.subjects.flex import block_mask, score_mod, uncompiled

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["FLEX"]

_SPELLINGS = {
    "score_mod": ("score_mod",),
    "block_mask": ("block_mask",),
    "mask_mod": ("mask_mod",),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "enable_gqa": ("enable_gqa",),
    "return_aux": ("return_aux",),
    "return_lse": ("return_lse",),
}

_SEES = """\
sees = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
def mask_mod(b, h, q_idx, kv_idx):
    return sees[b, h, q_idx, kv_idx]"""
_BLOCKS = (
    "torch.nn.attention.flex_attention.create_block_mask(mask_mod, *sees.shape, device=q.device)"
)
_AUX = "torch.nn.attention.flex_attention.AuxRequest(lse=True)"


def arguments(asked: Asked) -> Arguments | str:
    """The convention's arguments: every mask and every score mod can be passed.

    A ``block_mask`` is made before the call; where there is none, ``mask_mod`` is the callable.
    """
    problem = asked.problem
    plain = problem.score == library.NONE
    return {
        "score_mod": spare(None) if plain else needed(_score_mod(problem)),
        **_mask(problem, asked.able),
        "scale": asked.scale(),
        "enable_gqa": needed(value=True) if problem.group > 1 else offered(value=False),
        **_lse(asked),
    }


def _score_mod(problem: Problem) -> Made:
    setup = score_text(problem)
    return Made(
        make=lambda inputs: score_mod(problem, str(inputs.device)),
        text="score_mod" if setup else "",
        setup=setup,
    )


def _mask(problem: Problem, able: frozenset[str]) -> dict[str, Argument]:
    if problem.mask == library.FULL:
        return {"block_mask": spare(None), "mask_mod": spare(None)}
    if "block_mask" in able or "mask_mod" not in able:
        return {"block_mask": needed(_blocks(problem)), "mask_mod": spare(None)}

    def make(inputs: Inputs) -> Any:
        return problem.mask_mod(str(inputs.device))

    return {"mask_mod": needed(Made(make=make, text="mask_mod", setup=_SEES))}


def _blocks(problem: Problem) -> Made:
    return Made(
        make=lambda inputs: block_mask(problem, str(inputs.device)),
        text=_BLOCKS,
        setup=_SEES,
        what="mask, of which blocks are made,",
        size=problem.batch * problem.heads * problem.query * problem.kv,
    )


def _lse(asked: Asked) -> Arguments:
    """By ``return_aux``, since torch warns of ``return_lse``; by that one where it is alone."""
    if asked.options.returns_lse is False:
        return {"return_aux": spare(None), "return_lse": spare(value=False)}
    by_aux = "return_aux" in asked.able
    aux = Made(make=lambda _inputs: AuxRequest(lse=True), text=_AUX)
    return {
        "return_aux": offered(aux) if by_aux else spare(None),
        "return_lse": spare(value=False) if by_aux else offered(value=True),
    }


def _claims(names: frozenset[str], dotted: str) -> bool:
    del dotted
    return bool(names & {"score_mod", "block_mask", "mask_mod"})


def _within(device: str) -> AbstractContextManager[object]:
    """On a CPU torch's own function gives its dense formula, without tracing or a warning."""
    return uncompiled() if device == "cpu" else nullcontext()


FLEX = convention_of(
    Calling(
        name="flex",
        summary="a function of query, key, value with score_mod and block_mask, called like "
        "flex_attention",
        spellings=_SPELLINGS,
        arguments=arguments,
        layout=bhsd,
        claims=_claims,
        by_name=frozenset({"return_aux", "return_lse"}),
        within=_within,
    )
)
