"""Every call is seen, however it is made; and the model computes what it computes without."""

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


class Imported(nn.Module):
    """Its function was imported by name, long before."""

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
        self.blocks = nn.ModuleList(Imported(**options) for _ in range(3))

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


def made(make):
    torch.manual_seed(0)
    return make()


def test_each_call_is_kept_bit_for_bit(file, x):
    model = made(Stack)
    with attncheck.capture(file, model=model):
        model(x)
    recordings = load(file)
    passed = [block.passed[0] for block in model.blocks]
    for recording, tensors in zip(recordings, passed, strict=False):
        for kept, given in zip((recording.q, recording.k, recording.v), tensors, strict=True):
            assert torch.equal(kept.view(torch.int32), given.contiguous().view(torch.int32))
    assert [r.call.name for r in recordings] == [
        "blocks.0/0",
        "blocks.1/0",
        "blocks.2/0",
        "Stack/0",  # the model itself has no path
    ]


def test_names_count_the_calls_of_each_module(file, x):
    model = made(Stack)
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
def test_torchs_own_modules_are_seen_and_unchanged(kind, training, around, file, x, no_fast_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on nested tensors
        module = made(ATTENTION[kind]).train(training)
        with around():
            expected = call(kind, module, x)
            with attncheck.capture(file, model=module):
                out = call(kind, module, x)
    assert torch.equal(out, expected)
    recordings = load(file)
    assert len(recordings) == CALLS[kind]
    name = recordings[0].call.name
    assert name == ("MultiheadAttention/0" if kind == "attention" else name)
    assert recordings[0].problem().shape == "B2 H2 Q5 K5 D8"


def test_the_fast_path_is_off_inside_and_as_it_was_after(file, x):
    layer = made(ATTENTION["layer"]).eval()
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


def test_masks_of_torchs_own_modules(file, x):
    layer = made(ATTENTION["layer"]).train()
    padded = torch.zeros(2, 5, dtype=torch.bool)
    padded[1, 3:] = True
    with attncheck.capture(file):
        layer(x, src_key_padding_mask=padded)
    (recording,) = load(file)
    seen = recording.problem().mask_mod()(
        *torch.meshgrid(*(torch.arange(n) for n in (2, 2, 5, 5)), indexing="ij")
    )
    assert torch.equal(seen, ~padded[:, None, None, :].expand(2, 2, 5, 5))


def test_gradients_and_dropout_are_unchanged(file, x):
    def step(inside):
        model = made(lambda: Stack(dropout=0.5))
        torch.manual_seed(1)
        with inside:
            model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = step(torch.enable_grad())
    got = step(attncheck.capture(file))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    first, *_ = load(file)
    assert first.call.dropout == 0.5
    assert not first.q.requires_grad


def test_what_is_changed_afterwards_is_kept_as_it_was(file, x):
    given = x[:, None].clone()
    with attncheck.capture(file):
        functional.scaled_dot_product_attention(given, given, given)
        given.zero_()
    assert torch.equal(load(file)[0].q, x[:, None])


def test_autocast_is_recorded_as_the_kernel_reads_it(file, x):
    x = x[:, None]
    added = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16), attncheck.capture(file):
        out = functional.scaled_dot_product_attention(x, x, x, added)
    assert out.dtype == torch.bfloat16
    (recording,) = load(file)
    assert recording.call.dtype == "bf16"
    assert torch.equal(recording.q, x.bfloat16())
    assert torch.equal(recording.mask[0, 0], added.bfloat16())


def test_beside_a_function_that_has_taken_its_name(file, x, monkeypatch):
    def wrapped(*args, **kwargs):
        return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", wrapped)
    with attncheck.capture(file):
        functional.scaled_dot_product_attention(x, x, x)
        made(ATTENTION["layer"])(x)
    assert len(load(file)) == 2


def test_beside_a_default_device(file, x):
    """That is a mode too: it comes between this one and the function."""
    module = made(ATTENTION["layer"])
    with torch.device("cpu"), attncheck.capture(file), torch.device("cpu"):
        module(x)
    assert len(load(file)) == 1


def test_hooks_and_modes_are_gone_after_an_exception(file, x):
    model = made(Stack)
    expected = model(x)

    def interrupted():
        with attncheck.capture(file, model=model):
            model(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(load(file)) == 4  # what there was until then
    file.unlink()
    assert torch.equal(model(x), expected)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not file.exists()


def test_a_module_that_raises_leaves_the_names_right(file, x):
    model = made(Stack)
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


def test_an_exception_before_any_call_writes_nothing(file):
    with pytest.raises(ZeroDivisionError), attncheck.capture(file):
        1 / 0  # noqa: B018  # raises
    assert list(file.parent.iterdir()) == []


def test_the_file_is_replaced_in_one_step(file, x):
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
def one_left_out(reason, file, **options):
    """capture, with one warning of one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attncheck.capture(file, **options):
            yield
    (warning,) = (str(w.message) for w in caught)
    assert re.search(reason, warning)
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        (
            torch.zeros(1, 1, 2, 4, dtype=torch.float64),
            {},
            "torch.float64 is not one of fp32, fp16",
        ),
        (torch.zeros(1, 1, 2, 300), {}, "head_dim=300 must be 1–256"),
        (torch.zeros(1, 1, 0, 4), {}, r"shapes \(1, 1, 0, 4\), .* have a size of 0"),
        (torch.zeros(1, 0, 2, 4), {}, r"shapes \(1, 0, 2, 4\), .* have a size of 0"),
        (torch.zeros(0, 1, 2, 4), {}, r"shapes \(0, 1, 2, 4\), .* have a size of 0"),
        (torch.zeros(1, 1, 2, 0), {}, r"shapes \(1, 1, 2, 0\), .* have a size of 0"),
        (torch.full((1, 1, 2, 4), math.nan), {}, "q holds 8 NaN or infinite numbers: no error"),
        (torch.full((1, 1, 2, 4), -math.inf), {}, "q holds 8 NaN or infinite numbers: no error"),
        (
            torch.zeros(1, 1, 2, 4),
            {"attn_mask": torch.full((2, 2), math.nan)},
            r"its mask adds NaN or \+infinity",
        ),
        (
            torch.zeros(1, 1, 2, 4),
            {"attn_mask": torch.full((2, 2), math.inf)},
            r"its mask adds NaN or \+infinity",
        ),
        (
            torch.zeros(1, 1, 2, 4),
            {"scale": -1e300},
            r"scale=-1e\+300 must be a number in the range",
        ),
        (torch.zeros(1, 1, 2, 4, device="meta"), {}, "on meta .* has no numbers to copy"),
    ],
)
def test_what_cannot_be_kept_is_left_out_with_one_warning(given, options, reason, file, x):
    with one_left_out(f"^capture leaves out call-0: .*{reason}", file):
        functional.scaled_dot_product_attention(given, given, given, **options)
        functional.scaled_dot_product_attention(given, given, given, **options)
        functional.scaled_dot_product_attention(x, x, x)
    assert [r.call.name for r in load(file)] == ["call-2"]


@pytest.mark.parametrize(
    ("k", "v", "reason"),
    [
        (torch.zeros(1, 1, 0, 4), torch.zeros(1, 1, 0, 4), "have a size of 0"),
        (torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 0), "have a size of 0"),
        (torch.full((1, 1, 3, 4), math.inf), torch.zeros(1, 1, 3, 4), "k holds 12 NaN or inf"),
        (torch.zeros(1, 1, 3, 4), torch.full((1, 1, 3, 4), math.nan), "v holds 12 NaN or inf"),
    ],
)
def test_keys_and_values_that_cannot_be_kept_leave_the_file_readable(k, v, reason, file, x):
    with one_left_out(reason, file):
        functional.scaled_dot_product_attention(torch.zeros(1, 1, 2, 4), k, v)
        functional.scaled_dot_product_attention(x, x, x)
    assert [r.call.name for r in load(file)] == ["call-1"]


def test_what_autocast_makes_infinite_is_left_out(file, x):
    with one_left_out("q holds .* NaN or infinite", file):
        with torch.autocast("cpu", dtype=torch.float16):
            functional.scaled_dot_product_attention(x * 1e6, x, x)
        functional.scaled_dot_product_attention(x, x, x)
    assert [r.call.name for r in load(file)] == ["call-1"]


@pytest.mark.parametrize("name", ["two\nlines", "\udc80"])
def test_a_module_that_cannot_be_named_is_left_out(name, file, x):
    model = nn.Sequential()
    model.add_module(name, made(Imported))
    with one_left_out("its name must be printable, and not blank", file, model=model):
        model(x)
        functional.scaled_dot_product_attention(x, x, x)
    assert [r.call.name for r in load(file)] == ["call-0"]


def test_nested_and_mapped_tensors_are_left_out(file, x):
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
def test_calls_is_a_count(calls, file):
    with pytest.raises(UsageError, match="must be a whole number of at least 1"):
        attncheck.capture(file, calls=calls).__enter__()


def test_where_nothing_can_be_written_is_said_at_once(tmp_path):
    ran = []
    for file in (tmp_path, tmp_path / "no" / "folder.safetensors"):
        refused = pytest.raises(UsageError, match="cannot be written")
        with refused as error, attncheck.capture(file):
            ran.append(file)
        assert "\n" not in str(error.value)
    assert not ran


@pytest.mark.parametrize(
    ("file", "says"),
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
def test_what_is_no_path_of_a_file_is_said_at_once(file, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with one_line(UsageError, start=says):
        attncheck.capture(file).__enter__()
    assert not list(tmp_path.iterdir())


def test_importing_attncheck_imports_no_torch():
    code = (
        "import sys, attncheck\n"
        "assert 'torch' not in sys.modules and 'attncheck.inputs' not in sys.modules\n"
        "assert 'capture' in attncheck.__all__\n"
        "assert callable(attncheck.capture) and callable(attncheck.capture)\n"
        "import attncheck.inputs.capture\n"
        "from attncheck import capture\n"
        "assert capture is attncheck.capture\n"
        "assert not hasattr(attncheck, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_calls_limits_how_many_are_kept(file, x):
    with attncheck.capture(file, calls=2):
        made(Stack)(x)
    assert [r.call.name for r in load(file)] == ["call-0", "call-1"]


def test_no_call_is_an_error(file, x):
    with pytest.raises(UsageError) as error, attncheck.capture(file):
        torch.softmax(x, dim=-1)
    assert str(error.value).startswith("capture saw no call of scaled_dot_product_attention")
    assert "\n" not in str(error.value)


def test_a_model_is_a_module(file):
    with pytest.raises(UsageError, match=r"model is function: it must be a torch\.nn\.Module"):
        attncheck.capture(file, model=made).__enter__()
