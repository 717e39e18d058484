"""Any function in the convention of flash-attn's ``flash_attn_varlen_func``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.subjects.conventions.arguments import Arguments, Asked, Made, needed, offered
from attncheck.subjects.conventions.calling import Calling, convention_of
from attncheck.subjects.conventions.packing import Packed, packed, packed_layout
from attncheck.subjects.conventions.windowed import EMPTY_LSE, LSE_FLAGS, SPELLINGS, windowed

if TYPE_CHECKING:
    from attncheck.inputs import Inputs

__all__ = ["VARLEN"]

_SIDES = ("q", "k")


def arguments(asked: Asked) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none."""
    found = packed(asked.problem)
    if found is None:
        return f"the mask {asked.problem.mask} is no band in each of some sequences"
    wanted = windowed(asked, found.band, found.lengths())
    if isinstance(wanted, str):
        return wanted
    places: Arguments = {}
    for side, name in enumerate(_SIDES):
        longest = max(lengths[side] for lengths in found.lengths())
        places[f"cu_seqlens_{name}"] = needed(_starts(found, side))
        places[f"max_seqlen_{name}"] = offered(longest)
    return places | wanted


def _starts(found: Packed, side: int) -> Made:
    """int32 ``(parts + 1,)``."""
    starts = found.starts(side)

    def make(inputs: Inputs) -> torch.Tensor:
        return torch.tensor(starts, dtype=torch.int32, device=inputs.device)

    return Made(make=make, text=f"torch.tensor({starts}, dtype=torch.int32, device=q.device)")


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
        by_name=LSE_FLAGS,
        musts=("cu_seqlens_q", "cu_seqlens_k"),
        most=4,
        bottom_right=True,
        empty_lse=EMPTY_LSE,
    )
)
