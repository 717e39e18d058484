"""torch's FlexAttention, given the original mask and score mod."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention as flex

from attncheck.mods import library
from attncheck.mods.leaves import captured_tensors
from attncheck.outputs import Outputs
from attncheck.source_files import brief
from attncheck.subjects.contract import Call, Refused, Subject, with_full_tanh
from attncheck.subjects.matmul_precision import Products, fp32_products
from attncheck.subjects.memory import too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.nn.attention.flex_attention import BlockMask

    from attncheck.inputs import Inputs
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.mods.signatures import ScoreMod
    from attncheck.problem import Problem

__all__ = ["Flex", "block_mask", "score_mod", "uncompiled"]

_SMALLEST_GPU_DIM = 16  # tl.dot's smallest
_COMPILED_AT_A_TIME = 64
_FP32_BYTES = 4
# What torch 2.11 says on an H200, of shapes as ordinary as 65 queries with grouped heads.
_NO_TILES = ("NoValidChoicesError", "out of resource")
# And of a score mod that reads one tensor twice.
_READ_TWICE = "multiple indexing operations on the same tensor"


class Flex(Subject):
    """``flex_attention`` with a block mask made outside the call; LSE is the natural logarithm.

    Compiled on CUDA; eager on the CPU, where a compiled one would need a C++ compiler. Rows that
    see no key give 0 and −∞. Gradients are autograd's, on CUDA: torch has none on the CPU. Those of
    what a score mod reads are added up in fp32 by atomic additions.
    """

    name = "flex"
    summary = "torch's flex_attention with the original mods: compiled on CUDA, eager on the CPU"
    backward = True
    captured = True

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes every mask and score mod; wants head dimensions of at least 16 on CUDA."""
        if problem.formats.scaled:
            return "takes no fp8 inputs with descales"
        if device == "cpu":
            if problem.dtype == "tf32":
                return "the CPU has no tf32 products"
            if problem.backward:
                return "torch: FlexAttention does not support backward on CPU"
            pairs = problem.batch * problem.heads * problem.query * problem.kv
            return too_large("scores and weights in fp32", pairs * 8, device)
        if min(problem.head_dim, problem.value_dim) < _SMALLEST_GPU_DIM:
            return (
                f"head_dim={problem.head_dim} value_dim={problem.value_dim}: "
                f"compiled flex_attention needs at least {_SMALLEST_GPU_DIM}"
            )
        return None

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """With the full tanh that torch calls; eager it divides P before it rounds it."""
        assumed = with_full_tanh(super().arithmetic(problem, device), problem)
        return replace(assumed, normalised_weights=device == "cpu")

    def prepare(self, inputs: Inputs) -> Call:
        """Make the block mask, and compile on CUDA, which takes seconds."""
        problem, device = inputs.problem, inputs.q.device
        score = None if problem.score == library.NONE else score_mod(problem, str(device))
        read = captured_tensors(score, device) if score and problem.dcaptured else ()
        if any(tensor.itemsize < _FP32_BYTES for tensor in read):
            raise Refused("torch rounds the gradient of a 16-bit tensor to 16 bits")
        blocks = None if problem.mask == library.FULL else block_mask(problem, str(device))
        structure = problem.replace(seed=0, distribution="normal")
        function = _eager if device.type == "cpu" else _compiled(structure)
        products: Products = "tf32" if problem.dtype == "tf32" else "ieee"
        tensors = (inputs.q, inputs.k, inputs.v)
        followed = tuple(tensor.detach().requires_grad_(problem.backward) for tensor in tensors)

        def call() -> Outputs:
            with (
                torch.set_grad_enabled(problem.backward),
                _followed(read),
                fp32_products(products),
            ):
                out, lse = function(*followed, score, blocks, problem.scale)
                gradients = _gradients(out, lse, (*followed, *read), inputs)
            found = Outputs(out.detach(), None if lse is None else lse.detach(), *gradients[:3])
            return replace(found, dcaptured=_in_a_row(gradients[3:])) if read else found

        if device.type != "cpu":
            _compile_now(call)
        return call


def _gradients(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    followed: tuple[torch.Tensor, ...],
    inputs: Inputs,
) -> tuple[torch.Tensor, ...]:
    """Of what was followed, q, k and v first; none where none are asked for."""
    if inputs.dout is None:
        return ()
    results, gradients = [out], [inputs.dout]
    if inputs.dlse is not None:
        assert lse is not None, "it is asked for"
        results, gradients = [out, lse], [inputs.dout, inputs.dlse]
    return torch.autograd.grad(results, followed, gradients)


@contextlib.contextmanager
def _followed(read: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, gradients of ``read``, the very tensors that a mod captures, are asked for."""
    alone = [tensor for tensor in read if not tensor.requires_grad]
    try:
        for tensor in alone:
            tensor.requires_grad_()
        yield
    finally:
        for tensor in alone:
            tensor.requires_grad_(False)  # noqa: FBT003  (torch's own has no name in its stubs)


def _in_a_row(gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Of all numbers, fp32."""
    return torch.cat([one.float().flatten() for one in gradients])


def score_mod(problem: Problem, device: str) -> ScoreMod:
    """The Problem's, with scores of the dtype that it gets: flex would keep a float64 table's."""
    mod = problem.score_mod(device)

    def of_its_dtype(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return mod(score, b, h, q, kv).to(score.dtype)

    return of_its_dtype


def block_mask(problem: Problem, device: str) -> BlockMask:
    """The Problem's mask as a BlockMask, for one sequence or head where all see the same keys."""
    mask = problem.mask_mod(device)
    b = torch.arange(problem.batch, device=device).view(-1, 1)
    h = torch.arange(problem.heads, device=device).view(1, -1)
    first = torch.zeros((1, 1), dtype=torch.int64, device=device)
    # Broadcasting tells whether the mask reads b or h: only then does that length come out.
    sequences, heads = (mask(b, h, first, first) & torch.ones_like(first, dtype=torch.bool)).shape
    return flex.create_block_mask(mask, sequences, heads, problem.query, problem.kv, device=device)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: ScoreMod | None,
    blocks: BlockMask | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, aux = flex.flex_attention(
        q,
        k,
        v,
        score_mod=score,
        block_mask=blocks,
        scale=scale,
        enable_gqa=True,
        return_aux=flex.AuxRequest(lse=True),
    )
    return out, aux.lse


def _eager(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """flex_attention's own dense formula."""
    with uncompiled():
        return _attention(*arguments)


def uncompiled() -> AbstractContextManager[object]:
    """Within, flex_attention that is not compiled does no tracing, and does not warn of it."""
    return mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", new=True)


@functools.lru_cache(maxsize=_COMPILED_AT_A_TIME)
def _compiled(structure: Problem) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """A compiled function for Problems that differ from ``structure`` in their numbers only.

    Each has a code object of its own: torch counts recompilations for a code object, and a ninth
    structure would exceed its limit. ``fullgraph`` makes anything that cannot be compiled an
    error, where torch would otherwise run the eager formula in silence.
    """
    code = _attention.__code__.replace(co_name=f"flex_attention_{structure.id}")
    function = types.FunctionType(code, _attention.__globals__)
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = torch.compile(
        function, fullgraph=True, dynamic=False
    )
    return compiled


def _compile_now(call: Call) -> None:
    """One call, so that compiling is no part of a timed one; its advice on speed is not for us.

    Raises Refused where torch's compiler finds no tiles that fit the GPU, or does not add up what a
    score mod reads twice.
    """
    from torch._inductor.exc import InductorError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except InductorError as error:
            if _READ_TWICE in str(error):
                raise Refused("torch adds no gradients up of a tensor read twice") from error
            if any(said in str(error) for said in _NO_TILES):
                raise Refused(f"torch's compiler finds no tiles for it: {brief(error)}") from error
            raise
