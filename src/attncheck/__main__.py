"""``attncheck`` and ``python -m attncheck``."""

from __future__ import annotations

import os
import signal

__all__ = ["main", "run"]

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; an interrupt during its import ends the process with one line too."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if ours:
            # End at once, since a half-imported module may raise another error instead.
            signal.signal(signal.SIGINT, _end)
        from attncheck.cli import main as run_command_line

        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command_line()
    except KeyboardInterrupt:  # between two of these statements
        _end()


def run() -> None:
    """Run the command line, then end the process (``end_process``) without slow clean-up."""
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            from attncheck.core.own_process import end_process

            end_process(end.code)
        raise


def _end(*_: object) -> None:
    os.write(2, b"attncheck: interrupted; nothing was written.\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    run()
