"""Messages between a kernel's process and its owner, as JSON and bytes, read strictly.

Tensors are JSON with names, dtypes and shapes, followed by their concatenated bytes. A kernel's
declarations are JSON with exactly the fields of their class. Nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from attncheck.core.errors import HostError, UsageError
from attncheck.core.formats import FORMATS, Format
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import AXES
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.call_conditions import CallConditions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from attncheck.verify.executor import Origin
    from attncheck.workers.transport import Frame

_FLAGS = (
    *("triton", "sinks", "backward", "captured", "float_mask"),
    *("promises_gradients", "has_launches"),
)
_Message = TypeVar("_Message")
_COMPILERS = ("torch._dynamo", "torch.utils.cpp_extension")  # Imported by kernels that compile.
_INPUTS = (*"qkv", "q_descale", "k_descale", "v_descale", "x", "sink", "dout", "dlse")


def to_fields(value: Any) -> Any:
    """Return a dataclass as a JSON object.

    Raises:
        UsageError: for a value that JSON cannot represent, and for an unknown format.
    """
    try:
        words = msgspec.to_builtins(value)
    except TypeError as error:
        raise UsageError(f"{error}.") from None
    _require_known_formats(value)
    return words


def from_fields(kind: type[_Message], words: Any) -> _Message:
    """Return the dataclass of this kind from a JSON object by ``to_fields``.

    Raises:
        UsageError: for anything else: a missing or additional field, or one of another type.
    """
    try:
        value = msgspec.convert(words, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"what came is no {kind.__name__}: {error}") from None
    # Strict, because the sending process runs foreign code: a dataclass has defaults.
    if msgspec.to_builtins(value) != words:
        raise UsageError(f"what came is no {kind.__name__}: it has other fields.")
    _require_known_formats(value)
    return value


def _require_known_formats(value: Any) -> None:
    """Raise UsageError if a format in a dataclass is not attncheck's: the judge trusts its bits."""
    if isinstance(value, Format):
        if FORMATS.get(value.name) != value:
            raise UsageError(f"{value.name!r} is no format of attncheck's.")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _require_known_formats(getattr(value, field.name))


_DTYPES = {str(fmt.torch_dtype): fmt.torch_dtype for fmt in FORMATS.values()}


def pack_tensors(tensors: Mapping[Any, torch.Tensor]) -> tuple[list[list[Any]], bytes]:
    """Return ``[name, dtype, shape]`` of each tensor, and the bytes of all, row-major."""
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
    """Return the tensors packed by ``pack_tensors``, on ``device``; raise HostError if invalid."""
    tensors: dict[str, torch.Tensor] = {}
    at = 0
    for name, dtype, shape in _each(about, names):
        count = math.prod(shape) * dtype.itemsize
        # Checked before allocating, because the other side may claim any size.
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
    """Return the received Outputs, on ``device``; raise HostError if they are invalid."""
    tensors = unpack_tensors(about, data, device)
    if "out" not in tensors:
        raise HostError("what came has no out.")
    return Outputs(**tensors)


def pack_inputs(inputs: Inputs) -> tuple[dict[str, Any], bytes]:
    """Return Inputs that are not drawn from a Case as JSON and bytes."""
    about, data = pack_tensors(inputs.tensors())
    return {"problem": inputs.problem.to_json(), "tensors": about}, data


def unpack_inputs(words: dict[str, Any], data: bytes | bytearray, device: str) -> Inputs:
    """Return the Inputs that ``pack_inputs`` packed, on ``device``, each tensor contiguous."""
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
    """An error that a kernel raised in its process when it was asked something.

    Attributes:
        kind: As in ``executor.Failure``.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes of a kernel's Subject, as its process describes it."""

    name: str
    summary: str
    promises: tuple[str, ...]
    conventions: tuple[str, ...]
    triton: bool
    sinks: bool
    backward: bool
    captured: bool
    float_mask: bool
    promises_gradients: bool
    has_launches: bool
    compiles: bool  # whether it uses Triton, or a compiler was imported with it


def describe_subject(subject: Subject) -> dict[str, Any]:
    """Return the fields of a Description of ``subject``, as JSON."""
    flags = {name: bool(getattr(subject, name)) for name in _FLAGS}
    flags["compiles"] = subject.triton or any(name in sys.modules for name in _COMPILERS)
    promises = sorted(str(promise) for promise in subject.promises)
    words = {"name": subject.name, "summary": subject.summary, "promises": promises}
    return {**words, "conventions": list(subject.conventions), **flags}


def run_words(
    origin: Origin | None,
    under: CallConditions,
    launch: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the request of a run on the inputs of ``origin``; if None, they are sent with it."""
    source = {} if origin is None else {"case": origin.case.to_json(), "run": origin.run}
    return {**source, "under": to_fields(under), "launch": launch}


def remote_error(answer: Frame) -> RemoteError:
    """Return the error in an answer."""
    words = {name: str(answer.words.get(name, "")) for name in ("kind", "message", "trace")}
    return RemoteError(words["kind"], words["message"], words["trace"])


def read(kind: type[_Message], words: Any) -> _Message:
    """Return received JSON as a message of this kind; raise HostError if it is invalid."""
    try:
        if issubclass(kind, msgspec.Struct):
            return msgspec.convert(words, kind)
        return from_fields(kind, words)
    except (UsageError, msgspec.ValidationError) as error:
        raise HostError(f"what came is no {kind.__name__}: {error}") from None
