"""What the author of a kernel declares of it: the capability table, checked and written.

They are relative to the folder of the file that says them: ``*`` and ``**`` are any folders, the
name of a folder is all in it, ``.`` is everything.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from attncheck.core.errors import AttncheckError, UnknownName, UsageError
from attncheck.core.formats import DTYPES, FORMATS, Format, dtype_named, fp32
from attncheck.inputs.problem import PROMISES
from attncheck.judge.declared_arithmetic import default
from attncheck.mods.library import NONE
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncheck.inputs.problem import Problem
    from attncheck.judge.declared_arithmetic import Arithmetic
    from attncheck.mods.spec import Spec

__all__ = [
    "ALIASES",
    "ALIGNMENTS",
    "ANY",
    "AUTOGRAD",
    "COMPOSITION",
    "DEVICES",
    "EMPTY_ROWS",
    "LSE_BASES",
    "PHASES",
    "Capabilities",
    "DeclaredArithmetic",
    "Limits",
    "Override",
    "When",
    "family",
    "matches_pattern",
    "pattern_files",
    "pattern_mistake",
    "read_table",
    "render_table",
]


_WILD = frozenset("*?[")
_EVERYTHING = "."


def pattern_mistake(pattern: str) -> str:
    """What is wrong with a pattern, as the end of a sentence; empty where nothing is."""
    if PurePosixPath(pattern).is_absolute() or PureWindowsPath(pattern).is_absolute():
        return "is absolute: it must be relative to the folder of this file"
    if ".." in PurePosixPath(pattern).parts:
        return "has '..': it must be below the folder of this file"
    return ""


def matches_pattern(file: str, pattern: str) -> bool:
    """Whether ``file`` is one of a pattern: ``**`` is any folders, a folder is all in it."""
    if not pattern:
        return False
    pattern = str(PurePosixPath(pattern))
    if pattern == _EVERYTHING or fnmatchcase(file, pattern) or file.startswith(f"{pattern}/"):
        return True
    # ``a/**/b`` is ``a/b`` too.
    return "**/" in pattern and matches_pattern(file, pattern.replace("**/", "", 1))


def pattern_files(folder: Path, pattern: str) -> Iterator[Path]:
    """The files below ``folder`` that fit, in order; none of hidden folders that it does not name.

    A pattern with a mistake fits none.
    """
    if not pattern or pattern_mistake(pattern):
        return
    start = folder
    for part in PurePosixPath(pattern).parts:
        if _WILD & set(part):
            break
        start /= part
    below = _below(start) if start.is_dir() else iter([start] if start.is_file() else [])
    yield from (
        path for path in below if matches_pattern(path.relative_to(folder).as_posix(), pattern)
    )


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (path for name in sorted(names) if (path := Path(root, name)).is_file())


ANY = "any"
AUTOGRAD = "autograd"
COMPOSITION = "composition"
ALIASES = {"none": "full", "window": "sliding_window"}
"""Masks as kernels call them → their names in the library."""
DEVICES = ("cpu", "cuda")
PHASES = ("forward", "backward")

LSE_BASES = ("natural", "base2")
"""Logarithms in which a kernel gives LSE."""

EMPTY_ROWS = ("zero", "nan", "mean", "unspecified")
"""What a kernel gives for a row that sees no key (``subjects.empty_rows``)."""

ALIGNMENTS = ("top_left", "bottom_right")
"""Where the diagonal of a causal mask ends when the lengths differ: at row and key 0, or at the
last row and the last key."""

Names = tuple[str, ...]
HeadDim = int | tuple[int, int]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds of every table here."""


class DeclaredArithmetic(_Strict, frozen=True, kw_only=True):
    """Fields of ``judge.arithmetic.Arithmetic`` that differ from the convention's; None: as there.

    ``p_in_sum`` is another name of ``sums_rounded_weights``; of ``rounds_value_products`` false
    says that dO · v is not rounded, and a name of ``formats.FORMATS`` to what.
    """

    weights_scale: float | None = None
    lazy_rescale: float | None = None
    sums_rounded_weights: bool | None = None
    p_in_sum: bool | None = None
    normalised_weights: bool | None = None
    exp2_ulps: float | None = None
    block_kv: int | None = None
    splits: int | None = None
    rounds_value_products: Literal["fp16", "bf16"] | bool | None = None
    sums_rounded_heads: bool | None = None
    rereads_weights: bool | None = None
    dkv_parts: int | None = None
    dq_parts: int | None = None

    def changes(self) -> dict[str, Any]:
        """What is declared, by the names of ``Arithmetic``."""
        said = {k: v for k, v in msgspec.structs.asdict(self).items() if v is not None}
        alias = said.pop("p_in_sum", None)
        if "rounds_value_products" in said:
            name = said["rounds_value_products"]
            said["rounds_value_products"] = FORMATS[name] if isinstance(name, str) else None
        return said if alias is None else {"sums_rounded_weights": alias} | said

    def looser(self) -> dict[str, Any]:
        """Those of ``changes`` that allow more than the default arithmetic does."""
        assumed = default(DTYPES["bf16"])
        return {k: v for k, v in self.changes().items() if _allows_more(k, v, assumed)}


def _allows_more(name: str, value: Any, assumed: Arithmetic) -> bool:
    if name == "rounds_value_products":
        return value is not None
    said: float = value
    usual: float = getattr(assumed, name)
    # Shorter steps are more roundings; under a smaller scale more of the small weights are lost.
    return said < usual if name in {"block_kv", "weights_scale"} else said > usual


class Limits(_Strict, frozen=True, kw_only=True):
    """Which Problems a kernel takes; None: not declared.

    Attributes:
        dtypes: Names of ``formats.DTYPES``.
        head_dims: Of q, k and v alike, or pairs (of q and k, of v); or ``any``.
        masks: Names of ``mods.library``, ``composition`` or ``any``.
        scores: Names of score mods, ``none``, ``composition`` or ``any``.
        gqa: Whether several query heads may share a key head.
        rectangular: Whether query and key lengths may differ.
        scale: Whether it takes a scale other than 1/√head_dim.
        length_multiple: Of what both lengths must be multiples; not declared: of nothing.
        max_query, max_kv: Longest lengths; not declared: any.
        arithmetic: What differs from the convention's.
    """

    dtypes: Names | None = None
    head_dims: tuple[HeadDim, ...] | Literal["any"] | None = None
    masks: Names | None = None
    scores: Names | None = None
    gqa: bool | None = None
    rectangular: bool | None = None
    scale: bool | None = None
    length_multiple: int | None = None
    max_query: int | None = None
    max_kv: int | None = None
    arithmetic: DeclaredArithmetic = DeclaredArithmetic()


class When(_Strict, frozen=True, kw_only=True):
    """For which Problems an override holds; several values: for each of them; all keys must fit."""

    dtype: str | Names | None = None
    mask: str | Names | None = None
    head_dim: int | tuple[int, ...] | None = None
    device: str | Names | None = None
    phase: str | Names | None = None

    def holds(self, problem: Problem, device: str) -> bool:
        """Whether ``problem``, computed on ``device``, is one of them; with gradients: backward."""
        asked = {
            "dtype": problem.dtype,
            "mask": family(problem.mask),
            "head_dim": problem.head_dim,
            "device": device,
            "phase": PHASES[problem.backward],
        }
        return all(_is_among(value, getattr(self, name)) for name, value in asked.items())


class Override(Limits, frozen=True, kw_only=True):
    """Limits that replace the table's, field by field."""

    when: When


class Capabilities(Limits, frozen=True, kw_only=True):
    """A kernel's whole table.

    Attributes:
        entry: ``pkg.module:name``, ``file.py::name``, or a kernel of attncheck's.
        convention: A name of ``conventions.CONVENTIONS``; None for the first that fits.
        causal: How its causal mask is aligned where lengths differ.
        lse: Whether it gives LSE, or with which logarithm (``true``: the convention's).
        empty_row: What rows that see no key give.
        promises: What it promises of its bits (``question.PROMISES``).
        backward: How gradients are had: by ``autograd``, or by a function, as ``entry`` names one;
            false: it has none. Not declared: by autograd, where it can be.
        sources: Files that it is made of, as patterns of ``source_patterns``.
        override: Exceptions; later ones win.
    """

    entry: str
    convention: str | None = None
    causal: Literal["top_left", "bottom_right"] | None = None
    lse: bool | Literal["natural", "base2"] | None = None
    empty_row: Literal["zero", "nan", "mean", "unspecified"] | None = None
    promises: Names | None = None
    backward: bool | str | None = None
    sources: Names = ()
    override: tuple[Override, ...] = ()

    def limits(self, problem: Problem, device: str = "cpu") -> Limits:
        """What holds for ``problem``: each field as the last override that has it says."""
        said = {name: getattr(self, name) for name in Limits.__struct_fields__}
        for override in self.override:
            if override.when.holds(problem, device):
                said |= _said(override)
        return Limits(**said)

    def arithmetic_changes(self, problem: Problem, device: str = "cpu") -> dict[str, Any]:
        """What differs from the convention's arithmetic, by the names of ``Arithmetic``."""
        found = self.arithmetic.changes()
        for override in self.override:
            if override.when.holds(problem, device):
                found |= override.arithmetic.changes()
        return found

    def refuses(self, problem: Problem, device: str = "cpu") -> str | None:
        """Why the table has no place for ``problem``, in one line; None if it has."""
        return next(
            (said for said in _answers(self.limits(problem, device), problem) if said), None
        )

    def declares(self, problem: Problem, device: str = "cpu") -> bool:
        """Whether the table says of everything in ``problem`` that the kernel takes it.

        What it is silent on the kernel may refuse.
        """
        # It has no place for a loss of LSE, for sinks, for what score mods read, or for empty rows
        # whose gradients are NaN.
        beyond = problem.dlse or problem.sink or problem.dcaptured
        silent = beyond or self.empty_row == "nan"
        gradients = not problem.backward or (bool(self.backward) and not silent)
        return gradients and all(
            said == "" for said in _answers(self.limits(problem, device), problem)
        )


def family(spec: Spec) -> str:
    """What a table calls a mask or score mod: its name, ``composition``, or ``any`` of a file's."""
    if spec.parts:
        return COMPOSITION
    return ANY if "::" in spec.name else spec.name


def _said(override: Override) -> dict[str, Any]:
    fields = {name: getattr(override, name) for name in Limits.__struct_fields__}
    return {k: v for k, v in fields.items() if v is not None and k != "arithmetic"}


def _is_among(value: object, allowed: object) -> bool:
    if allowed is None:
        return True
    listed = allowed if isinstance(allowed, tuple) else (allowed,)
    return value in {ALIASES.get(each, each) if isinstance(each, str) else each for each in listed}


def _answers(limits: Limits, problem: Problem) -> Iterator[str | None]:
    """Of each thing that ``problem`` asks: declared (""), not declared (None), or why not."""
    yield _listed(limits.dtypes, problem.dtype, "dtype")
    yield _head_dim(limits.head_dims, problem)
    if problem.operation == "attention":
        masks = None if limits.masks is None else [ALIASES.get(m, m) for m in limits.masks]
        yield _listed(masks, family(problem.mask), "mask", limits.masks)
        yield (
            ""
            if _plain(problem, limits)
            else _listed(limits.scores, family(problem.score), "score mod")
        )
    usual = problem.operation == "softmax" or problem.scale == fp32(problem.head_dim**-0.5)
    for name, asked, what in (
        ("gqa", problem.group > 1, f"{problem.group} query heads to a key head"),
        (
            "rectangular",
            problem.query != problem.kv and problem.operation == "attention",
            f"{problem.query} queries and {problem.kv} keys",
        ),
        ("scale", not usual, f"scale={problem.scale:g}, other than 1/√head_dim"),
    ):
        yield _flag(name, getattr(limits, name), what) if asked else ""
    multiple = limits.length_multiple or 1
    uneven = any(length % multiple for length in (problem.query, problem.kv))
    lengths = f"{problem.query} queries and {problem.kv} keys"
    yield f"{lengths}: its table says length_multiple = {multiple}" if uneven else ""
    for name, length in (("max_query", problem.query), ("max_kv", problem.kv)):
        most = getattr(limits, name)
        long = most is not None and length > most
        yield f"length {length}: its table says {name} = {most}" if long else ""


def _plain(problem: Problem, limits: Limits) -> bool:
    """Whether no score mod is asked for, and the table says nothing against none."""
    return problem.score == NONE and limits.scores is None


def _listed(
    allowed: list[str] | Names | None, name: str, what: str, shown: Names | None = None
) -> str | None:
    if allowed is None:
        return None
    if name in allowed or ANY in allowed:
        return ""
    return f"{what} {name} is not declared: its table has {', '.join(shown or allowed) or 'none'}"


def _head_dim(allowed: tuple[HeadDim, ...] | str | None, problem: Problem) -> str | None:
    if allowed is None:
        return None
    asked = (problem.head_dim, problem.value_dim)
    if allowed == ANY or problem.operation == "softmax":
        return ""
    pairs = [each if isinstance(each, tuple) else (each, each) for each in allowed if each != ANY]
    if asked in pairs:
        return ""
    listed = ", ".join("/".join(map(str, dict.fromkeys(pair))) for pair in pairs) or "none"
    dims = f"head_dim={problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        dims += f" value_dim={problem.value_dim}"
    return f"{dims} is not declared: its table has {listed}"


def _flag(name: str, declared: bool | None, what: str) -> str | None:  # noqa: FBT001  # a field
    if declared is None:
        return None
    return "" if declared else f"{what}: its table says {name} = false"


_LARGEST_HEAD_DIM = 256


def read_table(table: object, what: str) -> Capabilities:
    """The table that a file or an entry point holds.

    Args:
        table: As TOML reads it.
        what: Where it stands, which begins every error: ``pyproject.toml: kernels.mine``.

    Raises:
        UsageError: for a key, a type or a name that cannot be, in one line with the valid ones.
    """
    try:
        _check_keys(table)
        found = msgspec.convert(table, Capabilities)
        for name, limits in _all_limits(found):
            _check_limits(limits, name)
        _check_listed("promises", found.promises or (), PROMISES)
        _check_backward(found.backward)
        _check_sources(found.sources)
        for index, override in enumerate(found.override):
            _check_when(override.when, f"override[{index}].when")
        _check_arithmetic(found)
    except msgspec.ValidationError as error:
        raise UsageError(f"{what}: {_in_our_words(str(error))}.") from None
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    return found


def render_table(found: Capabilities, header: str, comments: Mapping[str, Iterable[str]]) -> str:
    """The table as TOML, below ``[header]``.

    Args:
        found: What is written; fields that are as they would be without being said are left out.
        header: Its place in the file: ``tool.attncheck.kernels.mine``.
        comments: Lines that stand above a field, by its name; under ``""`` above all.
    """
    lines = [f"[{header}]", *(f"# {line}" for line in comments.get("", ()))]
    for name in (name for name in _ORDER if name not in _TABLES):
        value = getattr(found, name)
        lines += [f"# {line}" for line in comments.get(name, ())]
        if value is not None and value != ():
            lines.append(f"{name} = {_toml_value(value)}")
    changes = found.arithmetic.changes()
    if changes:
        lines += [
            "",
            f"[{header}.arithmetic]",
            *(f"{k} = {_toml_value(v)}" for k, v in changes.items()),
        ]
    for override in found.override:
        lines += ["", f"[[{header}.override]]", *_override(override)]
    return "\n".join(lines) + "\n"


def _override(found: Override) -> Iterator[str]:
    when = msgspec.structs.asdict(found.when)
    fits = ", ".join(f"{k} = {_toml_value(v)}" for k, v in when.items() if v is not None)
    yield f"when = {{ {fits} }}"
    for name in _ORDER:
        value = getattr(found, name, None)
        if value is not None and name not in _TABLES:
            yield f"{name} = {_toml_value(value)}"
    changes = found.arithmetic.changes()
    if changes:
        listed = ", ".join(f"{k} = {_toml_value(v)}" for k, v in changes.items())
        yield f"arithmetic = {{ {listed} }}"


_ORDER = (
    "entry",
    "convention",
    "dtypes",
    "head_dims",
    "masks",
    "scores",
    "gqa",
    "rectangular",
    "scale",
    "length_multiple",
    "max_query",
    "max_kv",
    "causal",
    "lse",
    "empty_row",
    "promises",
    "backward",
    "sources",
    "arithmetic",
    "override",
)
_TABLES = ("arithmetic", "override")


def _toml_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if value is None or isinstance(value, Format):  # what an Arithmetic has, as a table says it
        return json.dumps(value.name if value else False)
    # JSON's strings, numbers and truth values are TOML's.
    return json.dumps(value, ensure_ascii=False)


def _all_limits(found: Capabilities) -> list[tuple[str, Limits]]:
    return [("", found), *((f"override[{i}].", one) for i, one in enumerate(found.override))]


def _check_keys(table: object) -> None:
    """Raises UsageError for a key that there is not; msgspec would not say which there are."""
    for place, struct, given in _tables(table):
        if not isinstance(given, Mapping):
            continue  # its type is msgspec's to say
        for key in given:
            if key not in struct.__struct_fields__:
                fields = struct.__struct_fields__
                valid = ", ".join(
                    sorted(fields, key=_ORDER.index if struct is Capabilities else None)
                )
                raise UsageError(f"key {place + str(key)!r} is not known: choose from {valid}.")


def _tables(table: object) -> list[tuple[str, type[msgspec.Struct], object]]:
    """Each table within ``table``: where, what it must be, and what stands there."""
    found: list[tuple[str, type[msgspec.Struct], object]] = [("", Capabilities, table)]
    if not isinstance(table, Mapping):
        return found
    found.append(("arithmetic.", DeclaredArithmetic, table.get("arithmetic")))
    overrides = table.get("override")
    for index, each in enumerate(overrides if isinstance(overrides, list | tuple) else ()):
        place = f"override[{index}]."
        found.append((place, Override, each))
        if isinstance(each, Mapping):
            found.append((f"{place}when.", When, each.get("when")))
            found.append((f"{place}arithmetic.", DeclaredArithmetic, each.get("arithmetic")))
    return found


def _check_backward(said: bool | str | None) -> None:  # noqa: FBT001  # a field
    if said is True or (isinstance(said, str) and said != AUTOGRAD and ":" not in said):
        raise UsageError(
            f'backward={json.dumps(said)} must be "autograd", FILE.py::NAME, package.module:NAME '
            "or false."
        )


def _check_sources(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        if wrong := pattern_mistake(pattern):
            raise UsageError(f"sources: {pattern!r} {wrong}.")


def _check_limits(limits: Limits, place: str) -> None:
    for dtype in limits.dtypes or ():
        dtype_named(dtype)
    _check_listed(f"{place}masks", limits.masks or (), (*_mods(MASKS), *ALIASES))
    _check_listed(f"{place}scores", limits.scores or (), _mods(SCORES))
    for dims in limits.head_dims if isinstance(limits.head_dims, tuple) else ():
        for dim in dims if isinstance(dims, tuple) else (dims,):
            if not 1 <= dim <= _LARGEST_HEAD_DIM:
                raise UsageError(f"{place}head_dims={dim} must be 1–{_LARGEST_HEAD_DIM}.")
    for name in ("length_multiple", "max_query", "max_kv"):
        length = getattr(limits, name)
        if length is not None and length < 1:
            raise UsageError(f"{place}{name}={length} must be at least 1.")


def _mods(entries: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(name for name, one in entries.items() if one.compose is None), COMPOSITION, ANY)


def _check_when(when: When, place: str) -> None:
    asked = {"dtype": DTYPES, "device": DEVICES, "phase": PHASES, "mask": (*_mods(MASKS), *ALIASES)}
    for name, valid in asked.items():
        value = getattr(when, name)
        _check_listed(f"{place}.{name}", (value,) if isinstance(value, str) else value or (), valid)
    if when == When():
        raise UsageError(f"{place} is empty: choose from {', '.join(When.__struct_fields__)}.")


def _check_listed(what: str, names: Iterable[str], valid: Iterable[str]) -> None:
    known = tuple(valid)
    for name in names:
        if name not in known:
            raise UnknownName(what, name, known)


def _check_arithmetic(found: Capabilities) -> None:
    """Raises UsageError for numbers that no arithmetic of the declared dtypes can have."""
    for place, limits in _all_limits(found):
        said = limits.arithmetic
        alias, name = said.p_in_sum, said.sums_rounded_weights
        if alias is not None and name is not None and alias != name:
            raise UsageError(
                f"{place}arithmetic: p_in_sum and sums_rounded_weights are one thing: give one."
            )
        if said.rounds_value_products is True:
            raise UsageError(
                f"{place}arithmetic: rounds_value_products=true must be a format or false."
            )
        for dtype in found.dtypes or ("bf16",):
            try:
                dataclasses.replace(default(DTYPES[dtype]), **said.changes())
            except (AttncheckError, TypeError, ValueError) as error:
                raise UsageError(f"{place}arithmetic: {error}") from None


_AT = re.compile(r"(.*) - at `\$\.?([^`]*)`", re.DOTALL)
_WORDS = {"object": "table", "array": "list", "str": "text", "int": "whole number"}
_ENUMS = {"lse": '"natural" or "base2"'} | {
    name: " or ".join(f'"{each}"' for each in valid)
    for name, valid in (("empty_row", EMPTY_ROWS), ("causal", ALIGNMENTS))
}


def _in_our_words(text: str) -> str:
    """What msgspec says of a type, with the key in front."""
    match = _AT.fullmatch(text)
    said, key = (match[1], match[2]) if match else (text, "")
    said = re.sub(r" ?\| ?null", "", said.replace("`", ""))
    said = re.sub(r"\b[a-z]+\b", lambda word: _WORDS.get(word[0], word[0]), said)
    said = said[0].lower() + said[1:].replace(" | ", " or ")
    if key in _ENUMS:
        said += f": it must be {_ENUMS[key]}"
    return f"{key}: {said}" if key else said
