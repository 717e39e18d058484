"""A helper for tests of error messages, which must be one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def one_line(
    error: type[BaseException], says: str = "", *, match: str = "", start: str = "", whole: str = ""
) -> Iterator[pytest.ExceptionInfo]:
    """Require that the block raises ``error`` with a message of one line.

    Args:
        error: The exception's class.
        says: A part of the message.
        match: A pattern that the message contains.
        start: The beginning of the message.
        whole: The whole message.
    """
    with pytest.raises(error) as raised:
        yield raised
    message = str(raised.value)
    assert "\n" not in message
    assert says in message
    assert re.search(match, message), message
    assert message.startswith(start)
    assert not whole or message == whole
