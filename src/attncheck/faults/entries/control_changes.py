"""Changes that leave a kernel right: nothing may flag them."""

from __future__ import annotations

from attncheck.faults.entries.shared_patches import IN_SPLITS
from attncheck.faults.fault import Control, decode, flash2, ideal

__all__ = ["CONTROLS"]

CONTROLS = (
    Control(
        id="lazy-rescaling",
        summary="the running maximum moves only when it grows by more than 4 binades",
        why="P stays below 2^4, which these formats hold; the factor telescopes, and is declared",
        ideal=ideal(
            """
            -self._tiling = tiling or Tiling(block_query=128, block_kv=64)
            +self._tiling = tiling or Tiling(block_query=128, block_kv=64, lazy_rescale=4.0)
        """,
            dtypes=("bf16", "fp16", "fp32"),
        ),
        triton=flash2(
            """
             m_new = tl.maximum(m, tl.max(s, 1))
            +growth = m_new - m
            +if not IDENTITY:
            +    growth = growth * 1.4426950408889634
            +m_new = tl.where((m != float("-inf")) & (growth <= 4.0), m, m_new)

            -return Tiling(block_query=chosen.block_query, block_kv=chosen.block_kv)
            +return Tiling(block_query=chosen.block_query, block_kv=chosen.block_kv, lazy_rescale=4.0)
        """,
            dtypes=("bf16", "fp16", "fp32"),
        ),
    ),
    Control(
        id="row-sum-of-rounded-weights",
        summary="the row sum takes P as it is rounded for P·V",
        why="numerator and denominator have the same weights; it is declared, and LSE judged by it",
        ideal=ideal(
            """
             lazy_rescale=self._tiling.lazy_rescale,
            +sums_rounded_weights=True,

            -del problem, scale
            -return p.sum(-1)
            +rounded = self.operand(p * scale, problem.formats.weights)
            +return rounded.sum(-1) / scale
        """,
            dtypes=("bf16", "fp16"),
        ),
        triton=flash2("""
            -return p, alpha, m_new, total * alpha + tl.sum(p, 1)
            +return p, alpha, m_new, total * alpha + tl.sum(p.to(tl.bfloat16).to(tl.float32), 1)

             truncates=problem.dtype == "tf32",
            +sums_rounded_weights=True,
        """),
    ),
    Control(
        id="reversed-key-tiles",
        summary="the last tile of keys comes first",
        why="a sum in another order",
        ideal=ideal("""
            -self._tiling = tiling or Tiling(block_query=128, block_kv=64)
            +self._tiling = tiling or Tiling(block_query=128, block_kv=64, reverse=True)
        """),
        triton=flash2("""
            -first, beyond, of_run = run_of(visits, run, tl.cdiv(kv, BLOCK_K), LISTED)
            +first, beyond, of_run = run_of(visits, runs - 1 - run, tl.cdiv(kv, BLOCK_K), LISTED)
             for tile in range(first, beyond):
            -    start = tile * BLOCK_K
            +    start = (first + beyond - 1 - tile) * BLOCK_K

            -return Tiling(block_query=chosen.block_query, block_kv=chosen.block_kv)
            +return Tiling(block_query=chosen.block_query, block_kv=chosen.block_kv, reverse=True)
        """),
    ),
    Control(
        id="base-e-internals",
        summary="scores are natural and weights are powers of e",
        why="units of the inside; LSE is natural either way",
        ideal=ideal("""
            -    return power_of_two(self.kernel.exp2, (s - base) * c, s)
            +    return power_of_two(torch.exp, s - base, s)
             exponent = (s.double() * c - (base * c).double()).float()

            -return power_of_two(self.kernel.exp2, exponent, old)
            +return power_of_two(torch.exp, old - finite(new), old)

            -return problem.score != library.NONE or problem.sink
            +return True
        """),
        triton=flash2("""
             group = heads // self.k.shape[1]
            -factor = self.scale * LOG2E if self.score is None else self.scale
            +factor = self.scale

            -scale * LOG2E if identity else scale, scales(descale), () if sink is None else (sink,),
            +scale, scales(descale), () if sink is None else (sink,),

            -if IDENTITY:
            -    lse = lse * 1.4426950408889634

            -if not IDENTITY:
            -    difference = difference * 1.4426950408889634
            -return tl.exp2(difference)
            +return tl.exp(difference)

            -logit = logit * 1.4426950408889634
            +pass

            -lse = (m + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
            +lse = m + tl.log(tl.where(empty, 1.0, total))
        """),
    ),
    Control(
        id="finite-first-maximum",
        summary="the running maximum starts at half of the most negative fp32 number",
        why="no score is below it, and rows that see nothing are known by their row sum",
        ideal=ideal("""
            -first_maximum = -math.inf
            +first_maximum = -1.7014117331926443e38
        """),
        triton=flash2("""
            -m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
            +m = tl.full([BLOCK_Q], -1.7014117331926443e38, tl.float32)
        """),
    ),
    Control(
        id="other-split-count",
        summary="the keys are cut into other splits",
        why="a merge through LSE is exact but for rounding, and the splits are declared",
        ideal=ideal(IN_SPLITS),
        triton=decode("""
            -_SPLIT_BLOCKS = 4
            +_SPLIT_BLOCKS = 2  # of keys, at least, on a GPU: below it a split costs more than it brings
             _MOST_SPLITS = 64
            -_MOST_SPLITS_INTERPRETED = 3
            +_MOST_SPLITS_INTERPRETED = 7
        """),
    ),
    Control(
        id="alpha-skipped-where-it-is-one",
        summary="sums are not rescaled where the maximum has not moved",
        why="a product with 1 changes no bit",
        ideal=ideal("""
            -return running * alpha
            +return torch.where(alpha == 1, running, running * alpha)
        """),
        triton=flash2("""
                 s = hidden(s, visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K))
             p, alpha, m, total = advanced(s, m, total, IDENTITY)
             acc = with_values(
            -    p, v_block, seen, acc * alpha[:, None], CAREFUL, WEIGHTS_SCALE, PRECISION, IMPRECISE
            +    p, v_block, seen,
            +    tl.where((alpha == 1.0)[:, None], acc, acc * alpha[:, None]), CAREFUL, WEIGHTS_SCALE, PRECISION, IMPRECISE
        """),
    ),
)
