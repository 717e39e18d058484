"""The library of masks and score mods: argument checks and their messages, defaults and imports."""

import subprocess
import sys

import pytest
import torch

from attncheck.core.errors import ProblemError, UnknownName, UsageError
from attncheck.core.formats import fp32
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods import library
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

DIMENSIONS = Dimensions(batch=2, heads=4, query=5, kv=7)
CAUSAL = Spec.of("causal")
ALL_MASKS = (
    "and, bottom_right, causal, causal_bottom_right, document, documents, documents_bottom_right, "
    "expression, full, neighborhood, neighborhood_morton, neighborhood_tiled, not, offset, or, "
    "padding, prefix_lm, sliding_window"
)
ALL_SCORES = (
    "alibi, alibi_by_sequence, bias, chain, expression, none, offset, relative_bias, softcap, "
    "temperature"
)

of = Spec.of
WHOLE = "must be a whole number from 0 to 2147483647."
LENGTHS = "must be a list of whole numbers from 0 to 2147483647."
POSITIVE = "must be a positive number in the range of fp32."
PAIR = "must be two whole numbers from 1 to 16777216: rows, columns."

MASK_ERRORS = [
    (of("casual"), f"mask 'casual' is not known: did you mean 'causal'? Choose from {ALL_MASKS}."),
    (of("sliding_window"), "sliding_window needs its argument 'window'."),
    (
        of("sliding_window", window=3, size=4),
        "sliding_window has no argument 'size': its arguments: window.",
    ),
    (of("causal", window=3), "causal has no argument 'window': its arguments: none."),
    (of("sliding_window", window=-1), f"sliding_window.window=-1 {WHOLE}"),
    (of("sliding_window", window=2**31), f"sliding_window.window=2147483648 {WHOLE}"),
    (of("prefix_lm", prefix=2.0), f"prefix_lm.prefix=2.0 {WHOLE}"),
    (of("prefix_lm", prefix=True), f"prefix_lm.prefix=True {WHOLE}"),
    (
        of("document", lengths=[3, 3]),
        "document.lengths cover 6 positions: they must cover max(query, kv)=7.",
    ),
    (of("document", lengths=[]), f"document.lengths=[] {LENGTHS}"),
    (of("document", lengths=[8, -1]), f"document.lengths=[8, -1] {LENGTHS}"),
    (of("document", lengths=7), f"document.lengths=7 {LENGTHS}"),
    (
        of("padding", lengths=[3]),
        "padding.lengths has 1 lengths: it needs one for each of the batch=2.",
    ),
    (of("padding", lengths=[3, 8]), "padding.lengths has a length 8: none may exceed kv=7."),
    (
        of("documents", query_lengths=[5], kv_lengths=[3, 3]),
        "documents.kv_lengths cover 6 positions: they must cover kv=7.",
    ),
    (
        of("documents", query_lengths=[4, 0], kv_lengths=[3, 4]),
        "documents.query_lengths cover 4 positions: they must cover query=5.",
    ),
    (
        of("documents", query_lengths=[5], kv_lengths=[3, 4]),
        "documents has 1 query_lengths and 2 kv_lengths: each document has one of each.",
    ),
    (of("neighborhood", canvas=[0, 3], kernel=[1]), f"neighborhood.canvas=[0, 3] {PAIR}"),
    (of("neighborhood", canvas=[3], kernel=[1, 1]), f"neighborhood.canvas=[3] {PAIR}"),
    (of("neighborhood", canvas=9, kernel=[1, 1]), f"neighborhood.canvas=9 {PAIR}"),
    (
        of("neighborhood_morton", canvas=[4096, 4097], kernel=[1, 1]),
        "neighborhood_morton.canvas=[4096, 4097] has more than 16777216 cells.",
    ),
    (
        of("neighborhood", canvas=[3, 4], kernel=[3, 5]),
        "neighborhood.kernel=[3, 5] is larger than the canvas [3, 4].",
    ),
    (
        of("neighborhood_tiled", canvas=[3, 4], kernel=[3, 3], tile=[4, 1]),
        "neighborhood_tiled.tile=[4, 1] is larger than the canvas [3, 4].",
    ),
    (
        of("neighborhood_tiled", canvas=[3, 4], kernel=[3, 3]),
        "neighborhood_tiled needs its argument 'tile'.",
    ),
    (of("offset", CAUSAL), "offset needs its argument 'rows'."),
    (of("offset", rows=1), "offset has 0 parts: it takes exactly one part."),
    (of("offset", CAUSAL, rows=-1), "offset.rows=-1 must be a whole number from 0 to 2147483642."),
    (
        of("offset", of("offset", CAUSAL, rows=2**31 - 8), rows=3),
        "offset.rows=2147483640 must be a whole number from 0 to 2147483639.",
    ),
    # The part is checked on the longer problem: 3 rows before the 5.
    (
        of("offset", of("document", lengths=[7]), rows=3),
        "document.lengths cover 7 positions: they must cover max(query, kv)=8.",
    ),
    (of("causal", CAUSAL), "causal takes no parts: only a composition does."),
    (of("not"), "not has 0 parts: it takes exactly one part."),
    (of("not", CAUSAL, CAUSAL), "not has 2 parts: it takes exactly one part."),
    (of("and"), "and has 0 parts: it takes at least one part."),
    (of("or"), "or has 0 parts: it takes at least one part."),
    (
        of("or", CAUSAL, of("not", of("sliding_window"))),
        "sliding_window needs its argument 'window'.",
    ),
    (
        of("bottom_right", of("full"), lengths=[3, 7]),
        "bottom_right is of causal or sliding_window, and not of 'full'.",
    ),
    (
        of("bottom_right", CAUSAL, CAUSAL, lengths=[3, 7]),
        "bottom_right has 2 parts: it takes exactly one part.",
    ),
    (
        of("bottom_right", CAUSAL, lengths=[3, 8]),
        "bottom_right.lengths has a length 8: none may exceed kv=7.",
    ),
    (
        of("documents_bottom_right", CAUSAL, query_lengths=[5], kv_lengths=[3, 4]),
        (
            "documents_bottom_right has 1 query_lengths and 2 kv_lengths: each document has one "
            "of each."
        ),
    ),
    (of("and", of("alibi")), f"mask 'alibi' is not known: choose from {ALL_MASKS}."),
]

SCORE_ERRORS = [
    (of("causal"), f"score mod 'causal' is not known: choose from {ALL_SCORES}."),
    (of("softcap"), "softcap needs its argument 'cap'."),
    (of("softcap", cap=0.0), f"softcap.cap=0.0 {POSITIVE}"),
    (of("softcap", cap=float("inf")), f"softcap.cap=inf {POSITIVE}"),
    (of("softcap", cap=float("nan")), f"softcap.cap=nan {POSITIVE}"),
    (of("temperature", temperature=10**40), f"temperature.temperature={10**40} {POSITIVE}"),
    (of("temperature", temperature=-2), f"temperature.temperature=-2 {POSITIVE}"),
    (of("temperature", temperature=[2]), f"temperature.temperature=(2,) {POSITIVE}"),
    (
        of("relative_bias", distance=-1, seed=0),
        "relative_bias.distance=-1 must be a whole number from 0 to 1048576.",
    ),
    (
        of("relative_bias", distance=1, seed=2**63),
        f"relative_bias.seed={2**63} must be a whole number from 0 to {2**63 - 1}.",
    ),
    (of("relative_bias", distance=1), "relative_bias needs its argument 'seed'."),
    (of("bias", seed=0, per_head=0), "bias needs its argument 'per_batch'."),
    (
        of("bias", seed=0, per_batch=2, per_head=0),
        "bias.per_batch=2 must be a whole number from 0 to 1.",
    ),
    (
        of("offset", of("bias", seed=0, per_batch=0, per_head=1), rows=2**27),
        "bias of shape (1, 4, 134217733, 7) has 3758096524 numbers: at most 2147483647.",
    ),
    (of("chain"), "chain has 0 parts: it takes at least one part."),
    (of("none", of("none")), "none takes no parts: only a composition does."),
]


CASES = [*(("mask", *case) for case in MASK_ERRORS), *(("score", *case) for case in SCORE_ERRORS)]


@pytest.mark.parametrize(("kind", "spec", "message"), CASES, ids=lambda v: str(v)[:40])
def test_invalid_spec_is_refused_with_exact_message(kind, spec, message):
    for function in (getattr(library, f"check_{kind}"), getattr(library, f"build_{kind}")):
        with pytest.raises(UsageError) as error:
            function(spec, DIMENSIONS)
        assert str(error.value) == message
        assert isinstance(error.value, UnknownName if "not known" in message else ProblemError)


def test_integer_argument_is_rounded_to_fp32():
    mod = library.build_score(Spec.of("temperature", temperature=2**24 + 1), DIMENSIONS)
    index = torch.tensor(0)
    assert mod(torch.tensor(2.0**24), index, index, index, index).item() == 1.0


def test_argument_order_does_not_matter():
    one, other = (
        Spec.of("relative_bias", distance=4, seed=1),
        Spec.of("relative_bias", seed=1, distance=4),
    )
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == str(other)


def test_document_lengths_must_cover_longer_of_query_and_kv():
    tall = Dimensions(batch=1, heads=1, query=9, kv=7)
    library.check_mask(Spec.of("document", lengths=[4, 5]), tall)
    with pytest.raises(ProblemError, match=r"they must cover max\(query, kv\)=9\.$"):
        library.check_mask(Spec.of("document", lengths=[4, 4]), tall)


@pytest.mark.parametrize("name", ["softcap", "temperature"])
def test_real_argument_is_rounded_to_fp32_for_float64_scores(name):
    """The oracle in float64 must use the fp32 number that a kernel is given."""
    argument = {"softcap": "cap", "temperature": "temperature"}[name]
    rounded, exact = (
        library.build_score(Spec.of(name, **{argument: number}), DIMENSIONS)
        for number in (0.1, fp32(0.1))
    )
    index, score = torch.tensor(0), torch.tensor(0.05, dtype=torch.float64)
    assert rounded(score, *(index,) * 4).item() == exact(score, *(index,) * 4).item()


def test_every_entry_has_summary_and_either_build_or_compose():
    for entry in (*MASKS.values(), *SCORES.values()):
        assert (entry.build is None) != (entry.compose is None)
        assert entry.summary


def test_library_imports_neither_torch_nor_triton():
    code = (
        "import sys, attncheck.mods.library; "
        "sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
