"""The capability table, in which a kernel's author declares what it supports: types and TOML."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.errors import AttncheckError, UnknownName, UsageError
from attncheck.core.formats import DTYPES, FORMATS, Format
from attncheck.core.mod_spec import NONE
from attncheck.inputs.problem import PROMISES
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tomlkit.items import InlineTable, Table

    from attncheck.core.mod_spec import Spec
    from attncheck.inputs.problem import Problem

ANY = "any"
AUTOGRAD = "autograd"
COMPOSITION = "composition"
ALIASES = {"none": "full", "window": "sliding_window"}
"""Other names of masks that a table may use, and the library's name for each."""
DEVICES = ("cpu", "cuda")
PHASES = ("forward", "backward")

LSE_BASES = ("natural", "base2")  # bases of the logarithm in which a kernel returns LSE

EMPTY_ROWS = ("zero", "nan", "mean", "unspecified")
"""What a kernel returns for a row that sees no key (``conventions.empty_rows``)."""

ALIGNMENTS = ("top_left", "bottom_right")
"""Where the diagonal of a causal mask ends when the lengths differ: at row and key 0, or at the
last row and the last key."""

_LARGEST_HEAD_DIM = 256


# Compositions that a table names like any mask, as their parts are few.
_ALIGNED = tuple(name for name, one in MASKS.items() if one.takes)


def _mod_names(entries: Mapping[str, Any]) -> tuple[str, ...]:
    plain = (name for name, one in entries.items() if one.compose is None)
    return (*plain, *(_ALIGNED if entries is MASKS else ()), COMPOSITION, ANY)


_VALID: dict[str, tuple[str, ...]] = {
    "dtype": tuple(DTYPES),
    "mask": (*_mod_names(MASKS), *ALIASES),
    "score": _mod_names(SCORES),
    "promise": tuple(PROMISES),
    "device": DEVICES,
    "phase": PHASES,
    "lse": LSE_BASES,
    "empty_row": EMPTY_ROWS,
    "causal": ALIGNMENTS,
    "rounds_value_products": ("fp16", "bf16"),
    "head_dim": (ANY,),
}
"""Valid names of each key; the key is in the singular."""

# The names come from the library at run time, where msgspec checks them; type checkers see str.
if TYPE_CHECKING:
    DtypeName = str
    MaskName = str
    ScoreName = str
    Promise = str
    DeviceName = str
    PhaseName = str
else:
    DtypeName, MaskName, ScoreName, Promise, DeviceName, PhaseName = (
        Literal[_VALID[key]] for key in ("dtype", "mask", "score", "promise", "device", "phase")
    )

Length = Annotated[int, msgspec.Meta(ge=1)]
HeadDim = int | tuple[int, int]  # msgspec 0.22 cannot constrain an int beside a tuple


# ------------------------------------------------------------------ the table


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table that rejects unknown keys."""


class DeclaredArithmetic(_Strict, frozen=True, kw_only=True):
    """Fields of ``Arithmetic`` that replace the convention's; None keeps the convention's value.

    ``p_in_sum`` is another name of ``sums_rounded_weights``. ``rounds_value_products`` names the
    format (``formats.FORMATS``) to which dO · v is rounded, or is false if it is not rounded.
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
        """Return the declared values by the names of the fields of ``Arithmetic``."""
        declared = {k: v for k, v in msgspec.structs.asdict(self).items() if v is not None}
        alias = declared.pop("p_in_sum", None)
        if "rounds_value_products" in declared:
            name = declared["rounds_value_products"]
            declared["rounds_value_products"] = FORMATS[name] if isinstance(name, str) else None
        return declared if alias is None else {"sums_rounded_weights": alias} | declared

    def looser(self) -> dict[str, Any]:
        """Return those of ``changes`` that allow larger errors than the default arithmetic."""
        assumed = default_arithmetic(DTYPES["bf16"])

        def allows_more(name: str, value: Any) -> bool:
            if name == "rounds_value_products":
                return value is not None
            usual: float = getattr(assumed, name)
            # Shorter steps round more often; with a smaller scale more small weights underflow.
            finer = name in {"block_kv", "weights_scale"}
            return bool(value < usual if finer else value > usual)

        return {k: v for k, v in self.changes().items() if allows_more(k, v)}

    def check(self, dtypes: Iterable[str]) -> None:
        """Raise ValueError if a number is impossible for the arithmetic of one of ``dtypes``."""
        alias, name = self.p_in_sum, self.sums_rounded_weights
        if alias is not None and name is not None and alias != name:
            raise ValueError("p_in_sum and sums_rounded_weights are one thing: give one.")
        if self.rounds_value_products is True:
            raise ValueError("rounds_value_products=true must be a format or false.")
        for dtype in dtypes:
            try:
                # Arithmetic's own constructor rejects impossible numbers.
                dataclasses.replace(default_arithmetic(DTYPES[dtype]), **self.changes())
            except (AttncheckError, TypeError) as error:
                raise ValueError(str(error)) from None


class Limits(_Strict, frozen=True, kw_only=True):
    """Limits of the Problems that a kernel accepts; None: not declared."""

    dtypes: tuple[DtypeName, ...] | None = None  # names of ``formats.DTYPES``
    # A number for q, k and v alike, or a pair (of q and k, of v); or ``any``.
    head_dims: tuple[HeadDim, ...] | Literal["any"] | None = None
    masks: tuple[MaskName, ...] | None = None  # names of the library, ``composition`` or ``any``
    # Names of score mods, ``none``, ``composition`` or ``any``.
    scores: tuple[ScoreName, ...] | None = None
    gqa: bool | None = None  # whether several query heads may share a key head
    rectangular: bool | None = None  # whether query and key lengths may differ
    scale: bool | None = None  # whether it takes a scale other than 1/√head_dim
    # Query and key lengths must be multiples of this; not declared: any length.
    length_multiple: Length | None = None
    # The longest query and key lengths; not declared: any.
    max_query: Length | None = None
    # Most query rows over all query heads that share a key head, as decode kernels count them.
    max_rows: Length | None = None
    max_kv: Length | None = None
    arithmetic: DeclaredArithmetic = DeclaredArithmetic()

    def __post_init__(self) -> None:
        for dims in self.head_dims if isinstance(self.head_dims, tuple) else ():
            for dim in dims if isinstance(dims, tuple) else (dims,):
                if not 1 <= dim <= _LARGEST_HEAD_DIM:
                    raise ValueError(f"head_dims={dim} must be 1–{_LARGEST_HEAD_DIM}.")


class When(_Strict, frozen=True, kw_only=True):
    """The Problems to which an override applies: every key must match, by any of its values."""

    dtype: DtypeName | tuple[DtypeName, ...] | None = None
    mask: MaskName | tuple[MaskName, ...] | None = None
    head_dim: int | tuple[int, ...] | None = None
    device: DeviceName | tuple[DeviceName, ...] | None = None
    phase: PhaseName | tuple[PhaseName, ...] | None = None

    def holds(self, problem: Problem, device: str) -> bool:
        """Return whether ``problem`` on ``device`` matches; with gradients it is backward."""
        values = {
            "dtype": problem.dtype,
            "mask": family(problem.mask),
            "head_dim": problem.head_dim,
            "device": device,
            "phase": PHASES[problem.backward],
        }
        return all(_is_among(value, getattr(self, name)) for name, value in values.items())


class Override(Limits, frozen=True, kw_only=True):
    """Limits that replace the table's, field by field."""

    when: When

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.when == When():
            raise ValueError(f"when is empty: choose from {', '.join(When.__struct_fields__)}.")


class Capabilities(Limits, frozen=True, kw_only=True):
    """A kernel's whole capability table."""

    entry: str  # ``pkg.module:name``, ``file.py::name``, or a kernel of attncheck's
    # A name of ``conventions.CONVENTIONS``; None: the first that fits the function.
    convention: str | None = None
    # Alignment of its causal mask if the lengths differ.
    causal: Literal["top_left", "bottom_right"] | None = None
    # Whether it returns LSE, or in which logarithm (``true``: the convention's).
    lse: bool | Literal["natural", "base2"] | None = None
    # What it returns for rows that see no key.
    empty_row: Literal["zero", "nan", "mean", "unspecified"] | None = None
    # When it promises equal bits (``problem.PROMISES``).
    promises: tuple[Promise, ...] | None = None
    # Gradients come from ``autograd`` or from a function, named as in ``entry``; false: it has
    # none. Not declared: autograd if possible.
    backward: bool | str | None = None
    sources: tuple[str, ...] = ()  # patterns of its source files (``matches_pattern``)
    override: tuple[Override, ...] = ()  # exceptions; later ones win

    def __post_init__(self) -> None:
        super().__post_init__()
        how = self.backward
        if how is True or (isinstance(how, str) and how != AUTOGRAD and ":" not in how):
            raise ValueError(
                f'backward={json.dumps(how)} must be "autograd", FILE.py::NAME, '
                "package.module:NAME or false."
            )
        for pattern in self.sources:
            if wrong := pattern_mistake(pattern):
                raise ValueError(f"sources: {pattern!r} {wrong}.")
        # An override's arithmetic is checked here because only the whole table has the dtypes.
        places = {f"override[{i}].": each for i, each in enumerate(self.override)}
        for place, limits in {"": self, **places}.items():
            try:
                limits.arithmetic.check(self.dtypes or ("bf16",))
            except ValueError as error:
                raise ValueError(f"{place}arithmetic: {error}") from None

    def limits(self, problem: Problem, device: str = "cpu") -> Limits:
        """Return the limits for ``problem``: each field from the last matching override with it."""
        limits = {name: getattr(self, name) for name in Limits.__struct_fields__}
        for override in self.override:
            if override.when.holds(problem, device):
                # Arithmetic is merged field by field in ``arithmetic_changes``.
                fields = {name: getattr(override, name) for name in limits if name != "arithmetic"}
                limits |= {name: value for name, value in fields.items() if value is not None}
        return Limits(**limits)

    def arithmetic_changes(self, problem: Problem, device: str = "cpu") -> dict[str, Any]:
        """Return changes to the convention's arithmetic by the names of ``Arithmetic``'s fields."""
        changes = self.arithmetic.changes()
        for override in self.override:
            if override.when.holds(problem, device):
                changes |= override.arithmetic.changes()
        return changes

    def refuses(self, problem: Problem, device: str = "cpu") -> str | None:
        """Return why the table excludes ``problem``, in one line; None if it does not."""
        return next(filter(None, _exclusions(self.limits(problem, device), problem)), None)

    def declares(self, problem: Problem, device: str = "cpu") -> bool:
        """Return whether the table declares that the kernel accepts every part of ``problem``.

        The kernel may refuse what its table does not mention.
        """
        # A table cannot declare gradients with a loss of LSE, with sinks, with respect to tensors
        # that score mods read, or of empty rows that are NaN.
        undeclarable = problem.dlse or problem.sink or problem.dcaptured
        silent = undeclarable or self.empty_row == "nan"
        gradients = not problem.backward or (bool(self.backward) and not silent)
        return gradients and all(
            reason == "" for reason in _exclusions(self.limits(problem, device), problem)
        )


# ------------------------------------------------------------------ a Problem within a table


def family(spec: Spec) -> str:
    """Return a table's name for a mod: its own, ``composition``, or ``any`` for a file's mod."""
    if spec.parts and spec.name not in _ALIGNED:
        return COMPOSITION
    return ANY if "::" in spec.name else spec.name


def _is_among(value: object, allowed: object) -> bool:
    if allowed is None:
        return True
    listed = allowed if isinstance(allowed, tuple) else (allowed,)
    return value in {ALIASES.get(each, each) if isinstance(each, str) else each for each in listed}


def _exclusions(limits: Limits, problem: Problem) -> Iterator[str | None]:
    """Yield why each part of ``problem`` is excluded; "" if declared, None if not mentioned."""
    attention = problem.operation == "attention"
    yield _exclusion(limits.dtypes, problem.dtype, "dtype")
    yield _head_dim_exclusion(limits.head_dims, problem)
    if attention:
        yield _exclusion(limits.masks, family(problem.mask), "mask")
        # A table without ``scores`` does not exclude a Problem without a score mod.
        plain = problem.score == NONE and limits.scores is None
        yield "" if plain else _exclusion(limits.scores, family(problem.score), "score mod")
    lengths = f"{problem.query} queries and {problem.kv} keys"
    for name, present, what in (
        ("gqa", problem.group > 1, f"{problem.group} query heads to a key head"),
        ("rectangular", attention and problem.query != problem.kv, lengths),
        ("scale", not problem.has_usual_scale, f"scale={problem.scale:g}, other than 1/√head_dim"),
    ):
        declared = getattr(limits, name)
        if not present or declared:
            yield ""
        else:
            yield None if declared is None else f"{what}: its table says {name} = false"
    multiple = limits.length_multiple or 1
    uneven = any(length % multiple for length in (problem.query, problem.kv))
    yield f"{lengths}: its table says length_multiple = {multiple}" if uneven else ""
    longest = {"max_query": problem.query, "max_rows": problem.query * problem.group}
    longest["max_kv"] = problem.kv
    for name, length in longest.items():
        most = getattr(limits, name)
        long = most is not None and length > most
        yield f"length {length}: its table says {name} = {most}" if long else ""


def _exclusion(allowed: tuple[str, ...] | None, name: str, what: str) -> str | None:
    """Return why ``name`` is excluded; "" if it is allowed, None if nothing is declared."""
    if allowed is None:
        return None
    # ``none`` is an alias of the full mask and also the name of the absent score mod.
    if {ANY, name} & {*allowed, *(ALIASES.get(each, each) for each in allowed)}:
        return ""
    return f"{what} {name} is not declared: its table has {', '.join(allowed) or 'none'}"


def _head_dim_exclusion(allowed: tuple[HeadDim, ...] | str | None, problem: Problem) -> str | None:
    if allowed is None:
        return None
    if isinstance(allowed, str) or problem.operation == "softmax":
        return ""
    pairs = [each if isinstance(each, tuple) else (each, each) for each in allowed]
    if (problem.head_dim, problem.value_dim) in pairs:
        return ""
    listed = ", ".join("/".join(map(str, dict.fromkeys(pair))) for pair in pairs) or "none"
    dims = f"head_dim={problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        dims += f" value_dim={problem.value_dim}"
    return f"{dims} is not declared: its table has {listed}"


# ------------------------------------------------------------------ reading


def read_table(table: object, what: str) -> Capabilities:
    """Return the Capabilities of a table from a file or an entry point, strictly checked.

    Args:
        what: The table's place, which begins every error: ``pyproject.toml: kernels.mine``.

    Raises:
        UsageError: for an invalid key, type or name, in one line with the valid ones.
    """
    try:
        return msgspec.convert(table, Capabilities)
    except msgspec.ValidationError as error:
        raise UsageError(f"{what}: {_explain(str(error), table)}") from None


_AT = re.compile(r"(.*) - at `\$\.?([^`]*)`", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_UNKNOWN_NAME = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_TOO_SMALL = re.compile(r"Expected `int` >= (\d+)")
_WORDS = {"object": "table", "array": "list", "str": "text", "int": "whole number"}


def _explain(text: str, table: object) -> str:
    """Return msgspec's error message reworded: the key first, the value, and what is allowed."""
    match = _AT.fullmatch(text)
    text, path = (match[1], match[2]) if match else (text, "")
    if match := _UNKNOWN_FIELD.fullmatch(text):
        key = f"{path}.{match[1]}" if path else match[1]
        return str(UnknownName("key", key, _struct_at(path).__struct_fields__))
    key = re.sub(r"\[\d+\]$", "", path)
    last = key.rpartition(".")[2]
    if match := _UNKNOWN_NAME.fullmatch(text):
        valid = _VALID.get(last) or _VALID[last.removesuffix("s")]
        return str(UnknownName(key, match[1], valid))
    if match := _TOO_SMALL.fullmatch(text):
        value = table
        for part in re.findall(r"[^.\[\]]+", path):
            value = value[int(part) if part.isdigit() else part]  # type: ignore[index]  # msgspec's
        return f"{path}={value} must be at least {match[1]}."
    # Messages of our own ``__post_init__`` need no rewording.
    if not text.startswith(("Expected", "Object")):
        return f"{path}.{text}" if path else text
    # TOML has no null: in msgspec's message it means that the key may be left out.
    plain = re.sub(r" ?\| ?null", "", text.replace("`", ""))
    plain = re.sub(r"\b[a-z]+\b", lambda word: _WORDS.get(word[0], word[0]), plain)
    plain = plain[0].lower() + plain[1:].replace(" | ", " or ")
    return f"{path}: {plain}." if path else f"{plain}."


def _struct_at(path: str) -> type[msgspec.Struct]:
    last = path.rpartition(".")[2]
    if last.startswith("override"):
        return Override
    if last == "when":
        return When
    return DeclaredArithmetic if last == "arithmetic" else Capabilities


# ------------------------------------------------------------------ writing

_ORDER = list(dict.fromkeys(("entry", "convention", *Capabilities.__struct_fields__)))
_ORDER = [name for name in _ORDER if name not in {"arithmetic", "override"}]
"""Plain fields in the order in which they are written; the two tables follow."""


def render_table(table: Capabilities, header: str, comments: Mapping[str, Iterable[str]]) -> str:
    """Return the table as TOML, below ``[header]``.

    Args:
        table: The table to write; fields that are None or empty are left out.
        header: Its place in the file: ``tool.attncheck.kernels.mine``.
        comments: Comment lines above each field by its name; those of ``""`` precede all fields.
    """
    import tomlkit

    document = tomlkit.parse(f"[{header}]\n")
    written: Any = document
    while written:  # the header's keys lead to its empty table
        (written,) = written.values()
    for name in ("", *_ORDER):
        for line in comments.get(name, ()):
            written.add(tomlkit.comment(line))
        _add(written, name, getattr(table, name, None))
    # Last, because TOML would read plain keys after these tables as keys of theirs.
    changes = table.arithmetic.changes()
    if changes:
        written.add(tomlkit.nl())
        written["arithmetic"] = _fill(tomlkit.table(), changes)
    if table.override:
        overrides = tomlkit.aot()
        for each in table.override:
            overrides.append(_override_table(each))
        written.add(tomlkit.nl())
        written["override"] = overrides
    return tomlkit.dumps(document)


def _override_table(override: Override) -> Table:
    import tomlkit

    table = tomlkit.table()
    table.add("when", _fill(tomlkit.inline_table(), msgspec.structs.asdict(override.when)))
    for name in _ORDER:
        _add(table, name, getattr(override, name, None))
    changes = override.arithmetic.changes()
    if changes:
        table.add("arithmetic", _fill(tomlkit.inline_table(), changes))
    return table


def _fill(table: Any, values: Mapping[str, Any]) -> Any:
    for name, value in values.items():
        _add(table, name, value)
    return table


def _add(table: Table | InlineTable, name: str, value: Any) -> None:
    """Add a plain field unless it is None or empty."""
    if isinstance(value, Format) or (value is None and name == "rounds_value_products"):
        value = value.name if value else False  # a table has a format's name, or false for None
    if isinstance(value, tuple):
        value = [list(each) if isinstance(each, tuple) else each for each in value]
    if value is not None and value != []:
        table.add(name, value)


# ------------------------------------------------------------------ patterns of source files


def pattern_mistake(pattern: str) -> str:
    """Return what is wrong with a pattern of ``sources``, as the end of a sentence; or "".

    Patterns are relative to the folder of their TOML file: ``*`` and ``**`` match any folders, a
    folder's name matches everything in it, and ``.`` matches everything.
    """
    if PurePosixPath(pattern).is_absolute() or PureWindowsPath(pattern).is_absolute():
        return "is absolute: it must be relative to the folder of this file"
    if ".." in PurePosixPath(pattern).parts:
        return "has '..': it must be below the folder of this file"
    return ""


def matches_pattern(file: str, pattern: str) -> bool:
    """Return whether ``file`` matches ``pattern``; see ``pattern_mistake`` for patterns."""
    if not pattern:
        return False
    pattern = str(PurePosixPath(pattern))  # ``./a/`` becomes ``a``
    if pattern == "." or fnmatchcase(file, pattern) or file.startswith(f"{pattern}/"):
        return True
    # ``a/**/b`` matches ``a/b`` too.
    return "**/" in pattern and matches_pattern(file, pattern.replace("**/", "", 1))


def pattern_files(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield files below ``folder`` that match, in order; none if the pattern is invalid.

    Hidden folders are only searched if the pattern begins with their names.
    """
    if not pattern or pattern_mistake(pattern):
        return
    # Start at the last folder without wildcards, because the whole repository may be large.
    start = folder
    for part in PurePosixPath(pattern).parts:
        if set("*?[") & set(part):
            break
        start /= part
    below = _files_below(start) if start.is_dir() else [start] if start.is_file() else []
    for path in below:
        if matches_pattern(path.relative_to(folder).as_posix(), pattern):
            yield path


def _files_below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        # Changed in place so that os.walk skips other folders: ``.git`` may hold most of the files.
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (path for name in sorted(names) if (path := Path(root, name)).is_file())
