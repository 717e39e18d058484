"""Any function in the convention of torch's ``F.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.mods import library
from attncheck.subjects.conventions.arguments import (
    SINKS,
    Argument,
    Arguments,
    Asked,
    Made,
    needed,
    offered,
    spare,
)
from attncheck.subjects.conventions.calling import Calling, convention_of
from attncheck.subjects.conventions.diagonals import band, window
from attncheck.subjects.conventions.layouts import bhsd
from attncheck.subjects.sdpa import attention_mask

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["KEYWORDS", "SDPA"]

KEYWORDS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
"""What the convention has besides query, key and value, with torch's meanings."""

_ALIASES = {
    "attn_mask": ("mask",),
    "is_causal": ("causal",),
    "scale": ("sm_scale", "softmax_scale"),
}
# torch's own gives no LSE.
_LSE = {"return_lse": ("return_lse", "return_softmax_lse")}
_SINKS = {"sinks": SINKS}
_OWN = {"attn_mask", "mask", "is_causal", "enable_gqa", "sm_scale"}


def arguments(asked: Asked) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none.

    * ``is_causal`` is passed for the causal mask, aligned top-left as in torch; every other mask is
      a boolean ``attn_mask`` (True: seen) that broadcasts to the scores;
    * ``scale`` is left out where it is 1/√head_dim, so that its default is examined too;
    * ``enable_gqa`` is passed where there are fewer key than query heads.
    """
    problem = asked.problem
    if problem.score != library.NONE:
        return "the sdpa convention has no score mod"
    causal = _is_causal(problem, bottom_right=asked.bottom_right)
    flagged = causal and "is_causal" in asked.able
    mask = spare(None) if flagged or problem.mask == library.FULL else _written_out(problem)
    grouped = problem.group > 1
    wanted = {
        "enable_gqa": needed(value=True) if grouped else offered(value=False),
        "scale": asked.scale(),
        "attn_mask": mask,
        "dropout_p": offered(0.0),
        "is_causal": offered(flagged),
        "return_lse": asked.lse_flag(),
        "sinks": asked.sinks(),
    }
    if causal and mask.when == "needed" and "attn_mask" not in asked.able:
        # What else it lacks is said first.
        lacks = [n for n in ("enable_gqa", "scale", "sinks") if wanted[n].when == "needed"]
        lacks = [name for name in lacks if name not in asked.able]
        return f"takes no {lacks[0]}" if lacks else "takes no attn_mask or is_causal"
    return wanted


def _is_causal(problem: Problem, *, bottom_right: bool) -> bool:
    """Whether the mask is the one of ``is_causal``."""
    seen = band(problem.mask, problem.dimensions)
    lengths = [(problem.query, problem.kv)]
    return seen is not None and window(seen, lengths, bottom_right=bottom_right) == (-1, 0)


def _written_out(problem: Problem) -> Argument:
    return needed(
        Made(
            make=lambda inputs: attention_mask(problem, str(inputs.device)),
            text="mask",
            what="attn_mask",
            size=problem.query * problem.kv,
        )
    )


def _claims(names: frozenset[str], dotted: str) -> bool:
    del dotted
    return bool(names & _OWN)


CALLING = Calling(
    name="sdpa",
    summary="a function of query, key, value, called like F.scaled_dot_product_attention",
    spellings={name: (name, *_ALIASES.get(name, ())) for name in KEYWORDS} | _LSE | _SINKS,
    arguments=arguments,
    layout=bhsd,
    by_name=frozenset(_LSE | _SINKS),
    claims=_claims,
)

SDPA = convention_of(CALLING)
