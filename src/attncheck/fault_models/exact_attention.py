"""Exact attention of one call, and its gradients, dense in float64; each step can be changed.

It imports nothing from oracles or kernels: a separate implementation for small problems, with a
name for each step that may go wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.formats import FORMATS
from attncheck.core.outputs import Outputs
from attncheck.mods.captured_gradients import CapturedSums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from attncheck.fault_models.steps import Steps
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.signatures import MaskMod, ScoreMod

TRIED_TILES = (16, 32, 64, 128)  # keys of a tile to try where a kernel declares no tile
_SPLITS = (2, 3, 4)  # numbers of splits of the keys, each with a recurrence of its own
_MOST_SPLIT_ROWS = 64  # most query rows with splits, which kernels use to decode
_KEY_TILES = (16, 32, 48, 64, 96, 128)  # keys of a tile that need not have as many rows

# Errors of a mod that takes only 0-d indices, or reads a table beyond its end.
NOT_BROADCAST = (RuntimeError, IndexError, TypeError, ValueError)
FP32_LOWEST = -150 * math.log(2.0)  # exp below it is 0 in fp32
_FP32_LARGEST = 128 * math.log(2.0)


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxParts:
    """The intermediate results of a softmax, ``(batch, heads, rows[, kv or value_dim])``."""

    maximum: Tensor  # largest score of a row; −∞ if it sees no key and has no sink
    weights: Tensor  # exp(score − maximum), 0 where hidden
    total: Tensor  # sum of the weights and the sink's
    values: Tensor  # weights · v

    @property
    def dead(self) -> Tensor:
        """Return which rows have a total weight of 0."""
        return self.total == 0

    @property
    def out(self) -> Tensor:
        """Return the output, 0 in dead rows."""
        safe = torch.where(self.dead, 1.0, self.total)[..., None]
        return torch.where(self.dead[..., None], 0.0, self.values / safe)

    @property
    def lse(self) -> Tensor:
        """Return the natural log-sum-exp, −∞ in dead rows."""
        return torch.where(self.dead, -math.inf, self.maximum + self.total.log())

    @property
    def outputs(self) -> Outputs:
        """Return out and LSE."""
        return Outputs(self.out, self.lse)


class ExactAttention:
    """The numbers of one call, float64 on the CPU, and the exact attention of some of its rows.

    Axes are (batch, heads, rows, kv): k and v are repeated for each query head that reads them. For
    a softmax the scores are the products, and v is the unit matrix.

    Attributes:
        inputs: The kernel's inputs.
        rows: Indices of the query rows that are predicted, in order.
        tiles: (query rows, keys) of a tile: only the declared one, or several to try.
        b, h, i, j: Indices of sequence, head, row and key that broadcast.
        q, k, v: The operands in float64, q of the predicted rows.
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        rows: Tensor | None = None,
        tile: tuple[int, int] | None = None,
    ) -> None:
        self.inputs = inputs = inputs.to("cpu")
        self.problem = problem = inputs.problem
        self.rows = torch.arange(problem.query) if rows is None else rows
        self.tiles = (tile,) if tile else tuple((size, size) for size in TRIED_TILES)
        self.b = torch.arange(problem.batch).view(-1, 1, 1, 1)
        self.h = torch.arange(problem.heads).view(1, -1, 1, 1)
        self.i = self.rows.view(1, 1, -1, 1)
        self.j = torch.arange(problem.kv).view(1, 1, 1, -1)
        self.scale = problem.scale
        # With the unit matrix as values, out is the softmax itself.
        if problem.operation == "softmax":
            self.v = torch.eye(problem.kv, dtype=torch.float64).expand(1, 1, -1, -1)
            return
        q, k, v = inputs.promoted()
        self.q = q[:, :, self.rows]
        self.k, self.v = self.by_query_head(k), self.by_query_head(v)

    @property
    def whole(self) -> bool:
        """Return whether every row is predicted, which gradients need."""
        return len(self.rows) == self.problem.query

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (batch, heads, rows, kv)."""
        problem = self.problem
        return problem.batch, problem.heads, len(self.rows), problem.kv

    @property
    def key_tiles(self) -> tuple[int, ...]:
        """Return keys of a tile to try; of the sizes that hold all keys only the smallest."""
        sizes = sorted({size for _, size in self.any_tiles})
        # A tile that holds all keys is equivalent to any larger one.
        small = [size for size in sizes if size < self.problem.kv]
        return tuple(small + sizes[len(small) : len(small) + 1])

    @property
    def any_tiles(self) -> tuple[tuple[int, int], ...]:
        """Return (query rows, keys) of tiles to try, which need not be square."""
        return self.tiles if len(self.tiles) == 1 else tuple(product(TRIED_TILES, _KEY_TILES))

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Return rows of a tile to try."""
        return tuple(dict.fromkeys(rows for rows, _ in self.tiles))

    @property
    def tilings(self) -> tuple[tuple[int, int], ...]:
        """Return the tiles that hold only some of the keys."""
        return tuple((rows, keys) for rows, keys in self.tiles if keys < self.problem.kv)

    def by_query_head(self, tensor: Tensor) -> Tensor:
        """Return a tensor of key heads, each repeated for the query heads that read it."""
        return tensor.repeat_interleave(self.problem.group, dim=1)

    @cached_property
    def every_q(self) -> Tensor:
        """Return all query rows, even if only some are predicted."""
        return self.inputs.promoted()[0]

    @cached_property
    def sink(self) -> Tensor | None:
        """Return each head's sink, ``(1, heads, 1)``."""
        sink = self.inputs.sink
        return None if sink is None else sink.double().view(1, -1, 1)

    @cached_property
    def qk(self) -> Tensor:
        """Return q·k, or the scores of a softmax."""
        if self.problem.operation == "softmax":
            return self.inputs.scores()[:, :, self.rows]
        return self.q @ self.k.mT

    @cached_property
    def x(self) -> Tensor:
        """Return the scores before the score mod."""
        return self.qk * self.scale

    @cached_property
    def mask(self) -> MaskMod:
        """Return the Problem's mask."""
        return self.problem.mask_mod("cpu")

    @cached_property
    def score(self) -> ScoreMod:
        """Return the Problem's score mod."""
        return self.problem.score_mod("cpu")

    @cached_property
    def s(self) -> Tensor:
        """Return the scores after the score mod."""
        return self.modified(self.x)

    @cached_property
    def seen(self) -> Tensor:
        """Return which keys a row sees, bool ``(batch, heads, rows, kv)``."""
        # A score mod that gives −∞ hides a key as a mask does.
        return self.visible(self.mask) & (self.s != -math.inf)

    @cached_property
    def z(self) -> Tensor:
        """Return the scores after the mask, −∞ where hidden."""
        return torch.where(self.seen, self.s, -math.inf)

    @cached_property
    def parts(self) -> SoftmaxParts:
        """Return the exact softmax."""
        return self.softmax(self.z, sink=self.sink)

    @cached_property
    def exact(self) -> Outputs:
        """Return out and LSE without a fault."""
        return self.parts.outputs

    @cached_property
    def backward(self) -> ExactGradients:
        """Return the call's gradients; every row must be predicted."""
        return ExactGradients(self)

    def visible(
        self,
        mask: MaskMod,
        *,
        b: Tensor | None = None,
        h: Tensor | None = None,
        i: int | Tensor = 0,
    ) -> Tensor:
        """Return the keys that a mask shows, bool.

        ``b`` and ``h`` are other sequences and heads to ask about; rows are shifted by ``i``.
        """
        at = (self.b if b is None else b, self.h if h is None else h, self.i + i, self.j)
        try:
            seen = torch.as_tensor(mask(*at))
        except NOT_BROADCAST:
            last = self.problem.query - 1
            seen = _vmap_axes(mask, 0, (at[0], at[1], at[2].clamp(0, last), at[3]))
        return seen.to(torch.bool).expand(self.shape)

    def modified(
        self,
        x: Tensor,
        score: ScoreMod | None = None,
        *,
        b: Tensor | None = None,
        h: Tensor | None = None,
        i: int | Tensor = 0,
        j: int | Tensor = 0,
    ) -> Tensor:
        """Return ``x`` after a score mod, by default the Problem's.

        Indices are those of ``visible``, and keys are shifted by ``j``.
        """
        score = score or self.score
        at = (self.b if b is None else b, self.h if h is None else h, self.i + i, self.j + j)
        try:
            # A copy, since a score mod may write to its argument.
            s = score(x.clone(), *at)
        except NOT_BROADCAST:
            s = _vmap_axes(score, 1, at, x)
        return s.to(torch.float64).expand(x.shape)

    def softmax(self, z: Tensor, v: Tensor | None = None, *, sink: Tensor | None) -> SoftmaxParts:
        """Return the softmax of scores that are −∞ where hidden.

        Args:
            v: Values of the keys; the call's own by default.
            sink: Natural logits that broadcast to rows; None for none.
        """
        maximum = z.amax(-1)
        if sink is not None:
            maximum = torch.maximum(maximum, sink.expand(maximum.shape))
        # In a row that sees nothing −∞ − −∞ would be NaN.
        base = torch.where(maximum == -math.inf, 0.0, maximum)
        weights = (z - base[..., None]).exp()
        total = weights.sum(-1)
        if sink is not None:
            total = total + (sink - base).exp()
        return SoftmaxParts(
            maximum, weights, total, weighted_sum(weights, self.v if v is None else v)
        )

    def attend(
        self,
        *,
        x: Tensor | None = None,
        s: Tensor | None = None,
        seen: Tensor | None = None,
        v: Tensor | None = None,
        hidden: float = -math.inf,
    ) -> Outputs:
        """Return out and LSE of the call with other intermediate results.

        Args:
            hidden: The score of a hidden key.
        """
        if s is None:
            s = self.s if x is None else self.modified(x)
        if seen is None:
            seen = self.seen
        return self.softmax(torch.where(seen, s, hidden), v, sink=self.sink).outputs

    def with_extra_keys(self, scores: Tensor, z: Tensor | None = None) -> Outputs:
        """Return out and LSE with further keys behind the last one, whose values are 0.

        Args:
            scores: Scores of the further keys, which broadcast to ``(batch, heads, rows, any)``.
            z: Scores of the call's own keys, −∞ where hidden; the exact ones by default.
        """
        more = scores.expand(*self.shape[:3], -1)
        v = torch.nn.functional.pad(self.v, (0, 0, 0, more.shape[-1]))
        z = torch.cat([self.z if z is None else z, more], -1)
        return self.softmax(z, v, sink=self.sink).outputs

    def predict(self, steps: Steps) -> Iterator[tuple[Outputs, dict[str, int]]]:
        """Yield the outputs with ``steps``, and the keys of a tile where that matters.

        Yield nothing where the steps equal those of a right kernel on this Problem.
        """
        problem = self.problem
        if steps.of_backward:
            yield from ((outputs, {}) for outputs in self.backward.predict(steps))
            return
        mask = steps.mask and steps.mask(problem, "cpu")
        score = steps.score and steps.score(problem, "cpu")
        scale = steps.scale and steps.scale(problem)
        # Steps that are right on this Problem would fit every right kernel.
        if (steps.mask and mask is None) or (steps.score and score is None):
            return
        if steps.scale and scale is None:
            return
        x, v = self.x, self.v
        if steps.products:
            x = steps.products(self.qk) * self.scale
        if scale:
            # The call's scale may be 0.
            x = x * (scale / self.scale) if self.scale else self.qk * scale
        if steps.descale:
            x, v = self._descaled(steps.descale, x)
        s = self.s if x is self.x and score is None else self.modified(x, score)
        seen = self.seen if mask is None else self.visible(mask)
        z = torch.where(seen, s, steps.hidden)
        if steps.by_tile:
            yield from self.by_tile(steps, z)
            return
        parts = self.softmax(z, v, sink=self.sink if steps.sink else None)
        lse = parts.lse if steps.lse is None else steps.lse(parts.lse)
        yield Outputs(parts.out * steps.normaliser, lse), {}

    def _descaled(
        self, change: Callable[[str, Tensor], Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        ratios = {}
        for name in "qkv":
            own = getattr(self.inputs.descale, name).double()
            ratios[name] = self.by_query_head(change(name, own) / own)[..., None, None]
        return x * (ratios["q"] * ratios["k"]), self.v * ratios["v"]

    def by_tile(
        self, steps: Steps, z: Tensor | None = None
    ) -> Iterator[tuple[Outputs, dict[str, int]]]:
        """Yield outputs of the recurrence over tiles of all sizes, also within several splits.

        Arguments are those of ``online``.
        """
        z, kv = self.z if z is None else z, self.problem.kv
        for size in self.key_tiles:
            for outputs in self.recurrences(size, steps, z):
                yield outputs, {"tile": size}
        for count, size in product(_SPLITS, self.key_tiles):
            length = -(-kv // count)
            # A split of one tile would equal a larger tile.
            if size < length and self.sink is None and len(self.rows) <= _MOST_SPLIT_ROWS:
                parts = [
                    self.online(size, steps, z[..., at:end], self.v[:, :, at:end])
                    for at, end in pairwise([*range(0, kv, length), kv])
                ]
                both = zip(*((one.out, one.lse) for one in parts), strict=True)
                outs, lses = (torch.stack(each) for each in both)
                yield merged(outs, lses), {"tile": size, "splits": count}

    def recurrences(
        self, size: int, steps: Steps, z: Tensor | None = None, *, maxima_of: Tensor | None = None
    ) -> Iterator[Outputs]:
        """Yield outputs of ``online``; with a sink both where it comes first, and last."""
        yield self.online(size, steps, z, maxima_of=maxima_of)
        if self.sink is not None:
            keys = self.online(size, steps, z, maxima_of=maxima_of, sink_first=False)
            assert keys.lse is not None, "as it was made"
            outs = torch.stack([keys.out, torch.zeros_like(keys.out)])
            yield merged(outs, torch.stack([keys.lse, self.sink.expand(keys.lse.shape)]))

    def online(
        self,
        size: int,
        steps: Steps,
        z: Tensor | None = None,
        v: Tensor | None = None,
        *,
        maxima_of: Tensor | None = None,
        sink_first: bool = True,
    ) -> Outputs:
        """Return outputs of FlashAttention-2's recurrence over tiles of ``size`` keys.

        It runs in float64, but weights that are 0 or infinite in fp32 are so here, too.

        Args:
            z: Scores, −∞ where hidden; the call's by default.
            v: Values of the keys; the call's by default.
            maxima_of: Scores that the running maximum is of; ``z`` by default.
            sink_first: Whether the sink, if there is one, begins the recurrence; else it is left
                out.
        """
        z, v = self.z if z is None else z, self.v if v is None else v
        tops = z if maxima_of is None else maxima_of
        shape = z.shape[:3]
        m = z.new_full(shape, steps.first_maximum)
        total, out = z.new_zeros(shape), z.new_zeros((*shape, self.v.shape[-1]))
        if self.sink is not None and sink_first:
            m, total = self.sink.expand(shape), torch.ones_like(total)
        weights = steps.weights
        if steps.weights_scale is not None:
            weights = _scaled_weights(self.problem.formats.weights.name, steps.weights_scale)
        starts = range(0, z.shape[-1], size)
        for start in starts:
            part = z[..., start : start + size]
            new = torch.maximum(m, tops[..., start : start + size].amax(-1))
            shift = torch.where(new == -math.inf, 0.0, new)
            if steps.zero_maximum_when_empty:
                new = shift
            relative = steps.relative(last=start == starts[-1])
            p = fp32_exp(steps.exponent(part, shift[..., None]) if relative else part)
            if start == 0 and steps.first_weight != 1.0:
                p = torch.cat([p[..., :1] * steps.first_weight, p[..., 1:]], -1)
            alpha = fp32_exp((m - shift * steps.rescale_maximum) * steps.rescale_exponent)
            summed = p if steps.summed_weights is None else steps.summed_weights(p)
            rescaled = steps.of_sum(total, alpha if steps.rescales_sum else torch.ones_like(alpha))
            total = rescaled + steps.sign_of_sum * summed.sum(-1)
            p = p if weights is None else weights(p)
            # 1 + 0 · α: an infinite factor spoils out whether it is applied or not.
            factor = alpha if steps.rescales_out else 1.0 + 0 * alpha
            added = weighted_sum(p, v[:, :, start : start + size])
            out = steps.of_out(out, factor[..., None]) + steps.sign_of_out * added
            out = out if steps.kept_out is None else steps.kept_out(out)
            total = total if steps.kept_sum is None else steps.kept_sum(total)
            m = new
        dead = total == 0
        lse = torch.where(dead, -math.inf, m + total.log())
        safe = torch.where(dead, 1.0, total)[..., None]
        return Outputs(torch.where(dead[..., None], 0.0, out / safe), lse)

    def with_out(self, rows: Tensor, value: float, *, lse: float | None = None) -> Outputs:
        """Return the exact outputs, but with ``value`` in some rows of out.

        Args:
            rows: The rows, bool ``(batch, heads, rows[, value_dim])``; with columns for out alone.
            value: Value of out there.
            lse: Value of LSE there; None leaves it exact.
        """
        of_out = rows if rows.dim() == 4 else rows[..., None]
        out = torch.where(of_out, value, self.parts.out)
        own = self.parts.lse
        return Outputs(out, own if lse is None else torch.where(rows, lse, own))

    def with_lse(self, lse: Tensor) -> Outputs:
        """Return the exact out with another LSE."""
        return replace(self.exact, lse=lse)


class ExactGradients:
    """Gradients of a call with a loss, for a call with all rows predicted.

    Attributes:
        call: The forward.
        dout, dlse: The loss's gradients of out and LSE.
    """

    def __init__(self, call: ExactAttention) -> None:
        self.call = call
        self.dout, self.dlse = call.inputs.loss()

    @cached_property
    def exact(self) -> Outputs:
        """Return out, LSE and gradients without a fault."""
        return self.gradients()

    @cached_property
    def delta(self) -> Tensor:
        """Return Σ dO·O of each row."""
        return (self.dout * self.call.parts.out).sum(-1)

    @cached_property
    def off(self) -> Tensor:
        """Return the term that is subtracted from dP in each row: delta − dLSE."""
        return (self.delta - self.dlse)[..., None]

    @cached_property
    def dp(self) -> Tensor:
        """Return dP = dO·v."""
        return self.dout @ self.call.v.mT

    @cached_property
    def slopes(self) -> Tensor:
        """Return the score mod's derivative."""
        return self.slopes_at(self.call.x)

    @cached_property
    def of_heads(self) -> dict[str, Tensor]:
        """Return dK and dV of each query head, ``(batch, heads, kv, …)``, without a group's sum."""
        p = self.weights()
        dx = p * (self.dp - self.off) * self.slopes
        return {"dk": dx.mT @ self.call.q * self.call.scale, "dv": p.mT @ self.dout}

    def slopes_at(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """Return the score mod's derivative at other scores, or of other heads."""
        call = self.call
        if call.problem.score.name == "none":
            return torch.ones_like(x)
        x = x.clone().requires_grad_()
        # A test that disabled gradients may run the diagnosis.
        with torch.enable_grad():
            s = call.modified(x, h=h)
            # A mod that does not read the score has a slope of 0.
            if not s.requires_grad:
                return torch.zeros_like(x)
            (slopes,) = torch.autograd.grad(s, x, torch.ones_like(s))
        return slopes

    def weights(
        self, *, s: Tensor | None = None, seen: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Return P computed from LSE, 0 where hidden."""
        call = self.call
        lse = call.parts.lse if lse is None else lse
        # A row without keys has weights of 0, and not exp(∞).
        base = torch.where(lse == -math.inf, 0.0, lse)[..., None]
        seen = call.seen if seen is None else seen
        p = ((call.s if s is None else s) - base).exp()
        # exp overflows in fp32.
        p = torch.where(p > torch.finfo(torch.float32).max, math.inf, p)
        return torch.where(seen, p, 0.0)

    def gradients(  # Each argument replaces one intermediate result.
        self,
        *,
        weights: Tensor | None = None,
        delta: Tensor | None = None,
        dlse: Tensor | None = None,
        dout: Tensor | None = None,
        dp: Tensor | None = None,
        slopes: Tensor | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> Outputs:
        """Return exact out and LSE with gradients; arguments replace exact intermediate results."""
        call, problem = self.call, self.call.problem
        p = self.weights() if weights is None else weights
        dout = self.dout if dout is None else dout
        off = (self.delta if delta is None else delta) - (self.dlse if dlse is None else dlse)
        dz = p * ((self.dp if dp is None else dp) - off[..., None])
        # Where P is 0, an infinite or NaN derivative must not matter.
        dx = torch.where(p == 0, 0.0, dz * (self.slopes if slopes is None else slopes))
        dq = _signed_sum(dx, call.k if k is None else k) * call.scale
        dk = _signed_sum(dx.mT, call.q if q is None else q) * call.scale
        dv = _signed_sum(p.mT, dout)
        dsink = None
        if call.sink is not None:
            of_sink = torch.exp(call.sink - call.parts.lse)
            # Where the sink has no weight, delta may be NaN, and must not matter.
            dsink = torch.where(of_sink > 0, of_sink * -off, 0.0).sum((0, 2))
        return replace(
            call.exact,
            dq=dq,
            dk=sum_group(dk, problem.group),
            dv=sum_group(dv, problem.group),
            dsink=dsink,
            dcaptured=self.captured(dz) if problem.dcaptured else None,
        )

    def of_scores(self, dz: Tensor) -> Outputs:
        """Return the gradients for ``dz``, the gradients of the scores after the score mod."""
        call, group = self.call, self.call.problem.group
        dx = dz * self.slopes
        dk = _signed_sum(dx.mT, call.q) * call.scale
        return replace(self.exact, dq=_signed_sum(dx, call.k) * call.scale, dk=sum_group(dk, group))

    def seeing(self, seen: Tensor) -> Outputs:
        """Return the gradients where rows see other keys in the backward."""
        return self.gradients(weights=self.weights(seen=seen))

    def reading(self, read: Mapping[str, Tensor]) -> Outputs:
        """Return the gradients where the backward reads other q, k, v, dout, lse or delta.

        Each tensor is ``(batch, heads, …)``, with query heads.
        """
        call = self.call
        q, k, v = (read.get(name, getattr(call, name)) for name in "qkv")
        dout = read.get("dout", self.dout)
        s = call.modified(q @ k.mT * call.scale) if {"q", "k"} & {*read} else None
        return self.gradients(
            weights=self.weights(s=s, lse=read.get("lse")),
            delta=read.get("delta"),
            dout=dout,
            dp=dout @ v.mT,
            q=q,
            k=k,
        )

    def summed_over(self, heads: Tensor) -> dict[str, Tensor]:
        """Return dK and dV summed over the given query heads, ``(kv_heads, any)``."""
        kv_heads, members = heads.shape
        return {
            name: x[:, heads.flatten()].view(len(x), kv_heads, members, *x.shape[2:]).sum(2)
            for name, x in self.of_heads.items()
        }

    def times(self, factor: float, *names: str) -> Outputs:
        """Return the exact gradients, those in ``names`` times ``factor``."""
        originals: dict[str, Any] = {name: getattr(self.exact, name) for name in names}
        changed = {name: x * factor for name, x in originals.items() if x is not None}
        return replace(self.exact, **changed)

    def predict(self, steps: Steps) -> Iterator[Outputs]:
        """Yield the gradients with ``steps``, if they differ from a right kernel's."""
        call, problem = self.call, self.call.problem
        seen = None
        if steps.backward_mask is not None:
            mask = steps.backward_mask(problem, "cpu")
            if mask is None:
                return
            seen = call.visible(mask)
        weights = self.weights(seen=seen, lse=call.parts.lse * steps.backward_lse)
        sloped = steps.slope is None or steps.slope(problem)
        if steps.slope is not None and (sloped or problem.score.name == "none"):
            return
        outputs = self.gradients(
            weights=weights,
            delta=None if steps.delta is None else steps.delta(self.delta, self.dlse),
            dlse=None if steps.delta is None else torch.zeros_like(self.dlse),
            slopes=None if sloped else torch.ones_like(self.slopes),
        )
        # A missing scale is divided out at the end, since it is a factor of the sums.
        unscaled = {name for name in ("dq", "dk") if name not in steps.scaled_gradients}
        changed = {name: getattr(outputs, name) / call.scale for name in unscaled}
        if steps.group_heads is not None:
            changed |= self.summed_over(steps.group_heads(problem))
        yield replace(outputs, **changed)

    def captured(self, dz: Tensor, where: Tensor | None = None) -> Tensor:
        """Return the gradients of tensors that the score mod reads.

        Args:
            dz: Gradients of the scores after the score mod, ``(batch, heads, query, kv)``.
            where: The seen places that count; all seen ones by default.
        """
        call = self.call
        sums = CapturedSums(call.score, "cpu")
        at = (call.b, call.h, call.i, call.j)
        sums.add(call.x, at, dz, call.seen if where is None else call.seen & where)
        return sums.sums


def merged(outs: Tensor, lses: Tensor, base: float = 1.0) -> Outputs:
    """Merge out and LSE of parts of the keys, along the first axis, by their LSE times ``base``."""
    lse = (lses * base).logsumexp(0)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    weights = (lses * base - shift).exp()
    return Outputs((weights[..., None] * outs).sum(0), lse)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights · values, where a weight of 0 suppresses values that are not finite."""
    finite = values.isfinite()
    if bool(finite.all()):
        return weights @ values
    sums = weights @ torch.where(finite, values, 0.0)
    touched = (weights > 0).double() @ (~finite).double()
    return torch.where(touched > 0, math.nan, sums)


def _signed_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``weighted_sum`` for weights of either sign."""
    if bool(values.isfinite().all()):
        return weights @ values
    above, below = weights.clamp(min=0.0), (-weights).clamp(min=0.0)
    return weighted_sum(above, values) - weighted_sum(below, values)


def sum_group(of_heads: Tensor, group: int) -> Tensor:
    """Sum ``(batch, heads, …)`` over the query heads that read one key head."""
    batch, heads, *rest = of_heads.shape
    return of_heads.view(batch, heads // group, group, *rest).sum(2)


def fp32_exp(exponent: Tensor) -> Tensor:
    """Return exp, but 0 or infinite where it is so in fp32."""
    p = exponent.exp()
    p = torch.where(exponent < FP32_LOWEST, 0.0, p)
    return torch.where(exponent > _FP32_LARGEST, math.inf, p)


def _scaled_weights(name: str, scale: float) -> Callable[[Tensor], Tensor]:
    """Return a rounding of weights to format ``name`` after a multiplication by ``scale``."""
    fmt = FORMATS[name]
    return lambda p: (p * scale).clamp(max=fmt.max).float().to(fmt.torch_dtype).double() / scale


def _vmap_axes(
    mod: Callable[..., Tensor], scores: int, at: tuple[Tensor, ...], *leading: Tensor
) -> Tensor:
    """Apply a mod that takes 0-d arguments over all four axes."""
    # The innermost axis first, so that the result has the axes in their order.
    for axis in (3, 2, 1, 0):
        of_indices = tuple(0 if other == axis else None for other in range(4))
        mod = torch.vmap(mod, in_dims=(0,) * scores + of_indices)
    return mod(*leading, *(axis.flatten() for axis in at))
