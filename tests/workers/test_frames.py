"""Frames: what is sent comes whole and once, and nothing else is taken for one."""

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

OURS, ANOTHER = bytes(range(KEY)), bytes(KEY)
WORDS = {"a": [1, None, "é\ud800"], "inf": float("inf")}
SENT = Frame(kind="ran", words=WORDS, data=b"\x00\xff" * 9)


@pytest.fixture
def pipe():
    reads, writes = os.pipe()
    os.set_blocking(reads, False)  # nothing here may wait for ever
    yield reads, writes
    for descriptor in (reads, writes):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def bytes_of(*frames, key=OURS):
    reads, writes = os.pipe()
    sender = Sender(writes, key)
    for frame in frames:
        sender.send(frame)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        return file.read()


def received(pipe, raw, *, most=100, count=1, key=OURS):
    reads, writes = pipe
    os.write(writes, raw)
    os.close(writes)
    receiver = Receiver(reads, key)
    return [receiver.receive(most=most) for _ in range(count)][-1]


def test_what_is_sent_is_received(pipe):
    assert received(pipe, bytes_of(SENT)) == SENT


def test_frames_come_in_their_order(pipe):
    other = Frame(kind="answer", words={})
    assert received(pipe, bytes_of(SENT, other), count=2) == other


@pytest.mark.parametrize("place", [0, 12, 30, 36, 44, 60, 100, -1])
def test_a_flipped_bit_is_seen(pipe, place):
    raw = bytearray(bytes_of(SENT))
    raw[place] ^= 1
    with pytest.raises((BrokenFrame, Closed)):
        received(pipe, bytes(raw))


@pytest.mark.parametrize("length", [0, 1, 40, 60, -1])
def test_a_torn_frame_is_none(pipe, length):
    with pytest.raises(Closed, match=r"nobody writes any more\."):
        received(pipe, bytes_of(SENT)[:length])


NO_FRAMES = {
    "of who does not know the key": (bytes_of(SENT, key=ANOTHER), {}, "checksum"),
    "that comes again": (bytes_of(SENT) * 2, {"count": 2}, "frame 1 where 2 is the next"),
    "after one that was left out": (
        bytes_of(SENT, SENT)[len(bytes_of(SENT)) :],
        {},
        "frame 2 where 1 is the next",
    ),
    "that was printed": (
        b"\x1b[31mKernelError: attncheck\x00\x01\n" + b"x" * 100,
        {},
        "begins as no frame does",
    ),
    "of more bytes than are owed": (bytes_of(SENT), {"most": 17}, "18 bytes, of at most 17"),
}


@pytest.mark.parametrize(("raw", "how", "said"), NO_FRAMES.values(), ids=NO_FRAMES)
def test_what_is_no_frame(pipe, raw, how, said):
    with pytest.raises(BrokenFrame, match=said):
        received(pipe, raw, **how)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (Frame(kind="x" * 17, words={}), "a frame"),
        (Frame(kind="ran", words={"a": "x" * LARGEST_WORDS}), "bytes of JSON"),
    ],
)
def test_what_nobody_would_take_is_not_sent(pipe, frame, said):
    with pytest.raises(BrokenFrame, match=said):
        Sender(pipe[1], OURS).send(frame)


def test_who_reads_no_more_is_told(pipe):
    os.close(pipe[0])
    with pytest.raises(Closed, match="nobody reads"):
        Sender(pipe[1], OURS).send(SENT)


@pytest.mark.parametrize("words", ["[1]", "1", "[" * 30_000, "{", "nul"])
def test_words_are_a_json_object(pipe, words, monkeypatch):
    monkeypatch.setattr("attncheck.workers.transport._DUMPS", lambda *_, **__: words)
    with pytest.raises(BrokenFrame, match="no JSON"):
        received(pipe, bytes_of(SENT))
