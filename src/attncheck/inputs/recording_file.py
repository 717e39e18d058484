"""Reading and writing of recordings; errors are one line.

Both are in one module, with common checks, so that no call is written that cannot be read.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attncheck.core.errors import ProblemError, UsageError
from attncheck.core.formats import FORMATS
from attncheck.inputs.recorded_calls import (
    DTYPES,
    METADATA,
    VERSION,
    Call,
    Header,
    Recording,
    sizes_problem,
    tensor_name,
)

if TYPE_CHECKING:
    from torch import Tensor


def call_fact(call: Call) -> str | None:
    """Return what is wrong with a call's description; None if it is right."""
    if not call.name.strip() or not call.name.isprintable():
        return "its name must be printable, and not blank"
    try:
        # Decoding checks the types, which the constructor does not, and JSON has no NaN.
        msgspec.json.decode(msgspec.json.encode(call), type=Call)
        sizes_problem(call)
    except (msgspec.ValidationError, ProblemError) as error:
        return str(error).rstrip(".")
    return None


def tensor_fact(call: Call, name: str, tensor: Tensor) -> str | None:
    """Return what is wrong with a tensor of a call; None if it is right."""
    if name == "sink":
        return _sink_fact(call, tensor)
    return _mask_fact(call, tensor) if name == "mask" else _qkv_fact(call, name, tensor)


def _sink_fact(call: Call, sink: Tensor) -> str | None:
    if tuple(sink.shape) != (call.heads,) or sink.dtype != torch.float32:
        have = f"{tuple(sink.shape)} of {sink.dtype}"
        return f"its sinks are {have}, but should be ({call.heads},) of torch.float32"
    if bool((torch.isnan(sink) | torch.isposinf(sink)).any()):
        return "its sinks hold NaN or +infinity: no error can be measured from them"
    return None


def _qkv_fact(call: Call, name: str, tensor: Tensor) -> str | None:
    sizes, dtype = call.sizes, FORMATS[call.dtype].torch_dtype
    shape = (*sizes.q[:3], sizes.value_dim) if name == "dout" else getattr(sizes, name)
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}, but should have {shape}"
    if tensor.dtype != dtype:
        return f"{name} is {tensor.dtype}, but should be {dtype}"
    # The exact attention of NaN is NaN, so no error can be measured.
    odd = int((~torch.isfinite(tensor)).sum())
    if odd:
        return f"{name} holds {odd} NaN or infinite numbers: no error can be measured from them"
    return None


def _mask_fact(call: Call, mask: Tensor) -> str | None:
    scores = call.sizes.x
    fits = mask.dim() == 4 and all(
        have in {1, size} for have, size in zip(mask.shape, scores, strict=True)
    )
    if not fits:
        return f"its mask has shape {tuple(mask.shape)}, which does not broadcast to {scores}"
    able = [torch.bool] if call.mask == "bool" else [FORMATS[n].torch_dtype for n in DTYPES]
    if mask.dtype not in able:
        return f"its mask is {mask.dtype}, but should be {' or '.join(map(str, able))}"
    if call.mask == "additive" and bool((torch.isnan(mask) | torch.isposinf(mask)).any()):
        return "its mask adds NaN or +infinity: no error can be measured from them"
    return None


def load(path: Path | str) -> tuple[Recording, ...]:
    """Return the calls that ``attncheck.capture`` wrote, in their order.

    Each call's distribution and mask are registered (``Recording.register``), so that its Problem
    can be created, drawn, and read from JSON in this process.

    Raises:
        UsageError: for a file that is missing, truncated, no recording, or of another version, and
            for a call that is no Problem or whose q, k or v hold NaN or an infinity (exact
            attention is not finite then). One line with the file, the call and the error.
    """
    path = Path(path)
    header, tensors = _read_contents(path)
    names = [call.name for call in header.calls]
    for name in names:
        if names.count(name) > 1:
            _refuse(path, f"has two calls {name!r}")
    recordings = tuple(
        Recording(file=path.name, call=call, **_take_tensors(path, i, call, tensors))
        for i, call in enumerate(header.calls)
    )
    # _take_tensors removed every tensor of a call.
    for name in tensors:
        _refuse(path, f"has a tensor {name!r} that belongs to no call")
    for recording in recordings:
        recording.register()
    return recordings


def _refuse(path: Path, fact: str) -> NoReturn:
    raise UsageError(f"recording {str(path)!r} {fact}.")


def _read_contents(path: Path) -> tuple[Header, dict[str, Tensor]]:
    if not path.exists():
        _refuse(path, "is not there: attncheck.capture writes one")
    if not path.is_file():
        _refuse(path, "is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            header = _read_header(path, file.metadata() or {})
            # Copies, since safetensors may return views of the mapped file, which may be rewritten.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # no dict
    except SafetensorError as error:
        reason = str(error).partition("\n")[0]
        _refuse(path, f"is not a safetensors file, or is cut short ({reason})")
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror or str(error).partition(chr(10))[0]}")
    return header, tensors


def _read_header(path: Path, metadata: dict[str, str]) -> Header:
    if METADATA not in metadata:
        _refuse(path, f"is no recording of attncheck.capture: its metadata has no {METADATA!r}")
    text = metadata[METADATA]
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != VERSION:
            _refuse(path, f"is of version {version}: this attncheck reads version {VERSION}")
        header = msgspec.json.decode(text, type=Header)
    except msgspec.DecodeError as error:
        _refuse(path, f"has metadata that are none of version {VERSION}: {error}")
    except RecursionError:
        _refuse(path, f"has metadata that are none of version {VERSION}: nested too deeply")
    if not header.calls:
        _refuse(path, "holds no call")
    return header


class _Versioned(msgspec.Struct):
    version: int


def _take_tensors(
    path: Path, index: int, call: Call, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Remove a call's tensors from ``tensors`` and return them by name, checked."""
    where = f"call {call.name!r}"
    fact = call_fact(call)
    if fact:
        _refuse(path, f"{where}: {fact}")
    of_call = {}
    masked = ["mask"] * (call.mask in {"bool", "additive"})
    for name in ["q", "k", "v", *masked, *["sink"] * call.sink, *["dout"] * call.backward]:
        stored = tensor_name(index, name)
        if stored not in tensors:
            _refuse(path, f"{where} has no tensor {stored!r}")
        of_call[name] = tensors.pop(stored)
        fact = tensor_fact(call, name, of_call[name])
        if fact:
            _refuse(path, f"{where}: {fact}")
    return of_call


def write_calls(path: Path, calls: list[tuple[Call, dict[str, Tensor]]]) -> None:
    """Write calls, each with its tensors by name, contiguous on the CPU; raises UsageError."""
    header = Header(version=VERSION, calls=[call for call, _ in calls])
    tensors = {
        tensor_name(i, name): tensor
        for i, (_, copies) in enumerate(calls)
        for name, tensor in copies.items()
    }
    draft_path = draft(path)
    try:
        # Written to a draft that is then renamed: a reader sees the old file or the whole new one.
        draft_path.touch(exist_ok=False)
        mode = draft_path.stat().st_mode  # a new file's mode; safetensors permits only the owner
        save_file(tensors, draft_path, {METADATA: msgspec.json.encode(header).decode()})
        draft_path.chmod(mode)
        draft_path.replace(path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from None
    finally:
        draft_path.unlink(missing_ok=True)


def draft(path: Path) -> Path:
    """Return the path of a file's draft, in the same folder, before it is renamed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def write_error(path: Path, error: Exception) -> UsageError:
    """Return the error of a file that cannot be written."""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return UsageError(f"recording {str(path)!r} cannot be written: {reason}.")
