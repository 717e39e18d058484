"""Claims of a plain function: the limits found by trying it, the questions asked within them, and
wrong answers beyond them as findings of their own."""

import msgspec
import pytest

from attncheck.core.judgement import Unclaimed
from attncheck.core.mod_spec import NONE, Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failure_causes import unclaimed_findings
from attncheck.subjects.load import load_subject
from attncheck.verify import claims as room
from attncheck.verify.capability_detection import Detection
from attncheck.verify.claims import CLAIMED, NOT_CLAIMED, claimed_questions, find_claims
from attncheck.verify.kernel_hosts import on_terms
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

KERNELS = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

def right(q, k, v, is_causal=False):
    return sdpa(q, k, v, is_causal=is_causal)

def raises(q, k, v, is_causal=False):
    if q.shape[-1] not in (32, 64, 128) or v.shape != k.shape or q.shape != k.shape:
        raise RuntimeError("no kernel for these sizes")
    if q.dtype != torch.float16:
        raise TypeError("fp16 alone")
    return sdpa(q, k, v, is_causal=is_causal)

def refuses(q, k, v):
    if q.shape[2] % 32 or k.shape[2] % 32:
        raise ValueError("lengths must be multiples of 32")
    return sdpa(q, k, v)

def odd_dims(q, k, v):
    out = sdpa(q, k, v)
    return out if q.shape[-1] in (16, 32, 64, 128, 256) else out / 2

def whole_tiles(q, k, v):
    if q.shape != k.shape:
        raise ValueError("one length")
    if k.shape[2] % 128:  # the last tile is not masked
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 128)) for x in (k, v))
    return sdpa(q, k, v)

def first_tile_alone(q, k, v):
    return sdpa(q, k[:, :, :64], v[:, :, :64])

def slopes_of_the_first(q, k, v, causal=False, alibi_slopes=None):
    distance = torch.arange(k.shape[1]) - torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    slopes = torch.zeros(q.shape[2]) if alibi_slopes is None else alibi_slopes
    bias = -slopes.view(-1, q.shape[2])[:1, :, None, None] * distance.abs()
    if causal:
        bias = bias.masked_fill(distance > 0, float("-inf"))
    out = sdpa(*(x.transpose(1, 2).float() for x in (q, k, v)), attn_mask=bias)
    return out.to(q.dtype).transpose(1, 2)

def slopes_upwards(q, k, v, causal=False, alibi_slopes=None):
    slopes = None if alibi_slopes is None else -alibi_slopes.expand(q.shape[0], q.shape[2])
    return slopes_of_the_first(q, k, v, causal, slopes)

def halved(q, k, v):
    return sdpa(q, k, v) / 2

def base2(q, k, v):
    scores = q.float() @ k.float().mT / q.shape[-1] ** 0.5
    return sdpa(q, k, v), scores.logsumexp(-1) / 0.6931471805599453

def never(q, k, v):
    raise RuntimeError("no")

def wrong_inside(q, k, v, causal=False):
    return heads_inside(q, k, v, causal) * 0.9

def heads_inside(q, k, v, causal=False):
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)

def scaled_bhsd(q, k, v, softmax_scale=None):
    return sdpa(q, k, v, scale=softmax_scale)

def decode(q, k, v, softmax_scale=None):
    if q.shape[1] * (q.shape[2] // k.shape[2]) > 64:
        raise ValueError("64 rows of all heads that share a key head")
    with torch.no_grad():
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(q, k, v, scale=softmax_scale, enable_gqa=True).transpose(1, 2)

def assumes_usual_strides(q, k, v):
    usual = torch.empty(q.shape, device="meta").stride()
    return sdpa(q.as_strided(q.shape, usual), k, v) if q.shape == k.shape else sdpa(q, k, v)

def masked(q, k, v, attn_mask=None):
    return sdpa(q, k, v, attn_mask=attn_mask)

def booleans_alone(q, k, v, attn_mask=None):
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise TypeError("attn_mask must be bool")
    return sdpa(q, k, v, attn_mask=attn_mask)

def scales_its_mask(q, k, v, attn_mask=None):
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask * q.shape[-1] ** -0.5
    return sdpa(q, k, v, attn_mask=attn_mask)

def zero_is_hidden(q, k, v, attn_mask=None):
    return sdpa(q, k, v, attn_mask=None if attn_mask is None else attn_mask != 0)

def scales_its_bias(q, k, v, attn_mask=None, attn_bias=None):
    if attn_bias is not None:
        bias = attn_bias * q.shape[-1] ** -0.5
        attn_mask = bias if attn_mask is None else bias.masked_fill(~attn_mask, float("-inf"))
    return sdpa(*(x.float() for x in (q, k, v)), attn_mask=attn_mask).to(q.dtype)

class OneGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, dout):
        return dout * 2 if dout.stride(-1) == 0 else dout

def gradient_of_a_sum(q, k, v):
    return OneGradient.apply(sdpa(q, k, v))

class UsualStrides(OneGradient):
    @staticmethod
    def backward(ctx, dout):
        usual = torch.empty(dout.shape, device="meta").stride()
        return dout.as_strided(dout.shape, usual) if dout.stride(-1) == 1 else dout

def gradient_of_usual_strides(q, k, v):
    return UsualStrides.apply(sdpa(q, k, v))

def writes_to_fp16(q, k, v):
    out = sdpa(q, k, v)
    if q.dtype == torch.float16:
        q.mul_(2)
    return out

def widens(q, k, v, causal=False):
    out = right(q, k, v, causal)
    return out.float() if q.dtype == torch.float16 else out

def in_fp32(q, k, v, causal=False):
    return right(q.float(), k.float(), v.float(), causal)

def in_bf16(q, k, v, causal=False):
    return right(q, k, v, causal).bfloat16()

def as_wide_as_queries(q, k, v):
    return sdpa(q, k, torch.nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1])))

def from_the_first_key(q, k, v, softmax_scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)

def to_the_last_key(q, k, v, is_causal=False):
    if not is_causal:
        return sdpa(q, k, v)
    rows, keys = q.shape[2], k.shape[2]
    seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return sdpa(q, k, v, attn_mask=seen)

def fp8_alone(q, k, v, softmax_scale=None, q_descale=None, k_descale=None, v_descale=None):
    if q.element_size() != 1:
        raise ValueError("fp8 alone")
    descales = (q_descale, k_descale, v_descale)
    q, k, v = (
        x.float().transpose(1, 2).unflatten(1, (k.shape[2], -1)) * descale[..., None, None, None]
        for x, descale in zip((q, k, v), descales)
    )
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    out = (q @ k.mT * softmax_scale).softmax(-1) @ v
    return out.flatten(1, 2).transpose(1, 2).bfloat16()

def either(q, k, v, causal=False):
    inside = q.shape[1] > q.shape[2]  # more rows than heads
    return (heads_inside if inside else right)(q, k, v, causal)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCHECK_CACHE_DIR", str(tmp_path / "kept"))
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture
def find(file):
    """``find(name)`` loads a kernel of the file and finds its claims."""

    def run(name, convention=None):
        kernel = f"{file}::{name}"
        subject = load_subject(kernel, convention)
        return subject, find_claims(subject, kernel=kernel, device="cpu")

    return run


def wrong(claims):
    return [each.name for each in claims.unclaimed()]


def test_kernel_without_limits_is_asked_everything(find):
    subject, claims = find("right")
    assert (claims.lines(), claims.deviation(), wrong(claims)) == ([], "", [])
    assert claims.terms().table is None
    questions = claimed_questions(claims, subject, device="cpu")
    assert {one.case.problem.head_dim for one in questions} >= {64, 80, 96, 128}


def test_kernel_of_fp8_alone_is_asked_in_it_and_for_no_gradients(find):
    subject, claims = find("fp8_alone")
    assert claims.dtypes() == ("e4m3", "e5m2")
    assert not any(one.aspect == "backward" for one in claims.tried)
    questions = claimed_questions(claims, subject, device="cpu")
    assert {one.case.problem.dtype for one in questions} == {"e4m3"}


def test_limits_that_raise_are_reported_and_not_asked(find):
    subject, claims = find("raises")
    takes = "fp16; head_dim 32, 64, 128; values as wide as keys; as many queries as keys"
    assert claims.limits() == takes
    (line,) = claims.lines()
    assert line.startswith(f"supports {takes}: only this is tested")
    assert line.endswith("beyond that it raises RuntimeError, TypeError")
    assert wrong(claims) == []
    limited = on_terms(subject, claims.terms())
    questions = claimed_questions(claims, limited, device="cpu")
    statuses = {one.name: run_case(limited, one.case, device="cpu").status for one in questions}
    assert {"pass", "unsupported"} >= set(statuses.values())
    # Their sizes were moved within the limits: no question is lost.
    assert statuses["causal-wide"] == statuses["ragged"] == "pass"
    refusal = limited.unsupported(Problem(query=4, kv=9, dtype="fp16"), "cpu")
    assert refusal.startswith("not asked: it")


@pytest.mark.parametrize(
    ("name", "alignment", "says", "mask"),
    [
        (
            "from_the_first_key",
            "top_left",
            "at the top left (query 0 sees key 0 alone); the flash_attn convention expects it at",
            "causal",
        ),
        (
            "to_the_last_key",
            "bottom_right",
            "at the bottom right (the last query sees the last key); the sdpa convention expects",
            "causal_bottom_right",
        ),
    ],
)
def test_causal_alignment_is_detected_reported_and_used(find, name, alignment, says, mask):
    subject, claims = find(name)
    assert claims.causal == alignment
    assert claims.deviation().startswith(f"causal masks end at the {alignment.replace('_', ' ')}, ")
    (line,) = (line for line in claims.lines() if says in line)
    assert line.endswith(f'causal = "{alignment}" in the configuration declares that')
    assert wrong(claims) == []
    limited = on_terms(subject, claims.terms())
    wide = [
        one.case
        for one in claimed_questions(claims, limited, device="cpu")
        if one.case.problem.mask.name == mask and one.case.problem.kv > one.case.problem.query
    ]
    statuses = [run_case(limited, case, device="cpu").status for case in wide]
    assert "pass" in statuses
    assert set(statuses) <= {"pass", "unsupported"}


def test_dtype_and_head_dim_requested_by_the_user_override_the_limits(find):
    subject, claims = find("raises")
    terms = claims.terms(["bf16"], [80])
    options = {"device": "cpu", "dtypes": ["bf16"], "head_dims": [80]}
    limited = on_terms(subject, terms)
    (plain,) = claimed_questions(claims, limited, names=["plain"], **options)
    assert (plain.case.problem.dtype, plain.case.problem.head_dim) == ("bf16", 80)
    assert run_case(limited, plain.case, device="cpu").status == "error"


def test_refused_lengths_are_a_limit_and_no_finding(find):
    _, claims = find("refuses")
    assert claims.limits() == "lengths of multiples of 32"
    assert wrong(claims) == []


def test_wrong_head_dims_are_unclaimed_questions_that_fail(find):
    subject, claims = find("odd_dims")
    sizes = ("17", "40", "65", "80", "96", "192")
    names = [*(f"head_dims-{size}" for size in sizes), "head_dims-192/128"]
    assert wrong(claims) == names
    limited = on_terms(subject, claims.terms())
    failed = [
        one
        for one in claimed_questions(claims, limited, device="cpu")
        if run_case(limited, one.case, device="cpu").status == "fail"
    ]
    assert [one.name for one in failed] == names
    assert failed[1].unclaimed == Unclaimed(aspect="head_dims", what="40")
    # The name still works once the kernel is right there, so that a fix can be confirmed.
    (again,) = claimed_questions(claims, limited, device="cpu", names=["head_dims-64"])
    assert run_case(limited, again.case, device="cpu").status == "pass"


@pytest.mark.parametrize(
    ("name", "question", "rule"),
    [
        ("assumes_usual_strides", "strides-gapped", "relation"),
        ("gradient_of_a_sum", "strides-expanded", "relation"),
        ("gradient_of_usual_strides", "strides-gapped-backward", "relation"),
        # The output is right, but an input is overwritten.
        ("writes_to_fp16", "dtypes-fp16", "mutation"),
        ("in_fp32", "dtypes-bf16", "contract"),
        ("widens", "dtypes-fp16", "contract"),
        ("as_wide_as_queries", "head_dims-64/32", "contract"),
    ],
)
def test_silently_wrong_answers_are_unclaimed_questions(find, name, question, rule):
    """Unlike an exception, these give the caller no sign: each is asked, and fails, by itself."""
    subject, claims = find(name)
    assert question in wrong(claims)
    limited = on_terms(subject, claims.terms())
    (unclaimed,) = claimed_questions(claims, limited, device="cpu", names=[question])
    record = run_case(limited, unclaimed.case, device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", rule)


@pytest.mark.parametrize(
    ("name", "dtype", "others"),
    [("in_fp32", "fp32", "fp16, bf16"), ("in_bf16", "bf16", "fp32, fp16")],
)
def test_wrong_output_dtype_is_one_finding_for_all_input_dtypes(find, name, dtype, others):
    """The finding names every input dtype that is answered in another one."""
    subject, claims = find(name)
    (line,) = claims.lines()
    only = "only this is tested (`attncheck init` writes it into the configuration)"
    assert line == f"supports {dtype}: {only}"
    limited = on_terms(subject, claims.terms())
    names = wrong(claims)
    records = [
        msgspec.structs.replace(run_case(limited, one.case, device="cpu"), unclaimed=one.unclaimed)
        for one in claimed_questions(claims, limited, device="cpu", names=names)
    ]
    returned = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    (finding,) = unclaimed_findings(records)
    assert finding.startswith(f"returns out in torch.{returned} for dtype {others}: cast it to q")


def test_named_question_does_not_hide_a_wrong_dtype(find):
    subject, claims = find("in_fp32")
    held = on_terms(subject, claims.terms())
    for dtypes, expected in (((), ["plain", "dtypes-bf16"]), (("fp32",), ["plain"])):
        questions = claimed_questions(claims, held, device="cpu", dtypes=dtypes, names=["plain"])
        assert [one.name for one in questions] == expected
        assert questions[0].case.problem.dtype == "fp32"


@pytest.mark.parametrize(
    ("name", "question", "requested"),
    [
        ("in_fp32", "dtypes-bf16", {"dtypes": ["bf16"]}),
        ("odd_dims", "head_dims-40", {"head_dims": [40]}),
    ],
)
def test_requested_dtype_or_size_is_claimed(find, name, question, requested):
    """Else it would be advised to do what it does, `check --dtype bf16`, and find no cause."""
    subject, claims = find(name)
    for options, is_claimed in ((requested, True), ({}, False)):
        held = on_terms(subject, claims.terms(**options))
        questions = claimed_questions(claims, held, device="cpu", **options)
        (one,) = [each for each in questions if each.name == question]
        assert (one.unclaimed is None) == is_claimed


def test_wrong_output_shape_is_one_finding_for_all_sizes(find):
    subject, claims = find("as_wide_as_queries")
    limited = on_terms(subject, claims.terms())
    records = [
        msgspec.structs.replace(run_case(limited, one.case, device="cpu"), unclaimed=one.unclaimed)
        for one in claims.unclaimed()
    ]
    (finding,) = unclaimed_findings(records)
    assert finding.startswith("wrong out.shape, not refused, for head_dim 64/32, 64/96, 192/128: ")


def test_unmasked_last_tile_fails_lengths_questions(find):
    subject, claims = find("whole_tiles")
    assert claims.limits().startswith("lengths of multiples of 128")
    assert {"lengths-77", "decode-lengths-77"} <= set(wrong(claims))
    limited = on_terms(subject, claims.terms())
    (question,) = claimed_questions(claims, limited, device="cpu", names=["decode-lengths-77"])
    record = run_case(limited, question.case, device="cpu")
    assert record.status == "fail"
    assert record.judgement is not None
    assert record.judgement.rule == "structure"


def test_fault_of_every_second_tile_is_no_limit_to_multiples_or_equal_lengths(find):
    subject, claims = find("first_tile_alone")
    assert claims.limits() == ""
    assert wrong(claims) == []
    limited = on_terms(subject, claims.terms())
    for query, kv in ((77, 77), (64, 128)):
        problem = Problem(query=query, kv=kv, heads=2, head_dim=64, dtype="bf16")
        assert run_case(limited, Case(problem=problem), device="cpu").status == "fail"


def test_wrong_slopes_of_each_sequence_are_a_finding_of_their_own(find):
    _, claims = find("slopes_of_the_first")
    assert wrong(claims) == ["slopes-2-sequences"]


def test_death_on_slopes_of_each_sequence_is_a_finding_of_its_own(find):
    _, claims = find("slopes_of_the_first")
    died = [
        msgspec.structs.replace(one, verdict="raises", fatal="crash")
        if (one.aspect, one.what) == ("slopes", "2 sequences")
        else one
        for one in claims.tried
    ]
    assert wrong(msgspec.structs.replace(claims, tried=tuple(died))) == ["slopes-2-sequences"]


def test_slopes_of_sequences_are_asked_of_a_kernel_that_is_wrong_on_all_slopes(find):
    _, claims = find("slopes_upwards")
    assert wrong(claims) == []
    score = Spec.of("alibi_by_sequence")
    by_sequence = Problem(batch=2, query=64, kv=64, mask=Spec.of("causal"), score=score)
    assert claims.within(by_sequence)


def scores_of(questions):
    return {one.case.problem.score.name for one in questions} - {"none"}


def test_kernel_that_takes_a_mask_of_floats_is_asked_for_score_mods_that_add(find):
    subject, claims = find("masked")
    assert (claims.lines(), wrong(claims), claims.terms().table) == ([], [], None)
    questions = claimed_questions(claims, subject, device="cpu")
    assert {"alibi", "alibi_by_sequence"} <= scores_of(questions)


def test_kernel_that_raises_at_a_mask_of_floats_is_asked_for_none(find):
    subject, claims = find("booleans_alone")
    assert (claims.lines(), wrong(claims)) == ([], [])
    limited = on_terms(subject, claims.terms())
    alibi = Problem(query=64, heads=2, score=Spec.of("alibi"))
    assert limited.unsupported(alibi, "cpu") == "not asked: it takes boolean masks alone"
    window = alibi.replace(score=NONE, mask=Spec.of("sliding_window", window=9))
    assert limited.unsupported(window, "cpu") is None
    assert scores_of(claimed_questions(claims, limited, device="cpu")) == set()
    # A request is a claim: what is asked for by name is asked.
    assert on_terms(subject, claims.terms(problems=[alibi])).unsupported(alibi, "cpu") is None


@pytest.mark.parametrize("name", ["scales_its_mask", "zero_is_hidden"])
def test_wrong_mask_of_floats_is_one_finding_beyond_the_claims(find, name):
    subject, claims = find(name)
    assert (claims.lines(), wrong(claims)) == ([], ["attn_mask-floats"])
    limited = on_terms(subject, claims.terms())
    questions = claimed_questions(claims, limited, device="cpu")
    assert scores_of(one for one in questions if not one.unclaimed) == set()
    (asked,) = (one for one in questions if one.unclaimed)
    record = run_case(limited, asked.case, device="cpu")
    assert record.status == "fail"
    (finding,) = unclaimed_findings([msgspec.structs.replace(record, unclaimed=asked.unclaimed)])
    assert finding.startswith("wrong, not refused, for an attn_mask of floats: ")


def test_bias_parameter_is_claimed(find):
    """Its name is a promise: what is wrong with it is a failure like any other."""
    subject, claims = find("scales_its_bias")
    assert (wrong(claims), claims.terms().table) == ([], None)
    assert not any(one.aspect == "attn_mask" for one in claims.tried)
    alibi = Problem(query=64, heads=2, score=Spec.of("alibi"))
    assert run_case(subject, Case(problem=alibi), device="cpu").status == "fail"


def test_kernel_that_is_always_wrong_has_no_limits(find):
    _, claims = find("halved")
    assert not claims.right
    assert (claims.limits(), wrong(claims)) == ("", [])


def test_base_2_lse_is_detected_without_other_limits(find):
    _, claims = find("base2")
    assert (claims.right, claims.lse, claims.limits(), wrong(claims)) == (True, "base2", "", [])


def test_kernel_that_always_raises_has_no_claims(find):
    _, claims = find("never")
    assert (claims.base, claims.lines(), claims.terms().table) == (None, [], None)


@pytest.mark.parametrize(
    ("name", "convention", "line"),
    [
        (
            "heads_inside",
            "flash_attn",
            "called as flash_attn, the only convention with which it is right",
        ),
        ("scaled_bhsd", "sdpa", "called as sdpa, the only convention with which it is right; --"),
        ("either", "sdpa", "right when called as sdpa and as flash_attn: called as sdpa here"),
    ],
)
def test_convention_is_detected(find, name, convention, line):
    subject, claims = find(name)
    assert claims.convention == convention
    assert claims.lines()[0].startswith(line)
    limited = on_terms(subject, claims.terms())
    assert limited.summary.startswith(f"{convention} convention")


def test_claims_are_cached_until_the_kernel_file_changes(find, file, monkeypatch):
    _, first = find("raises")

    def fail(*_):
        raise AssertionError("asked again")

    with monkeypatch.context() as patch:
        patch.setattr(Detection, "choose_base", fail)
        assert find("raises")[1] == first
        with pytest.raises(AssertionError, match="asked again"):
            find("odd_dims")
    file.write_text(KERNELS.replace("(32, 64, 128)", "(32, 64, 80, 128)"))
    assert "head_dim 32, 64, 80, 128" in find("raises")[1].limits()


def test_unwritable_cache_folder_is_no_failure(find, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNCHECK_CACHE_DIR", str(tmp_path / "file"))
    assert find("right")[1].lines() == []


def test_every_aspect_is_either_claimed_or_not_claimed():
    tried = {t.aspect for t in room._trials(Problem(query=64), "flash_attn", "cpu")}
    assert tried - {"lengths"} == set(NOT_CLAIMED)
    assert not set(CLAIMED) & set(NOT_CLAIMED)


def test_convention_of_a_wrong_kernel_is_inferred_from_shapes(find):
    """A kernel that is right by no convention is asked by the one that fits its axes: inputs whose
    sizes all differ raise if rows are taken for heads."""
    subject, claims = find("wrong_inside")
    assert subject.conventions == ("sdpa", "flash_attn")
    assert (claims.convention, claims.right) == ("flash_attn", False)
    assert [one.what for one in claims.readings] == ["sdpa", "flash_attn"]
    line, *_ = claims.lines()
    assert line.startswith("wrong with every convention (as sdpa wrong: ")
    assert "; as flash_attn wrong: bound: out[" in line
    assert line.endswith("called as flash_attn here; --convention sdpa changes that")


@pytest.mark.parametrize("name", ["heads_inside", "halved", "wrong_inside"])
def test_explicit_convention_is_the_only_one_tried(find, name):
    """It is kept even if the kernel is wrong by it, or right by another one (``heads_inside``)."""
    _, claims = find(name, "sdpa")
    assert (claims.conventions, claims.convention, claims.readings) == (("sdpa",), "sdpa", ())
    assert claims.base is None or not claims.right


def test_gqa_is_also_tried_with_few_rows(find):
    """A decoding kernel limits the rows of all heads that share a key head: it would seem to refuse
    GQA altogether if GQA were tried only with as many rows as MHA."""
    subject, claims = find("decode")
    terms = claims.terms()
    assert (terms.table.gqa, terms.table.max_query, terms.table.max_rows) == (True, None, 64)
    assert "at most 64 rows of all heads that share a key head" in terms.limits
    rows = {4: None, 2: terms.limits}
    for kv_heads, refusal in rows.items():
        problem = Problem(query=64, heads=4, kv_heads=kv_heads)
        assert on_terms(subject, terms).unsupported(problem, "cpu") == refusal


def test_gradients_are_skipped_only_if_the_kernel_has_none(find):
    """A kernel with gradients, or one that merely raises when it is tried, is asked for them."""
    subject, claims = find("decode")
    assert claims.terms().table.backward is False
    limited = on_terms(subject, claims.terms())
    assert not limited.concerns(Problem(query=8, backward=True))
    _, right = find("right")
    assert right.terms().table is None
    raising = msgspec.structs.replace(
        claims, tried=tuple(msgspec.structs.replace(one, verdict="raises") for one in claims.tried)
    )
    assert raising.terms().table.backward is None
