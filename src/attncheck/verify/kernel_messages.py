"""What a kernel's process and its owner tell each other, as JSON and bytes, strictly read back.

Outputs are bytes: names, dtypes and shapes in words, and the bits one after another. What a kernel
declares is JSON: every field by its name, and nothing besides. Nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import torch

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.errors import HostError, UsageError
from attncheck.core.formats import FORMATS, Format
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import AXES
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Subject, Tiling
from attncheck.verify.call_conditions import CallConditions, CallNotes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from attncheck.verify.executor import Origin
    from attncheck.workers.transport import Frame

_FLAGS = ("triton", "sinks", "backward", "captured", "promises_gradients", "has_launches")
_Message = TypeVar("_Message")
_COMPILERS = ("torch._dynamo", "torch.utils.cpp_extension")  # who imports them means to compile
_INPUTS = (*"qkv", "q_descale", "k_descale", "v_descale", "x", "sink", "dout", "dlse")


def to_fields(value: Any) -> Any:
    """A dataclass as a JSON object, formats by their names.

    Raises:
        UsageError: for what JSON cannot say, and for a format that is none of attncheck's.
    """
    if isinstance(value, Format):
        # It travels by its name, which must mean the same on the other side.
        if FORMATS.get(value.name) != value:
            raise UsageError(f"{value.name!r} is no format of attncheck's.")
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_fields(getattr(value, f.name)) for f in dataclasses.fields(value)}
    # Exact types, because a subclass such as numpy's float64 would come back as another type.
    if value is not None and type(value) not in {bool, int, float, str}:
        raise UsageError(f"{type(value).__name__} is no number, word or flag.")
    return value


def from_fields(kind: type[_Message], words: Any) -> _Message:
    """Return what ``to_fields`` wrote of a dataclass of this kind.

    Raises:
        UsageError: for anything else: a field too many or too few, or of another type.
    """
    assert dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    # Strict, because the process that wrote it runs foreign code.
    if not isinstance(words, dict) or sorted(words) != sorted(names):
        raise UsageError(f"what came is no {kind.__name__}.")
    types_of = _types(kind)
    try:
        value = kind(**{name: _value(types_of[name], words[name], name) for name in names})
    except (TypeError, ValueError) as error:
        raise UsageError(f"what came is no {kind.__name__}: {error}") from None
    return value


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """The types of its fields; to look them up takes longer than to read it."""
    return get_type_hints(kind)


def _value(kind: Any, value: Any, name: str) -> Any:
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif get_origin(kind) is types.UnionType:
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        return _value(kind, value, name)
    elif kind is Format:
        if isinstance(value, str) and value in FORMATS:
            return FORMATS[value]
    elif dataclasses.is_dataclass(kind):
        return from_fields(kind, value)  # type: ignore[arg-type]  # it is a class
    # Somebody may declare 1 where the field says float.
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise UsageError(f"{name} is of no type that it may be of.")


_DTYPES = {str(fmt.torch_dtype): fmt.torch_dtype for fmt in FORMATS.values()}


def pack_tensors(tensors: Mapping[Any, torch.Tensor]) -> tuple[list[list[Any]], bytes]:
    """``[name, dtype, shape]`` of each tensor, and the bits of all, row-major."""
    about: list[list[Any]] = []
    parts = []
    for name, tensor in tensors.items():
        about.append([name, str(tensor.dtype), list(tensor.shape)])
        flat = tensor.detach().cpu().contiguous().flatten()
        parts.append(flat.view(torch.uint8).numpy().tobytes())
    return about, b"".join(parts)


def unpack_tensors(
    about: Any, data: bytes | bytearray, device: torch.device, names: Collection[str] = AXES
) -> dict[str, torch.Tensor]:
    """Return what ``pack_tensors`` was given, on ``device``; raises HostError for anything else."""
    tensors: dict[str, torch.Tensor] = {}
    at = 0
    for name, dtype, shape in _each(about, names):
        count = math.prod(shape) * dtype.itemsize
        # Before anything is allocated: the sizes are only what the other side claims.
        if name in tensors or at + count > len(data):
            raise HostError("tensors of more bytes than came.")
        # frombuffer refuses an empty buffer: a tensor without elements is cut from one byte.
        bits = torch.frombuffer(bytearray(data[at : at + count]) or bytearray(1), dtype=torch.uint8)
        tensors[name] = bits[:count].view(dtype).reshape(shape).to(device)
        at += count
    if at != len(data):
        raise HostError("tensors of fewer bytes than came.")
    return tensors


def unpack_outputs(about: Any, data: bytes | bytearray, device: torch.device) -> Outputs:
    """Return the Outputs that came, on ``device``; raises HostError for what are none."""
    tensors = unpack_tensors(about, data, device)
    if "out" not in tensors:
        raise HostError("what came has no out.")
    return Outputs(**tensors)


def pack_inputs(inputs: Inputs) -> tuple[dict[str, Any], bytes]:
    """Return Inputs that no Case draws: their Problem and tensors as JSON, and bits."""
    about, data = pack_tensors(inputs.tensors())
    return {"problem": inputs.problem.to_json(), "tensors": about}, data


def unpack_inputs(words: dict[str, Any], data: bytes | bytearray, device: str) -> Inputs:
    """Return what ``pack_inputs`` was given, on ``device``, each tensor contiguous."""
    problem, where = Problem.from_json(words["problem"]), torch.device(device)
    return Inputs.of(problem, unpack_tensors(words["tensors"], data, where, _INPUTS))


def _each(about: Any, names: Collection[str]) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    if not isinstance(about, list):
        raise HostError("what came is no list of tensors.")
    for one in about:
        if not (isinstance(one, list) and len(one) == 3):
            raise HostError("what came is no tensor.")
        name, dtype, shape = one
        if name not in names or dtype not in _DTYPES or not _is_shape(shape):
            raise HostError("what came is no tensor of a kernel's.")
        yield name, _DTYPES[dtype], shape


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list) or len(shape) > 4:
        return False
    # Not isinstance, because True is an int.
    return all(type(size) is int and size >= 0 for size in shape)


class RemoteError(HostError):
    """An error that a kernel raised when it was asked something in its process.

    Attributes:
        kind: As of ``executor.Failure``.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kernel's process says of it, as its Subject does."""

    name: str
    summary: str
    promises: tuple[str, ...]
    conventions: tuple[str, ...]
    triton: bool
    sinks: bool
    backward: bool
    captured: bool
    promises_gradients: bool
    has_launches: bool
    compiles: bool  # whether it is of Triton, or something that compiles was imported with it


def describe_subject(subject: Subject) -> dict[str, Any]:
    """Return a Description as JSON has it."""
    flags = {name: bool(getattr(subject, name)) for name in _FLAGS}
    flags["compiles"] = subject.triton or any(name in sys.modules for name in _COMPILERS)
    promises = sorted(str(promise) for promise in subject.promises)
    words = {"name": subject.name, "summary": subject.summary, "promises": promises}
    return {**words, "conventions": list(subject.conventions), **flags}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """What a kernel's process says of a call, beside its outputs; fields as of ``Execution``."""

    seconds: float | None
    tiling: Tiling | None
    arithmetic: Arithmetic
    notes: CallNotes
    compiling: float
    drawn: str  # ``obligations.inputs_digest`` of the inputs, before the call
    left: str  # the same after it


def run_words(
    origin: Origin | None,
    under: CallConditions,
    *,
    timed: bool = False,
    launch: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the request of a run, of inputs that ``origin`` names, or that travel with it."""
    drawn = {} if origin is None else {"case": origin.case.to_json(), "run": origin.run}
    return {**drawn, "under": to_fields(under), "timed": timed, "launch": launch}


def remote_error(answer: Frame) -> RemoteError:
    """An answer that is none."""
    words = {name: str(answer.words.get(name, "")) for name in ("kind", "message", "trace")}
    return RemoteError(words["kind"], words["message"], words["trace"])


def read(kind: type[_Message], words: Any) -> _Message:
    """Return what came as a message of this kind; raises HostError for what is none."""
    try:
        if issubclass(kind, msgspec.Struct):
            return msgspec.convert(words, kind)
        return from_fields(kind, words)
    except (UsageError, msgspec.ValidationError) as error:
        raise HostError(f"what came is no {kind.__name__}: {error}") from None
