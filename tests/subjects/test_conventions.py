"""Functions in a calling convention as Subjects: support, arguments, results, names, arithmetic."""

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
from attncheck.verify.call_conditions import CallConditions
from attncheck.verify.executor import Execution, Failure, InProcess

CAUSAL, WINDOW = Spec.of("causal"), Spec.of("sliding_window", window=7)
ALIBI = Spec.of("alibi")


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "query": 20, "kv": 30, "head_dim": 16}
    return Problem(**(sizes | changes))


def sdpa(function) -> Subject:
    subject = make_subject(function, "kernel", "sdpa")
    assert isinstance(subject, Subject)
    return subject


def complete(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def bare(query, key, value):
    return scaled_dot_product_attention(query, key, value)


class KeywordRecorder:
    """A kernel of the complete convention that records its keywords."""

    def __call__(self, q, k, v, /, **keywords):
        self.keywords = keywords
        self.grad_enabled = torch.is_grad_enabled()
        return scaled_dot_product_attention(q, k, v, **keywords)


# Supported Problems and passed arguments.


@pytest.mark.parametrize(
    "function",
    [complete, scaled_dot_product_attention, KeywordRecorder()],
    ids=["complete", "torch's", "object"],
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
def test_complete_kernel_is_within_rounding_on_every_problem(function, changes, exact):
    problem = small(**changes)
    subject = sdpa(function)
    assert subject.unsupported(problem, "cpu") is None
    inputs = draw_inputs(problem)
    assert exact(inputs).excess(subject.run(inputs)) <= 1


def test_wrong_mask_is_more_than_rounding(exact):
    inputs = draw_inputs(small(mask=CAUSAL))
    full = inputs.replace(problem=inputs.problem.replace(mask=Spec.of("full")))
    assert exact(inputs).excess(sdpa(complete).run(full)) > 1


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
def test_problem_that_the_signature_cannot_express_is_unsupported(changes, reason):
    assert sdpa(bare).unsupported(small(**changes), "cpu") == reason


def test_causal_mask_is_passed_as_attn_mask_without_a_flag(exact):
    def masked(q, k, v, attn_mask=None):
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    inputs = draw_inputs(small(mask=CAUSAL))
    assert sdpa(masked).unsupported(inputs.problem, "cpu") is None
    assert exact(inputs).excess(sdpa(masked).run(inputs)) <= 1


@pytest.mark.parametrize("function", [complete, bare])
def test_problem_that_the_convention_cannot_express_is_unsupported(function):
    subject = sdpa(function)
    assert subject.unsupported(small(dtype="e4m3"), "cpu").endswith("which fp8 inputs need")
    softcap = small(score=Spec.of("softcap", cap=5.0))
    assert subject.unsupported(softcap, "cpu").startswith("a bias is added to scores, and softcap")
    assert subject.unsupported(small(dtype="tf32"), "cpu") == "the CPU has no tf32 products"
    assert subject.unsupported(small(dtype="tf32"), "cuda") is None
    assert not subject.concerns(Problem(operation="softmax", query=8))
    wide = small(mask=WINDOW, query=2_000_000, kv=2_000_000)
    assert "attn_mask would take" in (sdpa(complete).unsupported(wide, "cpu") or "")


def test_default_scale_is_not_passed():
    """The kernel's own default scale is tested too."""
    recorder = KeywordRecorder()
    sdpa(recorder).run(draw_inputs(small()))
    assert recorder.keywords == {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    assert not recorder.grad_enabled
    sdpa(recorder).run(draw_inputs(small(scale=0.7, mask=WINDOW)))
    assert recorder.keywords["scale"] == small(scale=0.7).scale
    assert recorder.keywords["attn_mask"].dtype == torch.bool
    assert recorder.keywords["attn_mask"].shape == (1, 1, 20, 30)


def test_arguments_without_defaults_are_passed():
    def strict(q, k, v, attn_mask, scale, *, is_causal):
        return scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)

    assert isinstance(InProcess().run(sdpa(strict), draw_inputs(small(mask=CAUSAL))), Execution)


# Score mods that add, in a mask of floats.


def scales_its_mask(query, key, value, attn_mask=None, is_causal=False, enable_gqa=False):
    """Booleans are right; what is added is multiplied by the scale."""
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask * query.shape[-1] ** -0.5
    return scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa
    )


BY_BATCH = Spec.of("bias", seed=0, per_batch=1, per_head=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"score": ALIBI},
        {"score": ALIBI, "mask": CAUSAL, "query": 30, "kv": 20},
        {"score": Spec.of("alibi_by_sequence"), "mask": WINDOW, "kv_heads": 2},
        {"score": BY_BATCH, "mask": Spec.of("padding", lengths=[0, 9]), "dtype": "fp32"},
    ],
    ids=str,
)
def test_added_score_mod_reaches_the_kernel_as_a_mask_of_floats(changes, exact):
    inputs = draw_inputs(small(**changes))
    for function, is_right in (
        (complete, True),
        (scaled_dot_product_attention, True),
        (scales_its_mask, False),
    ):
        subject = sdpa(function)
        assert subject.unsupported(inputs.problem, "cpu") is None
        assert (exact(inputs).excess(subject.run(inputs)) <= 1) == is_right


def test_mask_of_floats_has_the_dtype_of_query_and_holds_the_causal_mask():
    recorder, inputs = KeywordRecorder(), draw_inputs(small(score=ALIBI, mask=CAUSAL))
    sdpa(recorder).run(inputs)
    mask = recorder.keywords["attn_mask"]
    assert (mask.dtype, mask.shape) == (torch.bfloat16, (1, 4, 20, 30))
    assert torch.equal(mask.isneginf(), ~torch.ones(4, 20, 30, dtype=torch.bool).tril()[None])
    assert not recorder.keywords["is_causal"]


def test_score_mod_is_passed_as_a_bias_by_functions_that_name_one():
    passed = {}

    def kernel(q, k, v, attn_mask=None, attn_bias=None):
        passed.update(attn_mask=attn_mask, attn_bias=attn_bias)
        return q

    subject = sdpa(kernel)
    subject.run(draw_inputs(small(score=ALIBI, mask=WINDOW)))
    assert {name: each.dtype for name, each in passed.items()} == {
        "attn_mask": torch.bool,
        "attn_bias": torch.float32,
    }
    assert not subject.float_mask
    assert sdpa(complete).float_mask


@pytest.mark.parametrize(
    ("function", "changes", "reason"),
    [
        (complete, {"score": BY_BATCH}, "would round the bias to bf16"),
        (complete, {"score": ALIBI, "heads": 3}, "would round the bias to bf16"),
        (complete, {"score": BY_BATCH, "dtype": "fp32"}, None),
        (bare, {"score": ALIBI}, "takes no attn_mask or attn_bias"),
    ],
)
def test_mask_of_floats_is_exact_or_unsupported(function, changes, reason):
    assert sdpa(function).unsupported(small(**changes), "cpu") == reason


def test_size_of_a_mask_of_floats_is_refused_before_it_is_computed():
    wide = small(score=ALIBI, query=2_000_000, kv=2_000_000)
    assert "attn_mask would take" in (sdpa(complete).unsupported(wide, "cpu") or "")


# Other names of the same arguments.


def tutorial(q, k, v, causal, sm_scale):
    """The signature of Triton's tutorial, where both are required."""
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
def test_other_names_of_arguments_are_recognised(function, changes, reason, exact):
    problem = small(**changes)
    subject = make_subject(function, "kernel")
    assert subject.summary.startswith("sdpa convention")
    assert subject.unsupported(problem, "cpu") == reason
    if reason is None:
        inputs = draw_inputs(problem)
        assert exact(inputs).excess(subject.run(inputs)) <= 1


def test_starred_keywords_are_passed_with_torch_names():
    passed = {}

    def kernel(q, k, v, *, sm_scale=None, **keywords):
        passed.update(keywords, sm_scale=sm_scale)
        return q

    sdpa(kernel).run(draw_inputs(small(scale=0.7, mask=WINDOW)))
    assert set(passed) == {"sm_scale", "attn_mask", "is_causal", "dropout_p", "enable_gqa"}
    assert passed["sm_scale"] == small(scale=0.7).scale


def test_causal_flag_declared_bottom_right_does_not_support_top_left():
    options = ConventionOptions(causal="bottom_right")
    subject = make_subject(tutorial, "kernel", "sdpa", options)
    assert subject.unsupported(small(mask=CAUSAL), "cpu") == "takes no attn_mask"
    assert subject.unsupported(small(mask=Spec.of("causal_bottom_right")), "cpu") is None


def test_lse_is_requested_only_through_a_flag_of_the_signature():
    def flagged(q, k, v, return_lse=False):
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        out = scores.softmax(-1) @ v
        return (out, scores.logsumexp(-1)) if return_lse else out

    inputs = draw_inputs(small(dtype="fp32"))
    assert sdpa(flagged).run(inputs).lse is not None
    options = ConventionOptions(returns_lse=False)
    assert make_subject(flagged, "kernel", None, options).run(inputs).lse is None
    recorder = KeywordRecorder()
    sdpa(recorder).run(inputs)
    assert "return_lse" not in recorder.keywords


@pytest.mark.parametrize("name", ["sdpa", "flash_attn", "flex"])
def test_softmax_is_unsupported_by_conventions_of_attention(name):
    softmax = Problem(operation="softmax", query=8)
    subject = make_subject(bare, "kernel", name)
    assert subject.unsupported(softmax, "cpu") == f"the {name} convention is of attention"


def flash_attn_function(q, k, v): ...


flash_attn_function.__module__ = "flash_attn.flash_attn_interface"


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
def test_convention_is_detected_from_the_signature(signature, convention):
    kernel = eval(f"lambda {signature}: q")  # noqa: S307  # a signature of this file's
    assert make_subject(kernel, "kernel").summary.startswith(f"{convention} convention: takes ")


def test_convention_is_detected_from_the_module_of_a_function():
    assert make_subject(flash_attn_function, "kernel").summary.startswith("flash_attn convention")
    from torch.nn.attention.flex_attention import flex_attention

    arguments = "score_mod, block_mask, scale, enable_gqa, return_aux, return_lse"
    assert make_subject(flex_attention, "kernel").summary == f"flex convention: takes {arguments}"


def test_options_are_refused_for_a_subject():
    options = ConventionOptions(lse="base2")
    assert make_subject(sdpa(bare), "kernel", None, options).startswith(
        "is no function: a Subject says"
    )


def test_unknown_options_are_refused_and_promises_are_passed_on():
    with pytest.raises(UnknownName, match="lse 'base10' is not known"):
        ConventionOptions(lse="base10")
    with pytest.raises(UnknownName, match="empty_row 'one' is not known"):
        ConventionOptions(empty_row="one")
    options = ConventionOptions(promises=frozenset({"batch"}))
    assert make_subject(bare, "kernel", None, options).promises == {"batch"}


# Results.


def test_lse_returned_beside_out_is_within_rounding(exact):
    def both(q, k, v):
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    inputs = draw_inputs(small(dtype="fp32"))
    outputs = sdpa(both).run(inputs)
    assert outputs.lse.shape == (2, 4, 20)
    assert exact(inputs).excess(outputs) <= 1


def kernel_of(convention, make_result):
    if convention == "varlen":
        return lambda q, k, v, cu_seqlens_q, cu_seqlens_k: make_result(q)
    return lambda q, k, v: make_result(q)


RESULTS = [
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
SDPA_RESULTS = [
    (lambda q: (q, None), "alias", "out lies in the memory of its input q."),
    (lambda q: (q.clone(), q[..., 0]), "contract", "lse.dtype=torch.bfloat16, but should be"),
]


@pytest.mark.parametrize(
    ("convention", "make_result", "kind", "message"),
    [(name, *row) for name in ("sdpa", "flash_attn", "varlen") for row in RESULTS]
    + [("sdpa", *row) for row in SDPA_RESULTS],
    ids=range(41),
)
def test_result_of_a_function_is_checked(convention, make_result, kind, message):
    subject = make_subject(kernel_of(convention, make_result), "kernel", convention)
    result = InProcess().run(subject, draw_inputs(small(kv=20)))
    if not kind:
        assert isinstance(result, Execution)
        return
    assert isinstance(result, Failure)
    assert (result.kind, message.format(convention) in result.message) == (kind, True), result


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, AssertionError])
def test_refusing_exceptions_are_refusals_with_their_first_line(error):
    def picky(q, k, v):
        raise error("head_dim must be 64\nor 128")

    result = InProcess().run(sdpa(picky), draw_inputs(small()))
    assert result == Failure(kind="refused", message=f"{error.__name__}: head_dim must be 64")


@pytest.mark.parametrize("error", [RuntimeError, TypeError, IndexError, SystemExit])
def test_other_exceptions_are_errors(error):
    def broken(q, k, v):
        raise error("no")

    assert InProcess().run(sdpa(broken), draw_inputs(small())).kind == "error"


# Functions that fit a convention.


def typed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "custom_op", "packet", "compiled"])
def test_arguments_of_scripted_custom_and_compiled_functions_are_known(kind):
    op = torch.library.custom_op("planted::attention", mutates_args=())
    function = {
        "script": lambda: torch.jit.script(typed),
        "custom_op": lambda: op(_typed_copy),
        "packet": lambda: (op(_typed_copy), torch.ops.planted.attention)[1],
        "compiled": lambda: torch.compile(Attention(), backend="eager"),
    }[kind]()
    subject = sdpa(function)
    assert subject.takes == {"is_causal"}
    assert isinstance(InProcess().run(subject, draw_inputs(small())), Execution)


def _typed_copy(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    return typed(q, k, v, is_causal).clone()


class Attention(torch.nn.Module):
    def forward(self, q, k, v, is_causal=False):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def two_tensors(q, k): ...


def default_value(q, k, v=None): ...


def mask_third(q, k, attn_mask): ...


def needs_block_size(q, k, v, block_size): ...


def starred(*tensors, is_causal=False): ...


def by_position(q, k, v, is_causal=False, /): ...


@pytest.mark.parametrize(
    ("function", "summary"),
    [
        (complete, "attn_mask, is_causal, scale, enable_gqa"),
        (bare, "query, key and value alone"),
        (starred, "is_causal"),
        (by_position, "query, key and value alone"),
        (functools.partial(complete, is_causal=True), "attn_mask, is_causal, scale, enable_gqa"),
        (Attention(), "is_causal"),
        (scaled_dot_product_attention, "attn_mask, is_causal, scale, enable_gqa"),
    ],
)
def test_summary_lists_the_arguments_of_the_signature(function, summary):
    assert sdpa(function).summary == f"sdpa convention: takes {summary}"


FIRST_THREE = "a kernel's first three arguments are query, key and value, without defaults"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (3, "is int, and must be a function of query, key and value"),
        (dict, "is type, and must be a function of query, key and value"),
        (two_tensors, f"takes (q, k): {FIRST_THREE}"),
        (default_value, f"takes (q, k, v=…): {FIRST_THREE}"),
        (mask_third, f"takes (q, k, attn_mask): {FIRST_THREE}"),
        (
            needs_block_size,
            "needs 'block_size', which the sdpa convention does not pass: give it a default, ",
        ),
    ],
)
def test_unfit_function_is_refused_with_a_reason(function, reason):
    assert str(make_subject(function, "kernel", "sdpa")).startswith(reason)


def test_triton_jit_function_is_refused_in_favour_of_its_launcher():
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(q, k, v):
        pass

    assert "name the Python function that launches" in str(make_subject(kernel, "kernel", "sdpa"))


def test_conventions_are_listed_and_native_takes_only_subjects():
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


# Names of functions in files and modules.

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
def kernel_file(tmp_path, monkeypatch):
    path = tmp_path / "mine_of_conventions.py"
    path.write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return path


@pytest.mark.parametrize("convention", [None, "sdpa"])
def test_function_is_loaded_from_a_file_or_module(kernel_file, convention):
    subject = load_subject(f"{kernel_file}::kernel", convention)
    assert subject.name == "mine_of_conventions.py::kernel"
    for name in (
        "mine_of_conventions:kernel",
        "torch.nn.functional:scaled_dot_product_attention",
    ):
        assert load_subject(name, convention).name == name


@pytest.mark.usefixtures("kernel_file")
@pytest.mark.parametrize("name", ["Module", "Holder.kernel"])
def test_module_class_and_static_method_are_loaded(name):
    assert load_subject(f"mine_of_conventions:{name}").summary.endswith("alone")


@pytest.mark.usefixtures("kernel_file")
@pytest.mark.parametrize(
    ("name", "convention", "message"),
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
def test_unloadable_name_is_refused_in_one_line(name, convention, message):
    with one_line(UsageError, match=message):
        load_subject(name, convention)


def test_kernel_of_a_file_that_imports_triton_is_marked(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "launches.py"
    path.write_text(f"import triton.language as tl\n{MINE}")
    assert load_subject(f"{path}::kernel").triton
    path.write_text(MINE)
    assert not load_subject(f"{path}::kernel").triton


# The assumed arithmetic.


def test_weights_may_be_divided_before_they_are_rounded():
    arithmetic = sdpa(bare).arithmetic(small(), "cpu")
    assert arithmetic.normalised_weights
    assert not arithmetic.sums_rounded_weights


def plain_formula(q, k, v):
    return (q.float() @ k.float().mT / math.sqrt(q.shape[-1])).softmax(-1).to(q.dtype) @ v


@pytest.mark.parametrize("function", [scaled_dot_product_attention, bare, complete, Attention()])
def test_function_that_calls_torch_flash_on_the_cpu_is_granted_its_exp(function):
    """torch's exp is inaccurate in 16 bits, which is no fault of a function that calls it."""
    for dtype, inaccurate in (("bf16", True), ("fp16", True), ("fp32", False)):
        result = InProcess().run(sdpa(function), draw_inputs(small(dtype=dtype)))
        assert (result.arithmetic.exp2_ulps > 2) == inaccurate
    assert InProcess().run(sdpa(plain_formula), draw_inputs(small())).arithmetic.exp2_ulps == 2


def test_timed_calls_run_without_the_dispatch_mode():
    """Only the first call, which is not timed, is observed."""
    modes = []

    def kernel(q, k, v):
        modes.append(torch.utils._python_dispatch._get_current_dispatch_mode())
        return plain_formula(q, k, v)

    timed = CallConditions(timed=True)
    assert isinstance(InProcess().run(sdpa(kernel), draw_inputs(small()), under=timed), Execution)
    assert modes[0] is not None
    assert len(modes) > 1
    assert modes[1:] == [None] * (len(modes) - 1)
