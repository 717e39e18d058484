"""Gradients of packed documents: torch's in float64 within what fp32 sums and roundings allow, bit
for bit what FlashAttention-2 gives of each document alone, and every planted fault is noticed."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from attncheck.core.errors import UsageError
from attncheck.core.source_files import import_file
from attncheck.mods import masks, scores
from attncheck.mods.trace import trace_derivative, trace_mask, trace_score
from attncheck.verify.environment import prepare

if not torch.cuda.is_available():
    prepare("cpu")

from attncheck.kernels.flash2_backward import flash2_backward
from attncheck.kernels.launch import Launch
from attncheck.kernels.varlen_backward import key_program_list, varlen_backward
from attncheck.kernels.varlen_forward import program_list, varlen_forward
from attncheck.mods.to_triton import to_triton

PATCHED = import_file(Path(__file__).with_name("patched_kernels.py"), "a file of these tests")
REFERENCE = import_file(Path(__file__).with_name("gradient_reference.py"), "a file of these tests")
Score = REFERENCE.Score

NAMES = ("dq", "dk", "dv", "dsink")
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

    def but(self, **changes) -> Asked:
        return Asked(**(vars_of(self) | {"given": self.given.but(**changes)}))

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


def vars_of(asked: Asked) -> dict:
    return {name: getattr(asked, name) for name in ("given", "causal", "within", "score", "local")}


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
    given = REFERENCE.given(mask, dtype, shape=sizes, score=whole, **changes)
    return Asked(given=given, causal=causal, within=within, score=score, local=local)


@functools.cache
def mods(within, score):
    """The TritonMods of a mask and a score mod."""
    said = {"mask": None, "score": None, "slope": None}
    if within is not None:
        said["mask"] = to_triton(trace_mask(within))
    if score is not None:
        said["score"] = to_triton(trace_score(score.mod))
        said["slope"] = to_triton(trace_derivative(score.mod))
    return said


def run(asked, launch=LAUNCH, *, by_keys=None, backward=varlen_backward, **keywords):
    """out, lse and the gradients by name, in the kernel's axes."""
    called = dict(mods(asked.within, asked.score))
    slope = called.pop("slope")
    tensors, by_keys = asked.packed(), by_keys or launch
    q, k, v, dout, dlse = tensors.values()
    if asked.given.dtype == "tf32":
        launch, by_keys = (
            Launch(block_query=x.block_query, block_kv=x.block_kv, precision="tf32")
            for x in (launch, by_keys)
        )
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
    return out, lse, dict(zip(NAMES, found, strict=True))


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
    shares = [REFERENCE.worst(gradients, asked.given, out, lse)]
    for (row, key), (query, kv) in zip(STARTS, LENGTHS, strict=False):
        if not (query and kv):
            continue
        first = BEFORE + key
        rows, keys = slice(row, row + query), slice(first, first + kv)
        own = {"dq": gradients["dq"][:, :, rows]}
        own |= {name: gradients[name][:, :, keys] for name in ("dk", "dv")}
        one = one_of(asked.given, row, first, (query, kv)).but(sink=None)
        if asked.given.sink is None:
            shares.append(REFERENCE.worst(own, one, out[:, :, rows], lse[:, :, rows]))
    return max(max(share.values()) for share in shares)


def worst(asked, launch=LAUNCH, **keywords) -> float:
    return worst_of(asked, run(asked, launch, **keywords))


def same(one, other) -> bool:
    gradients, others = one[2], other[2]
    return all(
        (gradients[name] is None and others[name] is None)
        or torch.equal(gradients[name], others[name])
        for name in NAMES
    )


@pytest.mark.parametrize(
    ("dtype", "causal"),
    [
        ("fp32", ""),
        ("fp32", "top_left"),
        ("fp32", "bottom_right"),
        ("tf32", "top_left"),
        ("fp16", ""),
        ("bf16", "bottom_right"),
    ],
)
def test_gradients_are_right_in_every_dtype(dtype, causal):
    """Of query heads that share keys, with a sink, and a loss of LSE."""
    asked = asked_of(causal, dtype=dtype, sink=True)
    found = run(asked)
    assert worst_of(asked, found) <= 1
    packed = asked.packed()
    for name in "qkv":
        assert found[2][f"d{name}"].dtype == packed[name].dtype
        assert found[2][f"d{name}"].shape == packed[name].shape


@pytest.mark.parametrize(
    ("within", "causal"),
    [
        ("all", ""),
        ("all", "bottom_right"),
        ("window", ""),
        ("of heads", "bottom_right"),
        ("later rows see nothing", ""),
        ("nothing", "top_left"),
    ],
)
def test_any_mask_beside_the_flag(within, causal):
    asked = asked_of(causal, WITHIN[within])
    found = run(asked)
    assert worst_of(asked, found) <= 1
    seen = asked.given.seen()
    dead, unseen = ~seen.any(-1)[0].T, ~seen.any((0, 1, 2))
    assert bool(dead.any())
    assert bool(unseen[[0, 1, -3, -2, -1]].all())  # those in no document
    assert not found[2]["dq"][dead].any()
    assert not found[2]["dk"][unseen].any()
    assert not found[2]["dv"][unseen].any()


@pytest.mark.parametrize("local", [True, False], ids=["documents", "whole"])
@pytest.mark.parametrize("score", SCORES)
def test_mods_count_in_documents_or_through_them(score, local):
    asked = asked_of("bottom_right", WITHIN["stripes"], SCORES[score], local=local)
    assert worst(asked) <= 1


def test_places_matter():
    one, other = (asked_of(score=SCORES["of documents"], local=local) for local in (True, False))
    assert not same(run(one), run(other))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 2, 256, 3), (6, 2, 8, 130)])
def test_any_shape(shape):
    assert worst(asked_of("top_left", shape=shape)) <= 1


@pytest.mark.parametrize(
    ("causal", "blocks"),
    [("", (32, 16)), ("top_left", (16, 32)), ("bottom_right", (64, 64)), ("top_left", (128, 32))],
)
def test_any_tiles(causal, blocks):
    launch = Launch(block_query=blocks[0], block_kv=blocks[1])
    assert worst(asked_of(causal, dtype="bf16"), launch) <= 1


def test_keys_may_have_tiles_of_their_own():
    asked = asked_of("bottom_right")
    first = run(asked)
    # dK and dV are added up in another order then, in the interpreter by BLAS: bounds, not bits.
    for block_kv in (32, 64):
        mixed = run(asked, by_keys=Launch(block_query=16, block_kv=block_kv))
        assert worst_of(asked, mixed) <= 1
        assert torch.equal(mixed[2]["dq"], first[2]["dq"])


@pytest.mark.parametrize("causal", ["", "top_left", "bottom_right"])
def test_a_document_is_what_it_is_alone(causal):
    """To the bit what FlashAttention-2 gives of it, where its tiles are the same."""
    asked = asked_of(causal, score=SCORES["softcap"], dtype="bf16")
    out, lse, found = in_reference_axes(run(asked))
    said = mods(None, asked.score)
    for (row, key), (query, kv) in zip(STARTS, LENGTHS, strict=False):
        if not (query and kv):
            continue
        one = one_of(asked.given, row, BEFORE + key, (query, kv))
        rows, keys = slice(row, row + query), slice(BEFORE + key, BEFORE + key + kv)
        mask = masks.causal if causal == "top_left" else masks.causal_bottom_right(kv - query)
        alone = flash2_backward(
            one.q, one.k, one.v, out[:, :, rows], lse[:, :, rows], one.dout, one.dlse,
            scale=one.scale, launch=LAUNCH, **said | {
                "mask": to_triton(trace_mask(mask if causal else masks.full))
            },
        )  # fmt: skip
        assert torch.equal(alone[0], found["dq"][:, :, rows])
        assert torch.equal(alone[1], found["dk"][:, :, keys])
        assert torch.equal(alone[2], found["dv"][:, :, keys])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_gradient_of_lse_is_one_of_0(dtype):
    asked = asked_of("top_left", dtype=dtype, dlse=False, sink=True)
    assert same(run(asked), run(asked.but(dlse=torch.zeros(asked.given.q.shape[:3]))))
    assert worst(asked) <= 1


def test_lse_alone():
    """dout may be one 0, expanded."""
    asked = asked_of("top_left", sink=True)
    asked = asked.but(dout=torch.zeros(()).expand(asked.given.dout.shape))
    assert worst(asked) <= 1
    assert not run(asked)[2]["dv"].any()


def scattered(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, no two of them beside each other."""
    wide = torch.full((*x.shape[:2], x.shape[3], 2 * x.shape[2]), math.nan, dtype=x.dtype)
    view = wide.mT[:, :, ::2]
    view.copy_(x)
    return view


def test_strides_are_used():
    asked = asked_of("bottom_right", dtype="bf16", sink=True)
    views = {name: scattered(getattr(asked.given, name)) for name in ("q", "k", "v", "dout")}
    rows = {"dlse": asked.given.dlse.mT.contiguous().mT}
    assert same(run(asked.but(**views, **rows)), run(asked))


def test_out_has_strides_of_its_own():
    asked = asked_of("bottom_right")

    def moved(q, k, v, out, *rest, **keywords):
        return varlen_backward(q, k, v, scattered(out[None])[0], *rest, **keywords)

    assert same(run(asked, backward=moved), run(asked))


def poisoned(asked, keys, poison):
    k, v = asked.given.k.clone(), asked.given.v.clone()
    k[:, :, keys], v[:, :, keys] = poison, -poison
    return asked.but(k=k, v=v)


@pytest.mark.parametrize("poison", [1e30, math.inf, math.nan])
def test_hidden_keys_move_no_bit(poison):
    """Those after the rows of the first document, and those of documents and places without any."""
    asked = asked_of("top_left", sink=True)
    hidden = [0, 1, *range(BEFORE + 3, BEFORE + 24), -1]
    assert same(run(poisoned(asked, hidden, poison)), run(asked))


@pytest.mark.parametrize(
    ("causal", "within", "key"), [("bottom_right", "all", 31), ("", "window", 3)]
)
def test_a_document_that_is_not_finite_is_so_alone(causal, within, key):
    """And in it the rows that do not see the key keep every bit."""
    asked = asked_of(causal, WITHIN[within])
    place = BEFORE + 24 + key  # of the fifth, whose rows are 7 to 23
    right, found = run(asked)[2], run(poisoned(asked, [place], math.nan))[2]
    sees = asked.given.seen()[0, 0, :, place]
    assert bool(sees[7:24].any())
    assert not bool(sees[7:24].all())
    assert torch.equal(found["dq"][~sees], right["dq"][~sees])
    assert bool(found["dq"][sees].isnan().all())
    own = torch.zeros(len(right["dk"]), dtype=torch.bool)
    own[BEFORE + 24 : BEFORE + 57] = True
    for name in ("dk", "dv"):
        assert torch.equal(found[name][~own], right[name][~own])
        assert bool(found[name][own].isnan().any())


def test_a_row_that_sees_no_key_has_no_part_in_anything():
    """Whatever its gradients are, as long as dO is finite."""
    asked = asked_of("top_left", WITHIN["later rows see nothing"])
    dead = ~asked.given.seen().any(-1)
    dlse = asked.given.dlse.masked_fill(dead, math.nan)
    dout = asked.given.dout.masked_fill(dead[..., None], 1e30)
    assert same(run(asked.but(dlse=dlse, dout=dout)), run(asked))


def test_a_row_without_keys_passes_its_gradient_of_lse_to_the_sink():
    asked = asked_of(within=WITHIN["nothing"], sink=True)
    found = run(asked)
    assert not any(found[2][name].any() for name in ("dq", "dk", "dv"))
    assert worst_of(asked, found) <= 1
    assert found[2]["dsink"].all()


def test_runs_give_the_same_bits():
    asked = asked_of("bottom_right", dtype="bf16", sink=True)
    assert same(run(asked), run(asked))


@pytest.mark.parametrize("missing", ["score", "slope"])
def test_a_score_mod_needs_its_slope(missing):
    asked = asked_of(score=SCORES["softcap"])

    def without(*tensors, **keywords):
        return varlen_backward(*tensors, **keywords | {missing: None})

    with pytest.raises(UsageError, match="needs its slope"):
        run(asked, backward=without)


def test_a_program_owns_keys_of_one_document():
    assert key_program_list([3, 0, 17], 16).tolist() == [[0, 0], [2, 0], [2, 16]]
    assert key_program_list([0, 0], 16).shape == (0, 2)


def test_no_keys_at_all_have_no_gradients():
    """None in a document, that is, or none anywhere."""
    q, dout = torch.randn(3, 2, 16), torch.ones(3, 2, 8)
    starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    both = {"scale": 1.0, "launch": LAUNCH, "programs": program_list([3], 16)}
    for keys in (5, 0):
        k, v = torch.randn(keys, 1, 16), torch.randn(keys, 1, 8)
        out, lse = varlen_forward(q, k, v, *starts, **both)
        found = varlen_backward(
            q, k, v, out, lse, dout, None, *starts, **both, key_programs=key_program_list([0], 16)
        )
        assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in found[:3])


ROW_KERNEL, KEY_KERNEL = "by_rows_kernel", "by_keys_kernel"
FAULTS = {
    "dK without the scale": (KEY_KERNEL, "(dk * scale)", "(dk * 1.0)", {}),
    "dQ without the scale": (ROW_KERNEL, "(acc * scale)", "(acc * 1.0)", {}),
    "dQ without the flag": (
        ROW_KERNEL,
        "if CAUSAL:\n            p =",
        "if 0:\n            p =",
        {},
    ),
    "dK without the flag": (
        KEY_KERNEL,
        "if CAUSAL:\n                p =",
        "if 0:\n                p =",
        {},
    ),
    "the other corner": ("_diagonal", "diagonal = kv - query", "diagonal = 0", {}),
    "the walk begins a tile late": (KEY_KERNEL, "// BLOCK_Q * BLOCK_Q", "+ BLOCK_Q", {}),
    "the walk ends a tile early": (ROW_KERNEL, "BLOCK_Q + diagonal)", "diagonal)", {}),
    "the last tile of keys": (ROW_KERNEL, "range(0, end,", "range(0, end // 16 * 16,", {}),
    "the last tile of rows": (KEY_KERNEL, "range(begin, query,", "range(begin, query - 1,", {}),
    "one head of a group": (KEY_KERNEL, "range(group)", "range(group - 1)", {}),
    "the wrong head of a group": (
        KEY_KERNEL,
        "h = kv_head * group + member",
        "h = member",
        {"shape": (4, 2, 8, 8)},
    ),
    "keys of the next document": (ROW_KERNEL, "kv_start * k_row", "(kv_start + 1) * k_row", {}),
    "values of the next document": (KEY_KERNEL, "kv_start * v_row", "(kv_start + 1) * v_row", {}),
    "LSE of another document": (KEY_KERNEL, "total_query + query_start", "total_query", {}),
    "delta of another document": (
        ROW_KERNEL,
        "loaded_rows(delta_ptr + of_rows",
        "loaded_rows(delta_ptr",
        {},
    ),
    "stored in another document": (
        KEY_KERNEL,
        "(kv_start + keys[:, None])",
        "keys[:, None].to(tl.int64)",
        {},
    ),
    "the last column is lost": (
        KEY_KERNEL,
        "loaded(of_head, rows, cols, q_row, q_col, query, head_dim)",
        "loaded(of_head, rows, cols, q_row, q_col, query, head_dim - 1)",
        {},
    ),
    "keys count from 0": (
        ROW_KERNEL,
        "kv_idx = (first_kv_idx + keys)",
        "kv_idx = (0 * first_kv_idx + keys)",
        {"within": WITHIN["stripes"], "local": False},
    ),
    "rows count from 0": (
        KEY_KERNEL,
        "q_idx = (first_q_idx + rows)",
        "q_idx = (0 * first_q_idx + rows)",
        {"within": WITHIN["stripes"], "local": False},
    ),
    "the sequence is the document": (
        "_known_as",
        "b = tl.load(places + 3 * document)",
        "b = document",
        {"score": SCORES["of documents"], "local": False},
    ),
    "keys in no document are left": ("_by_keys", "torch.zeros(", "_full_of_ones(", {}),
    "dLSE is ignored": (
        "varlen_backward",
        "dlse.contiguous()[None]",
        "0 * dlse.contiguous()[None]",
        {},
    ),
    "no slope": (
        "constants",
        '"SLOPE": slope,',
        '"SLOPE": _one,',
        {"score": SCORES["softcap"]},
    ),
}
BESIDE = """


def _full_of_ones(*shape, **keywords):
    return torch.ones(*shape, **keywords)


@triton.jit
def _one(x, b, h, rows, keys, captured):
    return x * 0.0 + 1.0
"""


def with_a_fault(folder: Path, where: str, right: str, wrong: str):
    """The backward from a copy of its file in which the function ``where`` has a fault."""
    copies = PATCHED.copy_kernels(folder, ("varlen_backward",), where, right, wrong, BESIDE)
    return copies.varlen_backward.varlen_backward


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault, tmp_path):
    where, right, wrong, changes = FAULTS[fault]
    asked = asked_of("bottom_right", **changes)
    assert not changes or worst(asked) <= 1
    assert worst(asked, backward=with_a_fault(tmp_path, where, right, wrong)) > 1


def test_the_copy_without_a_fault_is_right(tmp_path):
    asked = asked_of("bottom_right")
    backward = with_a_fault(tmp_path, KEY_KERNEL, "(dk * scale)", "(dk * scale)")
    assert same(run(asked, backward=backward), run(asked))


def test_a_careless_kernel_lets_hidden_keys_through(tmp_path):
    careless = with_a_fault(tmp_path, "_by_rows", "needs_careful_launch(again)", "False")
    asked = poisoned(asked_of("top_left"), [BEFORE + 10], math.nan)  # hidden from 3 rows
    assert run(asked, backward=careless)[2]["dq"].isnan().any()
    assert not run(asked)[2]["dq"].isnan().any()


@pytest.mark.parametrize("missing", [None, "q", "k", "v", "dout", "dlse", "sink"])
def test_reads_and_writes_its_own_tensors_only(missing, monkeypatch):
    """The interpreter itself would copy from anywhere."""
    watched = import_file(
        Path(__file__).with_name("watched_accesses.py"), "a file of these tests"
    ).Watched
    asked = asked_of("bottom_right", WITHIN["stripes"], dtype="bf16", sink=True, local=False)
    tensors = [
        getattr(asked.given, name)
        for name in ("q", "k", "v", "dout", "dlse", "sink")
        if name != missing
    ]

    def remembered(make):
        def made(*arguments, **named):
            tensors.append(make(*arguments, **named))
            return tensors[-1]

        return made

    for name in ("empty", "zeros", "empty_like", "tensor"):
        monkeypatch.setattr(torch, name, remembered(getattr(torch, name)))
    seen = watched(monkeypatch, tensors)
    run(asked)
    assert (seen.outside > 0) == (missing is not None)
