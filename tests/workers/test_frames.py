"""Frames between processes: they arrive whole, once and in order, and other bytes are rejected."""

import contextlib
import os

import pytest

from attncheck.workers.transport import (
    KEY,
    LARGEST_WORDS,
    BrokenFrame,
    Closed,
    Frame,
    Receiver,
    Sender,
)

OUR_KEY, OTHER_KEY = bytes(range(KEY)), bytes(KEY)
WORDS = {"a": [1, None, "é\ud800"], "inf": float("inf")}
FRAME = Frame(kind="ran", words=WORDS, data=b"\x00\xff" * 9)


@pytest.fixture
def pipe():
    reads, writes = os.pipe()
    os.set_blocking(reads, False)  # so that no test can wait forever
    yield reads, writes
    for descriptor in (reads, writes):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def bytes_of(*frames, key=OUR_KEY):
    reads, writes = os.pipe()
    sender = Sender(writes, key)
    for frame in frames:
        sender.send(frame)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        return file.read()


def received(pipe, raw, *, most=100, count=1, key=OUR_KEY):
    reads, writes = pipe
    os.write(writes, raw)
    os.close(writes)
    receiver = Receiver(reads, key)
    return [receiver.receive(most=most) for _ in range(count)][-1]


def test_frame_is_received_as_sent(pipe):
    assert received(pipe, bytes_of(FRAME)) == FRAME


def test_frames_are_received_in_order(pipe):
    other = Frame(kind="answer", words={})
    assert received(pipe, bytes_of(FRAME, other), count=2) == other


@pytest.mark.parametrize("place", [0, 12, 30, 36, 44, 60, 100, -1])
def test_flipped_bit_is_rejected(pipe, place):
    raw = bytearray(bytes_of(FRAME))
    raw[place] ^= 1
    with pytest.raises((BrokenFrame, Closed)):
        received(pipe, bytes(raw))


@pytest.mark.parametrize("length", [0, 1, 40, 60, -1])
def test_truncated_frame_raises_closed(pipe, length):
    with pytest.raises(Closed, match=r"nobody writes any more\."):
        received(pipe, bytes_of(FRAME)[:length])


INVALID_FRAMES = {
    "wrong key": (bytes_of(FRAME, key=OTHER_KEY), {}, "checksum"),
    "repeated frame": (bytes_of(FRAME) * 2, {"count": 2}, "frame 1 where 2 is the next"),
    "skipped frame": (
        bytes_of(FRAME, FRAME)[len(bytes_of(FRAME)) :],
        {},
        "frame 2 where 1 is the next",
    ),
    "printed text": (
        b"\x1b[31mKernelError: attncheck\x00\x01\n" + b"x" * 100,
        {},
        "begins as no frame does",
    ),
    "more data than allowed": (bytes_of(FRAME), {"most": 17}, "18 bytes, of at most 17"),
}


@pytest.mark.parametrize(("raw", "options", "message"), INVALID_FRAMES.values(), ids=INVALID_FRAMES)
def test_invalid_frame_is_rejected(pipe, raw, options, message):
    with pytest.raises(BrokenFrame, match=message):
        received(pipe, raw, **options)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame(kind="x" * 17, words={}), "a frame"),
        (Frame(kind="ran", words={"a": "x" * LARGEST_WORDS}), "bytes of JSON"),
    ],
)
def test_sender_rejects_frames_that_no_receiver_accepts(pipe, frame, message):
    with pytest.raises(BrokenFrame, match=message):
        Sender(pipe[1], OUR_KEY).send(frame)


def test_sending_to_a_closed_pipe_raises_closed(pipe):
    os.close(pipe[0])
    with pytest.raises(Closed, match="nobody reads"):
        Sender(pipe[1], OUR_KEY).send(FRAME)


@pytest.mark.parametrize("words", ["[1]", "1", "[" * 30_000, "{", "nul"])
def test_words_that_are_no_json_object_are_rejected(pipe, words, monkeypatch):
    monkeypatch.setattr("attncheck.workers.transport._DUMPS", lambda *_, **__: words)
    with pytest.raises(BrokenFrame, match="no JSON"):
        received(pipe, bytes_of(FRAME))
