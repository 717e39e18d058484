"""Other projects' acceptance rules, applied to the problems that a gate asks, as their files do.

Read in November 2026. Every rule gets the float64 truth in place of the peer's own reference, which
can only help it. Their literals decide nothing of ours. flash-attention asks its rule of 16-bit
gradients only; here it is asked in fp32 and tf32 too.

=================  ===============================================================================
allclose(1e-2)     triton.testing.assert_close's defaults: atol 1e-2, rtol 0
2×                 Dao-AILab/flash-attention, tests and hopper/test_flash_attn.py: max error ≤ 2×
                   (3× with softcap, and 3e-4 more for gradients) that of the same formula in the
                   kernel's own dtype, + 2 max |(ref + 0.3 − 0.3) − ref|
torch              torch.testing.assert_close's defaults by dtype
gpucheck           Akasxh/gpucheck, src/gpucheck/assertions/tolerances.py, _DEFAULT_TOLERANCES
1.1× mean          pytorch/pytorch, test/inductor/test_flex_attention.py: mean error ≤ 1.1× (10× in
                   fp32) that of eager flex_attention in the same dtype
=================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attncheck import oracles
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.mod_spec import NONE
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import TensorName
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case
from attncheck.probes import PROBES
from attncheck.records.fault_scores import PeerVerdict
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.call_tensors import attention_mask
from attncheck.subjects.conventions.torch_arithmetic import fp32_products
from attncheck.subjects.ideal import Ideal, Index, slope
from attncheck.verify.executor import Execution, Failure, InProcess

ALLCLOSE = dict.fromkeys(("fp32", "fp16", "bf16"), (1e-2, 0.0))
"""atol and rtol by the output's dtype."""
TORCH = {"fp32": (1e-5, 1.3e-6), "fp16": (1e-5, 1e-3), "bf16": (1e-5, 1.6e-2)}
GPUCHECK = {"fp32": (1e-4, 1e-4), "fp16": (1e-2, 1e-2), "bf16": (5e-2, 5e-2)}

_CAPPED = 3.0  # flash-attention's factor in place of 2 where the scores have a cap
_MORE_OF_CAPPED_GRADIENTS = 3e-4
_COMPARED: tuple[TensorName, ...] = ("dq", "dk", "dv")  # no peer asks about a sink's gradient


@dataclass(frozen=True)
class PeerReference:
    """Knowledge that a peer has of a problem before it sees a kernel's outputs."""

    inputs: Inputs  # the tensors
    truth: Outputs  # out, LSE and gradients in float64

    @property
    def compares_gradients(self) -> bool:
        """Return whether it has gradients; of fp8 the rules say nothing of them."""
        problem = self.inputs.problem
        return problem.backward and not problem.formats.scaled

    @property
    def is_capped(self) -> bool:
        """Return whether scores have a cap."""
        return any(part.name == "softcap" for part in self.inputs.problem.score.walk())

    @cached_property
    def out(self) -> Tensor:
        """The truth in the output's dtype."""
        # A peer compares in the kernel's own dtype.
        output = self.inputs.problem.formats.output
        return round_to(self.truth.out, output).to(output.torch_dtype)

    @cached_property
    def gradients(self) -> dict[TensorName, Tensor]:
        """The true gradients in the storage dtype."""
        fmt, exact = self.inputs.problem.formats.output, self.truth.gradients()
        return {name: round_to(exact[name], fmt).to(fmt.torch_dtype) for name in _COMPARED}

    @cached_property
    def magnitude(self) -> Tensor:
        """Σ p |v|, float64 like out."""
        v = self.inputs.v
        return oracles.truth(self.inputs.replace(v=v.float().abs().to(v.dtype))).out

    @cached_property
    def unfused(self) -> Tensor:
        """flash-attention's attention_ref(upcast=False, reorder_ops=True): each result rounded."""
        q, k, v = self._operands
        products = self._product(q, self._rounded(k * self.inputs.problem.scale).mT)
        return self._weighted(self._rounded(self._modified(products)), v)

    @cached_property
    def eager(self) -> Tensor:
        """flex_attention's eager formula: q·k in the dtype, softmax in fp32."""
        q, k, v = self._operands
        products = self._product(q, k.mT) * self.inputs.problem.scale
        return self._weighted(self._modified(products), v)

    @cached_property
    def unfused_gradients(self) -> dict[TensorName, Tensor]:
        """Autograd of ``unfused``: each result is rounded."""
        inputs, problem = self.inputs, self.inputs.problem
        assert inputs.dout is not None, "asked of what has gradients"
        q, k, v = self._operands
        scaled, dout = self._rounded(k * problem.scale), inputs.dout.float()
        scores, slopes = self._product(q, scaled.mT), torch.ones(())
        if problem.score != NONE:
            mod, at = problem.score_mod(str(scores.device)), self._indices
            slopes = slope(mod, scores, Index(b=at[0], h=at[1], q_idx=at[2], kv_idx=at[3]))
            scores = self._rounded(self._modified(scores))
        p = self._rounded(self._softmax(scores))
        dp = self._product(dout, v.mT)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        if inputs.dlse is not None:
            ds = ds + p * inputs.dlse[..., None]
        ds = self._rounded(self._rounded(ds) * slopes)
        dk = self._rounded(self._product(ds.mT, q) * problem.scale)
        return {
            "dq": self._product(ds, scaled),
            "dk": self._of_keys(dk),
            "dv": self._of_keys(self._product(p.mT, dout)),
        }

    @cached_property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._rounded(x.float()) for x in self.inputs.promoted())
        group = self.inputs.problem.group
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    @cached_property
    def _indices(self) -> tuple[Tensor, ...]:
        problem, device = self.inputs.problem, self.inputs.device
        sizes = (problem.batch, problem.heads, problem.query, problem.kv)
        return torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij")

    def _modified(self, products: Tensor) -> Tensor:
        """Scores ``(batch, heads, query, kv)`` through the score mod of the problem."""
        problem = self.inputs.problem
        if problem.score == NONE:
            return products
        mod = problem.score_mod(str(products.device))
        return mod(products, *self._indices).to(products.dtype)

    def _softmax(self, scores: Tensor) -> Tensor:
        """P without a sink, 0 in rows that see nothing."""
        seen = attention_mask(self.inputs.problem, str(self.inputs.device))
        scores = torch.where(seen, scores, -torch.inf)
        sink = self.inputs.sink
        if sink is None:
            return torch.nan_to_num(torch.softmax(scores, -1))
        column = sink.float()[:, None, None].expand(*scores.shape[:3], 1)
        return torch.nan_to_num(torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1])

    def _weighted(self, scores: Tensor, v: Tensor) -> Tensor:
        p = self._rounded(self._softmax(scores))
        if self.inputs.problem.formats.scaled:  # FlashAttention-3: intermediate_dtype
            p = Ideal().operand(p, self.inputs.problem.formats.weights)
        return self._product(p, v)

    def _of_keys(self, gradient: Tensor) -> Tensor:
        """Summed over the heads of a group, in the storage dtype at last."""
        batch, heads, *rest = gradient.shape
        group = self.inputs.problem.group
        return self._rounded(gradient.view(batch, heads // group, group, *rest).sum(2))

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.inputs.problem.formats.output.torch_dtype).float()

    def _product(self, rows: Tensor, columns: Tensor) -> Tensor:
        """A matrix product as the dtype has it, rounded to it."""
        # Of fp32 tensors, whose products a GPU computes in tf32 where it is asked to.
        if self.inputs.problem.dtype == "tf32":
            rows, columns = (Ideal().operand(x, FORMATS["tf32"]) for x in (rows, columns))
        with fp32_products("ieee"):
            return self._rounded(rows @ columns)


def _close(got: Tensor, expected: Tensor, tolerance: tuple[float, float]) -> bool:
    atol, rtol = tolerance
    return torch.allclose(got.double(), expected.double(), atol=atol, rtol=rtol)


def _max_error(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().max().double()


def _within(factor: float, got: Tensor, unfused: Tensor, exact: Tensor, more: float = 0.0) -> bool:
    """Return whether max error ≤ ``factor`` × that of the unfused formula, and a little more."""
    # What rounding once more at another size costs: their guard against a floor of 0.
    floor = 2 * ((exact + 0.3 - 0.3) - exact).abs().max().double() + more
    allowed = factor * _max_error(unfused.to(exact.dtype), exact) + floor
    return bool(_max_error(got, exact) <= allowed)


Accepts = Callable[[Outputs, PeerReference], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """How another project accepts a kernel's outputs."""

    forward: Accepts  # of out, and of LSE where it compares it
    gradients: Accepts  # of dQ, dK and dV

    def refuses(self, outputs: Outputs, reference: PeerReference) -> bool:
        """Return whether it does not accept them, gradients too where it speaks of any."""
        if not self.forward(outputs, reference):
            return True
        return reference.compares_gradients and not self.gradients(outputs, reference)


def _elementwise(table: dict[str, tuple[float, float]]) -> Rule:
    """Return |got − expected| ≤ atol + rtol |expected| by dtype; NaN is never close."""

    def forward(got: Outputs, reference: PeerReference) -> bool:
        output = reference.inputs.problem.formats.output.name
        close = _close(got.out, reference.out, table[output])
        if got.lse is None or reference.truth.lse is None:
            return close
        return close and _close(got.lse, reference.truth.lse.float(), table["fp32"])

    def gradients(got: Outputs, reference: PeerReference) -> bool:
        tolerance, own = table[reference.inputs.problem.formats.output.name], got.gradients()
        return all(_close(own[name], x, tolerance) for name, x in reference.gradients.items())

    return Rule(forward, gradients)


def times_rule(factor: float) -> Accepts:
    """Return max error ≤ ``factor`` × that of the unfused formula, and a little more."""
    return lambda got, reference: _within(factor, got.out, reference.unfused, reference.out)


def _twice(got: Outputs, reference: PeerReference) -> bool:
    return times_rule(_CAPPED if reference.is_capped else 2.0)(got, reference)


def _twice_of_gradients(got: Outputs, reference: PeerReference) -> bool:
    factor, more = (_CAPPED, _MORE_OF_CAPPED_GRADIENTS) if reference.is_capped else (2.0, 0.0)
    gradients, unfused = got.gradients(), reference.unfused_gradients
    return all(
        _within(factor, gradients[name], unfused[name], exact, more)
        for name, exact in reference.gradients.items()
    )


def _mean_within(got: Tensor, reference: Tensor, exact: Tensor, dtype: str) -> bool:
    factor = 10.0 if dtype == "fp32" else 1.1
    error, allowed = ((x.double() - exact).abs().mean() for x in (got, reference))
    return bool(error <= factor * allowed)


def mean_rule(got: Outputs, reference: PeerReference) -> bool:
    """Return whether mean error ≤ 1.1× (10× in fp32) that of the eager formula."""
    dtype = "fp32" if reference.out.dtype == torch.float32 else ""
    return _mean_within(got.out, reference.eager, reference.truth.out, dtype)


def _mean_of_gradients(got: Outputs, reference: PeerReference) -> bool:
    dtype = reference.inputs.problem.formats.output.name
    gradients, exact = got.gradients(), reference.truth.gradients()
    unfused = reference.unfused_gradients
    return all(_mean_within(gradients[n], unfused[n], exact[n], dtype) for n in _COMPARED)


RULES: dict[str, Rule] = {
    "allclose(1e-2)": _elementwise(ALLCLOSE),
    "2×": Rule(_twice, _twice_of_gradients),
    "1.1× mean": Rule(mean_rule, _mean_of_gradients),
    "torch": _elementwise(TORCH),
    "gpucheck": _elementwise(GPUCHECK),
}
FAULT_RULES = ("allclose(1e-2)", "2×", "1.1× mean")
"""Those of which a report of faults tells."""
MUTANT_RULES = ("torch", "allclose(1e-2)", "2×", "gpucheck")
"""Those of which a report of mutants tells."""


def is_plain(case: Case) -> bool:
    """Return whether it is one call of attention and what comes of it, as in others' tests.

    That is ``compare``, or a probe's inputs.
    """
    one_call = case.question == "compare" or case.question in PROBES
    return one_call and case.problem.operation == "attention"


def refusing_rules(
    result: Execution | Failure, reference: PeerReference, rules: Iterable[str]
) -> set[str]:
    """Return those of ``rules`` that do not accept what a kernel gave.

    What raises, no test of theirs accepts.
    """
    if isinstance(result, Failure):
        return set(rules)
    return {rule for rule in rules if RULES[rule].refuses(result.outputs, reference)}


class RecordingExecutor(InProcess):
    """Calls a kernel in this process, and keeps what the last question's first call gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first_call: tuple[Inputs, Execution | Failure] | None = None

    def run(self, subject: Subject, inputs: Inputs, **how: Any) -> Execution | Failure:
        """Return what ``InProcess`` does, and keep the first."""
        result = super().run(subject, inputs, **how)
        if self.first_call is None:
            self.first_call = inputs, result
        return result

    def forget(self) -> None:
        """The next call is the first one."""
        self.first_call = None


class PeerRules:
    """Counts, rule by rule, up to the first problem where it catches the fault.

    A rule that refuses the right kernel on the same problem has caught nothing there: nobody would
    keep a test that fails whatever is tested.
    """

    def __init__(self, right: Subject, rules: Iterable[str] = FAULT_RULES) -> None:
        self._right = right
        self._verdicts = {rule: PeerVerdict(rule=rule) for rule in rules}

    @property
    def verdicts(self) -> tuple[PeerVerdict, ...]:
        """Return the verdict of each so far."""
        return tuple(self._verdicts.values())

    def apply(self, case: Case, call: tuple[Inputs, Execution | Failure] | None) -> None:
        """Ask the rules that have caught nothing yet about the first call of a question.

        Of a plain question alone (``is_plain``).
        """
        rules = [rule for rule, verdict in self._verdicts.items() if not verdict.caught]
        if not is_plain(case) or call is None or not rules:
            return
        inputs, result = call
        # What a kernel refuses, no test of theirs would ask.
        if isinstance(result, Failure) and result.kind == "refused":
            return
        reference = PeerReference(inputs, oracles.truth(inputs))
        refused = refusing_rules(result, reference, rules)
        # Asked of rules that refuse alone: the right kernel is run for nothing otherwise.
        alarms = refusing_rules(self._run_right(inputs), reference, refused) if refused else set()
        for rule in rules:
            before = self._verdicts[rule]
            self._verdicts[rule] = PeerVerdict(
                rule=rule,
                problems=before.problems + 1,
                caught=rule in refused - alarms,
                alarms=before.alarms + (rule in alarms),
            )

    def _run_right(self, inputs: Inputs) -> Execution | Failure:
        # One of its own, so that the recorded call stays the faulty kernel's.
        executor = InProcess()
        refusal = executor.refusal(self._right, inputs.problem, inputs.device.type)
        return executor.run(self._right if refusal is None else Ideal(), inputs)
