"""Functions in a calling convention as Subjects: what they are asked, and what they are given."""

import functools
import math
import sys

import pytest
import torch
from tests.messages import one_line
from torch.nn.functional import scaled_dot_product_attention

from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import CONVENTIONS, convention_named, make_subject
from attncheck.subjects.load import load_subject
from attncheck.verify.executor import Execution, Failure, InProcess

CAUSAL, WINDOW = Spec.of("causal"), Spec.of("sliding_window", window=7)


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "query": 20, "kv": 30, "head_dim": 16}
    return Problem(**(sizes | changes))


def sdpa(function) -> Subject:
    subject = make_subject(function, "kernel", "sdpa")
    assert isinstance(subject, Subject)
    return subject


def whole(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def bare(query, key, value):
    return scaled_dot_product_attention(query, key, value)


class Notes:
    """A kernel of the whole convention that notes its keywords."""

    def __call__(self, q, k, v, /, **keywords):
        self.keywords = keywords
        self.graded = torch.is_grad_enabled()
        return scaled_dot_product_attention(q, k, v, **keywords)


# What is asked.


@pytest.mark.parametrize(
    "function",
    [whole, scaled_dot_product_attention, Notes()],
    ids=["whole", "torch's", "object"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": CAUSAL},
        {"mask": CAUSAL, "query": 30, "kv": 20},
        {"mask": WINDOW},
        {"mask": Spec.of("padding", lengths=[0, 9])},
        {"kv_heads": 2, "mask": CAUSAL},
        {"scale": 0.7},
        {"dtype": "fp32", "value_dim": 8},
    ],
    ids=str,
)
def test_the_whole_convention_reaches_the_kernel(function, changes, exact):
    problem = small(**changes)
    subject = sdpa(function)
    assert subject.unsupported(problem, "cpu") is None
    inputs = draw_inputs(problem)
    assert exact(inputs).excess(subject.run(inputs)) <= 1


def test_a_wrong_mask_is_more_than_rounding(exact):
    inputs = draw_inputs(small(mask=CAUSAL))
    full = inputs.replace(problem=inputs.problem.replace(mask=Spec.of("full")))
    assert exact(inputs).excess(sdpa(whole).run(full)) > 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"mask": CAUSAL}, "takes no attn_mask or is_causal"),
        ({"mask": WINDOW}, "takes no attn_mask"),
        ({"kv_heads": 2}, "takes no enable_gqa"),
        ({"scale": 0.7}, "takes no scale"),
        ({"scale": 0.25}, None),  # 1/√16
    ],
)
def test_what_the_signature_lacks_is_not_asked(changes, reason):
    assert sdpa(bare).unsupported(small(**changes), "cpu") == reason


def test_a_causal_mask_is_written_out_where_there_is_no_flag(exact):
    def masked(q, k, v, attn_mask=None):
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    inputs = draw_inputs(small(mask=CAUSAL))
    assert sdpa(masked).unsupported(inputs.problem, "cpu") is None
    assert exact(inputs).excess(sdpa(masked).run(inputs)) <= 1


@pytest.mark.parametrize("function", [whole, bare])
def test_what_the_convention_lacks_is_not_asked(function):
    subject = sdpa(function)
    assert subject.unsupported(small(dtype="e4m3"), "cpu").endswith("which fp8 inputs need")
    alibi = small(score=Spec.of("alibi"))
    assert subject.unsupported(alibi, "cpu") == "the sdpa convention has no score mod"
    assert subject.unsupported(small(dtype="tf32"), "cpu") == "the CPU has no tf32 products"
    assert subject.unsupported(small(dtype="tf32"), "cuda") is None
    assert not subject.concerns(Problem(operation="softmax", query=8))
    wide = small(mask=WINDOW, query=2_000_000, kv=2_000_000)
    assert "attn_mask would take" in (sdpa(whole).unsupported(wide, "cpu") or "")


def test_the_default_scale_is_left_out_so_that_it_is_examined_too():
    notes = Notes()
    sdpa(notes).run(draw_inputs(small()))
    assert notes.keywords == {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    assert not notes.graded
    sdpa(notes).run(draw_inputs(small(scale=0.7, mask=WINDOW)))
    assert notes.keywords["scale"] == small(scale=0.7).scale
    assert notes.keywords["attn_mask"].dtype == torch.bool
    assert notes.keywords["attn_mask"].shape == (1, 1, 20, 30)


def test_what_has_no_default_is_passed():
    def strict(q, k, v, attn_mask, scale, *, is_causal):
        return scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)

    assert isinstance(InProcess().run(sdpa(strict), draw_inputs(small(mask=CAUSAL))), Execution)


# Other names for the same.


def tutorial(q, k, v, causal, sm_scale):
    """What Triton's tutorial has: both are required."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


def one_mask(q, k, v, mask=None, softmax_scale=None):
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)


@pytest.mark.parametrize(
    ("function", "changes", "reason"),
    [
        (tutorial, {}, None),
        (tutorial, {"mask": CAUSAL}, None),
        (tutorial, {"mask": CAUSAL, "scale": 0.7}, None),
        (tutorial, {"mask": CAUSAL, "query": 30, "kv": 20}, None),
        (tutorial, {"mask": WINDOW}, "takes no attn_mask"),
        (tutorial, {"kv_heads": 2}, "takes no enable_gqa"),
        (one_mask, {"mask": WINDOW, "scale": 0.7}, None),
        (one_mask, {"mask": CAUSAL}, None),
    ],
)
def test_other_names_for_the_same_are_known(function, changes, reason, exact):
    problem = small(**changes)
    subject = make_subject(function, "kernel")
    assert subject.summary.startswith("sdpa convention")
    assert subject.unsupported(problem, "cpu") == reason
    if reason is None:
        inputs = draw_inputs(problem)
        assert exact(inputs).excess(subject.run(inputs)) <= 1


def test_what_goes_into_keywords_has_torchs_names():
    passed = {}

    def kernel(q, k, v, *, sm_scale=None, **keywords):
        passed.update(keywords, sm_scale=sm_scale)
        return q

    sdpa(kernel).run(draw_inputs(small(scale=0.7, mask=WINDOW)))
    assert set(passed) == {"sm_scale", "attn_mask", "is_causal", "dropout_p", "enable_gqa"}
    assert passed["sm_scale"] == small(scale=0.7).scale


def test_a_flag_that_is_aligned_otherwise_is_not_asked_of_the_other_mask():
    options = ConventionOptions(causal="bottom_right")
    subject = make_subject(tutorial, "kernel", "sdpa", options)
    assert subject.unsupported(small(mask=CAUSAL), "cpu") == "takes no attn_mask"
    assert subject.unsupported(small(mask=Spec.of("causal_bottom_right")), "cpu") is None


def test_lse_is_asked_for_where_the_signature_has_a_flag():
    def flagged(q, k, v, return_lse=False):
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        out = scores.softmax(-1) @ v
        return (out, scores.logsumexp(-1)) if return_lse else out

    inputs = draw_inputs(small(dtype="fp32"))
    assert sdpa(flagged).run(inputs).lse is not None
    options = ConventionOptions(returns_lse=False)
    assert make_subject(flagged, "kernel", None, options).run(inputs).lse is None
    notes = Notes()
    sdpa(notes).run(inputs)
    assert "return_lse" not in notes.keywords


def test_a_softmax_is_no_question_for_a_function_of_attention():
    softmax = Problem(operation="softmax", query=8)
    for name in ("sdpa", "flash_attn", "flex"):
        subject = make_subject(bare, "kernel", name)
        assert subject.unsupported(softmax, "cpu") == f"the {name} convention is of attention"


def of_flash_attn(q, k, v): ...


of_flash_attn.__module__ = "flash_attn.flash_attn_interface"


@pytest.mark.parametrize(
    ("signature", "convention"),
    [
        ("q, k, v", "sdpa"),
        ("q, k, v, causal, sm_scale", "sdpa"),
        ("q, k, v, is_causal=False, softmax_scale=None", "sdpa"),
        ("q, k, v, causal=False, softmax_scale=None", "flash_attn"),
        ("q, k, v, window_size=(-1, -1)", "flash_attn"),
        ("q, k, v, alibi_slopes=None", "flash_attn"),
        ("q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None", "varlen"),
        ("q, k, v, score_mod=None", "flex"),
        ("q, k, v, block_mask=None, scale=None, enable_gqa=False", "flex"),
    ],
)
def test_the_convention_that_a_signature_shows_is_taken_and_said(signature, convention):
    kernel = eval(f"lambda {signature}: q")  # noqa: S307  # a signature of this file's
    assert make_subject(kernel, "kernel").summary.startswith(f"{convention} convention: takes ")


def test_a_name_shows_it_where_the_signature_does_not():
    assert make_subject(of_flash_attn, "kernel").summary.startswith("flash_attn convention")
    from torch.nn.attention.flex_attention import flex_attention

    taken = "score_mod, block_mask, scale, enable_gqa, return_aux, return_lse"
    assert make_subject(flex_attention, "kernel").summary == f"flex convention: takes {taken}"


def test_a_subject_has_no_options_but_its_own():
    options = ConventionOptions(lse="base2")
    assert make_subject(sdpa(bare), "kernel", None, options).startswith(
        "is no function: a Subject says"
    )


def test_options_are_checked_and_promises_kept():
    with pytest.raises(UnknownName, match="lse 'base10' is not known"):
        ConventionOptions(lse="base10")
    with pytest.raises(UnknownName, match="empty_row 'one' is not known"):
        ConventionOptions(empty_row="one")
    options = ConventionOptions(promises=frozenset({"batch"}))
    assert make_subject(bare, "kernel", None, options).promises == {"batch"}


# What it gives.


def test_lse_may_come_with_out(exact):
    def both(q, k, v):
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    inputs = draw_inputs(small(dtype="fp32"))
    outputs = sdpa(both).run(inputs)
    assert outputs.lse.shape == (2, 4, 20)
    assert exact(inputs).excess(outputs) <= 1


def of_convention(name, gives):
    if name == "varlen":
        return lambda q, k, v, cu_seqlens_q, cu_seqlens_k: gives(q)
    return lambda q, k, v: gives(q)


OF_ANY = [
    (lambda q: (q.clone(), None), "", ""),
    (lambda q: [q], "contract", "it returned list of 1: the {} convention gives out, or "),
    (lambda q: None, "contract", "it returned NoneType: the {}"),
    (lambda q: (q,) * 5, "contract", "it returned tuple of 5: the {} convention"),
    (lambda q: (None, None), "contract", "out is NoneType"),
    (lambda q: q[..., :3], "contract", "out.shape="),
    (lambda q: q.float(), "contract", "out.dtype=torch.float32"),
    (lambda q: q.to("meta"), "contract", "out.device=meta, but should be cpu."),
    (lambda q: (q, q), "contract", "lse.shape="),
    (lambda q: (q, 3.0), "contract", "lse is float, but should be a tensor."),
    (lambda q: q.mul_(2).clone(), "mutation", "wrote to its input q."),
    (lambda q: q.nothing, "error", "AttributeError"),
    (lambda q: int("x"), "refused", "ValueError: invalid literal"),
]
OF_SDPA = [
    (lambda q: (q, None), "alias", "out lies in the memory of its input q."),
    (lambda q: (q.clone(), q[..., 0]), "contract", "lse.dtype=torch.bfloat16, but should be"),
]


@pytest.mark.parametrize(
    ("convention", "gives", "kind", "message"),
    [(name, *row) for name in ("sdpa", "flash_attn", "varlen") for row in OF_ANY]
    + [("sdpa", *row) for row in OF_SDPA],
    ids=range(41),
)
def test_what_it_may_give(convention, gives, kind, message):
    subject = make_subject(of_convention(convention, gives), "kernel", convention)
    result = InProcess().run(subject, draw_inputs(small(kv=20)))
    if not kind:
        assert isinstance(result, Execution)
        return
    assert isinstance(result, Failure)
    assert (result.kind, message.format(convention) in result.message) == (kind, True), result


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, AssertionError])
def test_a_clean_refusal_is_one(error):
    def picky(q, k, v):
        raise error("head_dim must be 64\nor 128")

    result = InProcess().run(sdpa(picky), draw_inputs(small()))
    assert result == Failure(kind="refused", message=f"{error.__name__}: head_dim must be 64")


@pytest.mark.parametrize("error", [RuntimeError, TypeError, IndexError, SystemExit])
def test_anything_else_is_an_error(error):
    def broken(q, k, v):
        raise error("no")

    assert InProcess().run(sdpa(broken), draw_inputs(small())).kind == "error"


# What follows which convention.


def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "custom_op", "packet", "compiled"])
def test_of_what_torch_makes_of_a_function_its_schema_says_what_it_takes(kind):
    op = torch.library.custom_op("planted::attention", mutates_args=())
    made = {
        "script": lambda: torch.jit.script(written),
        "custom_op": lambda: op(_copying),
        "packet": lambda: (op(_copying), torch.ops.planted.attention)[1],
        "compiled": lambda: torch.compile(Attention(), backend="eager"),
    }[kind]()
    subject = sdpa(made)
    assert subject.takes == {"is_causal"}
    assert isinstance(InProcess().run(subject, draw_inputs(small())), Execution)


def _copying(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    return written(q, k, v, is_causal).clone()


class Attention(torch.nn.Module):
    def forward(self, q, k, v, is_causal=False):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def two(q, k): ...


def defaults(q, k, v=None): ...


def named(q, k, attn_mask): ...


def needs(q, k, v, block_size): ...


def anything(*tensors, is_causal=False): ...


def by_position(q, k, v, is_causal=False, /): ...


@pytest.mark.parametrize(
    ("found", "summary"),
    [
        (whole, "attn_mask, is_causal, scale, enable_gqa"),
        (bare, "query, key and value alone"),
        (anything, "is_causal"),
        (by_position, "query, key and value alone"),
        (functools.partial(whole, is_causal=True), "attn_mask, is_causal, scale, enable_gqa"),
        (Attention(), "is_causal"),
        (scaled_dot_product_attention, "attn_mask, is_causal, scale, enable_gqa"),
    ],
)
def test_the_signature_says_what_it_takes(found, summary):
    assert sdpa(found).summary == f"sdpa convention: takes {summary}"


FIRST_THREE = "a kernel's first three arguments are query, key and value, without defaults"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (3, "is int, and must be a function of query, key and value"),
        (dict, "is type, and must be a function of query, key and value"),
        (two, f"takes (q, k): {FIRST_THREE}"),
        (defaults, f"takes (q, k, v=…): {FIRST_THREE}"),
        (named, f"takes (q, k, attn_mask): {FIRST_THREE}"),
        (needs, "needs 'block_size', which the sdpa convention does not pass: give it a default, "),
    ],
)
def test_what_is_no_such_function(found, reason):
    assert str(make_subject(found, "kernel", "sdpa")).startswith(reason)


def test_a_triton_function_is_not_what_launches_it():
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(q, k, v):
        pass

    assert "name the Python function that launches" in str(make_subject(kernel, "kernel", "sdpa"))


def test_conventions_by_name():
    assert list(CONVENTIONS) == ["native", "sdpa", "flash_attn", "varlen", "flex", "paged"]
    known = "flash_attn, flex, native, paged, sdpa, varlen"
    with pytest.raises(UnknownName, match=f"'ragged' is not known: choose from {known}\\."):
        convention_named("ragged")
    subject = sdpa(bare)
    assert make_subject(subject, "kernel") is subject
    assert make_subject(subject, "kernel", "native") is subject
    assert make_subject(bare, "kernel", "native") == "is function, and must be a Subject"
    number = "is int, and must be a function of query, key and value"
    assert make_subject(3, "kernel", "sdpa") == number
    assert make_subject(3, "kernel") == f"{number}, or a Subject"


# By name, from files and modules.

MINE = """
import torch
from torch.nn.functional import scaled_dot_product_attention
def kernel(q, k, v):
    return scaled_dot_product_attention(q, k, v)
class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return kernel(q, k, v)
class Holder:
    kernel = staticmethod(kernel)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    path = tmp_path / "mine_of_conventions.py"
    path.write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return path


@pytest.mark.parametrize("convention", [None, "sdpa"])
def test_a_function_of_a_file_and_of_a_module(mine, convention):
    assert load_subject(f"{mine}::kernel", convention).name == "mine_of_conventions.py::kernel"
    name = "mine_of_conventions:kernel"
    assert load_subject(name, convention).name == name
    torchs = "torch.nn.functional:scaled_dot_product_attention"
    assert load_subject(torchs, convention).name == torchs


def test_what_else_a_module_may_hold(mine):
    assert load_subject("mine_of_conventions:Module").summary.endswith("alone")
    assert load_subject("mine_of_conventions:Holder.kernel").summary.endswith("alone")


@pytest.mark.parametrize(
    ("asked", "convention", "message"),
    [
        ("mine_of_conventions:gone", None, "mine_of_conventions has no 'gone'"),
        ("no_such_module:kernel", None, "importing no_such_module raised ModuleNotFoundError"),
        (":kernel", None, "there is no module before ':'"),
        ("mine_of_conventions:", None, "there is no name after ':'"),
        ("mine_of_conventions:torch", None, "is module, and must be a function of"),
        ("mine_of_conventions:kernel", "native", "and must be a Subject"),
        ("mine_of_conventions:kernel", "ragged", "'ragged' is not known: choose from flash_attn, "),
        ("mine_of_conventions:kernel", "varlen", "takes no cu_seqlens_q, which the varlen"),
        ("ideal", "sdpa", "is attncheck's own: leave its convention out"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(mine, asked, convention, message):
    with one_line(UsageError, match=message):
        load_subject(asked, convention)


def test_a_kernel_that_launches_triton_says_so(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "launches.py"
    path.write_text(f"import triton.language as tl\n{MINE}")
    assert load_subject(f"{path}::kernel").triton
    path.write_text(MINE)
    assert not load_subject(f"{path}::kernel").triton


# The arithmetic that is assumed.


def test_weights_may_be_divided_before_they_are_rounded():
    assumed = sdpa(bare).arithmetic(small(), "cpu")
    assert assumed.normalised_weights
    assert not sdpa(bare).arithmetic(small(), "cpu").sums_rounded_weights


def own(q, k, v):
    return (q.float() @ k.float().mT / math.sqrt(q.shape[-1])).softmax(-1).to(q.dtype) @ v


@pytest.mark.parametrize("function", [scaled_dot_product_attention, bare, whole, Attention()])
def test_what_reaches_torchs_flash_kernel_of_the_cpu_has_its_exp(function):
    """Wherever it is called: its exp is short in 16 bits, which is no fault of the caller's."""
    for dtype, short in (("bf16", True), ("fp16", True), ("fp32", False)):
        result = InProcess().run(sdpa(function), draw_inputs(small(dtype=dtype)))
        assert (result.arithmetic.exp2_ulps > 2) == short
    assert InProcess().run(sdpa(own), draw_inputs(small())).arithmetic.exp2_ulps == 2


def test_what_is_timed_is_the_function_alone():
    """Only the first call, which is not timed, is looked at."""
    modes = []

    def kernel(q, k, v):
        modes.append(torch.utils._python_dispatch._get_current_dispatch_mode())
        return own(q, k, v)

    assert isinstance(InProcess().run(sdpa(kernel), draw_inputs(small()), timed=True), Execution)
    assert modes[0] is not None
    assert len(modes) > 1
    assert modes[1:] == [None] * (len(modes) - 1)
