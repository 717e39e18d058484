"""Calls of the backward of packed documents, with every kind of document in one call."""

import itertools
from dataclasses import dataclass, replace

import torch
from tests.kernels import gradient_reference as reference
from tests.kernels.backward_calls import NAMES, mods
from tests.kernels.gradient_reference import Question, Score

from attncheck.kernels.launch import Launch
from attncheck.kernels.varlen_backward import key_program_list, varlen_backward
from attncheck.kernels.varlen_forward import program_list, varlen_forward
from attncheck.mods import masks, scores

# Documents without rows, without keys, without both, with one row and key, longer than a tile.
LENGTHS = ((3, 19), (0, 5), (4, 0), (0, 0), (17, 33), (1, 1), (5, 18))
BEFORE, BEHIND = 2, 3  # keys in no document
ROWS, KEYS = (sum(lengths[side] for lengths in LENGTHS) for side in (0, 1))
ENDS = tuple(itertools.accumulate(LENGTHS, lambda one, two: (one[0] + two[0], one[1] + two[1])))
STARTS = ((0, 0), *ENDS)
LAUNCH = Launch(block_query=16, block_kv=16)


def stripes(b, h, q_idx, kv_idx):
    return (q_idx + 2 * kv_idx) % 3 != 0


def of_heads(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx + 5 * h


WITHIN = {
    "all": None,
    "window": masks.sliding_window(9),
    "of heads": of_heads,
    "stripes": stripes,
    "later rows see nothing": lambda b, h, q_idx, kv_idx: kv_idx + 2 * q_idx < 20,
    "nothing": lambda b, h, q_idx, kv_idx: q_idx + kv_idx < 0,
}
SLOPES = torch.tensor([0.5, 0.25])
SCORES = {
    "softcap": Score(mod=scores.softcap(2.0), bend=0.5),
    "alibi": Score(mod=scores.alibi(SLOPES)),
    "of documents": Score(mod=lambda s, b, h, i, j: torch.where(b % 2 == 0, s, s * 0.5)),
    "both": Score(mod=lambda s, b, h, i, j: 2 * torch.tanh((s + 0.1 * (i - j)) / 2), bend=0.5),
}


def flagged(causal, i, j, lengths):
    """Whether row ``i`` of a document sees its key ``j`` under the causal flag."""
    query, kv = lengths
    shown = {"": j >= 0, "top_left": j <= i, "bottom_right": j <= i + kv - query}
    return shown[causal]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The arguments of the packed kernel; ``whole``: the reference's, documents as one sequence.

    ``local``: mods count from each document's first row and key, and b is its number.
    """

    whole: Question
    causal: str = ""
    within: object = None
    score: object = None
    local: bool = True

    def but(self, **changes):
        return replace(self, whole=self.whole.but(**changes))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in the kernel's axes."""
        tensors = {name: getattr(self.whole, name)[0].transpose(0, 1) for name in "qkv"}
        dlse = self.whole.dlse
        return tensors | {
            "dout": self.whole.dout[0].transpose(0, 1),
            "dlse": None if dlse is None else dlse[0],
        }

    def places(self) -> torch.Tensor | None:
        if self.local:
            return None
        numbers = [(7, row, BEFORE + key) for row, key in STARTS[:-1]]
        return torch.tensor(numbers, dtype=torch.int32)


def document_of(ends) -> torch.Tensor:
    lengths = torch.tensor([end - start for start, end in itertools.pairwise((0, *ends))])
    return torch.repeat_interleave(torch.arange(len(ends)), lengths)


def pack(causal="", within=None, score=None, dtype="fp32", *, local=True, **changes) -> Packed:
    """Draw standard normal tensors, and translate mask and score mod for the reference."""
    shape = changes.pop("shape", (2, 1, 20, 7))
    heads, kv_heads, dim, value_dim = shape
    of_row = document_of([rows for rows, _ in ENDS])
    nowhere = len(LENGTHS)
    of_key = torch.cat(
        [
            torch.full((BEFORE,), nowhere),
            document_of([keys for _, keys in ENDS]),
            torch.full((BEHIND,), nowhere),
        ]
    )
    firsts = torch.tensor([*STARTS[:-1], (0, 0)])
    lengths = torch.tensor([*LENGTHS, (0, 0)])

    def place(i, j):
        document = of_row[i]
        row, key = firsts[document].unbind(-1)
        return document, i - row, j - BEFORE - key

    def mask(b, h, i, j):
        document, row, key = place(i, j)
        seen = (document == of_key[j]) & flagged(causal, row, key, lengths[document].unbind(-1))
        if within is not None:
            seen = seen & within(*((document, h, row, key) if local else (b + 7, h, i, j)))
        return seen

    def mod(s, b, h, i, j):
        document, row, key = place(i, j)
        return score.mod(s, *((document, h, row, key) if local else (b + 7, h, i, j)))

    whole_score = None if score is None else Score(mod=mod, bend=score.bend)
    sizes = (1, heads, kv_heads, ROWS, BEFORE + KEYS + BEHIND, dim, value_dim)
    whole = reference.make_question(mask, dtype, shape=sizes, score=whole_score, **changes)
    return Packed(whole=whole, causal=causal, within=within, score=score, local=local)


def run(packed, launch=LAUNCH, *, by_keys=None, backward=varlen_backward, **keywords):
    """Run forward and backward; return out, lse and the gradients by name, in the kernel's axes."""
    traced = dict(mods(packed.within, packed.score))
    slope = traced.pop("slope")
    tensors, by_keys = packed.tensors(), by_keys or launch
    q, k, v, dout, dlse = tensors.values()
    if packed.whole.dtype == "tf32":
        launch, by_keys = (replace(x, precision="tf32") for x in (launch, by_keys))
    starts = [
        torch.tensor([first + start[side] for start in STARTS], dtype=torch.int32)
        for side, first in enumerate((0, BEFORE))
    ]
    rows, keys = zip(*LENGTHS, strict=True)
    common = traced | {"scale": packed.whole.scale, "sink": packed.whole.sink}
    common |= {"causal": packed.causal, "places": packed.places()}
    common |= {"programs": program_list(rows, launch.block_query)}
    out, lse = varlen_forward(q, k, v, *starts, **common, launch=launch)
    common |= {"key_programs": key_program_list(keys, by_keys.block_kv), "launch": launch}
    common |= {"slope": slope, "launch_by_keys": by_keys} | keywords
    gradients = backward(q, k, v, out, lse, dout, dlse, *starts, **common)
    return out, lse, dict(zip(NAMES[:4], gradients, strict=True))


def in_reference_axes(results):
    out, lse, gradients = results
    batched = {
        name: each if each is None or name == "dsink" else each.transpose(0, 1)[None]
        for name, each in gradients.items()
    }
    return out.transpose(0, 1)[None], lse[None], batched


def document_part(whole, row, key, lengths):
    """One document of the reference's question, with mask and score mod at the whole's indices."""
    query, kv = lengths
    rows, keys = slice(row, row + query), slice(key, key + kv)
    parts = {name: getattr(whole, name)[:, :, rows] for name in ("q", "dout")}
    parts |= {name: getattr(whole, name)[:, :, keys] for name in ("k", "v")}
    parts["dlse"] = None if whole.dlse is None else whole.dlse[:, :, rows]
    score = whole.score and Score(
        mod=lambda s, b, h, i, j: whole.score.mod(s, b, h, i + row, j + key), bend=whole.score.bend
    )
    return whole.but(
        **parts, score=score, mask=lambda b, h, i, j: whole.mask(b, h, i + row, j + key)
    )


def worst_of(packed, results) -> float:
    """The largest error in units of its allowance: of the whole, and of each document by itself."""
    out, lse, gradients = in_reference_axes(results)
    shares = [reference.worst(gradients, packed.whole, out, lse)]
    for (row, key), (query, kv) in zip(STARTS, LENGTHS, strict=False):
        if not (query and kv):
            continue
        first = BEFORE + key
        rows, keys = slice(row, row + query), slice(first, first + kv)
        own = {"dq": gradients["dq"][:, :, rows]}
        own |= {name: gradients[name][:, :, keys] for name in ("dk", "dv")}
        one = document_part(packed.whole, row, first, (query, kv)).but(sink=None)
        if packed.whole.sink is None:
            shares.append(reference.worst(own, one, out[:, :, rows], lse[:, :, rows]))
    return max(max(share.values()) for share in shares)


def worst(packed, launch=LAUNCH, **keywords) -> float:
    return worst_of(packed, run(packed, launch, **keywords))
