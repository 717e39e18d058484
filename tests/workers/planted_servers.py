"""A server that exits, hangs, prints or leaves daemons, for tests of the process around it."""

import ctypes
import os
import sys
import time
from pathlib import Path

from attncheck.workers.transport import Frame


class Planted:
    """Answers a request with the result of the method that its kind names."""

    def answer(self, request: Frame) -> Frame:
        value = getattr(self, request.kind)(**request.words)
        return Frame(kind="answer", words={"value": value}, data=b"")

    def close(self) -> None:
        """Leave everything running: the tests check that the owner cleans up."""

    def daemon(self) -> int:
        """Start a process in another session whose parent has exited; return its id."""
        reads, writes = os.pipe()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return int(os.read(reads, 20))
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(writes, str(os.getpid()).encode())
        time.sleep(1000)
        return 0

    def prints(self, chunks: int) -> int:
        for _ in range(chunks):
            os.write(1, bytes(1 << 16))
        os.write(2, b"e")
        return chunks

    def hangs(self) -> None:
        time.sleep(1000)

    def holds_the_lock(self) -> None:
        ctypes.PyDLL(None).pause()

    def exits(self, code: int) -> None:
        os._exit(code)

    def aborts(self) -> None:
        os.abort()

    def forks_and_exits(self) -> None:
        """Exit, but leave a fork unknown to Python that holds the pipe open."""
        if ctypes.CDLL(None).fork():
            os._exit(0)
        time.sleep(1000)

    def says(self, words: str) -> str:
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()
        return words


def planted() -> Planted:
    return Planted()


def is_running(pid):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
