"""Masks and score mods from users' files, traced, checked and added to the library.

A file is imported once per device, with that device as torch's default, so that its mods' captured
tensors are created there; and again after it has changed.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from attncheck.core.errors import ProblemError, TraceError, UsageError
from attncheck.core.mod_spec import Argument, Check, Dimensions, Entry, Spec
from attncheck.core.source_files import load_member
from attncheck.mods.expression import Expression, expression_digest
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES
from attncheck.mods.trace import count_disagreements, trace_mask, trace_score

ModKind = Literal["mask", "score mod"]

_KINDS: dict[int, ModKind] = {4: "mask", 5: "score mod"}
_REFERENCE = re.compile(r".+\.py::[^:]+")


# --- mods of a module, by their signatures -----------------------------------------------


def mods_in(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the mask and score mods of ``module`` by name, in the order in which they are bound.

    Mods are its public callables that take exactly four or five positional arguments, however they
    are made: by a ``def``, a factory, ``functools.partial``. Functions imported from elsewhere do
    not count; ``__all__``, if it exists, lists the public names.

    Raises:
        UsageError: where ``__all__`` is no list or tuple.
    """
    public = vars(module).get("__all__")
    if public is not None and not isinstance(public, list | tuple):
        file = Path(module.__file__).name if module.__file__ else module.__name__
        kind = type(public).__name__
        raise UsageError(f"__all__ of {file} is {kind}: it must be a list of names.")
    return {
        name: value
        for name, value in vars(module).items()
        if (name in public if public is not None else not name.startswith("_"))
        and kind_of_mod(value)
        and not _is_imported(value, module)
    }


def kind_of_mod(value: object) -> ModKind | None:
    """Return ``mask`` for four positional arguments, ``score mod`` for five, None otherwise."""
    try:
        if not callable(value) or inspect.isclass(value):
            return None
        parameters = inspect.signature(value).parameters.values()
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # built-ins and foreign __signature__s may raise anything
        return None
    required = [p for p in parameters if p.default is p.empty]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind not in positional for p in required):
        return None
    return _KINDS.get(len(required))


def definition_line(value: object) -> int | None:
    """Return the line of its file where a mod is defined; None if it is unknown."""
    while isinstance(value, functools.partial):
        value = value.func
    if not inspect.isfunction(value):  # a method, or an object with __call__
        value = value if inspect.ismethod(value) else type(value).__call__
    code = getattr(value, "__code__", None)
    line: int | None = getattr(code, "co_firstlineno", None)
    return line


def _is_imported(value: object, module: ModuleType) -> bool:
    if not inspect.isfunction(value):
        return False
    # A function made by another module's factory counts as this module's.
    return value.__module__ != module.__name__ and "<locals>" not in value.__qualname__


# --- adding a file's mod to the library -------------------------------------------------------


def is_mod_reference(text: str) -> bool:
    """Return whether ``text`` has the form ``file.py::name``, unlike names of the library."""
    return _REFERENCE.fullmatch(text) is not None


def load_mask(reference: str) -> Spec:
    """Return the Spec of the mask ``file.py::name``, and add it to the library without its folder.

    The Spec contains a digest of the trace, so that a Problem's id identifies the mask as it is
    now. A Problem is refused if the mask reads outside a captured tensor, computes a whole number
    beyond 32 bits, or returns other values than its trace.

    Raises:
        UsageError: for a file or name that does not exist or cannot be imported.
        TraceError: for a mask that cannot be traced, does not return one truth value per index, or
            changes when it is traced again.
    """
    return _load(reference, "mask", trace_mask, MASKS)


def load_score(reference: str) -> Spec:
    """Return the score mod ``file.py::name``; as ``load_mask``."""
    return _load(reference, "score mod", trace_score, SCORES)


@dataclass(frozen=True, slots=True)
class _FileMod:
    """A mod of one version of a file."""

    reference: str  # ``file.py::name``
    what: ModKind  # ``mask`` or ``score mod``
    version: tuple[int, int]  # of the file

    @property
    def name(self) -> str:
        """Its name in the library."""
        return self.reference.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.what} {self.name!r}"

    def build(self, device: str) -> Any:
        """Return the callable, its tensors on ``device``."""
        return _import_mod(self, _path(self.reference), device)


_paths: dict[tuple[str, str, Argument], Path] = {}
"""Files of loaded mods by kind, name and digest."""


def _load(
    reference: str, what: ModKind, trace: Callable[..., Expression], entries: dict[str, Entry[Any]]
) -> Spec:
    if not is_mod_reference(reference):
        raise UsageError(f"{what} {reference!r} is not FILE.py::NAME.")
    mod = _FileMod(reference, what, _version(reference))
    expression = trace(mod.build("cpu"))
    # Trace twice, to detect mods that draw random numbers or count their calls.
    if expression_digest(trace(mod.build("cpu"))) != expression_digest(expression):
        raise TraceError(
            f"{mod} gives other values when it is called again: capture what it draws or counts."
        )
    # 40 bits: a Spec's argument is a number, and JSON readers keep one below 2^53 exactly.
    digest = int(expression_digest(expression)[:10], 16)
    _paths[what, mod.name, digest] = _path(reference)
    entries[mod.name] = Entry(
        summary=str(expression),
        build=lambda _values, _dimensions, device: mod.build(device),
        arguments={"digest": _check_as_traced(mod, expression, digest)},
        additive=_is_sum(expression),
    )
    return Spec.of(mod.name, digest=digest)


def _path(reference: str) -> Path:
    return Path(reference.rpartition("::")[0]).resolve()


def _version(reference: str) -> tuple[int, int]:
    """Return a file's modification time and size; zeros if it does not exist."""
    try:
        stat = _path(reference).stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@cache
def _import_mod(mod: _FileMod, path: Path, device: str) -> Any:
    """Import a mod. ``path`` is in the cache key since a relative reference may change meaning."""
    with torch.device(device):
        value = load_member(mod.reference, f"{mod.what} {mod.reference!r}")
    if _version(mod.reference) != mod.version:
        raise UsageError(f"{mod}: {path.name} has changed since the mod was traced.")
    if not callable(value):
        kind = type(value).__name__
        raise UsageError(f"{mod.what} {mod.reference!r} is {kind}: it must be a callable.")
    return value


def _check_as_traced(mod: _FileMod, expression: Expression, digest: int) -> Check:
    """Return the check of a Spec's digest; it checks indices once for each set of dimensions."""

    @cache
    def check_values(dimensions: Dimensions) -> None:
        check_index_ranges(expression, dimensions, str(mod))
        wrong = count_disagreements(expression, mod.build("cpu"), dimensions)
        if wrong:
            raise ProblemError(
                f"{mod} gives other values than its trace at {wrong} sampled indices: it must be "
                "the same at each call, and for each index by itself."
            )

    def check(_label: str, value: Argument, dimensions: Dimensions) -> None:
        if value != digest:
            before, now = (_paths.get((mod.what, mod.name, n)) for n in (value, digest))
            if before is not None and before != now:
                raise ProblemError(
                    f"{mod} is of another file of that name now: give the files names that differ."
                )
            raise ProblemError(
                f"{mod} has changed: the problem was made with digest {value}, the file gives "
                f"{digest}."
            )
        check_values(dimensions)

    return check


def _is_sum(expression: Expression) -> bool:
    """Return whether a score mod is the score plus or minus what does not depend on it."""
    depends: list[bool] = []
    sums: list[bool] = []
    for node in expression.structure.nodes:
        score = node.op == "input" and node.name == "score"
        is_sum = False
        if node.op in {"add", "sub"}:
            first, second = node.operands
            is_sum = sums[first] and not depends[second]
            is_sum |= node.op == "add" and sums[second] and not depends[first]
        sums.append(score or is_sum)
        depends.append(score or any(depends[i] for i in node.operands))
    return sums[-1]
