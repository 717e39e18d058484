"""Any function in the convention of flash-attn's ``flash_attn_varlen_func``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.subjects.conventions.arguments import Arguments, Asked, Made, needed, offered
from attncheck.subjects.conventions.calling import Calling, convention_of
from attncheck.subjects.conventions.diagonals import band
from attncheck.subjects.conventions.packing import Packed, packed, packed_layout
from attncheck.subjects.conventions.windowed import EMPTY_LSE, LSE_FLAGS, SPELLINGS, windowed

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["VARLEN"]

_SIDES = ("q", "k")


def arguments(asked: Asked) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none."""
    problem = asked.problem
    found = packed(problem)
    seen = band(found.rest, problem.dimensions) if found else None
    if found is None or seen is None:
        return f"the mask {problem.mask} is no band in each of some sequences"
    wanted = windowed(asked, seen, found.lengths(), found.leads())
    if isinstance(wanted, str):
        return wanted
    places: Arguments = {}
    for side, name in enumerate(_SIDES):
        longest = max(lengths[side] for lengths in found.lengths())
        places[f"cu_seqlens_{name}"] = needed(_starts(found, side))
        places[f"max_seqlen_{name}"] = offered(longest)
    return places | wanted | _descales(problem, found)


def _starts(found: Packed, side: int) -> Made:
    """int32 ``(parts + 1,)``."""
    starts = found.starts(side)

    def make(inputs: Inputs) -> torch.Tensor:
        return torch.tensor(starts, dtype=torch.int32, device=inputs.device)

    return Made(make=make, text=f"torch.tensor({starts}, dtype=torch.int32, device=q.device)")


def _descales(problem: Problem, found: Packed) -> Arguments:
    """fp32 ``(parts, kv_heads)`` each: a part has those of its sequence."""
    if not problem.formats.scaled:
        return {}
    sequences = [b for b, _, _ in found.places()]

    def made(name: str) -> Made:
        def make(inputs: Inputs) -> torch.Tensor:
            scale: torch.Tensor = getattr(inputs.descale, name)
            return scale[sequences]

        return Made(make=make, text=f"{name}_descale[{sequences}]")

    return {f"{name}_descale": needed(made(name)) for name in "qkv"}


def _claims(names: frozenset[str], dotted: str) -> bool:
    return any(name.startswith("cu_seqlens") for name in names) or "varlen" in dotted


VARLEN = convention_of(
    Calling(
        name="varlen",
        summary="a function of q, k, v (total, heads, dim) and cu_seqlens_q, cu_seqlens_k, called "
        "like flash_attn_varlen_func",
        spellings={
            f"{what}_{side}": (f"{what}_{side}",)
            for what in ("cu_seqlens", "max_seqlen")
            for side in _SIDES
        }
        | SPELLINGS,
        arguments=arguments,
        layout=packed_layout,
        claims=_claims,
        by_name=LSE_FLAGS | {"sinks"},
        musts=("cu_seqlens_q", "cu_seqlens_k"),
        most=4,
        bottom_right=True,
        empty_lse=EMPTY_LSE,
    )
)
