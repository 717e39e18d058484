"""Our Triton forward of packed documents as a subject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attncheck.inputs import Descale
from attncheck.mods import library
from attncheck.outputs import Outputs
from attncheck.subjects.conventions.diagonals import band, window
from attncheck.subjects.conventions.packing import packed, packed_layout
from attncheck.subjects.flash import Flash

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.kernels.launch import Launch
    from attncheck.kernels.varlen_forward import Causal
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Call, Tiling
    from attncheck.subjects.conventions.packing import Packed

__all__ = ["Varlen"]

_MOST_HEADS = 65_535
_CAUSAL = (-1, 0)


class Varlen(Flash):
    """FlashAttention-2 forward of documents one behind the other, without padding.

    A batch is its sequences as documents, ``padding`` is keys of other lengths, ``document`` and
    ``documents`` are documents within each sequence. What else a mask with documents hides is left
    to the kernel's causal flag where that is it, aligned bottom-right or top-left, else to a traced
    mask.
    """

    name = "triton-varlen"
    summary = "our FlashAttention-2 forward of packed documents in Triton"
    sinks = True

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes what is documents, padding, or a band in each whole sequence."""
        found = packed(problem)
        if found is None:
            return f"the mask {problem.mask} names documents or padding more than once"
        if not found.cut and band(found.rest, problem.dimensions) is None:
            return f"the mask {problem.mask} is neither documents nor padding nor a band"
        if device == "cuda" and problem.heads > _MOST_HEADS:
            return f"heads = {problem.heads}: at most {_MOST_HEADS} on a GPU"
        return super().unsupported(problem.replace(batch=1, mask=library.FULL), device)

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """``kernels.varlen_forward.varlen_forward``."""
        from attncheck.kernels import varlen_forward

        return varlen_forward.varlen_forward

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Its tiles where they are those of a whole sequence; None where documents move them.

        A document's tiles of keys begin with its first key, wherever that is.
        """
        tiling = super().tiling(problem, device)
        found = _packed(problem)
        places = zip(found.places(), found.lengths(), strict=True)
        starts = {key for (_, _, key), lengths in places if min(lengths) > 0}
        moved = tiling is not None and any(start % tiling.block_kv for start in starts)
        return None if moved else tiling

    def launch(self, problem: Problem, device: str) -> Launch:
        """Tiles by the Problem's own lengths, so that no sequence's depend on its neighbours'."""
        alone = problem.replace(batch=1, mask=library.FULL, score=library.NONE)
        return super().launch(alone, device)

    def prepare(self, inputs: Inputs) -> Call:
        """Pack the documents, trace the mods, and bind the launch."""
        problem = inputs.problem
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(inputs.device.type)
        forward, layout = self.forward(), packed_layout(problem)
        tensors = layout.queries(inputs.q), layout.keys(inputs.k), layout.keys(inputs.v)
        chosen = self.launch(problem, inputs.device.type)
        keywords = _documents(inputs, chosen) | _mods(problem, inputs.device.type)

        def call() -> Outputs:
            out, lse = forward(
                *tensors,
                scale=problem.scale,
                launch=chosen,
                sink=inputs.sink,
                out_dtype=problem.formats.output.torch_dtype,
                **keywords,
            )
            return Outputs(layout.out[tuple(out.shape)](out), layout.lse[tuple(lse.shape)](lse))

        return call


def _packed(problem: Problem) -> Packed:
    found = packed(problem)
    assert found is not None, "asked of what it takes"
    return found


def _documents(inputs: Inputs, launch: Launch) -> dict[str, Any]:
    """Where the documents are, and whose descales they have."""
    from attncheck.kernels.varlen_forward import program_list

    found, device = _packed(inputs.problem), inputs.device
    of_queries, of_keys = (
        torch.tensor(found.starts(side), dtype=torch.int32, device=device) for side in (0, 1)
    )
    places = torch.tensor(found.places(), dtype=torch.int32, device=device)
    programs = program_list([rows for rows, _ in found.lengths()], launch.block_query)
    descale = inputs.descale
    if descale is not None:
        b = places[:, 0].long()
        descale = Descale(q=descale.q[b], k=descale.k[b], v=descale.v[b])
    return {
        "cu_seqlens_q": of_queries,
        "cu_seqlens_k": of_keys,
        "programs": programs.to(device),
        "places": places,
        "descale": descale,
    }


def _mods(problem: Problem, device: str) -> dict[str, Any]:
    """What hides keys within documents, by flag or by mask, and the score mod."""
    from attncheck.mods.to_triton import to_triton
    from attncheck.subjects.traced import traced_mask, traced_score

    found = _packed(problem)
    causal = _causal(problem, found)
    mask = score = None
    if found.rest != library.FULL and not causal:
        mask = to_triton(traced_mask(problem.replace(mask=found.rest), device))
    if problem.score != library.NONE:
        score = to_triton(traced_score(problem, device))
    return {"causal": causal, "mask": mask, "score": score}


def _causal(problem: Problem, found: Packed) -> Causal:
    """How the kernel's flag is aligned where it is what hides keys within documents."""
    seen = band(found.rest, problem.dimensions)
    if seen is None:
        return ""
    lengths, leads = found.lengths(), found.leads()
    if window(seen, lengths, bottom_right=True, leads=leads) == _CAUSAL:
        return "bottom_right"
    if window(seen, lengths, bottom_right=False, leads=leads) == _CAUSAL:
        return "top_left"
    return ""
