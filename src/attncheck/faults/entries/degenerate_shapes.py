"""Faults: no keys, one key, one row."""

from __future__ import annotations

from attncheck.faults.fault import Edit, Fault, Host

__all__ = ["FAULTS"]

_IDEAL = "subjects.ideal_attention"
_WEIGHTS = (
    "        p = self._weights(s, maximum)\n        alpha = self._power(run.maximum, maximum)\n"
)
_LAST = "def _in_nats(problem: Problem) -> bool:\n"

FAULTS = (
    Fault(
        id="seqlen-k-zero-uninit",
        category="degenerate shapes",
        summary="a sequence without keys is left before anything is stored",
        when="a sequence or document of no keys beside others",
        seen="out and LSE are what the memory held",
        sources=(
            "Dao-AILab/flash-attention#2470",
            "Dao-AILab/flash-attention#1155",
            "pytorch/pytorch#81077",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old="lse = torch.where(dead, -math.inf, run.maximum * unit + log)\n",
                        new="""lse = torch.where(dead, -math.inf, run.maximum * unit + log)
        left = dead.all(-1, keepdim=True)
        out = torch.where(left[..., None], torch.empty_like(out), out)
        lse = torch.where(left, torch.empty_like(lse), lse)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="kernels.varlen_forward",
                        old="    kv = tl.load(kv_starts + document + 1) - kv_start\n",
                        new="    kv = tl.load(kv_starts + document + 1) - kv_start\n"
                        "    if kv == 0:\n        return\n",
                    ),
                ),
            ),
        },
        named=("rows-unwritten",),
    ),
    Fault(
        id="one-key-row-slice-nan",
        category="degenerate shapes",
        summary="a tile is done in two halves, and one in which a row sees nothing is not guarded",
        when="one key, or rows whose keys all lie in one half of a tile",
        seen="−∞ − −∞ is NaN in those rows",
        sources=(
            "flashinfer-ai/flashinfer#4401",
            "flashinfer-ai/flashinfer#4451",
            "flashinfer-ai/flashinfer#4452",
        ),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old=_WEIGHTS,
                        new="""        half = s.shape[-1] // 2
        own = s.unflatten(-1, (2, half)).amax(-1).repeat_interleave(half, -1)
        c = self.factors.exponent[..., None]
        exp2 = self.kernel.exp2
        p = exp2((s - own) * c) * exp2((own - maximum[..., None]) * c)
        alpha = self._power(run.maximum, maximum)
""",
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-flash2",
                edits=(
                    Edit(
                        module="kernels.tile",
                        old="    p = power(s - shift[:, None], IDENTITY)\n",
                        new="""    halves = tl.reshape(s, [s.shape[0], 2, s.shape[1] // 2])
    own = tl.max(halves, 2)
    parts = power(halves - own[:, :, None], IDENTITY)
    parts = parts * power(own - shift[:, None], IDENTITY)[:, :, None]
    p = tl.reshape(parts, [s.shape[0], s.shape[1]])
""",
                    ),
                ),
            ),
        },
        named=("empty-split-nan",),
    ),
    Fault(
        id="varlen-max-seqlen-one",
        category="degenerate shapes",
        summary="where no document has more than one row, each is taken to have one",
        when="documents of one row, and some of none",
        seen="rows behind an empty document read another document's keys",
        sources=("Dao-AILab/flash-attention#1537",),
        hosts={
            "ideal": Host(
                kernel="ideal",
                edits=(
                    Edit(
                        module=_IDEAL,
                        old="        self.mask = problem.mask_mod(self.device)\n",
                        new="        self.mask = _a_row_each(problem).mask_mod(self.device)\n",
                    ),
                    Edit(
                        module=_IDEAL,
                        old=_LAST,
                        new="""def _a_row_each(problem):
    def swapped(spec):
        given = spec.values
        rows = given.get("query_lengths", ())
        if rows and max(rows) == 1:
            given["query_lengths"] = [1] * sum(rows) + [0] * (len(rows) - sum(rows))
        return spec.of(spec.name, *map(swapped, spec.parts), **given)

    return problem.replace(mask=swapped(problem.mask))


"""
                        + _LAST,
                    ),
                ),
            ),
            "triton": Host(
                kernel="triton-varlen",
                edits=(
                    Edit(
                        module="subjects.varlen",
                        old="    return found\n\n\ndef _alone(",
                        new="""    if max(rows for rows, _ in found.lengths()) > 1:
        return found
    swapped = []
    for parts in found.segments:
        there = sum(rows for rows, _ in parts)
        swapped.append([(int(i < there), keys) for i, (_, keys) in enumerate(parts)])
    return replace(found, segments=swapped)


def _alone(""",
                    ),
                ),
            ),
        },
        named=("empty-documents-not-counted",),
    ),
)
