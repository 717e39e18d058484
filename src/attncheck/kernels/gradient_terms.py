"""Gradients besides those of q, k and v: row deltas, the sink, tensors that a score mod reads.

For captured tensors a function is printed for a list of reads, as score mods are. A kernel takes it
as a ``tl.constexpr`` argument. It calls the slopes and places of the reads by name, so that Triton
sees the source of each.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.

from __future__ import annotations

import hashlib
import linecache
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from attncheck.kernels.launch import ALIGNMENT, aligned, block_dim
from attncheck.kernels.tile import loaded, loaded_rows, power, score_gradients
from attncheck.mods.to_triton import TritonMod

_ROWS = 1024  # Rows that a program of ``_sink_gradient`` adds up at a time.


def row_deltas(
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    block: int,
    warps: int = 4,
) -> torch.Tensor:
    """Return the delta that is subtracted from dP in each row: Σ dO·O − dLSE (Dao 2023, Alg. 2).

    LSE's gradient with respect to a score is the weight P, so that dLSE joins dP as −Σ dO·O does.

    Args:
        out: ``(batch, heads, query, value_dim)``, any strides.
        dout: Like out; strides may be 0.
        lse: fp32 ``(batch, heads, query)``, contiguous.
        dlse: The gradient of LSE, like lse; None for 0.
        block: Rows per program, a power of two.

    Returns:
        fp32 ``(batch, heads, query)``; 0 for a row whose LSE is −∞, whatever its gradients are.
    """
    batch, heads, query, value_dim = out.shape
    delta = torch.empty_like(lse)
    out, dout, strides, unit = in_steps(out, dout)
    # fmt: off
    _row_deltas[triton.cdiv(query, block), batch * heads](
        out, dout, lse, delta, () if dlse is None else (dlse,), *strides, heads, query, value_dim,
        DLSE=dlse is not None, AHEAD=unit, BLOCK_Q=block,
        BLOCK_V=block_dim(value_dim, out.dtype), num_warps=warps,
    )
    # fmt: on
    return delta


def in_steps(
    out: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], int]:
    """Return O and dO, copied if they must be, their strides, and the unit of the strides.

    The unit is ``ALIGNMENT`` bytes where a row is a multiple of that, so that loads are that wide.
    It depends on the shape alone, since the width of loads may decide the order of a row's sum.
    """
    unit = ALIGNMENT // out.element_size()
    if out.shape[3] % unit:
        return out, dout, (*out.stride(), *dout.stride()), 1
    out, dout = aligned(out), aligned(dout)
    strides = (step // unit for x in (out, dout) for step in x.stride())
    return out, dout, tuple(strides), unit


def sink_gradient(sink: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return Σ P·(0 − delta) over each head's rows; the sink is a key of value 0 and weight P.

    Args:
        sink: fp32 ``(heads,)``, natural.
        lse: fp32 ``(batch, heads, query)``, contiguous.
        delta: From ``row_deltas``.

    Returns:
        fp32 ``(heads,)``.
    """
    batch, heads, query = lse.shape
    dsink = torch.empty_like(sink)
    _sink_gradient[(heads,)](sink, lse, delta, dsink, batch, heads, query, BLOCK=_ROWS)
    return dsink


# Specialised on strides and alignment, loads would differ in width, and so row sums in order: the
# same numbers in another memory layout would give other bits.
_STRIDES = tuple(
    f"{name}_{axis}" for name in ("out", "dout") for axis in ("batch", "head", "row", "col")
)
_POINTERS = ("out_ptr", "dout_ptr", "lse_ptr", "delta_ptr", "dlse")


# Parameters are easier to read in lines than in a column.
# fmt: off
@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_POINTERS)
def _row_deltas(
    out_ptr, dout_ptr, lse_ptr, delta_ptr, dlse, out_batch, out_head, out_row, out_col, dout_batch,
    dout_head, dout_row, dout_col, heads, query, value_dim, DLSE: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_V: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    cols = tl.arange(0, BLOCK_V)
    b64 = (tl.program_id(1) // heads).to(tl.int64)
    h64 = (tl.program_id(1) % heads).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * query
    out_ptr += (b64 * out_batch + h64 * out_head) * AHEAD
    dout_ptr += (b64 * dout_batch + h64 * dout_head) * AHEAD
    if AHEAD > 1:
        out_ptr = tl.multiple_of(out_ptr, 16)
        dout_ptr = tl.multiple_of(dout_ptr, 16)
        out_col = 1
        dout_col = 1
    out = loaded(out_ptr, rows, cols, out_row * AHEAD, out_col, query, value_dim).to(tl.float32)
    dout = loaded(dout_ptr, rows, cols, dout_row * AHEAD, dout_col, query, value_dim).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if DLSE:
        delta -= loaded_rows(dlse[0] + first, rows, query)
    lse = loaded_rows(lse_ptr + first, rows, query)
    delta = tl.where(lse == float("-inf"), 0.0, delta)
    tl.store(delta_ptr + first + rows, delta, mask=rows < query)


@triton.jit
def _sink_gradient(
    sink_ptr, lse_ptr, delta_ptr, dsink_ptr, batch, heads, query, BLOCK: tl.constexpr,
):
    h = tl.program_id(0)
    sink = tl.load(sink_ptr + h)
    total = tl.zeros([BLOCK], tl.float32)
    for b in range(batch):
        first = (b * heads + h).to(tl.int64) * query
        for start in range(0, query, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            lse = tl.load(lse_ptr + first + rows, mask=rows < query, other=float("inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse)
            total -= power(sink - lse, False) * loaded_rows(delta_ptr + first, rows, query)
    tl.store(dsink_ptr + h, tl.sum(total, 0))


# fmt: on


@dataclass(frozen=True, slots=True, eq=False)
class CapturedReads:
    """The reads of a score mod from float tensors, from ``mods.captured_reads.trace_reads``."""

    # Per read: the score mod's derivative with respect to the number read; the index of the number
    # in its tensor; and the index of that tensor's first number among those of all tensors.
    reads: tuple[tuple[TritonMod, TritonMod, int], ...]
    numbers: int  # count over all tensors

    def function(self) -> Any:
        """Return the ``@triton.jit`` function that adds a tile's terms to the gradients.

        Its arguments ``(x, p, dp, delta, b, h, rows, keys, arguments)`` are those of
        ``score_gradients``. Reads of the same structure get the same function object.
        """
        return _function(tuple((slope.function, place.function) for slope, place, _ in self.reads))

    def arguments(self, gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the last argument of ``function``, a tuple per read.

        It holds ``gradients``, fp32 ``(numbers,)``, from the first number of the read's tensor on,
        and the captured arguments of its slope and place.
        """
        return tuple(
            (gradients[start:], slope.captured, place.captured)
            for slope, place, start in self.reads
        )


@triton.jit
def added(terms, place, gradients):
    """Add ``terms``, a tile, to ``gradients`` at ``place``, which broadcasts to it.

    Terms along an axis of which all have one place are summed first: atomic additions are slow, and
    those to one address wait for one another.
    """
    if len(place.shape) == 0:
        terms = tl.sum(tl.sum(terms, 1), 0)
    else:
        if place.shape[0] == 1:
            terms = tl.sum(terms, 0, keep_dims=True)
        if place.shape[1] == 1:
            terms = tl.sum(terms, 1, keep_dims=True)
    tl.atomic_add(gradients + place, terms, mask=terms != 0.0, sem="relaxed")


@cache
def _function(mods: tuple[tuple[Any, Any], ...]) -> Any:
    """Return a function that adds the terms of each of ``mods``, pairs of a slope and a place."""
    lines = ["def captured_terms(x, p, dp, delta, b, h, rows, keys, arguments):"]
    scope: dict[str, Any] = {
        "tl": tl, "__name__": __name__, "added": added, "score_gradients": score_gradients,
    }  # fmt: skip
    for number, (slope, place) in enumerate(mods):
        scope |= {f"slope_{number}": slope, f"place_{number}": place}
        lines += [
            f"    gradients, captured, of_place = arguments[{number}]",
            "    terms = score_gradients(",
            f"        x, p, dp, delta, b, h, rows, keys, captured, slope_{number}, False",
            "    )",
            f"    place = place_{number}(x, b, h, rows, keys, of_place)",
            "    added(terms, place + tl.zeros((), tl.int32), gradients)",
        ]
    source = "\n".join([*lines, ""])
    hashed = "\n".join([source, *(mod.fn.__qualname__ for pair in mods for mod in pair)])
    # Triton and inspect read a function's text through linecache; no file is needed.
    digest = hashlib.sha256(hashed.encode()).hexdigest()[:16]
    file = f"<attncheck captured_terms {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)  # noqa: S102  (our own printed text)
    function = scope["captured_terms"]
    function.__qualname__ = f"captured_terms_{digest}"  # for the reason given in to_triton
    return triton.jit(function)
