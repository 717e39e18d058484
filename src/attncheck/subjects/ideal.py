"""An ideal kernel: FlashAttention in fp32 torch operations, rounded only where a kernel must."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch

from attncheck.core.cuda_compiler import Launch, compile_kernel
from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import HostError
from attncheck.core.formats import FORMATS, Format, fp32
from attncheck.core.mod_spec import FULL, NONE
from attncheck.core.outputs import Outputs
from attncheck.fault_models.steps import RIGHT
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import OPERATIONS, PROMISES, Problem
from attncheck.mods.captured_gradients import CapturedSums
from attncheck.mods.signatures import MaskMod, ScoreMod
from attncheck.subjects.capabilities.subject import Call, Subject, Tiling, with_full_tanh
from attncheck.subjects.conventions.torch_arithmetic import fp32_products


def weighted(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    weights: torch.Tensor,
    seen: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Return ``product(weights, values)``, where non-finite values reach only rows that see them.

    ``weights`` and ``seen`` are (…, rows, n), ``values`` is (…, n, columns).
    """
    # 0 · NaN is NaN, so a plain product would spread a NaN to every row.
    nonfinite = ~torch.isfinite(values)
    out = product(weights, torch.where(nonfinite, 0.0, values))
    for j in nonfinite.any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist():
        to_rows = (seen[..., j, None] & nonfinite[..., None, j, :]).expand_as(out)
        added = out + weights[..., j, None] * values[..., None, j, :]
        out = torch.where(to_rows, added, out)
    return out


def finite(maximum: torch.Tensor) -> torch.Tensor:
    """Return ``maximum`` with 0 in place of −∞, the maximum of a row that has seen no key."""
    # ``where`` would do this too, but with three kernel launches on a GPU.
    return torch.nan_to_num(maximum, nan=math.nan, posinf=math.inf, neginf=0.0)


def power_of_two(
    exp2: Callable[[torch.Tensor], torch.Tensor], exponent: torch.Tensor, score: torch.Tensor
) -> torch.Tensor:
    """Return ``exp2(exponent)``; 0 where ``score`` is −∞, as −∞ · c is NaN if c underflows to 0."""
    return torch.where(torch.isneginf(score), 0.0, exp2(exponent))


def multiply_add(x: torch.Tensor, factor: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """Return ``x · factor + term`` of fp32 tensors, rounded once, to fp32.

    Float64 holds the product exactly. ``addcmul`` passes over memory, the bottleneck, only once.
    """
    out = torch.empty_like(x, dtype=torch.float32)
    return torch.addcmul(term.double(), x, factor, out=out)


def padded(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return ``x`` (batch, heads, length, dim), zero-padded to a multiple of ``block`` rows."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))


# Scores of a softmax that are computed at a time: 2^22 take 16 MiB in fp32, 32 MiB in float64.
_SCORES_AT_A_TIME = {"cpu": 2**22, "cuda": 2**25}
# Query rows of attention computed at a time, over all heads. With few rows a GPU waits for Python,
# which calls about forty operations per key tile; with too many no tile is hidden from all of them.
_ROWS_AT_A_TIME = {"cpu": 2**16, "cuda": 2**17}
_SEEN_AT_A_TIME = {"cpu": 2**20, "cuda": 2**24}  # (row, key) pairs per evaluation of a mask

_LARGEST_MODERATE = FORMATS["fp32"].max / 4  # products and exponents below this cannot overflow

# False in a copy with a planted fault, which must run exactly as written, without shortcuts.
_IS_ORIGINAL = __name__ == "attncheck.subjects.ideal"

_GPU_SOURCE = Path(__file__).with_suffix(".cu")
# ideal.cu is used from this many multiplications of q·k and P·V on: compiling takes 0.1 s.
_FEWEST_PRODUCTS = 2**36
# Threads per block, threads per warp, and the most keys per tile that a warp's registers hold.
_THREADS, _WARP, _MOST_KEYS = 256, 32, 512
_WEIGHT_FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2}  # ideal.cu's codes for formats of P


def ideal_softmax(inputs: Inputs) -> Outputs:
    """Return the softmax of ``inputs.x`` ``(batch, heads, query, kv)`` over kv, and its LSE.

    * x − m in fp32, m the row's maximum; exp rounded once, to fp32.
    * The row sum is torch's pairwise sum in fp32 of the exp values, before they are rounded to the
      output format.
    * out = exp · (1 / sum) with the reciprocal in fp32, as good kernels do: one division per row
      costs each element one more rounding. The product is then rounded to the output format.
    * LSE = m + log(sum), log rounded once.
    * A row of −inf alone gives 0 and LSE −∞; a NaN or +inf makes its whole row NaN.
    """
    x = inputs.x
    assert x is not None, "Inputs of a softmax have their scores"
    rows = x.flatten(0, 2)
    step = max(1, _SCORES_AT_A_TIME[rows.device.type] // rows.shape[1])
    with torch.no_grad():
        parts = [_softmax_rows(rows[i : i + step]) for i in range(0, rows.shape[0], step)]
    out = torch.cat([out for out, _ in parts]).view(x.shape)
    lse = torch.cat([lse for _, lse in parts]).view(x.shape[:-1])
    return Outputs(out.to(inputs.problem.formats.output.torch_dtype), lse)


def _softmax_rows(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = stored.float()
    maximum = x.amax(-1)
    base = torch.where(torch.isneginf(maximum), 0.0, maximum)
    # exp in float64, rounded to fp32, is as good as rounding the exact value once.
    e = torch.exp((x - base[:, None]).double()).float()
    total = e.sum(-1)
    dead = total == 0
    total = torch.where(dead, 1.0, total)
    lse = torch.where(dead, -math.inf, maximum + torch.log(total.double()).float())
    return (e * (1.0 / total)[:, None]).to(stored.dtype), lse


def attention(kernel: Ideal, inputs: Inputs) -> Outputs:
    """Return out and LSE of ``kernel`` on ``inputs``."""
    return Pass(kernel, inputs).outputs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Indices of a tile's scores: integer tensors that broadcast to (batch, heads, rows, keys)."""

    b: torch.Tensor  # sequence, (batch, 1, 1, 1)
    h: torch.Tensor  # query head, (1, heads, 1, 1)
    q_idx: torch.Tensor  # query row, (1, 1, rows, 1)
    kv_idx: torch.Tensor  # key, (1, 1, 1, keys)


@dataclass(slots=True)
class _Running:
    """The online softmax's state between tiles; tensors ``(batch, heads, rows[, value_dim])``."""

    maximum: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor


class _Factors:
    """fp32 factors of scores and outputs, as tensors that broadcast to ``(batch, heads, rows)``."""

    scores: torch.Tensor | None  # factor of q·k before the softmax; None: q·k is used as it is
    exponent: torch.Tensor  # factor of a difference of scores in exp2 (c in the docstring of Ideal)
    lse: torch.Tensor | float  # factor of the largest score in LSE
    natural: float  # factor from natural units (sinks, LSE) to those of scores

    def __init__(self, kernel: Ideal, inputs: Inputs) -> None:
        problem, device = inputs.problem, inputs.device
        products = values = torch.ones((1, 1, 1), dtype=torch.float32, device=device)
        steps = kernel.steps
        if inputs.descale is not None:
            descale = inputs.descale
            descales = {"q": descale.q, "k": descale.k, "v": descale.v}
            if steps.descale is not None:
                descales = {name: steps.descale(name, x) for name, x in descales.items()}
            products, values = (
                x.repeat_interleave(problem.group, 1)[..., None]
                for x in (descales["q"] * descales["k"], descales["v"])
            )
        other_scale = None if steps.scale is None else steps.scale(problem)
        scale = problem.scale if other_scale is None else fp32(other_scale)
        self.scale = scale * products  # factor of q·k
        log2_scale = fp32(scale * kernel.log2_e)
        self.log2_e = fp32(kernel.log2_e)  # factor from natural units to exp2's
        self.natural = 1.0
        if kernel.scale_first and problem.score == NONE:
            self.scores, self.lse = log2_scale * products, fp32(math.log(2))
            self.exponent, self.natural = torch.ones_like(products), self.log2_e
        elif _in_nats(problem):
            self.scores, self.lse = self.scale, 1.0
            self.exponent = torch.full_like(products, self.log2_e)
        else:
            self.scores, self.lse, self.exponent = None, self.scale, log2_scale * products
        # P is multiplied by this before it is rounded.
        self.weights = steps.weights_scale or kernel.weights_scale(problem)
        self.out = values / self.weights  # factor of O at the end


class Pass:
    """One forward pass over prepared inputs."""

    def __init__(self, kernel: Ideal, inputs: Inputs) -> None:
        self.kernel = kernel
        self.problem = problem = inputs.problem
        self.tile = kernel.tiling(problem, inputs.device.type)
        self.device = str(inputs.device)
        fmt = problem.formats.products
        # q, k and v are rounded to the products' format, held in fp32, and padded to whole tiles.
        self.q = padded(kernel.operand(inputs.q.float(), fmt), self.tile.block_query)
        self.k = padded(kernel.operand(inputs.k.float(), fmt), self.tile.block_kv)
        self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
        # Checked once: ``weighted`` treats each key with a non-finite value separately.
        self.v_is_finite = bool(torch.isfinite(self.v).all())
        # Index tensors are made once: on a GPU the launches of a tile take as long as its work.
        lengths = problem.batch, problem.heads, self.q.shape[2], self.k.shape[2]
        numbers = (torch.arange(length, device=self.device) for length in lengths)
        self.sequence, self.head, self.row, self.key = numbers
        self.known_row = self.row.clamp(max=problem.query - 1)
        self.known_key = self.key.clamp(max=problem.kv - 1)
        self.steps = steps = kernel.steps
        own_mask = steps.mask and steps.mask(problem, self.device)
        # The Problem's mods, unless the kernel has its own; ``score`` is None without a score mod.
        self.mask = own_mask or problem.mask_mod(self.device)
        self.score: ScoreMod | None = None
        if problem.score != NONE:
            own_score = steps.score and steps.score(problem, self.device)
            self.score = own_score or problem.score_mod(self.device)
        self.factors = _Factors(kernel, inputs)
        self.moderate = self._is_moderate()
        self.sink = inputs.sink  # ``(heads,)``, or None
        # ideal.cu reads one exponent factor for each sequence and head, contiguous.
        self.exponents = self.factors.exponent.expand(lengths[0], lengths[1], 1).contiguous()

    def _is_moderate(self) -> bool:
        """Return whether no product or exponent can overflow and c > 0, so that −∞ · c is −∞."""
        if self.steps.rescale_exponent != 1.0:
            return False
        c = self.factors.exponent
        largest = self.q.abs().amax() * self.k.abs().amax() * self.q.shape[-1]
        fits = largest * c.amax().clamp(min=1.0) < _LARGEST_MODERATE
        return bool(fits & (c.amin() > 0))

    @functools.cached_property
    def fused(self) -> tuple[Launch, Launch] | None:
        """ideal.cu's two kernels; None if they are not equivalent, available or worth it."""
        kernel, problem, weights = self.kernel, self.problem, self.problem.formats.weights.name
        products = problem.batch * problem.heads * problem.query * problem.kv
        products *= problem.head_dim + problem.value_dim
        if self.q.device.type != "cuda" or torch.version.hip or products < _FEWEST_PRODUCTS:
            return None
        if not (kernel.quick and kernel.is_plain and self.v_is_finite) or kernel.reverse_sums:
            return None
        scaled = self.factors.weights != 1.0
        if scaled or weights not in _WEIGHT_FORMATS or self.tile.block_kv > _MOST_KEYS:
            return None
        return _gpu_kernels(self.q.device, self.tile.block_kv)

    def outputs(self) -> Outputs:
        """Return out and LSE."""
        problem = self.problem
        parts = [self._rows(rows) for rows in self.row_blocks()]
        out = torch.cat([part.out for part in parts], dim=2)[:, :, : problem.query]
        lse = torch.cat([part.lse for part in parts if part.lse is not None], dim=2)
        return Outputs(out, lse[:, :, : problem.query])

    def row_blocks(self) -> list[slice]:
        """Return slices of query rows to compute at a time: whole tiles of ``_ROWS_AT_A_TIME``."""
        per_block = self.problem.batch * self.problem.heads * self.tile.block_query
        # With whole tiles, a row's bits do not depend on how many rows are computed at a time.
        at_a_time = _ROWS_AT_A_TIME[self.q.device.type]
        if self.problem.mask == FULL:  # no tile is hidden, so blocks may be larger
            at_a_time *= 2
        step = max(1, at_a_time // per_block) * self.tile.block_query
        last = self.q.shape[2]
        return [slice(i, min(i + step, last)) for i in range(0, last, step)]

    def key_tiles(self) -> list[slice]:
        """Return the tiles of keys in the tiling's order."""
        size = self.tile.block_kv
        tiles = [slice(start, start + size) for start in range(0, self.k.shape[2], size)]
        # The order matters: running sums are rounded after each tile.
        return tiles[::-1] if self.tile.reverse else tiles

    def _rows(self, rows: slice) -> Outputs:
        q = self.q[:, :, rows].contiguous()  # once, rather than in each product
        running = self._start(q)
        step = self._flash1 if self.tile.recurrence == "flash1" else self._flash2
        for keys, seen, at, whole in self._tiles_seen(rows, self.key_tiles()):
            s, v = self.logits(q, keys), self.expanded(self.v[:, :, keys])
            hides = None if whole else seen
            if self.fused:
                self._fused(running, self.modified(s, None, at), hides, v, *self.fused)
                continue
            step(running, self.modified(s, hides, at), seen, v, keys)
        return self._finish(running)

    def _tiles_seen(
        self, rows: slice, tiles: list[slice]
    ) -> Iterator[tuple[slice, torch.Tensor, Index, bool]]:
        """Yield (keys, seen, index, whether all is seen) of each tile that is not wholly hidden.

        The mask is evaluated for many tiles at once: it is many small operations, and a GPU would
        wait for Python after each tile.
        """
        size, kv = self.tile.block_kv, self.problem.kv
        # (row, key) pairs of a tile; fewer once a result shows on which axes the mask is constant.
        pairs = self.problem.batch * self.problem.heads * (rows.stop - rows.start) * size
        while tiles:
            together = max(1, _SEEN_AT_A_TIME[self.q.device.type] // pairs)
            group, tiles = tiles[:together], tiles[together:]
            start = min(keys.start for keys in group)
            seen, at = self.seen(rows, slice(start, start + len(group) * size))
            each = _without_repeats(seen)
            pairs = each.numel() // len(group)
            if self.kernel.is_plain and self.problem.mask == FULL:
                ends = range(start + size, start + (len(group) + 1) * size, size)
                sees = [[True, end <= kv] for end in ends]
            else:
                of_tiles = each.reshape(-1, len(group), size).mT.flatten(0, 1)
                sees = torch.stack([of_tiles.any(0), of_tiles.all(0)], 1).tolist()
            for keys in group:
                own = slice(keys.start - start, keys.stop - start)
                some, whole = sees[own.start // size]
                if some:
                    yield keys, seen[..., own], replace(at, kv_idx=at.kv_idx[..., own]), whole

    def _start(self, q: torch.Tensor) -> _Running:
        """Return the state before the first tile: empty, or as after a tile with the sink alone."""
        shape = q.shape[:3]
        first = max(self.kernel.first_maximum, self.steps.first_maximum)
        maximum, total = q.new_full(shape, first), q.new_zeros(shape)
        if self.sink is not None and self.steps.sink:
            maximum = (self.sink * self.factors.natural)[:, None].expand(shape)
            # The sink's weight relative to itself is exp(0) = 1; a sink of −∞ has weight 0.
            total = (~torch.isneginf(maximum)).to(total.dtype)
        return _Running(maximum, total, q.new_zeros((*shape, self.problem.value_dim)))

    def seen(self, rows: slice, keys: slice) -> tuple[torch.Tensor, Index]:
        """Return which keys the rows see, ``(batch, heads, rows, keys)``, and the tile's indices.

        Padding keys are hidden. The mask gets the last row's or key's index for padding.
        """
        problem = self.problem
        row, key = self.row[rows], self.key[keys]
        at = Index(
            b=self.sequence.view(-1, 1, 1, 1),
            h=self.head.view(1, -1, 1, 1),
            # Clamped, so that a mod does not read its own tensors out of bounds.
            q_idx=self.known_row[rows].view(1, 1, -1, 1),
            kv_idx=self.known_key[keys].view(1, 1, 1, -1),
        )
        inside = self.kernel.inside(key, problem.kv).view(1, 1, 1, -1)
        seen = self.visible(self.mask, at) & inside
        return seen.expand(problem.batch, problem.heads, len(row), -1), at

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """Return which keys of a tile the rows see, by the kernel's own ``visible``."""
        return self.kernel.visible(mask, at)

    def logits(self, q: torch.Tensor, keys: slice) -> torch.Tensor:
        """Return a tile's scores before score mod and mask: q·k, scaled if ``factors`` say so."""
        s = self.kernel.scores(self.product(q, self.expanded(self.k[:, :, keys]).mT))
        s = s if self.steps.products is None else self.steps.products(s)
        if self.factors.scores is None:
            return s
        if self.score and self.kernel.scale_first:
            # As if a compiler fused this product with the mod's addition: both are rounded once.
            s = s.double()
        return s * self.factors.scores[..., None]

    def modified(self, s: torch.Tensor, seen: torch.Tensor | None, at: Index) -> torch.Tensor:
        """Return a tile's scores after the score mod, −∞ where not ``seen`` (None: all seen)."""
        if self.score:
            # A mod may compute in float64, but the kernel continues in fp32.
            s = self.score(s, at.b, at.h, at.q_idx, at.kv_idx).float()
        if seen is None:
            return s
        return torch.where(seen, s, max(self.kernel.hidden_score, self.steps.hidden))

    def _flash2(
        self,
        run: _Running,
        s: torch.Tensor,
        seen: torch.Tensor,
        v: torch.Tensor,
        keys: slice,
    ) -> None:
        steps = self.steps
        maximum = self._updated_maximum(run.maximum, s.amax(-1))
        base = finite(maximum)
        relative = steps.relative(last=keys.stop >= self.problem.kv)
        p = self._weights(s, base if relative else torch.zeros_like(base))
        if keys.start == 0 and steps.first_weight != 1.0:
            p[..., :1] = p[..., :1] * steps.first_weight
        against = base
        if steps.rescale_maximum != 1.0:
            against = finite(maximum * steps.rescale_maximum)
        alpha = self._rescaling(run.maximum, against, steps.rescale_exponent)
        total = self.kernel.rescaled(run.total, alpha) if steps.rescales_sum else run.total
        summed = p if steps.summed_weights is None else steps.summed_weights(p)
        run.total = self.kernel.added(total, self._row_sum(summed))
        out = self.kernel.rescaled(run.out, alpha[..., None]) if steps.rescales_out else run.out
        weights = p if steps.weights is None else steps.weights(p)
        run.out = self.kernel.added(out, self._weighted(weights, seen, v))
        run.maximum = base if steps.zero_maximum_when_empty else maximum
        if steps.kept_sum is not None:
            run.total = steps.kept_sum(run.total)
        if steps.kept_out is not None:
            run.out = steps.kept_out(run.out)

    def _flash1(
        self,
        run: _Running,
        s: torch.Tensor,
        seen: torch.Tensor,
        v: torch.Tensor,
        _keys: slice,
    ) -> None:
        tile_maximum = s.amax(-1)
        p = self._weights(s, finite(tile_maximum))
        maximum = torch.maximum(run.maximum, tile_maximum)
        base = finite(maximum)
        before = self.kernel.rescaled(run.total, self._rescaling(run.maximum, base))
        beta = self._rescaling(tile_maximum, base)
        run.total = self.kernel.added(before, beta * self._row_sum(p))
        out = self.kernel.rescaled(run.out, before[..., None])
        out = self.kernel.added(out, beta[..., None] * self._weighted(p, seen, v))
        run.out = out / torch.where(run.total == 0, 1.0, run.total)[..., None]
        run.maximum = maximum

    def _fused(
        self,
        run: _Running,
        s: torch.Tensor,
        seen: torch.Tensor | None,
        v: torch.Tensor,
        weigh: Launch,
        add: Launch,
    ) -> None:
        """Do a step of ``_flash2`` or ``_flash1`` by ideal.cu, with the same roundings.

        The separate torch operations pass over a tile of scores twenty times, and over O ten. Here
        a row's weights are summed in another order: within each lane, then over the lanes.

        Args:
            run: The running state, which is changed in place.
            s: Scores of a tile after the score mod, neither masked nor multiplied by c.
            seen: Which of them the rows see; None: all.
            v: The tile's values, of each query head.
            weigh: The kernel launched before P·V.
            add: The kernel launched after P·V.
        """
        batch, heads, rows, keys = shape = (*run.total.shape, v.shape[2])
        lines, by_step = batch * heads * rows, int(self.tile.recurrence == "flash1")
        weights = torch.empty(shape, dtype=torch.float32, device=s.device)
        run.maximum = run.maximum.contiguous()
        alpha, beta = torch.empty_like(run.total), torch.empty_like(run.total)
        strides = (0, 0, 0, 0) if seen is None else seen.expand(shape).stride()
        grid = (-(-lines * _WARP // _THREADS), 1, 1)
        weigh(
            grid,
            [
                *(s.expand(shape).contiguous(), seen, weights, run.maximum, run.total, alpha, beta),
                *(self.exponents, 0.0 if by_step else float(self.tile.lazy_rescale)),
                *(lines, keys, rows, heads, by_step, int(self.factors.scores is not None)),
                *(_WEIGHT_FORMATS[self.problem.formats.weights.name], *strides),
            ],
        )
        part = self.product(weights, v).contiguous()  # a single column is a view of two
        add(grid, [run.out, part, alpha, beta, run.total, lines, part.shape[-1], by_step])

    def _updated_maximum(self, old: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        """Return the running maximum after a tile; a lazy one stays within its threshold."""
        new = torch.maximum(old, tile)
        if not self.tile.lazy_rescale:
            return new
        growth = (new - old) * self.factors.exponent
        stays = (growth <= self.tile.lazy_rescale) & ~torch.isneginf(old)
        return torch.where(stays, old, new)

    def _weights(self, s: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Return P in fp32, exp2((s − base) · c); 0 where a score is −∞."""
        base, c = base[..., None], self.factors.exponent[..., None]
        if self.factors.scores is None:
            return self._exp2(multiply_add(s, c, -(base * c)), s)
        # The difference comes first: c times a finite score may overflow fp32.
        return power_of_two(self.kernel.exp2, (s - base) * c, s)

    def _rescaling(self, old: torch.Tensor, base: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        """Return the factor that makes weights relative to ``old`` relative to ``base``."""
        exponent = (old - base) * self.factors.exponent
        exponent = exponent if times == 1.0 else exponent * times
        return self._exp2(exponent, old)

    def _exp2(self, exponent: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        """Return the kernel's exp2 of ``exponent``; 0 where ``score`` is −∞."""
        if self.moderate:
            return self.kernel.exp2(exponent)
        return power_of_two(self.kernel.exp2, exponent, score)

    def _row_sum(self, p: torch.Tensor) -> torch.Tensor:
        return self.kernel.row_sum(p, self.problem, self.factors.weights)

    def _weighted(self, p: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return P·V, where non-finite values reach only the rows that see their key."""
        if self.factors.weights != 1.0:  # saves a pass over P
            p = p * self.factors.weights
        p = self.kernel.operand(p, self.problem.formats.weights)
        return self.product(p, v) if self.v_is_finite else weighted(self.product, p, seen, v)

    def _finish(self, run: _Running) -> Outputs:
        dead = run.total == 0
        out = run.out
        if self.tile.recurrence == "flash2":
            out = self.kernel.normalised(out, torch.where(dead, 1.0, run.total)[..., None])
            out = out if self.steps.normaliser == 1.0 else out * self.steps.normaliser
        out = torch.where(dead[..., None], 0.0, out * self.factors.out[..., None])
        log = torch.log(torch.where(dead, 1.0, run.total).double()).float()
        lse = torch.where(dead, -math.inf, run.maximum * self.factors.lse + log)
        return Outputs(out.to(self.problem.formats.output.torch_dtype), lse)

    def expanded(self, kv: torch.Tensor) -> torch.Tensor:
        """Return keys or values with each key head repeated for the query heads that share it."""
        group = self.problem.group
        return kv if group == 1 else kv.repeat_interleave(group, dim=1)

    def product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Multiply (batch, heads, rows, n) by (batch, heads, n, m), one tile of rows at a time."""
        batch, heads, length, inner = rows.shape
        blocks = length // self.tile.block_query
        tiles = rows.reshape(batch * heads * blocks, self.tile.block_query, inner)
        # One product per tile: torch may sum a larger matrix in another order.
        repeated = columns.flatten(0, 1).repeat_interleave(blocks, dim=0)
        return self.kernel.product(tiles, repeated).view(batch, heads, length, -1)


@functools.cache
def _gpu_kernels(device: torch.device, keys: int) -> tuple[Launch, Launch] | None:
    """Return ideal.cu's kernels for tiles of ``keys`` keys; None if they cannot be compiled."""
    source = _GPU_SOURCE.read_text(encoding="utf-8")
    widest = -(-keys // _WARP) * _WARP
    compile_one = functools.partial(
        compile_kernel, source, device=device, threads=_THREADS, shared=0
    )
    sizes = {"THREADS": _THREADS}
    try:
        weigh = compile_one("ideal_weigh", {**sizes, "WEIGH": 1, "KEYS": widest})
        add = compile_one("ideal_add", sizes)
    except HostError:  # no compiler, or the GPU lacks an instruction (bf16)
        return None
    return weigh, add


def _without_repeats(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its expanded axes (stride 0) reduced to length 1."""
    return x[tuple(slice(None) if stride else slice(1) for stride in x.stride())]


def _in_nats(problem: Problem) -> bool:
    """Return whether q·k is scaled before the softmax, as mods and sinks need natural units."""
    # With a negative scale the largest product is the smallest score.
    return problem.score != NONE or problem.sink or problem.scale < 0


Part = TypeVar("Part")


def with_gradients(kernel: Ideal, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Return the forward pass's ``outputs`` on ``inputs`` together with the gradients."""
    return _BackwardPass(kernel, inputs, outputs).gradients()


def slope(score: ScoreMod, x: torch.Tensor, at: Index) -> torch.Tensor:
    """Return the derivative of ``score`` at each of the scores ``x``; 0 where it is constant."""
    with torch.enable_grad():
        scores = x.detach().requires_grad_()
        modified = score(scores, at.b, at.h, at.q_idx, at.kv_idx)
        if not modified.requires_grad:
            return torch.zeros_like(x)
        (gradient,) = torch.autograd.grad(modified.expand_as(x).sum(), scores, allow_unused=True)
    return torch.zeros_like(x) if gradient is None else gradient


class _BackwardPass(Pass):
    """One backward pass over prepared inputs and the outputs of the forward pass."""

    def __init__(self, kernel: Ideal, inputs: Inputs, outputs: Outputs) -> None:
        super().__init__(kernel, inputs)
        assert inputs.dout is not None, "a Problem with a backward has a loss"
        assert outputs.lse is not None, "the forward pass gives it"
        rows = self.tile.block_query
        self.forward = outputs
        self.dout = padded(kernel.operand(inputs.dout.float(), self.problem.formats.products), rows)
        # delta takes dO as it is stored; products may read it rounded to tf32.
        dlse, other_delta = inputs.dlse, self.steps.delta
        if other_delta is None:
            delta = kernel.delta(inputs.dout.float(), outputs.out.float(), dlse)
        else:
            delta = kernel.delta(inputs.dout.float(), outputs.out.float(), None)
            delta = other_delta(delta, torch.zeros_like(delta) if dlse is None else dlse)
        self.delta = padded(delta[..., None], rows)[..., 0]
        self.lse = padded(outputs.lse[..., None] * self.steps.backward_lse, rows)[..., 0]
        self.all_finite = all(bool(torch.isfinite(x).all()) for x in (self.q, self.k, self.dout))
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.captured: CapturedSums | None = None
        if self.score and self.problem.dcaptured:
            self.captured = CapturedSums(self.score, self.device, torch.float32)

    def gradients(self) -> Outputs:
        problem, blocks = self.problem, self.row_blocks()
        dtype, scale = problem.formats.storage.torch_dtype, self.factors.scale[..., None]
        # dK and dV are running sums, so their bits depend on the order of the rows.
        parts = {rows.start: self._dq_of_rows(rows) for rows in self._in_order(blocks)}
        dq = torch.cat([parts[rows.start] for rows in blocks], dim=2)[:, :, : problem.query]
        dk = self.dk[:, :, : problem.kv]
        is_scaled = self.steps.scaled_gradients
        return dataclasses.replace(
            self.forward,
            dq=(self.kernel.scaled(dq, scale) if "dq" in is_scaled else dq).to(dtype),
            dk=(self.kernel.scaled(dk, scale) if "dk" in is_scaled else dk).to(dtype),
            dv=self.dv[:, :, : problem.kv].to(dtype),
            dsink=None if self.sink is None else self._dsink(self.sink),
            dcaptured=None if self.captured is None else self.captured.sums,
        )

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """Return which keys of a tile the rows see, by the kernel's ``visible_in_backward``."""
        own_mask = self.steps.backward_mask and self.steps.backward_mask(self.problem, self.device)
        return self.kernel.visible_in_backward(own_mask or mask, at)

    def _dq_of_rows(self, rows: slice) -> torch.Tensor:
        """Return the rows' dQ before the scale, and add what they contribute to dK and dV."""
        q, dout = self.q[:, :, rows], self.dout[:, :, rows]
        dq = torch.zeros_like(q)
        # The mask treats padding as the last row, but padding must not contribute.
        row = torch.arange(rows.start, rows.stop, device=self.device)
        exists = (row < self.problem.query).view(1, 1, -1, 1)
        for keys in self.key_tiles():
            seen, at = self.seen(rows, keys)
            seen = seen & exists
            if not bool(seen.any()):
                continue
            p, dx = self._weights_again(rows, keys, seen, at)
            k = self.expanded(self.k[:, :, keys])
            dq = self.kernel.gradient_added(dq, self._seen_product(dx, seen, k))
            self.dv[:, :, keys] = self._add_rows(self.dv[:, :, keys], p, seen, dout)
            self.dk[:, :, keys] = self._add_rows(self.dk[:, :, keys], dx, seen, q)
        return dq

    def _weights_again(
        self, rows: slice, keys: slice, seen: torch.Tensor, at: Index
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return P and the gradient of the scores before the mod, both in the weights' format."""
        kernel, fmt = self.kernel, self.problem.formats.weights
        x = self.logits(self.q[:, :, rows], keys).float()
        p = self._weights_from_lse(self.modified(x, seen, at), self.lse[:, :, rows])
        v = self.expanded(self.v[:, :, keys])
        dp = self.product(self.dout[:, :, rows], v.mT)
        dx = kernel.dscores(p, dp, self.delta[:, :, rows, None])
        if self.captured is not None:
            kernel.capture(self.captured, x, at, torch.where(seen, dx, 0.0), seen)
        if self.score and (self.steps.slope is None or self.steps.slope(self.problem)):
            dx = dx * kernel.slope(self.score, x, at)
        # A hidden key contributes nothing, whatever it holds.
        dx = torch.where(seen, dx, 0.0)
        return kernel.operand(p, fmt), kernel.operand(dx, fmt)

    def _weights_from_lse(self, s: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Return P in fp32 from LSE; unlike the forward pass's it is normalised."""
        base, c = finite(lse)[..., None], self.factors.exponent[..., None]
        if self.factors.scores is not None:
            return power_of_two(self.kernel.exp2, (s - base * self.factors.natural) * c, s)
        # s·c is in log2 units; LSE is natural, so it is multiplied by log2 e, rounded once.
        exponent = multiply_add(s, c, -(base * self.factors.log2_e))
        return power_of_two(self.kernel.exp2, exponent, s)

    def _seen_product(
        self, weights: torch.Tensor, seen: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if self.all_finite:
            return self.product(weights, values)
        return weighted(self.product, weights, seen, values)

    def _add_rows(
        self, running: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return dK or dV of a key tile plus the rows' contributions, by row tile, then by head.

        Args:
            running: dK or dV so far, ``(batch, kv_heads, keys, dim)``.
            weights: dX or P, ``(batch, heads, rows, keys)``.
            seen: Which keys the rows see, in the shape of ``weights``.
            rows: q or dO, ``(batch, heads, rows, dim)``.
        """
        problem, size = self.problem, self.tile.block_query
        # (batch, heads, tiles, keys, size) and (batch, heads, tiles, size, dim)
        of_keys, sees, tiles = (_in_tiles(x, size) for x in (weights, seen, rows))
        part = self._tile_product(of_keys.mT, sees.mT, tiles)
        parts = part.view(problem.batch, problem.kv_heads, problem.group, *part.shape[2:])
        if self.steps.group_heads is not None:
            parts = part[:, self.steps.group_heads(problem).to(part.device)]
        for tile in self._in_order(list(range(tiles.shape[2]))):
            for head in range(parts.shape[2]):
                running = self.kernel.gradient_added(running, parts[:, :, head, tile])
        return running

    def _tile_product(
        self, weights: torch.Tensor, seen: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            products = self.kernel.product(left.flatten(0, 2), right.flatten(0, 2))
            return products.view(*left.shape[:3], *products.shape[1:])

        if self.all_finite:
            return product(weights, values)
        return weighted(product, weights, seen, values)

    def _dsink(self, sink: torch.Tensor) -> torch.Tensor:
        """Return dsink ``(heads,)``, summed in fp32 by sequence, then by tile of rows."""
        lse = self.lse[:, :, : self.problem.query]
        at_sink = sink[:, None].expand_as(lse)
        exponent = (at_sink - finite(lse)) * self.factors.log2_e
        p = power_of_two(self.kernel.exp2, exponent, at_sink)
        # A sink has no value vector, so its dP is 0.
        terms = self.kernel.dscores(p, torch.zeros_like(p), self.delta[:, :, : lse.shape[2]])
        size = self.tile.block_query
        sums = _in_tiles(padded(terms[..., None], size), size).sum((-2, -1))
        total = torch.zeros_like(sink)
        for b in range(self.problem.batch):
            for tile in self._in_order(list(range(sums.shape[2]))):
                total = self.kernel.gradient_added(total, sums[b, :, tile])
        return total

    def _in_order(self, parts: list[Part]) -> list[Part]:
        """Return parts of the query rows, reversed if the tiling starts with the last keys."""
        return parts[::-1] if self.tile.reverse else parts


def _in_tiles(x: torch.Tensor, size: int) -> torch.Tensor:
    """Reshape ``(batch, heads, rows, n)`` to ``(batch, heads, tiles, size, n)``."""
    batch, heads, _, n = x.shape
    return x.reshape(batch, heads, -1, size, n)


class Ideal(Subject):
    """A tiled FlashAttention-2 forward (Dao 2023, algorithm 1) with every rounding specified.

    * q·k in fp32 from operands in the products' format (tf32: rounded to nearest, or truncated
      as tensor cores do); scores in fp32.
    * Without a score mod, P = exp2(s·c − m·c) with c = fp32(scale · log2 e), m·c rounded and the
      multiply-add rounded once. m·c overflows if a score exceeds 2.36e38, fp32's largest number
      divided by log2 e; such a row is wrong. With a score mod, s' is the mod of fp32(s · scale), in
      natural units, and P = exp2((s' − m)·log2 e), where the difference, log2 e and the product are
      rounded: no finite score overflows. exp2 and log are rounded once, to fp32.
    * P is in fp32; the row sum adds P unrounded; P is rounded to the weights' format before P·V.
    * O is rescaled in fp32, and at the end multiplied by the fp32 reciprocal of the row sum, as
      flash-attn does; then rounded to the output format.
    * LSE = fp32(m · scale) + log(row sum), or m + log(row sum) with a score mod.
    * fp8: q·k is of the stored numbers; scale and c are multiplied by fp32(q's · k's descale), one
      number per sequence and key head. P is multiplied by the dtype's weights_scale before it is
      rounded (saturating; 2^-τ of that where a lazy maximum lets P reach 2^τ), and O at the end by
      fp32(v's descale / weights_scale).
    * A sink is in natural units, and with one so are scores, as with a score mod. It is processed
      before the first tile: the maximum starts as the sink and the row sum as 1.
    * Rows that see no key give 0 and an LSE of −∞, or of the sink. A key or value that the mask
      hides from a row cannot affect it, even if it is NaN. A score mod's −∞ does not hide a key:
      its weight is 0, and a non-finite value gives NaN. A score of −∞ has weight 0 even if descales
      are so small that c underflows to 0.

    A tiling of FlashAttention-1 (Dao et al. 2022, algorithm 1) differs in that a step's P is
    relative to the step's own maximum, so that its largest is 1 exactly, and O is divided by the
    row sum after each step.

    Backward (algorithm 2), in fp32 except where said otherwise:

    * delta is the row's Σ dO·O, with O as it is stored, minus dLSE.
    * P is recomputed from the forward pass's LSE: exp2(s·c − LSE·log2 e), with LSE·log2 e rounded
      and the multiply-add rounded once; with a score mod or a sink exp2((s' − LSE)·log2 e).
    * dS = P·(dP − delta), times the score mod's derivative by torch's autograd in fp32. P and dS
      are rounded to the weights' format before Pᵀ·dO, dS·K and dSᵀ·q. dO is rounded to the
      products' format before any product.
    * dQ is summed over key tiles in the tiling's order, dK and dV over row tiles (the last first in
      a reverse tiling) and, within one, over the query heads that share a key head. dQ and dK are
      multiplied by the scale at the end. All are then rounded to the storage format.
    * dsink is the sum of exp2((sink − LSE)·log2 e)·(0 − delta) over rows, by tiles, in fp32.
    * dcaptured is the sum of dS (unrounded, before the score mod's derivative) times the mod's
      derivative with respect to the number that it reads, by tiles, in fp32.
    * A row that sees no key has gradient 0 and contributes to none. A hidden key or value cannot
      affect gradients of rows that do not see it, even if it is NaN.

    ``ideal_softmax`` computes Problems of softmax.

    Every matrix product has the shape of a whole tile, as on a GPU: a row's bits do not depend
    on the lengths or on its neighbours.

    ``steps`` are the deviations of a kernel with a planted fault; here there are none.

    Args:
        tiling: How to walk over the keys (default: 128 × 64 from the first key on).
        tf32: Whether tf32 operands are rounded to ``nearest`` or by ``truncate``.
        reverse_sums: Whether the sums within a tile go from the last term to the first.
        scale_first: Whether, without a score mod, scores are multiplied by c before m is
            subtracted; with one, nothing is rounded before the mod's result in the forward pass.
            Good kernels differ in this.
        quick: Whether ideal.cu may compute a large problem on a GPU. It sums a row's weights in
            another order than the torch code does, which is fine for a yardstick whose bits nobody
            compares.
    """

    name = "ideal"
    summary = "tiled FlashAttention-2 in fp32 torch operations, rounded where a kernel must round"
    log2_e = math.log2(math.e)
    first_maximum = -math.inf
    hidden_score = -math.inf
    steps = RIGHT
    promises = frozenset(PROMISES)
    promises_gradients = True
    sinks = True
    backward = True
    captured = True

    def __init__(
        self,
        tiling: Tiling | None = None,
        *,
        tf32: Literal["nearest", "truncate"] = "nearest",
        reverse_sums: bool = False,
        scale_first: bool = False,
        quick: bool = False,
    ) -> None:
        self._tiling = tiling or Tiling(block_query=128, block_kv=64)
        self._tf32, self.quick = tf32, quick
        self.reverse_sums, self.scale_first = reverse_sums, scale_first

    @property
    def is_plain(self) -> bool:
        """Whether this is exactly this file's kernel: no subclass, other steps or patched copy."""
        return _IS_ORIGINAL and type(self) is Ideal and self.steps is RIGHT

    def concerns(self, problem: Problem) -> bool:
        """Return True for softmax and attention, with or without sinks, pages and gradients."""
        return problem.operation in OPERATIONS

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return None: every Problem is supported."""
        del problem, device
        return None

    def tiling(self, problem: Problem, device: str) -> Tiling:
        """Return the tiling given to the constructor."""
        del problem, device
        return self._tiling

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return IEEE fp32 arithmetic, on a GPU too; tf32 rounding follows the constructor."""
        del device
        return replace(
            with_full_tanh(super().arithmetic(problem, "cpu"), problem),
            truncates=problem.dtype == "tf32" and self._tf32 == "truncate",
            weights_scale=self.weights_scale(problem),
            lazy_rescale=self._tiling.lazy_rescale,
        )

    def prepare(self, inputs: Inputs) -> Call:
        """Return a call that does all the work."""

        def call() -> Outputs:
            # Gradients are computed by explicit formulas, so autograd would only waste memory.
            with torch.no_grad(), fp32_products("ieee"):
                if inputs.problem.operation == "softmax":
                    return ideal_softmax(inputs)
                outputs = attention(self, inputs)
                if inputs.problem.backward:
                    outputs = with_gradients(self, inputs, outputs)
                if self.steps.lse is not None and outputs.lse is not None:
                    outputs = replace(outputs, lse=self.steps.lse(outputs.lse))
                return outputs

        return call

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """Return which keys of a tile each row sees; axes may have length 1."""
        return mask(at.b, at.h, at.q_idx, at.kv_idx)

    def operand(self, values: torch.Tensor, fmt: Format) -> torch.Tensor:
        """Return fp32 ``values`` (q, k, v or P) rounded to ``fmt``, as a matrix product reads them.

        Finite values beyond fp8's range saturate; infinities stay infinite if the format has them.
        """
        if fmt.name == "tf32":
            return _to_tf32(values, truncate=self._tf32 == "truncate")
        if fmt.saturates:
            # torch's cast to fp8 turns values out of range into NaN or ∞.
            values = torch.where(values.isinf(), values, values.clamp(-fmt.max, fmt.max))
        return values.to(fmt.torch_dtype).float()

    def inside(self, keys: torch.Tensor, kv: int) -> torch.Tensor:
        """Return which indices are below ``kv``: the last tile may extend beyond the last key."""
        return keys < kv

    def product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Multiply fp32 (tiles, rows, n) by (tiles, n, m): q·k, or P·V of one tile of keys.

        A single column is padded with a column of zeros: torch multiplies a matrix by a vector in
        another order when it is alone in its batch (torch 2.13 on a CPU).
        """
        if self.reverse_sums:
            rows, columns = rows.flip(-1), columns.flip(-2)
        if columns.shape[-1] == 1:
            return torch.bmm(rows, torch.nn.functional.pad(columns, (0, 1)))[..., :1]
        return torch.bmm(rows, columns)

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """Return q·k of a tile as the kernel stores it, before scale, score mod and mask."""
        return products

    def exp2(self, exponent: torch.Tensor) -> torch.Tensor:
        """Return 2 to the power of fp32 ``exponent``, rounded once."""
        return torch.exp2(exponent.double(), out=torch.empty_like(exponent))  # cast as it is stored

    def weights_scale(self, problem: Problem) -> float:
        """Return the factor of P before it is rounded.

        With a maximum that may lag by τ, P reaches 2^τ, which has to stay within fp8's range.
        """
        formats = problem.formats
        lag = 2.0 ** math.ceil(self._tiling.lazy_rescale) if formats.weights.saturates else 1.0
        return formats.weights_scale / lag

    def row_sum(self, p: torch.Tensor, problem: Problem, scale: float) -> torch.Tensor:
        """Return the row sums of a tile's P before it is multiplied by ``scale`` and rounded."""
        del problem, scale
        return p.flip(-1).sum(-1) if self.reverse_sums else p.sum(-1)

    def rescaled(self, running: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """Return the running sum or output, rescaled to a new maximum: ``running · alpha``."""
        return running * alpha

    def added(self, running: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the running sum ``(batch, heads, rows)``, or the running output, plus a part."""
        return running + part

    def normalised(self, out: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return the final O: ``out`` times the fp32 reciprocal of the row sum."""
        return out * (1.0 / total)

    def visible_in_backward(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """Return which keys of a tile each row sees in the backward pass."""
        return self.visible(mask, at)

    def delta(
        self, dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None
    ) -> torch.Tensor:
        """Return delta ``(batch, heads, query)``, which is subtracted from dP: Σ dO·O − dLSE."""
        delta = (dout * out).sum(-1)
        return delta if dlse is None else delta - dlse

    def dscores(self, p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a tile's scores after the score mod: P·(dP − delta)."""
        return p * (dp - delta)

    def slope(self, score: ScoreMod, x: torch.Tensor, at: Index) -> torch.Tensor:
        """Return the score mod's derivative at a tile's scores, by torch's autograd."""
        return slope(score, x, at)

    def capture(
        self, sums: CapturedSums, x: torch.Tensor, at: Index, ds: torch.Tensor, seen: torch.Tensor
    ) -> None:
        """Add a tile's contribution to the gradients of the tensors that the score mod reads.

        Args:
            sums: The gradients so far.
            x: The tile's scores before the mod.
            at: The tile's indices.
            ds: The gradient after the mod, 0 where not seen.
            seen: Which keys its rows see.
        """
        sums.add(x, (at.b, at.h, at.q_idx, at.kv_idx), ds, seen)

    def gradient_added(self, running: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return a running gradient plus one tile's contribution of one head."""
        return running + part

    def scaled(self, total: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the final dQ or dK: ``total · scale``."""
        return total * scale


def _to_tf32(values: torch.Tensor, *, truncate: bool) -> torch.Tensor:
    """Return fp32 ``values`` in tf32, 13 of 23 stored bits fewer: ties to even, or truncated."""
    dropped = FORMATS["fp32"].significand - FORMATS["tf32"].significand
    bits = values.contiguous().view(torch.int32)
    if not truncate:
        # Adding the last remaining bit makes this half a unit for odd numbers: ties go to even.
        half_less_one = (1 << (dropped - 1)) - 1
        bits = bits + half_less_one + ((bits >> dropped) & 1)
    rounded = (bits & -(1 << dropped)).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values)
