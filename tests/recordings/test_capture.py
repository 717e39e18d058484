"""``attncheck.capture`` records every call of attention and does not change the model's results."""

import contextlib
import math
import re
import subprocess
import sys
import warnings

import pytest
import torch
from tests.messages import one_line
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

import attncheck
from attncheck.core.errors import UsageError
from attncheck.inputs.recording_file import load


class Attention(nn.Module):
    """Calls a function that was imported by name before ``capture``, and keeps its arguments."""

    def __init__(self, width=16, heads=2, dropout=0.0):
        super().__init__()
        self.to_qkv = nn.Linear(width, 3 * width)
        self.heads, self.dropout = heads, dropout
        self.passed = []

    def forward(self, x):
        parts = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        self.passed.append(tuple(part.detach().clone() for part in parts))
        return scaled_dot_product_attention(*parts, None, self.dropout).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(**options) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return functional.scaled_dot_product_attention(x, x, x)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "recorded.safetensors"


@pytest.fixture
def x():
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def seeded(make):
    torch.manual_seed(0)
    return make()


def test_capture_records_each_call_bit_for_bit(file, x):
    model = seeded(Stack)
    with attncheck.capture(file, model=model):
        model(x)
    recordings = load(file)
    arguments = [block.passed[0] for block in model.blocks]
    for recording, tensors in zip(recordings, arguments, strict=False):
        for kept, passed in zip((recording.q, recording.k, recording.v), tensors, strict=True):
            assert torch.equal(kept.view(torch.int32), passed.contiguous().view(torch.int32))
    assert [r.call.name for r in recordings] == [
        "blocks.0/0",
        "blocks.1/0",
        "blocks.2/0",
        "Stack/0",  # the model itself has no path
    ]


def test_call_names_count_the_calls_of_each_module(file, x):
    model = seeded(Stack)
    with attncheck.capture(file, model=model):
        model(x)
        model(x)
        functional.scaled_dot_product_attention(x, x, x)
    names = [r.call.name for r in load(file)]
    assert names[4:] == ["blocks.0/1", "blocks.1/1", "blocks.2/1", "Stack/1", "call-0"]
    with attncheck.capture(file):
        model(x)
    assert [r.call.name for r in load(file)] == [f"call-{i}" for i in range(4)]


ATTENTION = {
    "attention": lambda: nn.MultiheadAttention(16, 2, batch_first=True),
    "layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    "layers": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2
    ),
    "decoder": lambda: nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
}
CALLS = {"attention": 1, "layer": 1, "layers": 2, "decoder": 2}


def call(kind, module, x):
    arguments = {"attention": (x, x, x), "decoder": (x, x)}.get(kind, (x,))
    options = {"need_weights": False} if kind == "attention" else {}
    out = module(*arguments, **options)
    return out[0] if isinstance(out, tuple) else out


@pytest.fixture
def no_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_torch_modules_are_recorded_and_unchanged(kind, training, around, file, x, no_fast_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on nested tensors
        module = seeded(ATTENTION[kind]).train(training)
        with around():
            expected = call(kind, module, x)
            with attncheck.capture(file, model=module):
                out = call(kind, module, x)
    assert torch.equal(out, expected)
    recordings = load(file)
    assert len(recordings) == CALLS[kind]
    if kind == "attention":
        assert recordings[0].call.name == "MultiheadAttention/0"
    assert recordings[0].problem().shape == "B2 H2 Q5 K5 D8"


def test_capture_disables_the_fast_path_and_restores_it(file, x):
    layer = seeded(ATTENTION["layer"]).eval()
    for before in (True, False):
        torch.backends.mha.set_fastpath_enabled(before)
        try:
            with torch.no_grad(), attncheck.capture(file):
                layer(x)
                assert not torch.backends.mha.get_fastpath_enabled()
            assert torch.backends.mha.get_fastpath_enabled() == before
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert len(load(file)) == 1


def test_key_padding_mask_of_a_torch_module_is_recorded(file, x):
    layer = seeded(ATTENTION["layer"]).train()
    padded = torch.zeros(2, 5, dtype=torch.bool)
    padded[1, 3:] = True
    with attncheck.capture(file):
        layer(x, src_key_padding_mask=padded)
    (recording,) = load(file)
    seen = recording.problem().mask_mod()(
        *torch.meshgrid(*(torch.arange(n) for n in (2, 2, 5, 5)), indexing="ij")
    )
    assert torch.equal(seen, ~padded[:, None, None, :].expand(2, 2, 5, 5))


def test_capture_changes_neither_gradients_nor_dropout(file, x):
    def gradients(context):
        model = seeded(lambda: Stack(dropout=0.5))
        torch.manual_seed(1)
        with context:
            model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(torch.enable_grad())
    captured = gradients(attncheck.capture(file))
    assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))
    first, *_ = load(file)
    assert first.call.dropout == 0.5
    assert not first.q.requires_grad


def test_recording_keeps_inputs_that_are_overwritten_later(file, x):
    tensor = x[:, None].clone()
    with attncheck.capture(file):
        functional.scaled_dot_product_attention(tensor, tensor, tensor)
        tensor.zero_()
    assert torch.equal(load(file)[0].q, x[:, None])


def test_inputs_and_mask_are_recorded_in_the_autocast_dtype(file, x):
    x = x[:, None]
    bias = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16), attncheck.capture(file):
        out = functional.scaled_dot_product_attention(x, x, x, bias)
    assert out.dtype == torch.bfloat16
    (recording,) = load(file)
    assert recording.call.dtype == "bf16"
    assert torch.equal(recording.q, x.bfloat16())
    assert torch.equal(recording.mask[0, 0], bias.bfloat16())


def test_capture_works_with_a_wrapper_around_sdpa(file, x, monkeypatch):
    def wrapped(*args, **kwargs):
        return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", wrapped)
    with attncheck.capture(file):
        functional.scaled_dot_product_attention(x, x, x)
        seeded(ATTENTION["layer"])(x)
    assert len(load(file)) == 2


def test_capture_works_inside_and_outside_a_default_device(file, x):
    """A default device is a torch function mode too, and may lie between capture and the call."""
    module = seeded(ATTENTION["layer"])
    with torch.device("cpu"), attncheck.capture(file), torch.device("cpu"):
        module(x)
    assert len(load(file)) == 1


def test_capture_writes_and_removes_its_hooks_after_an_exception(file, x):
    model = seeded(Stack)
    expected = model(x)

    def interrupted():
        with attncheck.capture(file, model=model):
            model(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(load(file)) == 4  # the calls before the exception
    file.unlink()
    assert torch.equal(model(x), expected)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not file.exists()


def test_call_names_are_right_after_a_module_raised(file, x):
    model = seeded(Stack)
    with attncheck.capture(file, model=model):
        with pytest.raises(RuntimeError):
            model(x[..., :3])
        model(x)
    assert [r.call.name for r in load(file)] == [
        "blocks.0/0",
        "blocks.1/0",
        "blocks.2/0",
        "Stack/0",
    ]


def test_exception_before_any_call_writes_no_file(file):
    with pytest.raises(ZeroDivisionError), attncheck.capture(file):
        1 / 0  # noqa: B018  # raises
    assert list(file.parent.iterdir()) == []


def test_file_is_replaced_only_at_the_end(file, x):
    file.write_text("an old one")
    with attncheck.capture(file):
        functional.scaled_dot_product_attention(x, x, x)
        assert file.read_text() == "an old one"
    assert len(load(file)) == 1
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    other = file.with_name("other")
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode


@contextlib.contextmanager
def capture_with_warning(reason, file, **options):
    """``capture``, which must give exactly one warning, of one line that matches ``reason``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attncheck.capture(file, **options):
            yield
    (warning,) = (str(w.message) for w in caught)
    assert re.search(reason, warning)
    assert "\n" not in warning


ZEROS = torch.zeros(1, 1, 2, 4)


@pytest.mark.parametrize(
    ("tensor", "others", "reason"),
    [
        (ZEROS.double(), {}, "torch.float64 is not one of fp32, fp16"),
        (torch.zeros(1, 1, 2, 300), {}, "head_dim=300 must be 1–256"),
        (torch.zeros(1, 1, 0, 4), {}, r"shapes \(1, 1, 0, 4\), .* have a size of 0"),
        (torch.zeros(1, 0, 2, 4), {}, r"shapes \(1, 0, 2, 4\), .* have a size of 0"),
        (torch.zeros(0, 1, 2, 4), {}, r"shapes \(0, 1, 2, 4\), .* have a size of 0"),
        (torch.zeros(1, 1, 2, 0), {}, r"shapes \(1, 1, 2, 0\), .* have a size of 0"),
        (torch.full((1, 1, 2, 4), math.nan), {}, "q holds 8 NaN or infinite numbers: no error"),
        (torch.full((1, 1, 2, 4), -math.inf), {}, "q holds 8 NaN or infinite numbers: no error"),
        (ZEROS, {"attn_mask": torch.full((2, 2), math.nan)}, r"its mask adds NaN or \+infinity"),
        (ZEROS, {"attn_mask": torch.full((2, 2), math.inf)}, r"its mask adds NaN or \+infinity"),
        (ZEROS, {"scale": -1e300}, r"scale=-1e\+300 must be a number in the range"),
        (ZEROS.to("meta"), {}, "on meta .* has no numbers to copy"),
        (ZEROS, {"key": ZEROS[:, :, :0], "value": ZEROS[:, :, :0]}, "have a size of 0"),
        (ZEROS, {"value": ZEROS[..., :0]}, "have a size of 0"),
        (ZEROS, {"key": torch.full((1, 1, 2, 4), math.inf)}, "k holds 8 NaN or infinite"),
        (ZEROS, {"value": torch.full((1, 1, 2, 4), math.nan)}, "v holds 8 NaN or infinite"),
    ],
)
def test_unrecordable_calls_are_skipped_with_one_warning(tensor, others, reason, file, x):
    """``others`` replaces or adds arguments; the file with the remaining call stays readable."""
    arguments = {"query": tensor, "key": tensor, "value": tensor} | others
    with capture_with_warning(f"^capture leaves out call-0: .*{reason}", file):
        functional.scaled_dot_product_attention(**arguments)
        functional.scaled_dot_product_attention(**arguments)
        functional.scaled_dot_product_attention(x, x, x)
    assert [r.call.name for r in load(file)] == ["call-2"]


def test_inputs_that_autocast_makes_infinite_are_skipped(file, x):
    with capture_with_warning("q holds .* NaN or infinite", file):
        with torch.autocast("cpu", dtype=torch.float16):
            functional.scaled_dot_product_attention(x * 1e6, x, x)
        functional.scaled_dot_product_attention(x, x, x)
    assert [r.call.name for r in load(file)] == ["call-1"]


@pytest.mark.parametrize("name", ["two\nlines", "\udc80"])
def test_module_with_unprintable_name_is_skipped(name, file, x):
    model = nn.Sequential()
    model.add_module(name, seeded(Attention))
    with capture_with_warning("its name must be printable, and not blank", file, model=model):
        model(x)
        functional.scaled_dot_product_attention(x, x, x)
    assert [r.call.name for r in load(file)] == ["call-0"]


def test_nested_and_vmapped_tensors_are_skipped(file, x):
    q = x[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.zeros(2, 3, 8), torch.zeros(2, 4, 8)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attncheck.capture(file):
            functional.scaled_dot_product_attention(nested, nested, nested)
            mapped = torch.vmap(functional.scaled_dot_product_attention)(q, q, q)
            functional.scaled_dot_product_attention(q, q, q)
    ours = [str(w.message) for w in caught if "capture" in str(w.message)]
    assert ours == [
        "capture leaves out call-0: nested tensors have sequences of several lengths: pad them.",
        "capture leaves out call-1: a tensor on meta or under vmap or grad has no numbers to copy.",
    ]
    assert mapped.shape == q.shape
    assert len(load(file)) == 1


@pytest.mark.parametrize("calls", [0, -1, 1.5, True])
def test_calls_must_be_a_positive_integer(calls, file):
    with pytest.raises(UsageError, match="must be a whole number of at least 1"):
        attncheck.capture(file, calls=calls).__enter__()


def test_unwritable_path_is_refused_before_the_body_runs(tmp_path):
    entered = []
    for file in (tmp_path, tmp_path / "no" / "folder.safetensors"):
        refused = pytest.raises(UsageError, match="cannot be written")
        with refused as error, attncheck.capture(file):
            entered.append(file)
        assert "\n" not in str(error.value)
    assert not entered


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "file is NoneType: it must be a path."),
        (5, "file is int: it must be a path."),
        (b"x", "file is bytes: it must be a path."),
        ("a\0b", r"recording 'a\x00b' cannot be written: "),
        ("caf\udce9", r"recording 'caf\udce9' cannot be written: "),
        ("a" * 250, f"recording {'a' * 250!r} cannot be written: File name too long."),
        ("", "recording '.' cannot be written: it is a folder."),
    ],
)
def test_invalid_path_is_refused_with_a_one_line_message(file, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with one_line(UsageError, start=message):
        attncheck.capture(file).__enter__()
    assert not list(tmp_path.iterdir())


def test_importing_attncheck_imports_no_torch():
    code = (
        "import sys, attncheck\n"
        "assert 'torch' not in sys.modules and 'attncheck.inputs' not in sys.modules\n"
        "assert 'capture' in attncheck.__all__\n"
        "assert callable(attncheck.capture)\n"
        "import attncheck.inputs.capture\n"
        "from attncheck import capture\n"
        "assert capture is attncheck.capture\n"
        "assert not hasattr(attncheck, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_calls_limits_the_number_of_recordings(file, x):
    with attncheck.capture(file, calls=2):
        seeded(Stack)(x)
    assert [r.call.name for r in load(file)] == ["call-0", "call-1"]


def test_capture_without_a_call_is_a_usage_error(file, x):
    with pytest.raises(UsageError) as error, attncheck.capture(file):
        torch.softmax(x, dim=-1)
    assert str(error.value).startswith("capture saw no call of scaled_dot_product_attention")
    assert "\n" not in str(error.value)


def test_model_must_be_a_torch_module(file):
    with pytest.raises(UsageError, match=r"model is function: it must be a torch\.nn\.Module"):
        attncheck.capture(file, model=seeded).__enter__()
