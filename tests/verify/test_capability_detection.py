"""What a probe finds of kernels of which it is known what they take."""

import math

import pytest
import torch

from attncheck.subjects.capabilities.capability_table import read_table, render_table
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import Candidate
from attncheck.verify import capability_detection
from attncheck.verify.capability_detection import detect_capabilities
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


@pytest.fixture
def ask(monkeypatch):
    """``ask(function, aspect, …)``: a probe of these aspects alone, and of two head_dims."""
    monkeypatch.setattr(capability_detection, "HEAD_DIMS", (64, 80))
    every = capability_detection.trials
    always = ("causal", "rectangular")

    def run(found, *aspects, conventions=("sdpa",), relations=()):
        def some(aspect, base, device):
            return every(aspect, base, device) if aspect in (*aspects, *always) else []

        monkeypatch.setattr(capability_detection, "trials", some)
        few = {name: capability_detection.RELATIONS[name] for name in relations}
        monkeypatch.setattr(capability_detection, "RELATIONS", few)
        candidate = Candidate(kernel="mine", target=found, name="mine", entry="mine.py::kernel")
        return detect_capabilities(
            candidate.make_subject,
            conventions,
            ConventionOptions(),
            device="cpu",
            advance=lambda what: None,
        )

    return run


def verdicts(found, aspect):
    return {one.what: one.verdict for one in found.tried if one.aspect == aspect}


def test_a_kernel_that_takes_one_head_dim(ask):
    found = ask(only_64, "head_dims")
    assert verdicts(found, "head_dims") == {"64": "takes", "80": "refuses"}
    table, comments = propose_table(found, "mine.py::kernel")
    assert table.head_dims == (64,)
    assert not comments["head_dims"]


def test_a_wrong_head_dim_stays_in_the_table_with_its_reason(ask):
    found = ask(half_at_80, "head_dims")
    assert verdicts(found, "head_dims") == {"64": "takes", "80": "wrong"}
    table, comments = propose_table(found, "mine.py::kernel")
    assert table.head_dims == "any"  # all that was tried: 80 is a fault, and no refusal
    assert len(comments["head_dims"]) == 1
    assert comments["head_dims"][0].startswith("80: wrong, to be mended, refused")


def test_what_raises_is_left_out_and_said(ask):
    found = ask(raises_at_80, "head_dims")
    assert verdicts(found, "head_dims") == {"64": "takes", "80": "raises"}
    table, comments = propose_table(found, "mine.py::kernel")
    assert table.head_dims == (64,)
    assert "80: raises, and is left out: RuntimeError: no kernel [31m for 80" in render_table(
        table, "kernels.mine", comments
    )


def test_an_lse_in_base_2_is_found_out(ask):
    found = ask(base2, "dtypes")
    assert found.options.lse == "base2"
    assert verdicts(found, "lse") == {"base2": "takes"}
    assert set(verdicts(found, "dtypes").values()) == {"takes", "refuses"}
    assert propose_table(found, "mine.py::kernel")[0].lse == "base2"
    # As a natural logarithm, which nobody has declared, it is wrong.
    candidate = Candidate(kernel="mine", target=base2, name="mine", entry="mine.py::kernel")
    natural = capability_detection.Detection(
        candidate.make_subject, ConventionOptions(), "cpu", lambda what: None
    )
    natural._load("sdpa", ConventionOptions(lse="natural"))
    natural.base = found.base
    assert natural.ask(capability_detection.Trial(aspect="lse", what="natural")) == "wrong"


def test_a_kernel_without_lse(ask):
    table, _ = propose_table(ask(only_64), "mine.py::kernel")
    assert table.lse is False


def test_a_causal_flag_that_is_aligned_the_other_way_is_found_out(ask):
    found = ask(bottom_right, "masks")
    assert found.options.causal == "bottom_right"
    assert found.options.empty_row == ""
    assert propose_table(found, "mine.py::kernel")[0].causal == "bottom_right"
    assert ask(right, "masks").options.causal == ""


def test_the_convention_by_which_it_is_right(ask):
    found = ask(heads_last, conventions=("sdpa", "flash_attn"))
    assert found.convention == "flash_attn"
    assert verdicts(found, "convention") == {"sdpa": "wrong", "flash_attn": "takes"}


def test_what_rows_without_keys_give_is_found_out(ask):
    found = ask(mean_of_nothing, "empty_row")
    assert found.options.empty_row == "mean"
    assert propose_table(found, "mine.py::kernel")[0].empty_row == "mean"


def test_lengths_that_must_be_multiples(ask):
    found = ask(multiples_of_32, "lengths")
    table, _ = propose_table(found, "mine.py::kernel")
    assert table.length_multiple == 32
    assert table.rectangular is True  # one query was not asked for
    assert propose_table(ask(right, "lengths"), "x")[0].length_multiple is None


def test_causal_for_equal_lengths_alone_is_an_override(ask):
    found = ask(square_causal, "masks")
    table, comments = propose_table(found, "mine.py::kernel")
    assert table.rectangular is True
    (override,) = table.override
    assert override.when.mask == ("causal",)
    assert override.rectangular is False
    text = render_table(table, "kernels.mine", comments)
    assert '[[kernels.mine.override]]\nwhen = {mask = ["causal"]}\nrectangular = false\n' in text


def test_a_promise_that_is_broken_is_not_proposed(ask):
    found = ask(not_repeatable, relations=("repeat",))
    assert verdicts(found, "promises") == {"repeat": "wrong"}
    table, comments = propose_table(found, "mine.py::kernel")
    assert table.promises == ("hidden",)
    assert comments["promises"][0].startswith("repeat is not promised: out[")
    assert verdicts(ask(right, relations=("repeat",)), "promises") == {"repeat": "takes"}


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
def test_a_kernel_that_gives_nothing_of_use_takes_nothing(ask, function, reason):
    found = ask(function)
    assert found.base is None
    (tried,) = found.tried
    assert tried.verdict == "raises"
    assert reason in tried.reason


def test_nan_is_a_wrong_answer(ask):
    found = ask(lambda q, k, v: q * math.nan, "head_dims")
    assert verdicts(found, "head_dims") == {"64": "wrong", "80": "wrong"}
    assert found.tried[0].reason.startswith("finite: ")


def test_a_subject_says_itself_what_it_takes(ask):
    found = ask(Ideal(), "head_dims", "dtypes", "scores", "empty_row", conventions=("native",))
    table, comments = propose_table(found, "ideal")
    assert not [one for one in found.tried if one.verdict == "wrong"]
    assert (table.head_dims, table.scores) == ("any", ("any",))
    assert (table.lse, table.empty_row) == (True, "zero")
    text = render_table(table, "kernels.mine", comments)
    assert read_table(parsed(text), "kernels.mine") == table


def parsed(text):
    import tomllib

    return tomllib.loads(text)["kernels"]["mine"]


@pytest.mark.parametrize("aspect", ["masks", "scores", "dtypes", "head_dims", "gqa", "scale"])
def test_every_trial_changes_one_thing_of_the_base(aspect):
    base = next(iter(capability_detection.base_problems()))
    trials = capability_detection.trials(aspect, base, "cpu")
    assert trials
    for one in trials:
        assert one.of(base).query == base.query
