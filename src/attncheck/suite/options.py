"""The plugin's options: long names that are ours, and short ones where nobody else has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from attncheck.core.errors import UsageError
from attncheck.core.formats import DTYPES
from attncheck.suite.profiles import PROFILES
from attncheck.suite.tiers import TIERS, Tier, tier_named

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Options", "add", "options_of", "spelled_out", "wants_our_profile"]

_PROFILE = "--hypothesis-profile"
_DEVICES = ("cpu", "cuda")
_MEASURED = tuple(name for name, dtype in DTYPES.items() if dtype.measured)
_OPTIONS: dict[str, dict[str, Any]] = {
    "kernel": {
        "action": "append",
        "metavar": "SPEC",
        "help": "kernel to judge (repeatable): a name (attncheck list), file.py::name, "
        "package.module:name or a name of [tool.attncheck.kernels] (default: all built-in ones)",
    },
    "device": {
        "metavar": "|".join(_DEVICES),
        "help": "where kernels run (default: cuda where torch sees a GPU, else cpu)",
    },
    "dtype": {
        "action": "append",
        "metavar": "DTYPE",
        "help": f"only this dtype (repeatable): {', '.join(_MEASURED)}",
    },
    "tier": {
        "metavar": "|".join(TIERS),
        "help": "how hard kernels are asked (default: smoke)",
    },
    "known-failures": {
        "metavar": "FILE",
        "help": "failures that are known, with a reason each (default: known_failures.toml beside "
        "the properties)",
    },
    "report": {
        "metavar": "DIR",
        "help": "write properties.json and properties.md there",
    },
}
_ALSO_SHORT = ("kernel", "device", "dtype", "tier", "known-failures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        kernels: As typed, in this order; empty for the default.
        device: ``cpu`` or ``cuda``; empty for the default.
        dtypes: Only these; empty for all.
        tier: How hard.
        known_failures: The file; empty for that beside the properties.
        report: Folder for a report; empty for none.
    """

    kernels: tuple[str, ...] = ()
    device: str = ""
    dtypes: tuple[str, ...] = ()
    tier: Tier = TIERS["smoke"]
    known_failures: str = ""
    report: str = ""


def add(parser: pytest.Parser) -> None:
    """Register ``--attncheck-kernel`` and the others: names that nobody else has."""
    group = parser.getgroup("attncheck", "attncheck: is a kernel right?")
    for name, attributes in _OPTIONS.items():
        short = f"; --{name} too, unless a conftest or plugin has it"
        said = attributes["help"] + (short if name in _ALSO_SHORT else "")
        group.addoption(_long(name), dest=_dest(name), **(attributes | {"help": said}))


def spelled_out(parser: pytest.Parser, args: Iterable[str]) -> list[str]:
    """``args`` with our short names in full, where nobody else has them.

    They are never registered: a conftest that registers a name which another has already ends in
    an error, and ours would be the other for every pytest of the environment, also for a conftest
    that is found late. Call it when all initial conftests are loaded.
    """
    free = {f"--{name}": _long(name) for name in _ALSO_SHORT if _is_free(parser, f"--{name}")}
    spelled: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*spelled, arg, *rest]
        name, equals, value = arg.partition("=")
        spelled.append(free.get(name, name) + equals + value)
    return spelled


def wants_our_profile(args: Iterable[str]) -> bool:
    """Whether Hypothesis is asked for a profile of ours, which must then be registered."""
    return any(name in arg for arg in args for name in PROFILES)


def options_of(config: pytest.Config) -> Options:
    """What was asked for; raises pytest.UsageError with the valid values."""
    given = {name: config.getoption(_dest(name)) for name in _OPTIONS}
    try:
        return Options(
            kernels=tuple(dict.fromkeys(given["kernel"] or ())),
            device=_one_of("device", given["device"] or "", _DEVICES),
            dtypes=tuple(
                _one_of("dtype", name, _MEASURED) for name in dict.fromkeys(given["dtype"] or ())
            ),
            tier=_tier(config, given["tier"] or "smoke"),
            known_failures=given["known-failures"] or "",
            report=given["report"] or "",
        )
    except UsageError as error:
        raise pytest.UsageError(f"attncheck: {error}") from None


def _tier(config: pytest.Config, name: str) -> Tier:
    """The tier, with the Hypothesis profile that was asked for in place of its own."""
    profile = config.getoption(_PROFILE, None)
    tier = tier_named(name)
    return replace(tier, profile=profile) if profile else tier


def _long(name: str) -> str:
    return f"--attncheck-{name}"


def _dest(name: str) -> str:
    return f"attncheck_{name.replace('-', '_')}"


def _is_free(parser: pytest.Parser, name: str) -> bool:
    """Whether nobody registered ``name``: then it comes back as unknown."""
    try:
        return name in parser.parse_known_and_unknown_args([name, "value"])[1]
    except (pytest.UsageError, SystemExit):  # somebody's, and it wants another value
        return False


def _one_of(kind: str, name: str, valid: tuple[str, ...]) -> str:
    if name and name not in valid:
        raise UsageError(f"--{kind} {name!r} is not known: choose from {', '.join(valid)}.")
    return name
