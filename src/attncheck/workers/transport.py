"""Framed, numbered and signed messages between two processes.

A frame consists of a magic word, sizes, a sequence number, JSON, raw bytes, and a checksum of it
all with a key that only the two processes know. Anything else on the descriptor, such as output of
other code, and partial or repeated frames, is refused; nothing received is unpickled or run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import AttncheckError

if TYPE_CHECKING:
    from collections.abc import Callable

    Ready = Callable[[], None]

KEY = 32  # Bytes of a key.

LARGEST_WORDS = 1 << 20  # Bytes of the JSON of one frame; a Problem takes a few hundred.

_MAGIC = b"attncheck\x00\x01\n"
_CHECKSUM = 32  # Bytes of a checksum.
_CHUNK = 1 << 20  # Bytes that are read or written at a time.
# Magic, kind, sequence number, bytes of JSON, bytes after it.
_HEADER = struct.Struct(f"<{len(_MAGIC)}s16sQIQ")
# Bound before any kernel is imported, so that a kernel cannot replace these functions.
_BLAKE2B, _SAME, _DUMPS, _LOADS = hashlib.blake2b, hmac.compare_digest, json.dumps, json.loads
_READ, _WRITE = os.read, os.write


class BrokenFrame(AttncheckError):
    """Bytes that are not the next frame of the other side."""


class Closed(AttncheckError):
    """The other side has closed the pipe, within or between frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message."""

    kind: str  # Type of the message, at most 16 ASCII letters.
    words: dict[str, Any]  # A JSON object.
    data: bytes | bytearray = b""  # Binary data.


class Sender:
    """Sends frames to a descriptor, each with the next number."""

    def __init__(self, descriptor: int, key: bytes) -> None:
        self._descriptor, self._key = descriptor, key
        self._sequence = 0

    def send(self, frame: Frame, ready: Ready | None = None) -> None:
        """Write ``frame`` completely.

        Args:
            ready: Waits until the descriptor is writable, or raises; None if writing blocks.

        Raises:
            BrokenFrame: if a receiver would refuse the frame.
            Closed: if the other side does not read any more.
        """
        words = _DUMPS(frame.words, separators=(",", ":")).encode()
        kind = frame.kind.encode("ascii")
        if len(words) > LARGEST_WORDS or len(kind) > 16:
            raise BrokenFrame(f"a frame {frame.kind[:16]!r} of {len(words)} bytes of JSON.")
        self._sequence += 1
        header = _HEADER.pack(_MAGIC, kind, self._sequence, len(words), len(frame.data))
        parts = header, words, frame.data, _checksum(self._key, header, words, frame.data)
        # A small frame is written at once, so that the other side wakes up only once.
        for part in parts if len(frame.data) > _CHUNK else (b"".join(parts),):
            self._write(memoryview(part), ready)

    def _write(self, rest: memoryview, ready: Ready | None) -> None:
        while rest:
            if ready is not None:
                ready()
            try:
                rest = rest[_WRITE(self._descriptor, rest[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Closed(f"nobody reads: {error.strerror}.") from None


class Receiver:
    """Receives frames from a descriptor, each with the next number."""

    def __init__(self, descriptor: int, key: bytes) -> None:
        self._descriptor, self._key = descriptor, key
        self._sequence = 0

    def receive(self, *, most: int, ready: Ready | None = None) -> Frame:
        """Return the next frame.

        Args:
            most: Largest number of bytes after the JSON.
            ready: Waits until the descriptor is readable, or raises; None if reading blocks.

        Raises:
            BrokenFrame: if the bytes are no frame, or it is too large.
            Closed: if the other side does not write any more.
        """
        header = self._read(_HEADER.size, ready)
        magic, kind, sequence, words_size, data_size = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise BrokenFrame("what came begins as no frame does.")
        # Checked before memory is allocated, since the sizes are not authenticated yet.
        if words_size > LARGEST_WORDS or data_size > most:
            raise BrokenFrame(f"a frame of {words_size} and {data_size} bytes, of at most {most}.")
        if data_size > _CHUNK:  # read without copying
            words, data = self._read(words_size, ready), self._read(data_size, ready)
            checksum = self._read(_CHECKSUM, ready)
        else:
            body = self._read(words_size + data_size + _CHECKSUM, ready)
            words, checksum = body[:words_size], body[-_CHECKSUM:]
            data = body[words_size:-_CHECKSUM]
        # Verified before anything is parsed.
        if not _SAME(checksum, _checksum(self._key, header, words, data)):
            raise BrokenFrame("a frame whose checksum is not the one of its bytes and our key.")
        self._sequence += 1
        # A repeated frame has a valid checksum too.
        if sequence != self._sequence:
            raise BrokenFrame(f"frame {sequence} where {self._sequence} is the next.")
        return Frame(kind=kind.rstrip(b"\x00").decode("ascii"), words=_object(words), data=data)

    def _read(self, count: int, ready: Ready | None) -> bytearray:
        buffer = bytearray(count)
        rest = memoryview(buffer)
        while rest:
            if ready is not None:
                ready()
            try:
                part = _READ(self._descriptor, min(len(rest), _CHUNK))
            except BlockingIOError:
                continue
            if not part:
                raise Closed("nobody writes any more.")
            rest[: len(part)] = part
            rest = rest[len(part) :]
        return buffer


def _checksum(key: bytes, *parts: bytes | bytearray) -> bytes:
    digest = _BLAKE2B(key=key, digest_size=_CHECKSUM)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _object(words: bytearray) -> dict[str, Any]:
    try:
        value = _LOADS(words)
    except (ValueError, RecursionError):
        raise BrokenFrame("a frame whose words are no JSON.") from None
    if not isinstance(value, dict):
        raise BrokenFrame("a frame whose words are no JSON object.")
    return value
