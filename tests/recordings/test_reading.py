"""Reading damaged or foreign recordings: one line that names the file, the call and the fact."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from attncheck.core.errors import UsageError
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.recording_file import load

CALL = {
    "name": "layer/0",
    "batch": 1,
    "heads": 4,
    "kv_heads": 2,
    "query": 3,
    "kv": 5,
    "head_dim": 8,
    "value_dim": 6,
    "dtype": "fp32",
    "mask": "none",
    "scale": None,
    "dropout": 0.0,
}


def tensors(call=CALL, **others):
    keys = (call["batch"], call["kv_heads"], call["kv"])
    q = torch.ones(call["batch"], call["heads"], call["query"], call["head_dim"])
    k, v = torch.ones(*keys, call["head_dim"]), torch.ones(*keys, call["value_dim"])
    named = {"0.q": q, "0.k": k, "0.v": v} | {f"0.{n}": t for n, t in others.items()}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "made.safetensors"


def write(file, *, call=None, stored=None, calls=None, **header):
    """Write a file with these metadata, and with tensors that fit the first call unless given."""
    header = {"version": 1, "calls": calls or [CALL | (call or {})]} | header
    stored = tensors(header["calls"][0]) if stored is None else stored
    save_file(stored, file, {"attncheck": json.dumps(header)})


def refusal(file):
    """The reason why a file is refused: one line that names the file, without loading anything."""
    before = set(DISTRIBUTIONS)
    with pytest.raises(UsageError) as error:
        load(file)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"recording {str(file)!r} ")
    assert set(DISTRIBUTIONS) == before
    return text.removeprefix(f"recording {str(file)!r} ")


@pytest.mark.parametrize("name", ["missing.safetensors", "two\nlines.safetensors"])
def test_missing_file_is_refused(name, tmp_path):
    assert refusal(tmp_path / name) == "is not there: attncheck.capture writes one."


def test_file_without_read_permission_is_refused(file, monkeypatch):
    write(file)

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("attncheck.inputs.recording_file.safe_open", denied)
    assert refusal(file) == "cannot be read: Permission denied."


@pytest.mark.parametrize("content", [b"", b"q,k,v\n1,2,3\n", b"\xff" * 64, b"\x08" + b"\0" * 7])
def test_file_that_is_no_safetensors_is_refused(content, file):
    file.write_bytes(content)
    assert refusal(file).startswith("is not a safetensors file, or is cut short (")


@pytest.mark.parametrize("kept", [4, 60, -1])
def test_truncated_file_is_refused(kept, file):
    write(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    assert refusal(file).startswith("is not a safetensors file, or is cut short (")


def test_safetensors_without_attncheck_metadata_is_refused(file):
    save_file(tensors(), file)
    missing = "is no recording of attncheck.capture: its metadata has no 'attncheck'."
    assert refusal(file) == missing
    save_file(tensors(), file, {"format": "pt"})
    assert refusal(file) == missing


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"calls": []}', '{"version": "1"}', '{"version": 1}']
)
def test_metadata_of_another_form_are_refused(text, file):
    save_file(tensors(), file, {"attncheck": text})
    assert refusal(file).startswith("has metadata that are none of version 1: ")


def test_file_of_another_version_is_refused(file):
    write(file, version=2, more={"of": "it"})
    assert refusal(file) == "is of version 2: this attncheck reads version 1."


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        ({"heads": "4"}, "Expected `int`, got `str` - at `$.calls[0].heads`"),
        ({"query": 0}, "Expected `int` >= 1 - at `$.calls[0].query`"),
        ({"dtype": "fp64"}, "Invalid enum value 'fp64' - at `$.calls[0].dtype`"),
        ({"mask": "alibi"}, "Invalid enum value 'alibi' - at `$.calls[0].mask`"),
        ({"alibi": 3.0}, "Object contains unknown field `alibi` - at `$.calls[0]`"),
    ],
)
def test_call_with_invalid_fields_is_refused(call, fact, file):
    write(file, call=call, stored=tensors())
    assert refusal(file) == f"has metadata that are none of version 1: {fact}."


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"head_dim": 257}, "head_dim=257 must be 1–256"),
        ({"value_dim": 300}, "value_dim=300 must be 1–256"),
        ({"scale": 1e300}, "scale=1e+300 must be a number in the range of fp32"),
        ({"scale": -1e300}, "scale=-1e+300 must be a number in the range of fp32"),
    ],
)
def test_call_that_is_no_valid_problem_is_refused(call, fact, file):
    write(file, call=call)
    assert refusal(file).startswith(f"call 'layer/0': {fact}")


@pytest.mark.parametrize("name", ["", " ", "\t", "\n", "two\nlines", "\x1b[2J"])
def test_call_with_unprintable_or_blank_name_is_refused(name, file):
    write(file, call={"name": name})
    assert refusal(file) == f"call {name!r}: its name must be printable, and not blank."


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_missing_tensor_is_refused(name, file):
    write(file, call={"mask": "bool"} if name == "mask" else {}, stored=tensors(**{name: None}))
    assert refusal(file) == f"call 'layer/0' has no tensor '0.{name}'."


def test_extra_tensor_is_refused(file):
    write(file, stored=tensors(mask=torch.ones(1, 1, 3, 5)))
    assert refusal(file) == "has a tensor '0.mask' that belongs to no call."


def test_two_calls_of_one_name_are_refused(file):
    more = {name.replace("0.", "1."): tensor.clone() for name, tensor in tensors().items()}
    write(file, calls=[CALL, CALL], stored=tensors() | more)
    assert refusal(file) == "has two calls 'layer/0'."


@pytest.mark.parametrize(
    ("stored", "fact"),
    [
        ({"k": torch.ones(1, 4, 5, 8)}, "k has shape (1, 4, 5, 8), but should have (1, 2, 5, 8)"),
        ({"v": torch.ones(2, 5, 6)}, "v has shape (2, 5, 6), but should have (1, 2, 5, 6)"),
        ({"q": torch.ones(1, 4, 3, 8).half()}, "q is torch.float16, but should be torch.float32"),
        ({"q": torch.ones(1, 4, 3, 8).int()}, "q is torch.int32, but should be torch.float32"),
    ],
)
def test_tensor_of_wrong_shape_or_dtype_is_refused(stored, fact, file):
    write(file, stored=tensors(**stored))
    assert refusal(file) == f"call 'layer/0': {fact}."


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_tensor_is_refused(name, value, file):
    stored = tensors()
    stored[f"0.{name}"][0, 0, 1, 2:4] = value
    write(file, stored=stored)
    assert refusal(file).startswith(f"call 'layer/0': {name} holds 2 NaN or infinite numbers: ")


@pytest.mark.parametrize(
    ("kind", "mask", "fact"),
    [
        ("bool", torch.ones(3, 5).bool(), "its mask has shape (3, 5), which does not broadcast"),
        ("bool", torch.ones(1, 3, 3, 5).bool(), "its mask has shape (1, 3, 3, 5), which does not"),
        ("bool", torch.ones(1, 1, 3, 5), "its mask is torch.float32, but should be torch.bool"),
        ("additive", torch.ones(1, 1, 3, 5).bool(), "its mask is torch.bool, but should be torch"),
        ("additive", torch.full((1, 1, 3, 5), math.nan), "its mask adds NaN or +infinity"),
        ("additive", torch.full((1, 1, 3, 5), math.inf), "its mask adds NaN or +infinity"),
    ],
)
def test_invalid_mask_is_refused(kind, mask, fact, file):
    write(file, call={"mask": kind}, stored=tensors(mask=mask))
    assert refusal(file).startswith(f"call 'layer/0': {fact}")


def test_folder_is_refused(tmp_path):
    assert refusal(tmp_path) == "is not a file."


def test_too_deeply_nested_metadata_are_refused(file):
    nested = "[" * 100_000 + "]" * 100_000
    save_file(tensors(), file, {"attncheck": f'{{"other": {nested}}}'})
    assert refusal(file) == "has metadata that are none of version 1: nested too deeply."


def test_file_without_calls_is_refused(file):
    save_file({}, file, {"attncheck": '{"version": 1, "calls": []}'})
    assert refusal(file) == "holds no call."
