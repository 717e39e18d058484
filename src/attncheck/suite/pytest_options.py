"""The plugin's options, marks and Hypothesis profiles, and the choice of a process's GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from attncheck.cases.tier import TIERS, Tier, tier_named
from attncheck.core.errors import UsageError, parse_seconds, require_known
from attncheck.core.formats import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hypothesis import settings

MARK = "attncheck_asks"  # Marker of tests that ``asks`` has turned into properties.


PROFILES = ("attncheck-dev", "attncheck-ci", "attncheck-nightly")
"""dev: random examples, with earlier failures first. ci: fixed examples. nightly: random examples;
a failure prints how to reproduce it."""


def register() -> None:
    """Register the profiles without activating one."""
    from hypothesis import settings

    common = settings_of()
    settings.register_profile("attncheck-dev", common)
    settings.register_profile("attncheck-ci", common, derandomize=True, database=None)
    settings.register_profile("attncheck-nightly", common, database=None, print_blob=True)


def settings_of() -> settings:
    """Return the settings that all profiles share."""
    from hypothesis import HealthCheck, Phase, settings

    return settings(
        deadline=None,  # interpreted kernels are slow
        # Our diagnosis replaces Hypothesis' explanation, which would need many more runs.
        phases=[phase for phase in Phase if phase is not Phase.explain],
        report_multiple_bugs=False,
        # A kernel may take few problems; if it takes none at all, the search itself reports that.
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )


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
    "timeout": {
        "metavar": "TIME",
        "help": "of one call of a kernel, such as 90s (default: 60s, and more to compile)",
    },
    "in-process": {
        "action": "store_true",
        "help": "for a debugger: call kernels in pytest's process, where they can break it",
    },
    "report": {
        "metavar": "DIR",
        "help": "write properties.json and properties.md there",
    },
}
_ALSO_SHORT = ("kernel", "device", "dtype", "tier", "known-failures", "in-process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line."""

    kernels: tuple[str, ...] = ()  # As on the command line; empty for the default.
    device: str = ""  # ``cpu`` or ``cuda``; empty for the default.
    dtypes: tuple[str, ...] = ()  # Only these; empty for all.
    tier: Tier = TIERS["smoke"]
    known_failures: str = ""  # The file; empty for the one in the folder of the properties.
    report: str = ""  # Folder for a report; empty for none.
    timeout: float = 0.0  # Time limit of one call in seconds; 0 for the default.
    in_process: bool = False  # Whether kernels are called in this process.


def add(parser: pytest.Parser) -> None:
    """Register ``--attncheck-kernel`` and the other options under their unique long names."""
    group = parser.getgroup("attncheck", "attncheck: is a kernel right?")
    for name, attributes in _OPTIONS.items():
        short = f"; --{name} too, unless a conftest or plugin has it"
        help_text = attributes["help"] + (short if name in _ALSO_SHORT else "")
        group.addoption(_long(name), dest=_dest(name), **(attributes | {"help": help_text}))


def spelled_out(parser: pytest.Parser, args: Iterable[str]) -> list[str]:
    """Return ``args`` with short option names replaced by long ones, unless others define them.

    Short names are never registered, since a conftest that registers an option of the same name
    would fail then, in every pytest of the environment. Call this after all initial conftests are
    loaded.
    """
    free = {f"--{name}": _long(name) for name in _ALSO_SHORT if _is_free(parser, f"--{name}")}
    spelled: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        # Only paths follow.
        if arg == "--":
            return [*spelled, arg, *rest]
        name, equals, value = arg.partition("=")
        spelled.append(free.get(name, name) + equals + value)
    return spelled


def options_of(config: pytest.Config) -> Options:
    """Return the options of the command line; raise pytest.UsageError for invalid values."""
    values = {name: config.getoption(_dest(name)) for name in _OPTIONS}
    try:
        require_known("--device", [values["device"]] if values["device"] else (), _DEVICES)
        require_known("--dtype", filter(None, values["dtype"] or ()), _MEASURED)
        tier = tier_named(values["tier"] or "smoke")
        return Options(
            kernels=tuple(dict.fromkeys(values["kernel"] or ())),
            device=values["device"] or "",
            dtypes=tuple(dict.fromkeys(values["dtype"] or ())),
            tier=replace(tier, profile=config.getoption(_PROFILE, None) or tier.profile),
            known_failures=values["known-failures"] or "",
            report=values["report"] or "",
            timeout=parse_seconds(values["timeout"], "--attncheck-timeout") or 0.0,
            in_process=values["in-process"],
        )
    except UsageError as error:
        raise pytest.UsageError(f"attncheck: {error}") from None


def _long(name: str) -> str:
    return f"--attncheck-{name}"


def _dest(name: str) -> str:
    return f"attncheck_{name.replace('-', '_')}"


def _is_free(parser: pytest.Parser, name: str) -> bool:
    """Return whether ``name`` is not registered, so that it is parsed as unknown."""
    try:
        return name in parser.parse_known_and_unknown_args([name, "value"])[1]
    except (pytest.UsageError, SystemExit):  # registered, with other values
        return False


_PLUGIN = "attncheck.suite.pytest_plugin"


def is_ours(metafunc: pytest.Metafunc, name: str) -> bool:
    """Return whether the argument ``name`` is the plugin's fixture, and not parametrised.

    A user's fixture of this name in a conftest, a class or a module takes precedence.
    """
    definitions = getattr(metafunc, "_arg2fixturedefs", {}).get(name)
    # pytest uses the last definition: the one nearest to the test.
    if not definitions or getattr(definitions[-1].func, "__module__", "") != _PLUGIN:
        return False
    if any(name in _names(mark) for mark in metafunc.definition.iter_markers("parametrize")):
        return False
    # Another plugin's hook may have parametrised it before ours ran.
    return not any(name in call.params for call in getattr(metafunc, "_calls", ()))


def _names(mark: Any) -> list[str]:
    """Return the argument names of ``@pytest.mark.parametrize``."""
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_gpu() -> None:
    """Assign GPU N modulo the number of GPUs to pytest-xdist's worker N; do nothing elsewhere.

    Called before CUDA is used, it leaves that GPU as the only visible one. If other code has used
    CUDA already, the GPU becomes the current device.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker.startswith("gw"):
        return
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return
    index = int(worker.removeprefix("gw")) % count
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own gap
        torch.cuda.set_device(index)
        return
    # The index counts visible devices only.
    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    os.environ[_VISIBLE] = visible[index] if visible else str(index)
