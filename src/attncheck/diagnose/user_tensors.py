"""Judge the tensors and outputs of a user's own call, without a kernel to call again."""

from __future__ import annotations

import dataclasses
import itertools
import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace as replace_struct

from attncheck.core.declared_arithmetic import Arithmetic, default_arithmetic
from attncheck.core.errors import ProblemError, UsageError
from attncheck.core.formats import DTYPES, FORMATS, Format, round_to
from attncheck.core.mod_spec import FULL, NONE, Dimensions, Entry, Spec
from attncheck.core.outputs import Outputs
from attncheck.diagnose.diagnosis import diagnose_result
from attncheck.diagnose.failing_kernel import LARGEST_DIAGNOSED
from attncheck.inputs import input_tensors
from attncheck.inputs.distributions import DISTRIBUTIONS, Distribution
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import USUAL_SCALE, Case, Problem
from attncheck.judge.probabilistic_bound import MISSED
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES, bias, table_reader
from attncheck.mods.torch_tracer import describe_mod
from attncheck.mods.trace import count_disagreements, trace_mask, trace_score
from attncheck.subjects.capabilities.subject import capability
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, out_of_memory
from attncheck.verify.judging import judge_outputs
from attncheck.verify.second_opinion import disagreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from attncheck.core.judgement import Judgement
    from attncheck.mods.expression import Expression
    from attncheck.records.record import Diagnosis

_DEVICES = ("cpu", "cuda")
_EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)

# A number for each call, so that what is registered by name is not mistaken for another call's.
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, eq=False, kw_only=True)
class UserTensors:
    """A call of attention: its tensors and its other arguments."""

    q: Tensor  # ``(batch, heads, query, head_dim)``, fp32, fp16, bf16 or fp8
    k: Tensor  # ``(batch, kv_heads, kv, head_dim)``, the same dtype
    v: Tensor  # ``(batch, kv_heads, kv, value_dim)``, the same dtype
    # A FlexAttention mask, or a bool tensor that broadcasts to ``(batch, heads, query, kv)``,
    # True where a row sees a key; None where all see all.
    mask: Tensor | Callable[..., Tensor] | None = None
    # As in ``F.scaled_dot_product_attention``: booleans, as ``mask``, or numbers that are added to
    # the scores, −∞ where a row does not see a key.
    attn_mask: Tensor | None = None
    is_causal: bool = False  # row i sees keys up to i, as ``F.scaled_dot_product_attention`` has it
    score_mod: Callable[..., Tensor] | None = None  # a FlexAttention score mod
    scale: float | None = None  # factor of q·k, read as fp32; None for 1/√head_dim
    # Factors of fp8 q, k and v, fp32 ``(batch, kv_heads)`` each; None for 1.
    descale: Descale | tuple[Tensor, Tensor, Tensor] | None = None
    # Each head's logit beside its keys, fp32 ``(heads,)``; None for none.
    sink: Tensor | None = None
    tf32: bool = False  # whether fp32 tensors are multiplied in tf32
    generic: bool = False  # whether the numbers are random, without structure

    @contextmanager
    def inputs(self) -> Iterator[Inputs]:
        """Yield the Inputs; their mask, score mod and distribution are registered meanwhile.

        Raises:
            UsageError: for tensors that are no call of attention, or a mask or score mod that
                cannot be traced; in one line.
        """
        self._check_tensors()
        if self.attn_mask is not None:
            with self._without_attn_mask().inputs() as inputs:
                yield inputs
            return
        with ExitStack() as names:
            name = f"given {next(_NUMBERS)}"
            mask = self._mask(names, name)
            score = NONE
            if self.score_mod is not None:
                self._check_mod("score mod", self.score_mod, trace_score)
                score = _register(names, SCORES, name, _entry(self.score_mod))
            distribution = Distribution(
                name=name, summary="tensors of a call", draw=_refuse_draw, generic=self.generic
            )
            _register(names, DISTRIBUTIONS, name, distribution)
            problem = self._problem().replace(mask=mask, score=score, distribution=name)
            # If they required gradients, autograd would keep all intermediates of the oracle.
            q, k, v = (tensor.detach() for tensor in (self.q, self.k, self.v))
            descale = self._descale(problem)
            yield Inputs(problem=problem, q=q, k=k, v=v, descale=descale, sink=self._sink())

    def _check_tensors(self) -> None:
        for name in ("q", "k", "v"):
            tensor = _require_tensor(name, getattr(self, name))
            if tensor.dim() != 4:
                raise UsageError(
                    f"{name}.shape={tuple(tensor.shape)} must have the axes (batch, heads, length, "
                    "dim)."
                )
            if 0 in tensor.shape:
                raise UsageError(f"{name}.shape={tuple(tensor.shape)} has an empty axis.")
            self._require_own_device(name, tensor)
            _require_strided(name, tensor)
        if self.q.device.type not in _DEVICES:
            able = " or ".join(_DEVICES)
            raise UsageError(f"q.device={self.q.device} must be {able}.")

    def _require_own_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.q.device:
            raise UsageError(f"{name}.device={tensor.device}, but q.device={self.q.device}.")

    def _problem(self) -> Problem:
        batch, heads, query, head_dim = self.q.shape
        return Problem(
            batch=batch,
            heads=heads,
            kv_heads=self.k.shape[1],
            query=query,
            kv=self.k.shape[2],
            head_dim=head_dim,
            value_dim=self.v.shape[3],
            dtype=self._dtype(),
            scale=USUAL_SCALE if self.scale is None else self.scale,
            sink=self.sink is not None,
        )

    def _dtype(self) -> str:
        names = {
            dtype.storage.torch_dtype: name
            for name, dtype in DTYPES.items()
            # tf32 tensors are stored as fp32, so that their dtype cannot tell the two apart.
            if dtype.measured and name != "tf32"
        }
        if self.q.dtype not in names:
            able = _dtype_names(names)
            raise UsageError(f"q.dtype={self.q.dtype} is not known: choose from {able}.")
        return "tf32" if self.tf32 else names[self.q.dtype]

    def _mask(self, names: ExitStack, name: str) -> Spec:
        if self.mask is None:
            return Spec.of("causal") if self.is_causal else FULL
        if self.is_causal:
            raise UsageError("mask and is_causal are given both: let the mask say it.")
        if isinstance(self.mask, torch.Tensor):
            if self.mask.dtype is not torch.bool:
                raise UsageError(
                    f"mask.dtype={self.mask.dtype} must be torch.bool, True where a row sees a "
                    "key; what is added to scores is attn_mask, or a score_mod."
                )
            table = self._table("mask", self.mask)
            return _register(names, MASKS, name, _entry(table_reader(table)))
        self._check_mod("mask", self.mask, trace_mask)
        return _register(names, MASKS, name, _entry(self.mask))

    def _check_mod(
        self, what: str, mod: Callable[..., Tensor], trace: Callable[..., Expression]
    ) -> None:
        """Raise UsageError for a mod that fails at some index, or differs from its trace.

        The oracle calls the mod itself, and would otherwise raise in the middle of its work.
        """
        device, name = str(self.q.device), describe_mod(what, mod)
        expression = trace(mod, device)
        batch, heads, query, _ = self.q.shape
        dimensions = Dimensions(batch=batch, heads=heads, query=query, kv=self.k.shape[2])
        check_index_ranges(expression, dimensions, name)
        others = count_disagreements(expression, mod, dimensions, device=device)
        if others:
            raise ProblemError(
                f"{name} gives other values than its trace at {others} sampled indices: it must be "
                "the same at each call, and for each index by itself."
            )

    def _without_attn_mask(self) -> UserTensors:
        """Return the same call with ``attn_mask`` as a mask and a score mod."""
        mask = _require_tensor("attn_mask", self.attn_mask)
        additive = mask.dtype is not torch.bool
        for name in ("mask", "is_causal", *(["score_mod"] if additive else [])):
            # False is the default of ``is_causal``.
            if getattr(self, name) is not None and getattr(self, name) is not False:
                raise UsageError(f"attn_mask and {name} are given both: let one of them say it.")
        if additive and mask.dtype not in _EXACT_IN_FP32:
            raise UsageError(
                f"attn_mask.dtype={mask.dtype} must be bool, True where a row sees a key, or of "
                f"what is added to the scores {_dtype_names(_EXACT_IN_FP32)}."
            )
        table = self._table("attn_mask", mask)
        if not additive:
            return replace(self, mask=table, attn_mask=None)
        if bool((table.isnan() | table.isposinf()).any()):
            raise UsageError("attn_mask holds NaN or ∞: what is added is finite, or −∞ to hide.")
        seen = ~table.isneginf()
        return replace(
            self,
            mask=None if bool(seen.all()) else seen,
            # With 0 and −∞ alone it is just a mask.
            score_mod=bias(table.float().masked_fill(~seen, 0))
            if bool(table[seen].any())
            else None,
            attn_mask=None,
        )

    def _table(self, name: str, mask: Tensor) -> Tensor:
        scores = (*self.q.shape[:3], self.k.shape[2])
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if len(shape) > 4 or any(a not in {1, b} for a, b in zip(shape, scores, strict=True)):
            raise UsageError(
                f"{name}.shape={tuple(mask.shape)} must broadcast to (batch, heads, query, kv) = "
                f"{scores}."
            )
        return mask.detach().to(self.q.device).reshape(shape)

    def _descale(self, problem: Problem) -> Descale | None:
        if not problem.formats.scaled:
            if self.descale is not None:
                raise UsageError(f"descale is given, but q.dtype={self.q.dtype} has none.")
            return None
        if isinstance(self.descale, Descale):
            return self.descale
        if self.descale is None:
            ones = torch.ones((problem.batch, problem.kv_heads), device=self.q.device)
            return Descale(q=ones, k=ones, v=ones)
        three = isinstance(self.descale, tuple | list) and len(self.descale) == len("qkv")
        if not three or not all(isinstance(scale, torch.Tensor) for scale in self.descale):
            raise UsageError(
                "descale must be three fp32 tensors (batch, kv_heads): of q, of k and of v."
            )
        for name, scale in zip("qkv", self.descale, strict=True):
            self._require_own_device(f"{name}_descale", scale)
        q, k, v = self.descale
        return Descale(q=q, k=k, v=v)

    def _sink(self) -> Tensor | None:
        """Return the sink as fp32, which holds bf16 and fp16 exactly."""
        if self.sink is None:
            return None
        sink = _require_tensor("sink", self.sink)
        if tuple(sink.shape) != self.q.shape[1:2]:
            raise UsageError(
                f"sink.shape={tuple(sink.shape)} must be (heads,) = {tuple(self.q.shape[1:2])}."
            )
        if sink.dtype not in _EXACT_IN_FP32:
            able = _dtype_names(_EXACT_IN_FP32)
            raise UsageError(f"sink.dtype={sink.dtype} is not known: choose from {able}.")
        self._require_own_device("sink", sink)
        if bool((sink.isnan() | sink.isposinf()).any()):
            raise UsageError("sink holds NaN or ∞: a logit is finite, or −∞ for none.")
        return sink.detach().float()


def _require_tensor(name: str, value: object) -> Tensor:
    """Return ``value``; raises UsageError unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} is {type(value).__name__}: it must be a tensor.")
    return value


def _require_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise UsageError(f"{name}.layout={tensor.layout} must be torch.strided.")


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _entry(mod: Callable[..., Tensor]) -> Entry[Any]:
    return Entry(summary="given with the tensors", build=lambda *_: mod, additive=False)


def _register(names: ExitStack, library: dict[str, Any], name: str, entry: object) -> Spec:
    library[name] = entry
    # The libraries belong to the whole process: remove a call's entries after it.
    names.callback(library.pop, name)
    return Spec.of(name)


def _refuse_draw(*_: object) -> Any:
    raise ProblemError("these numbers were given, and cannot be drawn again.")


@dataclass(frozen=True, eq=False, kw_only=True)
class UserOutputs:
    """The outputs of a kernel, and the call that gave them."""

    out: Tensor  # ``(batch, heads, query, value_dim)``
    lse: Tensor | None  # ``(batch, heads, query)``, natural logarithm; None where there is none
    call: dict[str, Any]  # arguments of ``UserTensors``; all None where a problem is given
    # In place of the call: its Inputs, or a Problem whose Inputs are drawn.
    problem: Problem | Inputs | None = None
    # The kernel's arithmetic; None for the usual one of these dtypes on this device.
    arithmetic: Arithmetic | None = None
    generic: bool = False  # whether the tensors are random and without structure

    def judgement(self) -> tuple[Judgement, str]:
        """Return the judgement, and where the oracles that it rests on disagree, if anywhere.

        Raises:
            UsageError: for arguments that are no call of attention, or no outputs of it, and where
                NaN or ∞ reaches the exact result of a row: there is nothing to compare it with.
        """
        with self._evidence() as (result, evidence):
            _check_exact_rows(evidence)
            judgement = judge_outputs(result, evidence)
            output, stored = result.arithmetic.output, str(self.out.dtype).removeprefix("torch.")
            if output.torch_dtype != self.out.dtype:
                judged = f"{judgement.arithmetic}, as every number of the {stored} out is one of it"
                judgement = replace_struct(judgement, arithmetic=judged)
            return judgement, disagreement(judgement, evidence.evidence)

    def diagnosis(self) -> Diagnosis | None:
        """Return the diagnosis; None where there are no findings."""
        with self._evidence() as (result, evidence):
            return diagnose_result(result, evidence)

    def has_more_heads_than_rows(self) -> bool:
        """Return whether q, k and v each have, as if their axes 1 and 2 were exchanged."""
        tensors = [self.call[name] for name in "qkv" if self.call[name] is not None]
        return bool(tensors) and all(one.shape[1] > one.shape[2] > 1 for one in tensors)

    def own_copy(self) -> UserOutputs | None:
        """Return a copy in memory of its own; None where it is too large to be diagnosed."""
        problem = self.problem.problem if isinstance(self.problem, Inputs) else self.problem
        rows = self.out.shape[:3].numel()
        kv = self.call["k"].shape[2] if problem is None else problem.kv
        if rows * kv > LARGEST_DIAGNOSED:
            return None
        try:
            # Copies, because the caller may overwrite the tensors before the diagnosis.
            return replace(
                self,
                out=_copy(self.out),
                lse=_copy(self.lse),
                call={name: _copy(value) for name, value in self.call.items()},
                problem=_copy(self.problem),
            )
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None

    @contextmanager
    def _evidence(self) -> Iterator[tuple[Execution, EvidenceBuilder]]:
        with self._inputs() as inputs:
            yield (
                self._result(inputs),
                EvidenceBuilder(Case(problem=inputs.problem), str(inputs.device), inputs),
            )

    @contextmanager
    def _inputs(self) -> Iterator[Inputs]:
        """Yield the Inputs of the call or problem."""
        if isinstance(self.out, tuple | list):
            kind = type(self.out).__name__
            raise UsageError(
                f"out is {kind}: it must be a tensor; if LSE is in it, give that as lse=."
            )
        _require_tensor("out", self.out)
        if not isinstance(self.arithmetic, Arithmetic | None):
            kind = type(self.arithmetic).__name__
            raise UsageError(f"arithmetic is {kind}: it must be an Arithmetic.")
        if self.problem is None:
            missing = [name for name in "qkv" if self.call[name] is None]
            if missing:
                raise UsageError(f"{missing[0]} is missing: give q, k and v, or problem.")
            tf32 = self.arithmetic is not None and self.arithmetic.products.name == "tf32"
            with UserTensors(**self.call, tf32=tf32, generic=self.generic).inputs() as inputs:
                yield inputs
            return
        # False is the default of ``is_causal``.
        twice = [n for n, value in self.call.items() if value is not None and value is not False]
        if twice:
            raise UsageError(f"problem and {twice[0]} are given both: the problem says it all.")
        if not isinstance(self.problem, Problem | Inputs):
            kind = type(self.problem).__name__
            raise UsageError(f"problem is {kind}: it must be a Problem, or its Inputs.")
        source = self.problem
        if isinstance(source, Problem):
            source = input_tensors.draw_inputs(source, self.out.device)
        yield source.forward()  # The outputs hold no gradients.

    def _result(self, inputs: Inputs) -> Execution:
        """Return the outputs as an Execution, as if a kernel had just given them."""
        problem, arithmetic = inputs.problem, self.arithmetic
        columns = problem.kv if problem.operation == "softmax" else problem.value_dim
        rows = (problem.batch, problem.heads, problem.query)
        output = _output_format("out", self.out, (*rows, columns), inputs)
        output = _format_before_upcast(self.out, output, problem.formats.output)
        if self.lse is not None:
            _output_format("lse", self.lse, rows, inputs)
        if arithmetic is None:
            assumed = default_arithmetic(problem.formats, capability(inputs.device.type))
            # The kernel may have divided P by its sum before rounding it, and have merged a sink
            # with the result of the keys alone.
            splits = 2 if problem.sink else 1
            arithmetic = replace(assumed, output=output, normalised_weights=True, splits=splits)
        elif arithmetic.output != output:
            raise UsageError(
                f"out.dtype={self.out.dtype}, but the arithmetic gives out in "
                f"{arithmetic.output.name}."
            )
        lse = None if self.lse is None else self.lse.detach()
        outputs = Outputs(self.out.detach(), lse)
        return Execution(outputs=outputs, seconds=None, tiling=None, arithmetic=arithmetic)


def _check_exact_rows(evidence: EvidenceBuilder) -> None:
    """Raise UsageError where a row that sees keys has no finite exact result."""
    truth, alive = evidence.truth, evidence.alive
    finite = truth.out.isfinite().all(-1) & evidence.evidence.lse.isfinite()
    bad = int((alive & ~finite).sum())
    if not bad:
        return
    counts = {
        name: int((~tensor.float().isfinite()).sum())
        for name, tensor in evidence.inputs.tensors().items()
        if name != "sink"  # where −∞ means none
    }
    counts_text = ", ".join(f"{n} of {name}" for name, n in counts.items() if n)
    whence = f"{counts_text} are NaN or infinite" if counts_text else "the score mod gives NaN or ∞"
    raise UsageError(
        f"the exact result of {bad} of {int(alive.sum())} rows is not finite, and nothing can be "
        f"compared with it: {whence}. Give finite numbers, or hide such keys by a mask."
    )


def _format_before_upcast(out: Tensor, stored: Format, usual: Format) -> Format:
    """Return the format that out was rounded to: ``stored``, or a shorter one if it was upcast.

    A number that was not rounded to a shorter format fits it by chance with a probability of 2 to
    the power of minus the bits that it lacks. Enough different numbers must fit that all do so by
    chance no more often than ``MISSED``.
    """
    for shorter in (usual, FORMATS["fp32"]):
        lacking = stored.significand - shorter.significand
        if lacking <= 0:
            continue
        numbers = out.detach().double().abs()
        numbers = numbers[numbers.isfinite() & (numbers > 0)]
        if bool((round_to(numbers, shorter) != numbers).any()):
            continue
        if len(torch.unique(numbers)) >= -math.log2(MISSED) / lacking:
            return shorter
    return stored


def _output_format(name: str, value: object, shape: tuple[int, ...], inputs: Inputs) -> Format:
    """Return the format of an output; raise UsageError if it is none of this call."""
    tensor = _require_tensor(name, value)
    if tuple(tensor.shape) != shape:
        fact = f"{name}.shape={tuple(tensor.shape)}, but should be {shape}"
        if tensor.dim() == 4 and tuple(tensor.transpose(1, 2).shape) == shape:
            fact += ": transpose axes 1 and 2 of it, or of q, k and v; (batch, heads, length, dim)"
        raise UsageError(f"{fact}.")
    if tensor.device != inputs.device:
        raise UsageError(f"{name}.device={tensor.device}, but should be {inputs.device}.")
    _require_strided(name, tensor)
    for fmt in FORMATS.values():
        # fp8 formats saturate; no kernel gives its result in one.
        if fmt.torch_dtype == tensor.dtype and not fmt.saturates:
            return fmt
    raise UsageError(f"{name}.dtype={tensor.dtype} is no dtype of a result.")


def _copy(value: Any) -> Any:
    """Return a copy with tensors of its own, strides preserved; other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return tuple(map(_copy, value))
    if isinstance(value, Inputs | Descale):
        each = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return replace(value, **{name: _copy(part) for name, part in each.items()})
    return value
