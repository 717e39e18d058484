"""The ideal kernel's backward pass; ``Ideal`` says what is rounded where."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import torch

from attncheck.mods.leaves import CapturedSums
from attncheck.subjects.ideal_attention import Index, Pass
from attncheck.subjects.ideal_steps import finite, padded, power_of_two, weighted

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.outputs import Outputs
    from attncheck.subjects.ideal import Ideal

__all__ = ["slope", "with_gradients"]

Part = TypeVar("Part")


def with_gradients(kernel: Ideal, inputs: Inputs, outputs: Outputs) -> Outputs:
    """``outputs`` of the forward pass on ``inputs``, and the gradients from them."""
    return _BackwardPass(kernel, inputs, outputs).gradients()


def slope(score: ScoreMod, x: torch.Tensor, at: Index) -> torch.Tensor:
    """The derivative of ``score`` at each of the scores ``x``; 0 where it does not depend on it."""
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        modified = score(given, at.b, at.h, at.q_idx, at.kv_idx)
        if not modified.requires_grad:
            return torch.zeros_like(x)
        (found,) = torch.autograd.grad(modified.expand_as(x).sum(), given, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


class _BackwardPass(Pass):
    """One backward pass from what the forward pass has given."""

    def __init__(self, kernel: Ideal, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__(kernel, inputs)
        assert inputs.dout is not None, "a Problem with a backward has a loss"
        assert outputs.lse is not None, "the forward pass gives it"
        rows = self.tile.block_query
        self.forward = outputs
        self.dout = padded(kernel.operand(inputs.dout.float(), self.problem.formats.products), rows)
        # Of dO as it is stored, where a product of tf32 reads less of it.
        delta = kernel.delta(inputs.dout.float(), outputs.out.float(), inputs.dlse)
        self.delta = padded(delta[..., None], rows)[..., 0]
        self.lse = padded(outputs.lse[..., None], rows)[..., 0]
        self.all_finite = all(bool(torch.isfinite(x).all()) for x in (self.q, self.k, self.dout))
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.captured: CapturedSums | None = None
        if self.score and self.problem.dcaptured:
            self.captured = CapturedSums(self.score, self.device, torch.float32)

    def gradients(self) -> Outputs:
        problem, blocks = self.problem, self.row_blocks()
        dtype, scale = problem.formats.storage.torch_dtype, self.factors.scale[..., None]
        parts = {rows.start: self._rows_of(rows) for rows in self._in_order(blocks)}
        dq = torch.cat([parts[rows.start] for rows in blocks], dim=2)[:, :, : problem.query]
        dk = self.dk[:, :, : problem.kv]
        return dataclasses.replace(
            self.forward,
            dq=self.kernel.scaled(dq, scale).to(dtype),
            dk=self.kernel.scaled(dk, scale).to(dtype),
            dv=self.dv[:, :, : problem.kv].to(dtype),
            dsink=None if self.sink is None else self._dsink(self.sink),
            dcaptured=None if self.captured is None else self.captured.sums,
        )

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """As the kernel sees them again."""
        return self.kernel.visible_again(mask, at)

    def _rows_of(self, rows: slice) -> torch.Tensor:
        """Of some rows dQ, before the scale; what they add to dK and dV is added."""
        q, dout = self.q[:, :, rows], self.dout[:, :, rows]
        dq = torch.zeros_like(q)
        # Padding is asked about as the last row: it must add nothing.
        row = torch.arange(rows.start, rows.stop, device=self.device)
        there = (row < self.problem.query).view(1, 1, -1, 1)
        for keys in self.key_tiles():
            seen, at = self.seen(rows, keys)
            seen = seen & there
            if not bool(seen.any()):
                continue
            p, dx = self._weights_again(rows, keys, seen, at)
            k = self.expanded(self.k[:, :, keys])
            dq = self.kernel.gradient_added(dq, self._seen_product(dx, seen, k))
            self.dv[:, :, keys] = self._with_rows(self.dv[:, :, keys], p, seen, dout)
            self.dk[:, :, keys] = self._with_rows(self.dk[:, :, keys], dx, seen, q)
        return dq

    def _weights_again(
        self, rows: slice, keys: slice, seen: torch.Tensor, at: Index
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """P and the gradient of the scores before the mod, each as a product reads it."""
        kernel, fmt = self.kernel, self.problem.formats.weights
        x = self.logits(self.q[:, :, rows], keys)
        p = self._p(self.modified(x, seen, at), self.lse[:, :, rows])
        v = self.expanded(self.v[:, :, keys])
        dp = self.product(self.dout[:, :, rows], v.mT)
        dx = kernel.dscores(p, dp, self.delta[:, :, rows, None])
        if self.captured is not None:
            kernel.capture(self.captured, x, at, torch.where(seen, dx, 0.0), seen)
        if self.score:
            dx = dx * kernel.slope(self.score, x, at)
        # Whatever a hidden key holds, it has no part.
        dx = torch.where(seen, dx, 0.0)
        return kernel.operand(p, fmt), kernel.operand(dx, fmt)

    def _p(self, s: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """P in fp32 from LSE: normalised, unlike the forward pass's."""
        base, c = finite(lse)[..., None], self.factors.exponent[..., None]
        if self.in_nats:
            return power_of_two(self.kernel.exp2, (s - base) * c, s)
        # LSE is natural: s·c is in log2 units, and so is the product with log2 e, rounded once.
        exponent = (s.double() * c - (base * self.factors.log2_e).double()).float()
        return power_of_two(self.kernel.exp2, exponent, s)

    def _seen_product(
        self, weights: torch.Tensor, seen: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if self.all_finite:
            return self.product(weights, values)
        return weighted(self.product, weights, seen, values)

    def _with_rows(
        self, running: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """A tile of keys' dK or dV with what some rows add: row tile by row tile, head by head.

        Args:
            running: ``(batch, kv_heads, keys, dim)`` so far.
            weights: dX or P, ``(batch, heads, rows, keys)``.
            seen: Of the same shape.
            rows: q or dO, ``(batch, heads, rows, dim)``.
        """
        problem, size = self.problem, self.tile.block_query
        # (batch, heads, tiles, keys, size) and (batch, heads, tiles, size, dim)
        of_keys, sees, tiles = (_in_tiles(x, size) for x in (weights, seen, rows))
        part = self._tile_product(of_keys.mT, sees.mT, tiles)
        parts = part.view(problem.batch, problem.kv_heads, problem.group, *part.shape[2:])
        for tile in self._in_order(list(range(tiles.shape[2]))):
            for head in range(problem.group):
                running = self.kernel.gradient_added(running, parts[:, :, head, tile])
        return running

    def _tile_product(
        self, weights: torch.Tensor, seen: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            found = self.kernel.product(left.flatten(0, 2), right.flatten(0, 2))
            return found.view(*left.shape[:3], *found.shape[1:])

        if self.all_finite:
            return product(weights, values)
        return weighted(product, weights, seen, values)

    def _dsink(self, sink: torch.Tensor) -> torch.Tensor:
        """``(heads,)``: in fp32, a tile of rows after the other, sequence by sequence."""
        lse = self.lse[:, :, : self.problem.query]
        at_sink = sink[:, None].expand_as(lse)
        exponent = (at_sink - finite(lse)) * self.factors.log2_e
        p = power_of_two(self.kernel.exp2, exponent, at_sink)
        terms = self.kernel.dscores(p, torch.zeros_like(p), self.delta[:, :, : lse.shape[2]])
        size = self.tile.block_query
        sums = _in_tiles(padded(terms[..., None], size), size).sum((-2, -1))
        total = torch.zeros_like(sink)
        for b in range(self.problem.batch):
            for tile in self._in_order(list(range(sums.shape[2]))):
                total = self.kernel.gradient_added(total, sums[b, :, tile])
        return total

    def _in_order(self, parts: list[Part]) -> list[Part]:
        """Of query rows: the last ones first where the last keys come first."""
        return parts[::-1] if self.tile.reverse else parts


def _in_tiles(x: torch.Tensor, size: int) -> torch.Tensor:
    """``(batch, heads, rows, n)`` → ``(batch, heads, tiles, size, n)``."""
    batch, heads, _, n = x.shape
    return x.reshape(batch, heads, -1, size, n)
