"""The calling conventions by name, and the Subject made of a user's function by one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attncheck.core.errors import look_up
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import Convention, ConventionOptions, Signature
from attncheck.subjects.conventions.flash_conventions import FLASH_ATTN, PAGED, VARLEN
from attncheck.subjects.conventions.function_subject import FunctionSubject
from attncheck.subjects.conventions.parse import CallArguments, ParsedCall, UnreadableCall
from attncheck.subjects.conventions.torch_conventions import FLEX, SDPA


class _Native:
    """attncheck's own convention, in which a kernel is a Subject."""

    name = "native"
    summary = "a Subject of attncheck: it says itself what it takes and how it is called"

    def claims(self, candidate: object) -> bool:
        """Return whether an object is a Subject."""
        return isinstance(candidate, Subject)

    def unfit(self, candidate: object) -> str | None:
        """Return why an object is not a Subject, to follow its name; or None."""
        if isinstance(candidate, Subject):
            return None
        return f"is {type(candidate).__name__}, and must be a Subject"


NATIVE = _Native()

CONVENTIONS: dict[str, Convention | _Native] = {
    each.name: each for each in (NATIVE, SDPA, FLASH_ATTN, VARLEN, FLEX, PAGED)
}

READERS = {
    each.name: each
    for each in CONVENTIONS.values()
    if isinstance(each, Convention) and each.parse is not None
}
"""The conventions whose calls ``parse_call`` can read."""

# The order in which ``claims`` of conventions are tried; SDPA if none claims an object.
_BY_CERTAINTY = (NATIVE, VARLEN, PAGED, FLEX, SDPA, FLASH_ATTN)

_NO_OPTIONS = ConventionOptions()


def convention_named(name: str) -> Convention | _Native:
    """Return the convention called ``name``; raises UnknownName with the valid names."""
    return look_up("convention", name, CONVENTIONS)


def make_subject(
    candidate: object,
    name: str,
    convention: str | None = None,
    options: ConventionOptions = _NO_OPTIONS,
) -> Subject | str:
    """Return ``candidate`` as a Subject.

    Args:
        convention: A name of ``CONVENTIONS``; None: the one that its signature or its name
            identifies, or else sdpa.

    Returns:
        The Subject, or why ``candidate`` cannot be one, to follow its name: ``is int, and …``.

    Raises:
        UnknownName: for an unknown convention.
    """
    if convention:
        chosen = convention_named(convention)
    else:
        chosen = next((each for each in _BY_CERTAINTY if each.claims(candidate)), SDPA)
    if isinstance(chosen, _Native):
        if not isinstance(candidate, Subject):
            return str(chosen.unfit(candidate))
        if options != _NO_OPTIONS:
            return "is no function: a Subject says itself how it is called"
        return candidate
    signature = chosen.signature(candidate)
    if not isinstance(signature, Signature):
        # A function may be mended, and a user who named the convention needs no alternative to it.
        return signature if convention or callable(candidate) else f"{signature}, or a Subject"
    assert callable(candidate)
    # Reports show the file's name without the machine's folders.
    path, separator, member = name.partition("::")
    return FunctionSubject(
        candidate, Path(path).name + separator + member, chosen, signature, options
    )


_AMBIGUOUS_NAMES = ("sm_scale", "softmax_scale", "mask")
"""Parameter names that functions of both axis orders use, (batch, heads, length, dim) and (batch,
length, heads, dim), although only one convention lists them as its own."""


def possible_conventions(function: object) -> tuple[str, ...]:
    """Return conventions by which a function may be called, first that of ``make_subject``.

    There is only one if the signature decides it; else also one with other axes, to be tried.
    """
    likeliest = next((each for each in _BY_CERTAINTY if each.claims(function)), SDPA)
    if not isinstance(likeliest, Convention) or likeliest.claims(function, _AMBIGUOUS_NAMES):
        return (likeliest.name,)
    others = (each for each in (SDPA, FLASH_ATTN) if each is not likeliest)
    return (likeliest.name, *(each.name for each in others if each.unfit(function) is None))


def parse_call(
    convention: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ParsedCall:
    """Return the computation of ``function(*args, **kwargs)``, by one of ``READERS``.

    Raises:
        UnreadableCall: if no other kernel can replace it: it has dropout, a bias with a gradient,
            or an argument that is not in the convention.
    """
    reader = READERS[convention]
    assert reader.parse is not None
    # A wrapper may pass on parameters of another convention, so all names are known.
    known = [each for one in READERS.values() for each in one.parameters]
    call = CallArguments(
        function,
        args,
        kwargs,
        order=[each.spellings[0] for each in reader.parameters if each.by_position],
        meanings={
            name: each.meaning for each in (*known, *reader.parameters) for name in each.spellings
        },
        ignored={each.meaning for each in known if not each.matters},
    )
    if call.value("dropout"):
        raise UnreadableCall("it has dropout")
    parsed = reader.parse(call)
    # Last, so that it finds the arguments that the reader has not used.
    call.check()
    return parsed
