"""Reads a recording; whatever is wrong with the file is one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
from safetensors import SafetensorError, safe_open

from attncheck.errors import UsageError
from attncheck.recordings.facts import call_fact, tensor_fact
from attncheck.recordings.recording import Recording
from attncheck.recordings.schema import METADATA, VERSION, Call, Header, tensor_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["load"]


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
    of_calls = [_taken(path, i, call, tensors) for i, call in enumerate(header.calls)]
    for name in tensors:
        _refuse(path, f"has a tensor {name!r} that belongs to no call")
    recordings = tuple(
        Recording(file=path.name, call=call, **taken)
        for call, taken in zip(header.calls, of_calls, strict=True)
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


def _taken(path: Path, index: int, call: Call, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checked tensors of a call by name, taken out of ``tensors``."""
    where = f"call {call.name!r}"
    fact = call_fact(call)
    if fact:
        _refuse(path, f"{where}: {fact}")
    wanted = ["q", "k", "v"] + ["mask"] * (call.mask in {"bool", "additive"})
    taken = {}
    for name in wanted:
        stored = tensor_name(index, name)
        if stored not in tensors:
            _refuse(path, f"{where} has no tensor {stored!r}")
        taken[name] = tensors.pop(stored)
        fact = tensor_fact(call, name, taken[name])
        if fact:
            _refuse(path, f"{where}: {fact}")
    return taken
