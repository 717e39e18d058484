"""What a refusal looks like: one line that names the fact."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def one_line(
    error: type[BaseException], says: str = "", *, match: str = "", start: str = "", whole: str = ""
) -> Iterator[pytest.ExceptionInfo]:
    """What is done inside raises ``error``, whose message is one line.

    Args:
        error: The class.
        says: A part of the message.
        match: A pattern that is found in it.
        start: How it begins.
        whole: All of it.
    """
    with pytest.raises(error) as raised:
        yield raised
    message = str(raised.value)
    assert "\n" not in message
    assert says in message
    assert re.search(match, message), message
    assert message.startswith(start)
    assert not whole or message == whole
