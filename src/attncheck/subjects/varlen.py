"""Our Triton kernels of packed documents as a subject, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attncheck.inputs import Descale
from attncheck.mods import library
from attncheck.outputs import Outputs
from attncheck.subjects.conventions.diagonals import band, window
from attncheck.subjects.conventions.gradients import laid
from attncheck.subjects.conventions.packing import packed, packed_layout
from attncheck.subjects.flash import BY_KEYS, BY_ROWS, Flash, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.kernels.launch import Launch
    from attncheck.kernels.varlen_forward import Causal
    from attncheck.mods.to_triton import TritonMod
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Call, Tiling
    from attncheck.subjects.conventions.layouts import Layout
    from attncheck.subjects.conventions.packing import Packed

    Tensors = tuple[torch.Tensor, ...]
    Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]

__all__ = ["Varlen"]

_MOST_HEADS = 65_535
_CAUSAL = (-1, 0)


class Varlen(Flash):
    """FlashAttention-2 of documents one behind the other, without padding.

    A batch is its sequences as documents, ``padding`` is keys of other lengths, ``document`` and
    ``documents`` are documents within each sequence. What else a mask with documents hides is left
    to the kernel's causal flag where that is it, aligned bottom-right or top-left, else to a traced
    mask. A Problem with a backward has both passes in one call.
    """

    name = "triton-varlen"
    summary = "our FlashAttention-2 of packed documents in Triton"
    sinks = True
    backward = True

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
        return super().launch(_alone(problem), device)

    def gradient_launches(self, problem: Problem, device: str) -> tuple[Launch, Launch]:
        """How dQ is launched, and how dK and dV are."""
        rows, keys = (launch(_alone(problem), device, tiles) for tiles in (BY_ROWS, BY_KEYS))
        return rows, keys

    def backward_launcher(self) -> Callable[..., Gradients]:
        """``kernels.varlen_backward.varlen_backward``."""
        from attncheck.kernels import varlen_backward

        return varlen_backward.varlen_backward

    def prepare(self, inputs: Inputs) -> Call:
        """Pack the documents, trace the mods, and bind the launches."""
        problem, device = inputs.problem, inputs.device.type
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)
        layout, chosen = packed_layout(problem), self.launch(problem, device)
        tensors = layout.queries(inputs.q), layout.keys(inputs.k), layout.keys(inputs.v)
        given = {"scale": problem.scale, "sink": inputs.sink}
        given |= _documents(inputs) | _mods(problem, device)
        forward = partial(
            self.forward(),
            *tensors,
            launch=chosen,
            programs=_programs(inputs, chosen),
            descale=_descale(inputs),
            out_dtype=problem.formats.output.torch_dtype,
            **given,
        )
        backward = self._prepared_backward(inputs, layout, tensors, given)

        def call() -> Outputs:
            out, lse = forward()
            found = Outputs(layout.out[tuple(out.shape)](out), layout.lse[tuple(lse.shape)](lse))
            return found if backward is None else backward(found, out, lse)

        return call

    def _prepared_backward(
        self, inputs: Inputs, layout: Layout, tensors: Tensors, given: dict[str, Any]
    ) -> Callable[[Outputs, torch.Tensor, torch.Tensor], Outputs] | None:
        """What adds the gradients to outputs, from the packed out and LSE; None for none."""
        if inputs.dout is None:
            return None
        problem, device = inputs.problem, inputs.device.type
        rows, keys = self.gradient_launches(problem, device)
        backward = partial(
            self.backward_launcher(),
            launch=rows,
            launch_by_keys=keys,
            programs=_programs(inputs, rows),
            key_programs=_key_programs(inputs, keys),
            slope=_slope(problem, device),
            **given,
        )
        of_q = laid("dq", inputs.q, layout.queries)
        of_k, of_v = (laid(f"d{n}", getattr(inputs, n), layout.keys) for n in "kv")
        dout, dlse = layout.queries(inputs.dout), _packed_rows(inputs.dlse)

        def call(found: Outputs, out: torch.Tensor, lse: torch.Tensor) -> Outputs:
            dq, dk, dv, dsink = backward(*tensors, out, lse, dout, dlse)
            dq, dk, dv = of_q.back(dq), of_k.back(dk), of_v.back(dv)
            return replace(found, dq=dq, dk=dk, dv=dv, dsink=dsink)

        return call


def _packed(problem: Problem) -> Packed:
    found = packed(problem)
    assert found is not None, "asked of what it takes"
    return found


def _alone(problem: Problem) -> Problem:
    """As long, of one sequence in which nothing is hidden."""
    return problem.replace(batch=1, mask=library.FULL, score=library.NONE, dcaptured=False)


def _documents(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Where the documents are, and by which numbers the mods know them."""
    found = _packed(inputs.problem)
    of = {
        "cu_seqlens_q": found.starts(0),
        "cu_seqlens_k": found.starts(1),
        "places": found.places(),
    }
    return {
        name: torch.tensor(numbers, dtype=torch.int32, device=inputs.device)
        for name, numbers in of.items()
    }


def _programs(inputs: Inputs, launch: Launch) -> torch.Tensor:
    from attncheck.kernels.varlen_forward import program_list

    rows = [rows for rows, _ in _packed(inputs.problem).lengths()]
    return program_list(rows, launch.block_query).to(inputs.device)


def _key_programs(inputs: Inputs, launch: Launch) -> torch.Tensor:
    from attncheck.kernels.varlen_backward import key_program_list

    keys = [keys for _, keys in _packed(inputs.problem).lengths()]
    return key_program_list(keys, launch.block_kv).to(inputs.device)


def _descale(inputs: Inputs) -> Descale | None:
    """Each document's: that of its sequence."""
    if inputs.descale is None:
        return None
    b = [b for b, _, _ in _packed(inputs.problem).places()]
    return Descale(**{name: getattr(inputs.descale, name)[b] for name in "qkv"})


def _packed_rows(dlse: torch.Tensor | None) -> torch.Tensor | None:
    """``(batch, heads, query)`` → ``(heads, total)``."""
    return None if dlse is None else dlse.transpose(0, 1).flatten(1)


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


def _slope(problem: Problem, device: str) -> TritonMod | None:
    """The score mod's derivative; None without one."""
    from attncheck.mods.to_triton import to_triton
    from attncheck.subjects.traced import traced_slope

    return None if problem.score == library.NONE else to_triton(traced_slope(problem, device))


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
