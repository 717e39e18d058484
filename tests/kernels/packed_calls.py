"""Calls of the backward of packed documents: one call with every kind of document."""

import itertools
from dataclasses import dataclass, replace

import torch
from tests.kernels import gradient_reference as reference
from tests.kernels.backward_calls import NAMES, mods
from tests.kernels.gradient_reference import Score

from attncheck.kernels.launch import Launch
from attncheck.kernels.varlen_backward import key_program_list, varlen_backward
from attncheck.kernels.varlen_forward import program_list, varlen_forward
from attncheck.mods import masks, scores

# One without rows, one without keys, one without either, one of one row and key; longer than tiles.
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
    """Whether the flag shows a row a key, by their places in a document."""
    query, kv = lengths
    shown = {"": j >= 0, "top_left": j <= i, "bottom_right": j <= i + kv - query}
    return shown[causal]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the kernel is asked, ``given`` in the reference's axes: all documents as one sequence.

    ``local``: the mods count from each document's first row and key, and b is its number.
    """

    given: object
    causal: str = ""
    within: object = None
    score: object = None
    local: bool = True

    def but(self, **changes):
        return replace(self, given=self.given.but(**changes))

    def packed(self) -> dict[str, torch.Tensor]:
        """The reference's tensors in the kernel's axes, packed."""
        named = {name: getattr(self.given, name)[0].transpose(0, 1) for name in "qkv"}
        dlse = self.given.dlse
        return named | {
            "dout": self.given.dout[0].transpose(0, 1),
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


def asked_of(causal="", within=None, score=None, dtype="fp32", *, local=True, **changes) -> Asked:
    """Standard normal numbers, and the mask and score mod as the whole has them."""
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

    whole = None if score is None else Score(mod=mod, bend=score.bend)
    sizes = (1, heads, kv_heads, ROWS, BEFORE + KEYS + BEHIND, dim, value_dim)
    given = reference.given(mask, dtype, shape=sizes, score=whole, **changes)
    return Asked(given=given, causal=causal, within=within, score=score, local=local)


def run(asked, launch=LAUNCH, *, by_keys=None, backward=varlen_backward, **keywords):
    """out, lse and the gradients by name, in the kernel's axes."""
    called = dict(mods(asked.within, asked.score))
    slope = called.pop("slope")
    tensors, by_keys = asked.packed(), by_keys or launch
    q, k, v, dout, dlse = tensors.values()
    if asked.given.dtype == "tf32":
        launch, by_keys = (replace(x, precision="tf32") for x in (launch, by_keys))
    starts = [
        torch.tensor([first + start[side] for start in STARTS], dtype=torch.int32)
        for side, first in enumerate((0, BEFORE))
    ]
    rows, keys = zip(*LENGTHS, strict=True)
    both = called | {"scale": asked.given.scale, "sink": asked.given.sink, "causal": asked.causal}
    both |= {"places": asked.places(), "programs": program_list(rows, launch.block_query)}
    out, lse = varlen_forward(q, k, v, *starts, **both, launch=launch)
    both |= {"key_programs": key_program_list(keys, by_keys.block_kv), "launch": launch}
    both |= {"slope": slope, "launch_by_keys": by_keys} | keywords
    found = backward(q, k, v, out, lse, dout, dlse, *starts, **both)
    return out, lse, dict(zip(NAMES[:4], found, strict=True))


def in_reference_axes(found):
    out, lse, gradients = found
    batched = {
        name: one if one is None or name == "dsink" else one.transpose(0, 1)[None]
        for name, one in gradients.items()
    }
    return out.transpose(0, 1)[None], lse[None], batched


def one_of(given, row, key, lengths):
    """A document's part of what the reference is asked; its own mask at the whole's indices."""
    query, kv = lengths
    rows, keys = slice(row, row + query), slice(key, key + kv)
    parts = {name: getattr(given, name)[:, :, rows] for name in ("q", "dout")}
    parts |= {name: getattr(given, name)[:, :, keys] for name in ("k", "v")}
    parts["dlse"] = None if given.dlse is None else given.dlse[:, :, rows]
    score = given.score and Score(
        mod=lambda s, b, h, i, j: given.score.mod(s, b, h, i + row, j + key), bend=given.score.bend
    )
    return given.but(
        **parts, score=score, mask=lambda b, h, i, j: given.mask(b, h, i + row, j + key)
    )


def worst_of(asked, found) -> float:
    """The largest error over what is allowed: of each document by itself, and of the whole."""
    out, lse, gradients = in_reference_axes(found)
    shares = [reference.worst(gradients, asked.given, out, lse)]
    for (row, key), (query, kv) in zip(STARTS, LENGTHS, strict=False):
        if not (query and kv):
            continue
        first = BEFORE + key
        rows, keys = slice(row, row + query), slice(first, first + kv)
        own = {"dq": gradients["dq"][:, :, rows]}
        own |= {name: gradients[name][:, :, keys] for name in ("dk", "dv")}
        one = one_of(asked.given, row, first, (query, kv)).but(sink=None)
        if asked.given.sink is None:
            shares.append(reference.worst(own, one, out[:, :, rows], lse[:, :, rows]))
    return max(max(share.values()) for share in shares)


def worst(asked, launch=LAUNCH, **keywords) -> float:
    return worst_of(asked, run(asked, launch, **keywords))
