"""Problem (what to compute) and Case (a question about it): data, JSON both ways, short ids."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from attncheck.core.errors import ProblemError, require_known
from attncheck.core.formats import DTYPES, FORMATS, Dtype, dtype_named, fp32
from attncheck.core.mod_spec import FULL, GENERATOR, NONE, Dimensions, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.distributions import Sizes, distribution_named, scores_of
from attncheck.mods import library
from attncheck.mods.signatures import MaskMod, ScoreMod

__all__ = ["Case", "Problem"]

OPERATIONS = ("attention", "softmax")
SOFTMAX_DTYPES = ("fp32", "fp16", "bf16", "fp64")
LARGEST_HEAD_DIM = 256
USUAL_SCALE = float("nan")
"""This object stands for 1/√head_dim; a Problem replaces it by that number."""
SINK_LOGITS = ("", "above", "below", "equal", "absent")
"""Positions of sinks: drawn among a row's scores, far above or below them all, at 0, the score of
a key of zeros, or at −∞. Not at +∞: subtracting the largest score would give NaN in any softmax."""
_LARGEST_SEED = 2**63 - 1
_SIZES = ("batch", "heads", "kv_heads", "query", "kv", "head_dim", "value_dim")
# Fields of attention that a softmax lacks, with their values in a softmax.
_ATTENTION_ONLY: dict[str, Any] = {
    "head_dim": 0,
    "value_dim": 0,
    "scale": 1.0,
    "mask": FULL,
    "score": NONE,
    "sink": False,
    "sink_logits": "",
    "paging": None,
    "backward": False,
    "dlse": False,
    "dcaptured": False,
}
# Fields that older versions lack. At their defaults they are left out of JSON to keep ids.
_SINCE = ("operation", "sink", "sink_logits", "paging", "backward", "dlse", "dcaptured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One call of a kernel, described without its tensors.

    Attention: ``out[b, h, i] = Σ_j softmax_j(score(scale · q[b, h, i] · k[b, g, j])) v[b, g, j]``
    over the keys j that the mask lets row i see, with g = h // (heads / kv_heads).

    Softmax: ``out[b, h, i, j] = softmax_j(x[b, h, i, j])`` of scores ``(batch, heads, query, kv)``.
    It has no head_dim, value_dim (both 0), scale (1), mask or score mod, and no fp8.

    Attributes:
        operation: ``attention`` or ``softmax``.
        batch: Sequences.
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of ``heads`` (default: ``heads``).
        query: Query length.
        kv: Key and value length (default: ``query``); the two may differ.
        head_dim: Columns of q and k, 1–256 (default: 64).
        value_dim: Columns of v and out, 1–256 (default: ``head_dim``).
        dtype: A name of ``formats.DTYPES``; fp64 has the numbers before rounding to any other
            dtype, and is for oracles only.
        mask: The keys that a row sees.
        score: Function applied to a score before the softmax.
        scale: Factor of q·k, rounded to fp32, of any sign (default: 1/√head_dim).
        sink: Whether each head has a logit that takes part in the softmax as one more key of
            value 0, which every row sees; LSE includes it. Scale, mask and score mod do not apply
            to it.
        sink_logits: Position of the sinks, a name of ``SINK_LOGITS``.
        paging: Layout of keys and values in memory; None if they are contiguous. It changes no
            number of the result.
        backward: Whether gradients are computed too: of a loss with respect to q, k and v (and
            the sink), given its gradient with respect to out. Not in fp8, nor with pages.
        dlse: Whether that loss depends on LSE too; needs ``backward``. A row that sees no key has
            an LSE of −∞ for all inputs: no gradient passes through it.
        dcaptured: Whether to compute the loss's gradient with respect to the float tensors that
            the score mod captures; needs ``backward``.
        distribution: A name of ``distributions.DISTRIBUTIONS``.
        seed: Seed of the draw.

    Raises:
        ProblemError: for an invalid size, number or mod.
        UnknownName: for a dtype, distribution or mod that is not known.
    """

    operation: str = "attention"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 0
    query: int
    kv: int = 0
    head_dim: int = 0
    value_dim: int = 0
    dtype: str = "bf16"
    mask: Spec = FULL
    score: Spec = NONE
    scale: float = USUAL_SCALE
    sink: bool = False
    sink_logits: str = ""
    paging: Paging | None = None
    backward: bool = False
    dlse: bool = False
    dcaptured: bool = False
    distribution: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        require_known("operation", [self.operation], OPERATIONS)
        dtype_named(self.dtype)
        distribution_named(self.distribution)
        self._default("kv_heads", self.heads)
        self._default("kv", self.query)
        if self.operation == "softmax":
            self._check_softmax()
            return
        self._default("head_dim", 64)
        self._default("value_dim", self.head_dim)
        # Sizes come first, since other checks depend on them; mods last, as checks build them.
        self._check_sizes(_SIZES)
        self._check_options()
        self._check_gradients()
        usual = self.scale is USUAL_SCALE
        # −0 becomes +0, so that equal numbers have equal ids.
        self._set("scale", fp32(1.0 / math.sqrt(self.head_dim) if usual else self.scale) + 0.0)
        library.check_mask(self.mask, self.dimensions)
        library.check_score(self.score, self.dimensions)
        if self.dcaptured:
            library.check_captures(self.score, self.dimensions)
        self._set("score", library.in_fp32(self.score))  # masks have whole numbers only

    @property
    def has_usual_scale(self) -> bool:
        """Whether the scale is the default, 1/√head_dim; a softmax has no other."""
        return self.operation == "softmax" or self.scale == fp32(1.0 / math.sqrt(self.head_dim))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def _default(self, name: str, value: float) -> None:
        if getattr(self, name) == 0:
            self._set(name, value)

    def _check_softmax(self) -> None:
        if self.scale is USUAL_SCALE:
            self._set("scale", 1.0)
        for name, softmax_value in (_ATTENTION_ONLY | {"kv_heads": self.heads}).items():
            value = getattr(self, name)
            if value != softmax_value:
                text = str(value) if isinstance(value, Spec) else repr(value)
                raise ProblemError(f"{name}={text} has no meaning for softmax.")
            self._set(name, softmax_value)  # 0.0 and False equal 0 but would change the id
        self._check_sizes(tuple(name for name in _SIZES if name not in _ATTENTION_ONLY))
        if self.dtype not in SOFTMAX_DTYPES:
            able = ", ".join(name for name in SOFTMAX_DTYPES if DTYPES[name].measured)
            raise ProblemError(f"softmax has no dtype {self.dtype!r}: choose from {able}.")
        scores_of(self.distribution)

    def _check_sizes(self, names: tuple[str, ...]) -> None:
        """Raise ProblemError for invalid sizes, seed, or numbers of heads and key heads."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ProblemError(f"{name}={value!r} must be a whole number of at least 1.")
        if self.heads % self.kv_heads:
            raise ProblemError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}: "
                "each key head serves the same number of query heads."
            )
        for name in ("head_dim", "value_dim"):
            if getattr(self, name) > LARGEST_HEAD_DIM:
                raise ProblemError(f"{name}={getattr(self, name)} must be 1–{LARGEST_HEAD_DIM}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ProblemError(f"seed={self.seed!r} must be a whole number.")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ProblemError(f"seed={self.seed} must be from 0 to 2**63 − 1.")

    def _check_options(self) -> None:
        """Raise ProblemError for an invalid scale, sink or paging."""
        fmt, scale = FORMATS["fp32"], self.scale
        # A scale that fp32 rounds to 0 is rejected.
        if scale is not USUAL_SCALE and not (
            _is_number(scale) and (scale == 0 or fmt.subnormal_spacing <= abs(scale) <= fmt.max)
        ):
            raise ProblemError(f"scale={scale!r} must be a number in the range of fp32.")
        if not isinstance(self.sink, bool):
            raise ProblemError(f"sink={self.sink!r} must be true or false.")
        if self.sink_logits not in SINK_LOGITS:
            names = ", ".join(SINK_LOGITS[1:])
            raise ProblemError(f"sink_logits={self.sink_logits!r} must be one of {names}.")
        if self.sink_logits and not self.sink:
            raise ProblemError(
                f"sink_logits={self.sink_logits!r} has no meaning without sink=True."
            )
        if self.paging is not None and not isinstance(self.paging, Paging):
            raise ProblemError(f"paging={self.paging!r} must be a Paging or None.")

    def _check_gradients(self) -> None:
        """Raise ProblemError for gradients that are not supported."""
        gradients = {name: getattr(self, name) for name in ("backward", "dlse", "dcaptured")}
        for name, value in gradients.items():
            if not isinstance(value, bool):
                raise ProblemError(f"{name}={value!r} must be true or false.")
        for name, value in gradients.items():
            if value and not self.backward:
                raise ProblemError(f"{name}=True has no meaning without backward=True.")
        if self.backward and self.formats.scaled:
            raise ProblemError(
                f"there are no gradients in {self.dtype}: nothing says which descales they have."
            )
        if self.backward and self.paging is not None:
            raise ProblemError("there are no gradients of keys in pages.")

    @property
    def formats(self) -> Dtype:
        """The number formats of ``dtype``."""
        return DTYPES[self.dtype]

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def sizes(self) -> Sizes:
        """The sizes of the tensors."""
        return Sizes(**{name: getattr(self, name) for name in _SIZES})

    @property
    def dimensions(self) -> Dimensions:
        """Index ranges of the mask and the score mod."""
        return Dimensions(batch=self.batch, heads=self.heads, query=self.query, kv=self.kv)

    def mask_mod(self, device: str = "cpu") -> MaskMod:
        """Return the mask as a FlexAttention callable with its captured tensors on ``device``."""
        return library.build_mask(self.mask, self.dimensions, device)

    def score_mod(self, device: str = "cpu") -> ScoreMod:
        """Return the score mod as a FlexAttention callable with captured tensors on ``device``."""
        return library.build_score(self.score, self.dimensions, device)

    def replace(self, **changes: Any) -> Problem:
        """Return this Problem with some fields changed; the new one is checked."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, which ``from_json`` reads."""
        values = ((each, getattr(self, each.name)) for each in dataclasses.fields(self))
        return {
            # Specs and Paging are objects of their own in JSON.
            each.name: value.to_json() if isinstance(value, Spec | Paging) else value
            for each, value in values
            if each.name not in _SINCE or value != each.default
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Return the Problem that ``to_json`` wrote; raises ProblemError on anything else."""
        if not isinstance(data, Mapping):
            raise ProblemError(f"a problem is a JSON object, not {data!r}.")
        unknown = sorted(set(data) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ProblemError(f"a problem has no field {unknown[0]!r}.")
        if "query" not in data:
            raise ProblemError("a problem needs its query length.")
        mods = {name: Spec.from_json(data[name]) for name in ("mask", "score") if name in data}
        paging = data.get("paging")
        paged = {} if paging is None else {"paging": Paging.from_json(paging)}
        return cls(**{**data, **mods, **paged})

    @property
    def id(self) -> str:
        """Ten letters and digits that identify this Problem on every machine."""
        return short_id(self.to_json())

    @property
    def shape(self) -> str:
        """The sizes in one line: ``B1 H4/2 Q128 K96 D64`` (``D64/32`` with another value_dim).

        For a softmax, with rows and columns: ``B1 H4 R128 C96``.
        """
        if self.operation == "softmax":
            return f"B{self.batch} H{self.heads} R{self.query} C{self.kv}"
        heads = str(self.heads) if self.group == 1 else f"{self.heads}/{self.kv_heads}"
        dims = "/".join(str(dim) for dim in dict.fromkeys((self.head_dim, self.value_dim)))
        return f"B{self.batch} H{heads} Q{self.query} K{self.kv} D{dims}"

    def __str__(self) -> str:
        softmax = self.operation == "softmax"
        parts = (
            self.dtype,
            self.operation if softmax else str(self.mask),
            str(self.score) if self.score != NONE else "",
            f"sink {self.sink_logits}".rstrip() if self.sink else "",
            str(self.paging) if self.paging else "",
            "backward" if self.backward else "",
            "dLSE" if self.dlse else "",
            "dcaptured" if self.dcaptured else "",
            self.shape,
            self.distribution,
            f"seed {self.seed}",
            "" if self.has_usual_scale else f"scale {self.scale:g}",
        )
        return " ".join(part for part in parts if part)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001  (IPython's)
        printer.text(str(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A Problem and a question about it, which together reproduce a check.

    Attributes:
        problem: The Problem to compute.
        question: ``compare`` (against exact attention), or the name of a relation or a probe.
        parameters: Parameters of the question.
        generator: Version of the generator that draws the inputs; part of the id, since another
            version may draw other bits.
    """

    problem: Problem
    question: str = "compare"
    parameters: Mapping[str, int | float] = field(default_factory=dict)
    generator: int = GENERATOR

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, which ``from_json`` reads."""
        question = {"question": self.question, "parameters": dict(self.parameters)}
        return {"problem": self.problem.to_json(), **question, "generator": self.generator}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """Return the Case that ``to_json`` wrote.

        Raises ProblemError on anything else, and on a case of another version of the generator.
        """
        if not isinstance(data, Mapping) or "problem" not in data:
            raise ProblemError("a case is a JSON object with a problem.")
        # Another version of the generator draws other bits, which this one cannot reproduce.
        generator = data.get("generator", GENERATOR)
        if generator != GENERATOR:
            raise ProblemError(
                f"the case was drawn by generator {generator}; this version draws {GENERATOR}."
            )
        question, parameters = data.get("question", "compare"), data.get("parameters", {})
        if not isinstance(question, str):
            raise ProblemError(f"a case's question is a name, not {question!r}.")
        if not isinstance(parameters, Mapping) or not all(map(_is_number, parameters.values())):
            raise ProblemError(f"a case's parameters are numbers by name, not {parameters!r}.")
        problem = Problem.from_json(data["problem"])
        return cls(problem=problem, question=question, parameters=dict(parameters))

    @property
    def id(self) -> str:
        """Ten letters and digits that identify this Case on every machine."""
        return short_id(self.to_json())

    def __str__(self) -> str:
        numbers = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.question}{f'({numbers})' if numbers else ''}: {self.problem}"

    _repr_pretty_ = Problem._repr_pretty_


def short_id(data: dict[str, Any]) -> str:
    """Return ten base-32 digits (50 bits) of the SHA-256 of the canonical JSON."""
    # Canonical JSON has no spaces and sorted keys, so that ids are the same on every machine.
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return base64.b32encode(hashlib.sha256(text.encode()).digest())[:10].decode().lower()


def _is_number(value: object) -> bool:
    """Return whether ``value`` is a real number but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def head_arrangement(problem: Problem) -> str:
    """Return ``MHA``, ``GQA`` or ``MQA``; empty for a softmax, which has no key heads."""
    if problem.operation == "softmax":
        return ""
    if problem.kv_heads == problem.heads:
        return "MHA"
    return "MQA" if problem.kv_heads == 1 else "GQA"


# Float64 products per second of the exact result: one thread of a CPU made 1.2e10 (8192 rows and
# keys, November 2026); a GPU's tensor cores make thousands of times as many.
_RATES = {"cpu": 1e10, "cuda": 1e13}
_MOST_HOURS = 1.0


def check_size(problem: Problem, device: str) -> None:
    """Raise ProblemError if inputs do not fit, or the exact result would take over an hour.

    Only inputs and outputs in float64 count: neither the oracle nor a fused kernel holds all scores
    of a head. A kernel that does hold them runs out of memory in its own process, which reports it.
    """
    dims = problem.head_dim + problem.value_dim
    numbers = dims * (problem.query * problem.heads + problem.kv * problem.kv_heads)
    if problem.operation == "softmax":
        numbers = 2 * problem.heads * problem.query * problem.kv
    # A backward also has a gradient for each number.
    needed = 8 * problem.batch * numbers * (2 if problem.backward else 1)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ProblemError(
            f"shape {problem.shape} needs {needed / 2**30:.0f} GiB for inputs and outputs in "
            f"float64; this machine has {available / 2**30:.0f} GiB."
        )
    pairs = problem.batch * problem.heads * problem.query * problem.kv
    products = 2 * pairs * dims * (3 if problem.backward else 1)
    hours = products / _RATES[device] / 3600
    if hours > _MOST_HOURS:
        where = "CPU" if device == "cpu" else "GPU"
        raise ProblemError(
            f"shape {problem.shape} has {pairs:.1e} pairs of a row and a key, whose exact result "
            f"would take some {hours:,.0f} h on this {where}: ask with fewer rows, keys or heads."
        )


# ------------------------------------------------------------ parameters of a question

Parameters = Mapping[str, int | float]
Allowed = Mapping[str, Sequence[int]]

Promise = Literal["repeat", "batch", "group", "layout", "hidden", "nan"]
"""Promise of a kernel about the bits of its results, beyond being right.

``repeat``: the same call returns the same bits. ``batch``: the bits of a row depend only on its own
sequence and kv head, and not on its place in the batch. ``group``: nor on how many query heads
share that kv head. ``layout``: strides and pages do not change bits. ``hidden``: keys that the mask
hides from a row change no bit of it, even if they overflow. ``nan``: nor if they are NaN, though
0 · NaN is NaN.
"""

PROMISES: tuple[Promise, ...] = ("repeat", "batch", "group", "layout", "hidden", "nan")


def fits_all(problem: Problem) -> None:
    """Return None: the question applies to every Problem."""
    del problem


def no_parameters(problem: Problem) -> Allowed:
    """Return an empty mapping: the question has no parameters."""
    del problem
    return {}


def check_parameters(question: str, parameters: Parameters, allowed: Allowed) -> None:
    """Raise ProblemError unless ``parameters`` has all ``allowed`` names, with allowed values."""
    # A missing parameter is an error too: a default could change the meaning of an old report.
    if set(parameters) != set(allowed):
        needed = ", ".join(allowed) or "none"
        raise ProblemError(f"{question} has parameters {dict(parameters)}: it needs {needed}.")
    for name, value in parameters.items():
        if value not in allowed[name]:
            raise ProblemError(f"{question}.{name}={value} must be one of {list(allowed[name])}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What can be asked of a kernel, the Problems that it applies to, and its parameters."""

    name: str
    summary: str  # What is true of a right kernel, in one line; failures quote it.
    # Problem → why the question does not apply to it, in one line; None if it does.
    unfit: Callable[[Problem], str | None] = fits_all
    # Problem → the values that each parameter may have, smallest first.
    allowed: Callable[[Problem], Allowed] = no_parameters

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raise ProblemError unless the question applies to ``problem`` with ``parameters``."""
        reason = self.unfit(problem)
        if reason:
            raise ProblemError(f"{self.name} says nothing of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))
