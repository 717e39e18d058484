"""Framed, numbered and signed messages between two processes.

A frame is a magic word, sizes, a sequence number, JSON, raw bytes, and a keyed checksum over all of
it. The key is a number that only the two processes know. What is written to the descriptor by
anybody else, torn or repeated is no frame; nothing of it is unpickled or run.
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

KEY = 32  # bytes of a key

LARGEST_WORDS = 1 << 20  # bytes of the JSON of one frame; a Problem is a few hundred

_MAGIC = b"attncheck\x00\x01\n"
_CHECKSUM = 32
_CHUNK = 1 << 20
# Magic, kind, sequence number, bytes of JSON, bytes after it.
_HEADER = struct.Struct(f"<{len(_MAGIC)}s16sQIQ")
# Bound here, before any kernel is imported: one that replaces them answers no better for it.
_BLAKE2B, _SAME, _DUMPS, _LOADS = hashlib.blake2b, hmac.compare_digest, json.dumps, json.loads
_READ, _WRITE = os.read, os.write


class BrokenFrame(AttncheckError):
    """Bytes that are no frame of the other side, or not the next."""


class Closed(AttncheckError):
    """The other side is gone, in the midst of a frame or between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message."""

    kind: str  # what it is, at most 16 ASCII letters
    words: dict[str, Any]  # a JSON object
    data: bytes | bytearray = b""  # what is no JSON


class Sender:
    """Sends frames to a descriptor, each with the next number."""

    def __init__(self, descriptor: int, key: bytes) -> None:
        self._descriptor, self._key = descriptor, key
        self._sequence = 0

    def send(self, frame: Frame, ready: Ready | None = None) -> None:
        """Send it whole.

        Args:
            ready: Returns when something can be written, or raises; None where writing waits.

        Raises:
            BrokenFrame: for one that no receiver would take.
            Closed: when nobody reads any more.
        """
        words = _DUMPS(frame.words, separators=(",", ":")).encode()
        kind = frame.kind.encode("ascii")
        if len(words) > LARGEST_WORDS or len(kind) > 16:
            raise BrokenFrame(f"a frame {frame.kind[:16]!r} of {len(words)} bytes of JSON.")
        self._sequence += 1
        header = _HEADER.pack(_MAGIC, kind, self._sequence, len(words), len(frame.data))
        parts = header, words, frame.data, _checksum(self._key, header, words, frame.data)
        # At once: the other side wakes up once, too.
        for part in parts if len(frame.data) > _CHUNK else (b"".join(parts),):
            self._write(memoryview(part), ready)

    def _write(self, left: memoryview, ready: Ready | None) -> None:
        while left:
            if ready is not None:
                ready()
            try:
                left = left[_WRITE(self._descriptor, left[:_CHUNK]) :]
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
            most: Bytes after its JSON, at most.
            ready: Returns when something can be read, or raises; None where reading waits.

        Raises:
            BrokenFrame: when what came is none, or is larger.
            Closed: when nobody writes any more.
        """
        header = self._read(_HEADER.size, ready)
        magic, kind, sequence, of_words, of_data = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise BrokenFrame("what came begins as no frame does.")
        # Before memory is taken for them, since the sizes have not been verified yet.
        if of_words > LARGEST_WORDS or of_data > most:
            raise BrokenFrame(f"a frame of {of_words} and {of_data} bytes, of at most {most}.")
        if of_data > _CHUNK:  # of which no copy is made
            words, data = self._read(of_words, ready), self._read(of_data, ready)
            checksum = self._read(_CHECKSUM, ready)
        else:
            whole = self._read(of_words + of_data + _CHECKSUM, ready)
            words, checksum = whole[:of_words], whole[-_CHECKSUM:]
            data = whole[of_words:-_CHECKSUM]
        # Before any of it is parsed.
        if not _SAME(checksum, _checksum(self._key, header, words, data)):
            raise BrokenFrame("a frame whose checksum is not the one of its bytes and our key.")
        self._sequence += 1
        # A frame that somebody repeats has a right checksum too.
        if sequence != self._sequence:
            raise BrokenFrame(f"frame {sequence} where {self._sequence} is the next.")
        return Frame(kind=kind.rstrip(b"\x00").decode("ascii"), words=_object(words), data=data)

    def _read(self, count: int, ready: Ready | None) -> bytearray:
        buffer = bytearray(count)
        left = memoryview(buffer)
        while left:
            if ready is not None:
                ready()
            try:
                part = _READ(self._descriptor, min(len(left), _CHUNK))
            except BlockingIOError:
                continue
            if not part:
                raise Closed("nobody writes any more.")
            left[: len(part)] = part
            left = left[len(part) :]
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
