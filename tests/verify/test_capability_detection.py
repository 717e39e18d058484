"""detect_capabilities: what it finds for kernels whose capabilities are known."""

import dataclasses
import math
import tomllib

import pytest
import torch

from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.capability_table import (
    Override,
    When,
    read_table,
    render_table,
)
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import Candidate
from attncheck.verify import capability_detection
from attncheck.verify.capability_detection import (
    DetectedCapabilities,
    TrialResult,
    detect_capabilities,
)
from attncheck.verify.proposed_table import propose_table


def attention(q, k, v, diagonal=None, hidden=-math.inf):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    if diagonal is not None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(diagonal)
        scores = scores.masked_fill(~seen, hidden)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def right(q, k, v, is_causal=False):
    return attention(q, k, v, 0 if is_causal else None)


def base2(q, k, v, is_causal=False):
    out, lse = right(q, k, v, is_causal)
    return out, lse / math.log(2)


def bottom_right(q, k, v, is_causal=False):
    return attention(q, k, v, k.shape[2] - q.shape[2] if is_causal else None)[0]


def heads_last(q, k, v):
    out, _ = attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2)


def half_at_80(q, k, v):
    out = attention(q, k, v)[0]
    return out / 2 if q.shape[-1] == 80 else out


def only_64(q, k, v):
    if q.shape[-1] != 64:
        raise ValueError("head_dim must be 64")
    return attention(q, k, v)[0]


def raises_at_80(q, k, v):
    if q.shape[-1] == 80:
        raise RuntimeError("no kernel\x1b[31m for 80")
    return attention(q, k, v)[0]


def multiples_of_32(q, k, v):
    if q.shape[2] % 32 or k.shape[2] % 32:
        raise ValueError("lengths must be multiples of 32")
    return attention(q, k, v)[0]


def mean_of_nothing(q, k, v, attn_mask=None):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -1e30)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


CALLS = []


def not_repeatable(q, k, v):
    CALLS.append(1)
    flipped = attention(q, k.flip(2), v.flip(2))[0]  # the same sums in another order
    return flipped if len(CALLS) % 2 else attention(q, k, v)[0]


def square_causal(q, k, v, is_causal=False):
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError("causal needs equal lengths")
    return right(q, k, v, is_causal)


def by_window(*refused):
    """A function of flash-attn's that raises ValueError where one of ``refused`` holds."""

    def function(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
        left, right = window_size
        rows, keys = q.shape[1], k.shape[1]
        if any(refuses(rows, keys, right) for refuses in refused):
            raise ValueError("not this window")
        after = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
        hidden = after > (0 if causal else right if right >= 0 else keys)
        hidden |= after < (-left if left >= 0 else -rows - keys)
        scores = (q.transpose(1, 2).float() @ k.permute(0, 2, 3, 1).float()) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
        return (weights @ v.transpose(1, 2).float()).to(q.dtype).transpose(1, 2)

    return function


def no_right_window(rows, keys, right):
    return right > 0


def no_fewer_keys(rows, keys, right):
    return right >= 0 and keys < rows


@pytest.mark.parametrize(
    ("refusals", "rectangular", "square"),
    [
        ((), True, ()),
        # Top-left masks of more queries than keys need a window to the right.
        ((no_right_window,), True, ("causal", "sliding_window")),
        ((no_fewer_keys,), True, ("causal", "sliding_window")),
    ],
    ids=["any", "left alone", "more keys alone"],
)
def test_masks_refused_at_unequal_lengths_are_not_declared_there(
    detect, refusals, rectangular, square
):
    detection = detect(by_window(*refusals), "masks", "unequal", conventions=("flash_attn",))
    table, _ = propose_table(detection, "mine.py::kernel")
    assert {"causal", "causal_bottom_right", "sliding_window"} <= {*table.masks}
    assert table.rectangular is rectangular
    assert tuple(mask for one in table.override for mask in one.when.mask) == square
    # What the convention cannot express was not asked of the kernel.
    assert "sliding_window, query < kv" not in verdicts(detection, "unequal")


def test_unequal_lengths_that_a_subject_says_it_refuses_are_not_declared(detect):
    class SquareWindows(Ideal):
        def unsupported(self, problem, device):
            if problem.mask.name == "sliding_window" and problem.query != problem.kv:
                return "windows are of as many keys as queries"
            return super().unsupported(problem, device)

    detection = detect(SquareWindows(), "masks", "unequal", conventions=("native",))
    table, _ = propose_table(detection, "mine.py::Kernel")
    square = Override(when=When(mask=("sliding_window",)), rectangular=False)
    assert (table.rectangular, table.override) == (True, (square,))


def test_mask_taken_at_one_kind_of_unequal_lengths_leaves_rectangular_undeclared(detect):
    def more_keys_alone(q, k, v, is_causal=False):
        if is_causal and q.shape[2] > k.shape[2]:
            raise ValueError("causal needs as many keys as queries")
        return right(q, k, v, is_causal)

    detection = detect(more_keys_alone, "masks", "unequal")
    table, comments = propose_table(detection, "mine.py::kernel")
    assert (table.rectangular, table.override) == (None, ())
    assert comments["rectangular"] == [
        "rectangular: takes causal, query < kv alone: not declared, so that it may refuse the rest"
    ]


@pytest.fixture
def detect(monkeypatch):
    """``detect(function, aspect, …)`` runs the trials of these aspects only, with two head_dims."""
    monkeypatch.setattr(capability_detection, "HEAD_DIMS", (64, 80))
    every = capability_detection.trials
    always = ("causal", "rectangular")

    def run(function, *aspects, conventions=("sdpa",), relations=()):
        def selected(aspect, base, device):
            return every(aspect, base, device) if aspect in (*aspects, *always) else []

        monkeypatch.setattr(capability_detection, "trials", selected)
        few = {name: capability_detection.RELATIONS[name] for name in relations}
        monkeypatch.setattr(capability_detection, "RELATIONS", few)
        candidate = Candidate(kernel="mine", target=function, name="mine", entry="mine.py::kernel")
        return detect_capabilities(
            candidate.make_subject,
            conventions,
            ConventionOptions(),
            device="cpu",
            advance=lambda what: None,
        )

    return run


def verdicts(detection, aspect):
    return {one.what: one.verdict for one in detection.tried if one.aspect == aspect}


@pytest.mark.parametrize(
    ("kernel", "verdict", "head_dims", "comment"),
    [
        (only_64, "refuses", (64,), None),
        # A wrong result is a fault, and no refusal: the table has every head_dim that was tried.
        (half_at_80, "wrong", "any", "80: wrong, to be mended, refused"),
        (
            raises_at_80,
            "raises",
            (64,),
            "80: raises, and is left out: RuntimeError: no kernel [31m",
        ),
    ],
    ids=["refuses", "wrong", "raises"],
)
def test_head_dims_of_the_table_and_their_comment(detect, kernel, verdict, head_dims, comment):
    detection = detect(kernel, "head_dims")
    assert verdicts(detection, "head_dims") == {"64": "takes", "80": verdict}
    table, comments = propose_table(detection, "mine.py::kernel")
    assert table.head_dims == head_dims
    assert len(comments["head_dims"]) == (comment is not None)
    assert comment is None or f"# {comment}" in render_table(table, "kernels.mine", comments)


def test_base_2_lse_is_detected(detect):
    detection = detect(base2, "dtypes")
    assert detection.options.lse == "base2"
    assert verdicts(detection, "lse") == {"base2": "takes"}
    assert set(verdicts(detection, "dtypes").values()) == {"takes", "refuses"}
    assert propose_table(detection, "mine.py::kernel")[0].lse == "base2"
    # Read as a natural logarithm, the same LSE is wrong.
    candidate = Candidate(kernel="mine", target=base2, name="mine", entry="mine.py::kernel")
    natural = capability_detection.Detection(
        candidate.make_subject, ConventionOptions(), "cpu", lambda what: None
    )
    natural._load("sdpa", ConventionOptions(lse="natural"))
    natural.base = detection.base
    assert natural.ask(capability_detection.Trial(aspect="lse", what="natural")) == "wrong"


def test_missing_lse_is_detected(detect):
    table, _ = propose_table(detect(only_64), "mine.py::kernel")
    assert table.lse is False


def test_bottom_right_causal_alignment_is_detected(detect):
    detection = detect(bottom_right, "masks")
    assert detection.options.causal == "bottom_right"
    assert detection.options.empty_row == ""
    assert propose_table(detection, "mine.py::kernel")[0].causal == "bottom_right"
    assert detect(right, "masks").options.causal == ""


def test_convention_that_gives_right_results_is_chosen(detect):
    detection = detect(heads_last, conventions=("sdpa", "flash_attn"))
    assert detection.convention == "flash_attn"
    assert verdicts(detection, "convention") == {"sdpa": "wrong", "flash_attn": "takes"}


def test_value_of_rows_without_keys_is_detected(detect):
    detection = detect(mean_of_nothing, "empty_row")
    assert detection.options.empty_row == "mean"
    assert propose_table(detection, "mine.py::kernel")[0].empty_row == "mean"


def test_required_length_multiple_is_detected(detect):
    detection = detect(multiples_of_32, "lengths")
    table, _ = propose_table(detection, "mine.py::kernel")
    assert table.length_multiple == 32
    assert table.rectangular is True  # a single query was not tried
    assert propose_table(detect(right, "lengths"), "x")[0].length_multiple is None


def test_causal_limited_to_equal_lengths_becomes_an_override(detect):
    detection = detect(square_causal, "masks")
    table, comments = propose_table(detection, "mine.py::kernel")
    assert table.rectangular is True
    (override,) = table.override
    assert override.when.mask == ("causal",)
    assert override.rectangular is False
    text = render_table(table, "kernels.mine", comments)
    assert '[[kernels.mine.override]]\nwhen = {mask = ["causal"]}\nrectangular = false\n' in text


def test_broken_promise_is_not_proposed(detect):
    detection = detect(not_repeatable, relations=("repeat",))
    assert verdicts(detection, "promises") == {"repeat": "wrong"}
    table, comments = propose_table(detection, "mine.py::kernel")
    assert table.promises == ("hidden",)
    assert comments["promises"][0].startswith("repeat is not promised: out[")
    assert verdicts(detect(right, relations=("repeat",)), "promises") == {"repeat": "takes"}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k, v: [q], "it returned list of 1"),
        (lambda q, k, v: q.double(), r"out.dtype=torch.float64, but should be torch.bfloat16"),
        (lambda q, k, v: 1 / 0, "ZeroDivisionError"),
        (lambda q, k, v: q.new_zeros(3), "out.shape="),
        (lambda q, k, v: None, "it returned NoneType"),
    ],
    ids=["list", "dtype", "raises", "shape", "none"],
)
def test_unusable_return_value_gives_no_base_problem(detect, function, reason):
    detection = detect(function)
    assert detection.base is None
    (tried,) = detection.tried
    assert tried.verdict == "raises"
    assert reason in tried.reason


def test_nan_output_is_wrong(detect):
    detection = detect(lambda q, k, v: q * math.nan, "head_dims")
    assert verdicts(detection, "head_dims") == {"64": "wrong", "80": "wrong"}
    assert detection.tried[0].reason.startswith("finite: ")


def test_detected_table_of_the_ideal_kernel_round_trips_through_toml(detect):
    detection = detect(
        Ideal(), "head_dims", "dtypes", "scores", "empty_row", conventions=("native",)
    )
    table, comments = propose_table(detection, "ideal")
    assert not [one for one in detection.tried if one.verdict == "wrong"]
    assert (table.head_dims, table.scores) == ("any", ("any",))
    assert (table.lse, table.empty_row) == (True, "zero")
    text = render_table(table, "kernels.mine", comments)
    assert read_table(tomllib.loads(text)["kernels"]["mine"], "kernels.mine") == table


# Fields of a Problem that the trials of an aspect change, and so of no other.
CHANGED = {
    "dtypes": {"dtype"},
    "head_dims": {"head_dim", "value_dim", "scale"},
    "masks": {"mask"},
    "scores": {"score"},
    "gqa": {"heads", "kv_heads"},
    "batch": {"batch"},
    "scale": {"scale"},
    "lengths": {"query", "kv"},
    "rectangular": {"query", "kv"},
    "unequal": {"query", "kv", "mask"},
    "causal": {"kv", "mask"},
    "backward": {"backward", "dlse", "sink"},
    "strides": {"backward"},
    "slopes": {"batch", "mask", "score"},
    "attn_mask": {"score"},
    "empty_row": {"batch", "query", "kv", "mask"},
}
# Values that cannot be asked by themselves: these are the causal mask at equal lengths, and masks
# of the lengths of several sequences.
ALSO_CHANGED = {
    "causal_bottom_right": {"kv"},
    "documents_bottom_right": {"kv"},
    "padding": {"batch"},
    "bottom_right": {"batch", "kv"},
}


def values_of(base):
    """Values that the base may have itself."""
    return {base.dtype, str(base.head_dim), base.mask.name, base.score.name, "gapped"}


@pytest.mark.parametrize("aspect", CHANGED)
@pytest.mark.parametrize("number", [0, 1, 4, -2])  # the last has no gradients
def test_each_trial_changes_only_its_aspect_of_the_base(aspect, number):
    base = list(capability_detection.base_problems())[number]
    trials = capability_detection.trials(aspect, base, "cpu")
    assert trials
    for one in trials:
        problem = one.of(base)
        names = (each.name for each in dataclasses.fields(Problem))
        changed = {name for name in names if getattr(problem, name) != getattr(base, name)}
        also = ALSO_CHANGED.get(one.what, set()) if aspect == "masks" else set()
        assert changed <= CHANGED[aspect] | also, one.what
        assert changed or one.what in values_of(base), one.what


def test_every_aspect_of_the_trials_has_its_changed_fields():
    base = next(iter(capability_detection.base_problems()))
    assert capability_detection._values(base.query, "cpu").keys() == CHANGED.keys()


@pytest.mark.parametrize(
    ("reason", "comment"),
    [
        ("word " * 17 + "elements differ", "word " * 17 + "…"),
        ("word " * 17 + "end", "word " * 17 + "end"),
        ("x" * 100, "x" * 88 + " …"),
    ],
)
def test_comments_are_cut_between_words(reason, comment):
    tried = (
        TrialResult(aspect="head_dims", what="64", verdict="takes"),
        TrialResult(aspect="head_dims", what="80", verdict="wrong", reason=reason),
    )
    detection = DetectedCapabilities(
        convention="sdpa",
        options=ConventionOptions(),
        base=Problem(query=16),
        exposes_lse=True,
        tried=tried,
    )
    (line,) = propose_table(detection, "mine.py::kernel")[1]["head_dims"]
    assert line.endswith(f"taken out: {comment}")
