"""Reading and writing of a recording; whatever is wrong with the file is one line.

One place for both, so that no call is written that would make its file unreadable.
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
    """Return what is wrong with a call's description; None where nothing is."""
    if not call.name.strip() or not call.name.isprintable():
        return "its name must be printable, and not blank"
    try:
        # As it will be read: a constructor checks nothing, and JSON has no NaN.
        msgspec.json.decode(msgspec.json.encode(call), type=Call)
        sizes_problem(call)
    except (msgspec.ValidationError, ProblemError) as error:
        return str(error).rstrip(".")
    return None


def tensor_fact(call: Call, name: str, tensor: Tensor) -> str | None:
    """Return what is wrong with a tensor of a call; None where nothing is."""
    if name == "sink":
        return _sink_fact(call, tensor)
    return _mask_fact(call, tensor) if name == "mask" else _fact(call, name, tensor)


def _sink_fact(call: Call, sink: Tensor) -> str | None:
    if tuple(sink.shape) != (call.heads,) or sink.dtype != torch.float32:
        have = f"{tuple(sink.shape)} of {sink.dtype}"
        return f"its sinks are {have}, but should be ({call.heads},) of torch.float32"
    if bool((torch.isnan(sink) | torch.isposinf(sink)).any()):
        return "its sinks hold NaN or +infinity: no error can be measured from them"
    return None


def _fact(call: Call, name: str, tensor: Tensor) -> str | None:
    shape, dtype = call.shapes[name], FORMATS[call.dtype].torch_dtype
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}, but should have {shape}"
    if tensor.dtype != dtype:
        return f"{name} is {tensor.dtype}, but should be {dtype}"
    # Exact attention of NaN is NaN: there is no error to measure.
    odd = int((~torch.isfinite(tensor)).sum())
    if odd:
        return f"{name} holds {odd} NaN or infinite numbers: no error can be measured from them"
    return None


def _mask_fact(call: Call, mask: Tensor) -> str | None:
    fits = mask.dim() == 4 and all(
        have in {1, size} for have, size in zip(mask.shape, call.scores, strict=True)
    )
    if not fits:
        return f"its mask has shape {tuple(mask.shape)}, which does not broadcast to {call.scores}"
    able = [torch.bool] if call.mask == "bool" else [FORMATS[n].torch_dtype for n in DTYPES]
    if mask.dtype not in able:
        return f"its mask is {mask.dtype}, but should be {' or '.join(map(str, able))}"
    if call.mask == "additive" and bool((torch.isnan(mask) | torch.isposinf(mask)).any()):
        return "its mask adds NaN or +infinity: no error can be measured from them"
    return None


def load(path: Path | str) -> tuple[Recording, ...]:
    """The calls that ``attncheck.capture`` wrote, in their order.

    Each call's distribution and mask are registered (``Recording.register``), so that its Problem
    can be made, drawn, and read from JSON in this process.

    Raises:
        UsageError: for a file that is missing, cut short, no recording, or of another version, and
            for a call that is no Problem or whose q, k or v hold NaN or an infinity (exact
            attention has no number there to measure from). One line: the file, the call, the fact.
    """
    path = Path(path)
    header, tensors = _contents(path)
    names = [call.name for call in header.calls]
    for name in names:
        if names.count(name) > 1:
            _refuse(path, f"has two calls {name!r}")
    of_calls = [_take_tensors(path, i, call, tensors) for i, call in enumerate(header.calls)]
    # _take_tensors took out what belongs to a call: anything left was written by somebody else.
    for name in tensors:
        _refuse(path, f"has a tensor {name!r} that belongs to no call")
    recordings = tuple(
        Recording(file=path.name, call=call, **tensors)
        for call, tensors in zip(header.calls, of_calls, strict=True)
    )
    for recording in recordings:
        recording.register()
    return recordings


def _refuse(path: Path, fact: str) -> NoReturn:
    raise UsageError(f"recording {str(path)!r} {fact}.")


def _contents(path: Path) -> tuple[Header, dict[str, Tensor]]:
    if not path.exists():
        _refuse(path, "is not there: attncheck.capture writes one")
    if not path.is_file():
        _refuse(path, "is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata() or {})
            # Copies: what safetensors gives may be the mapped file, which somebody may rewrite.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # no dict
    except SafetensorError as error:
        reason = str(error).partition("\n")[0]
        _refuse(path, f"is not a safetensors file, or is cut short ({reason})")
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror or str(error).partition(chr(10))[0]}")
    return header, tensors


def _header(path: Path, metadata: dict[str, str]) -> Header:
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
    """The checked tensors of a call by name, taken out of ``tensors``."""
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
        # Out of the dictionary: what is left at the end belongs to no call.
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
    beside = draft(path)
    try:
        # Written beside, then renamed: a reader sees the old file or the whole new one.
        beside.touch(exist_ok=False)
        mode = beside.stat().st_mode  # as any new file's here; safetensors' is for the owner alone
        save_file(tensors, beside, {METADATA: msgspec.json.encode(header).decode()})
        beside.chmod(mode)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from None
    finally:
        beside.unlink(missing_ok=True)


def draft(path: Path) -> Path:
    """Return the path of a file before it takes its name."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def write_error(path: Path, error: Exception) -> UsageError:
    """Return what to say of a file that cannot be written."""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return UsageError(f"recording {str(path)!r} cannot be written: {reason}.")
