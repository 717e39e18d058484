"""Changes that leave a kernel right."""

from __future__ import annotations

from attncheck.faults.entries.execution_faults import in_splits
from attncheck.faults.fault import Control, Edit, Host

__all__ = ["CONTROLS"]

_16_BITS_OR_MORE = ("bf16", "fp16", "fp32")
_TILING = "self._tiling = tiling or Tiling(block_query=128, block_kv=64)"
_DECLARED = "Tiling(block_query=chosen.block_query, block_kv=chosen.block_kv)"
_HALF_OF_LARGEST = "-1.7014117331926443e38"  # −FLT_MAX/2


def _ideal_tiling(said: str) -> Edit:
    new = _TILING.replace("block_kv=64", f"block_kv=64, {said}")
    return Edit(module="subjects.ideal", old=_TILING, new=new)


def _flash_tiling(said: str) -> Edit:
    new = f"{_DECLARED[:-1]}, {said})"
    return Edit(module="subjects.flash", old=_DECLARED, new=new)


CONTROLS = (
    Control(
        id="lazy-rescaling",
        summary="the running maximum moves only when it grows by more than 4 binades",
        why="P stays below 2^4, which these formats hold; the factor telescopes, and is declared",
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(_ideal_tiling("lazy_rescale=4.0"),),
                dtypes=_16_BITS_OR_MORE,
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="    m_new = tl.maximum(m, tl.max(s, 1))\n",
                        new="""    m_new = tl.maximum(m, tl.max(s, 1))
    growth = m_new - m
    if not IDENTITY:
        growth = growth * 1.4426950408889634
    m_new = tl.where((m != float("-inf")) & (growth <= 4.0), m, m_new)
""",
                    ),
                    _flash_tiling("lazy_rescale=4.0"),
                ),
                dtypes=_16_BITS_OR_MORE,
            ),
        },
    ),
    Control(
        id="row-sum-of-rounded-weights",
        summary="the row sum takes P as it is rounded for P·V",
        why="numerator and denominator have the same weights; it is declared, and LSE judged by it",
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="        del problem, scale\n        return p.sum(-1)\n",
                        new="        rounded = self.operand(p * scale, problem.formats.weights)\n"
                        "        return rounded.sum(-1) / scale\n",
                    ),
                    Edit(
                        module="subjects.ideal",
                        old="            lazy_rescale=self._tiling.lazy_rescale,\n",
                        new="            lazy_rescale=self._tiling.lazy_rescale,\n"
                        "            sums_rounded_weights=True,\n",
                    ),
                ),
                dtypes=("bf16", "fp16"),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="total * alpha + tl.sum(p, 1)",
                        new="total * alpha + tl.sum(p.to(tl.bfloat16).to(tl.float32), 1)",
                    ),
                    Edit(
                        module="subjects.flash",
                        old='            truncates=problem.dtype == "tf32",\n',
                        new='            truncates=problem.dtype == "tf32",\n'
                        "            sums_rounded_weights=True,\n",
                    ),
                ),
            ),
        },
    ),
    Control(
        id="reversed-key-tiles",
        summary="the last tile of keys comes first",
        why="a sum in another order",
        hosts={
            "ideal": Host(kernel="ideal", edits=(_ideal_tiling("reverse=True"),)),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="run_of(visits, run, tl.cdiv(kv, BLOCK_K), LISTED)",
                        new="run_of(visits, runs - 1 - run, tl.cdiv(kv, BLOCK_K), LISTED)",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="            start = tile * BLOCK_K\n",
                        new="            start = (first + beyond - 1 - tile) * BLOCK_K\n",
                    ),
                    _flash_tiling("reverse=True"),
                ),
            ),
        },
    ),
    Control(
        id="base-e-internals",
        summary="scores are natural and weights are powers of e",
        why="units of the inside; LSE is natural either way",
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal_attention",
                        old="return problem.score != library.NONE or problem.sink",
                        new="return True",
                    ),
                    Edit(
                        module="subjects.ideal_attention",
                        old="return power_of_two(self.kernel.exp2, (s - base) * c, s)",
                        new="return power_of_two(torch.exp, s - base, s)",
                    ),
                    Edit(
                        module="subjects.ideal_attention",
                        old="        exponent = (old - finite(new)) * self.factors.exponent\n"
                        "        return power_of_two(self.kernel.exp2, exponent, old)\n",
                        new="        return power_of_two(torch.exp, old - finite(new), old)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="    if not IDENTITY:\n"
                        "        difference = difference * 1.4426950408889634\n"
                        "    return tl.exp2(difference)\n",
                        new="    return tl.exp(difference)\n",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="            logit = logit * 1.4426950408889634\n",
                        new="            pass\n",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="(m + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453",
                        new="m + tl.log(tl.where(empty, 1.0, total))",
                    ),
                    Edit(
                        module="kernels.flash2_forward",
                        old="scale * LOG2E if identity else scale, scales(descale)",
                        new="scale, scales(descale)",
                    ),
                    Edit(
                        module="kernels.flash2_backward",
                        old="factor = self.scale * LOG2E if self.score is None else self.scale",
                        new="factor = self.scale",
                    ),
                    Edit(
                        module="kernels.tile",
                        old="    if IDENTITY:\n        lse = lse * 1.4426950408889634\n",
                        new="",
                    ),
                ),
            ),
        },
    ),
    Control(
        id="finite-first-maximum",
        summary="the running maximum starts at half of the most negative fp32 number",
        why="no score is below it, and rows that see nothing are known by their row sum",
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="first_maximum = -math.inf",
                        new=f"first_maximum = {_HALF_OF_LARGEST}",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old='m = tl.full([BLOCK_Q], float("-inf"), tl.float32)',
                        new=f"m = tl.full([BLOCK_Q], {_HALF_OF_LARGEST}, tl.float32)",
                    ),
                ),
            ),
        },
    ),
    Control(
        id="other-split-count",
        summary="the keys are cut into other splits",
        why="a merge through LSE is exact but for rounding, and the splits are declared",
        hosts={
            "ideal": Host(kernel="ideal", edits=in_splits()),
            "triton": Host(
                kernel="triton-decode",
                edits=(
                    Edit(
                        module="subjects.decode",
                        old="_MOST_SPLITS_INTERPRETED = 3",
                        new="_MOST_SPLITS_INTERPRETED = 7",
                    ),
                    Edit(
                        module="subjects.decode", old="_SPLIT_BLOCKS = 4", new="_SPLIT_BLOCKS = 2"
                    ),
                ),
            ),
        },
    ),
    Control(
        id="alpha-skipped-where-it-is-one",
        summary="sums are not rescaled where the maximum has not moved",
        why="a product with 1 changes no bit",
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module="subjects.ideal",
                        old="        return running * alpha\n",
                        new="        return torch.where(alpha == 1, running, running * alpha)\n",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.flash2_forward",
                        old="        p, v_block, seen, acc * alpha[:, None], CAREFUL,",
                        new="""        p, v_block, seen,
        tl.where((alpha == 1.0)[:, None], acc, acc * alpha[:, None]), CAREFUL,""",
                    ),
                ),
            ),
        },
    ),
)
