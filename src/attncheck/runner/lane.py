"""A lane: the process that makes a ``Work`` once and does one unit after the other with it.

It hears and answers on a socket that nobody else knows, so that what it prints is nothing but
print. It ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from attncheck import json_numbers
from attncheck.errors import AttncheckError, UsageError
from attncheck.inert import one_line
from attncheck.runner.unit import Done, Unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.runner.crew import Work

__all__ = [
    "LARGEST",
    "NAME",
    "Answered",
    "Hello",
    "answered",
    "from_bytes",
    "made",
    "main",
    "to_bytes",
]

M = TypeVar("M", bound=msgspec.Struct)

LARGEST = 2**27
"""Bytes of the largest message."""

NAME = "ATTNCHECK_LANE"
"""The environment variable by which a lane and all processes that it starts are known."""

_PR_SET_PDEATHSIG = 1
_LONGEST_REASON = 500


class Hello(msgspec.Struct, kw_only=True):
    """The first message to a lane.

    Attributes:
        work: Its factory, ``module:function``.
        options: Of that.
    """

    work: str
    options: dict[str, Any]


class Answered(msgspec.Struct, kw_only=True):
    """A message from a lane: it is ready, has done a unit, or ends since something was raised.

    Attributes:
        done: The result of the unit.
        raised: What was raised, in one line.
        usage: Whether that was a UsageError.
    """

    done: Done | None = None
    raised: str = ""
    usage: bool = False


def made(hello: Hello) -> tuple[Work | None, Answered]:
    """The Work that a lane is told to make, and its answer; None where that says why not."""
    try:
        return _factory(hello.work)(**hello.options), Answered()
    except Exception as error:  # noqa: BLE001  # the other side says it
        return None, Answered(raised=_reason(error), usage=isinstance(error, UsageError))


def answered(work: Work, raw: bytes) -> Answered:
    """The answer to the message that is a unit."""
    try:
        return Answered(done=work.do(from_bytes(raw, Unit)))
    except BaseException as error:  # noqa: BLE001  # a new lane tries once more, and says it
        return Answered(raised=_reason(error))


def to_bytes(message: msgspec.Struct) -> bytes:
    """A message, for ``from_bytes`` of its type."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError:  # a lone surrogate in a foreign text
        return msgspec.msgpack.encode(json_numbers.builtins(message))


def from_bytes(raw: bytes, kind: type[M]) -> M:
    """The message that ``to_bytes`` has made.

    Raises:
        msgspec.MsgspecError: for anything else.
    """
    return msgspec.msgpack.decode(raw, type=kind)


def main(descriptor: int, parent: int) -> None:
    """The life of a lane.

    Args:
        descriptor: Of the socket.
        parent: Process that started it.
    """
    _die_with(parent)
    with Connection(descriptor) as socket:
        work, first = made(from_bytes(socket.recv_bytes(LARGEST), Hello))
        socket.send_bytes(to_bytes(first))
        if work is None:
            return
        try:
            while raw := _next(socket):
                answer = answered(work, raw)
                socket.send_bytes(to_bytes(answer))
                if answer.raised:
                    return
        finally:
            work.close()


def _factory(work: str) -> Callable[..., Work]:
    module, _, function = work.partition(":")
    try:
        factory: Callable[..., Work] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"no work {work!r}: {_reason(error)}.") from error
    return factory


def _reason(error: BaseException) -> str:
    """What was raised, in one line."""
    text = one_line(str(error))
    kind = type(error).__name__
    said = text if isinstance(error, AttncheckError) else f"{kind}: {text}" if text else kind
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}…"


def _next(socket: Connection) -> bytes:
    """The next message; empty where there is none, since the other side has closed."""
    try:
        return socket.recv_bytes(LARGEST)
    except (EOFError, ConnectionError):
        return b""


def _die_with(parent: int) -> None:
    """SIGKILL as soon as the process ``parent`` is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)
