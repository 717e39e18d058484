"""The calling conventions by name, and somebody's function as a Subject of one of them."""

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
    """attncheck's own convention: a Subject."""

    name = "native"
    summary = "a Subject of attncheck: it says itself what it takes and how it is called"

    def claims(self, candidate: object) -> bool:
        """Return whether an object is a Subject."""
        return isinstance(candidate, Subject)

    def unfit(self, candidate: object) -> str | None:
        """Return why an object is none, to stand after ``it must``."""
        return None if isinstance(candidate, Subject) else "be a Subject"


NATIVE = _Native()

CONVENTIONS: dict[str, Convention | _Native] = {
    each.name: each for each in (NATIVE, SDPA, FLASH_ATTN, VARLEN, FLEX, PAGED)
}

READERS = {
    each.name: each
    for each in CONVENTIONS.values()
    if isinstance(each, Convention) and each.parse is not None
}
"""Conventions whose calls are read by ``parse_call``."""

# Who is tried first: whether an object shows that it is theirs. Where none is sure it is SDPA's.
_BY_CERTAINTY = (NATIVE, VARLEN, PAGED, FLEX, SDPA, FLASH_ATTN)

_AS_USUAL = ConventionOptions()


def convention_named(name: str) -> Convention | _Native:
    """Return the convention called ``name``; raises UnknownName with the valid names."""
    return look_up("convention", name, CONVENTIONS)


def adopted(
    candidate: object,
    name: str,
    convention: str | None = None,
    options: ConventionOptions = _AS_USUAL,
) -> Subject | str:
    """Return ``candidate`` as a Subject.

    Args:
        convention: A name of ``CONVENTIONS``; None for the one that its signature, or its name,
            shows, which is sdpa where they show none.

    Returns:
        The Subject, or why there is none, to stand after ``it must``.

    Raises:
        UnknownName: for a convention that is not known.
    """
    if convention:
        chosen = convention_named(convention)
    else:
        chosen = next((each for each in _BY_CERTAINTY if each.claims(candidate)), SDPA)
    if isinstance(chosen, _Native):
        if not isinstance(candidate, Subject):
            return "be a Subject"
        if options != _AS_USUAL:
            return "be a function: a Subject says itself how it is called"
        return candidate
    signature = chosen.signature(candidate)
    if not isinstance(signature, Signature):
        # Who named the convention wants to know what it lacks, not what else would do.
        return signature if convention else f"be a Subject, or {signature}"
    assert callable(candidate)
    # Reports show the file's name, and no folder of the machine.
    path, separator, member = name.partition("::")
    return FunctionSubject(
        candidate, Path(path).name + separator + member, chosen, signature, options
    )


_OF_EITHER = ("sm_scale", "softmax_scale", "mask")
"""Names that functions of (batch, heads, length, dim) have as well as of (batch, length, heads,
dim), whichever convention has made them known."""


def possible_conventions(function: object) -> tuple[str, ...]:
    """Return those by which a function may be called, what ``adopted`` takes first.

    One where its signature settles it; else also those with other axes, which only a trial tells.
    """
    likeliest = next((each for each in _BY_CERTAINTY if each.claims(function)), SDPA)
    if not isinstance(likeliest, Convention) or likeliest.claims(function, _OF_EITHER):
        return (likeliest.name,)
    others = (each for each in (SDPA, FLASH_ATTN) if each is not likeliest)
    return (likeliest.name, *(each.name for each in others if each.unfit(function) is None))


def parse_call(
    convention: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ParsedCall:
    """Read what ``function(*args, **kwargs)`` computes, by one of ``READERS``.

    Raises:
        UnreadableCall: for what no kernel of ours can be given: dropout, a bias with a gradient, an
            argument that the convention has not.
    """
    reader = READERS[convention]
    assert reader.parse is not None
    # A wrapper may pass on what another convention has: its names are understood too.
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
    # Last: only what the reader has not looked at is left over.
    call.check()
    return parsed
