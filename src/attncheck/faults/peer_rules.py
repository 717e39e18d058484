"""Acceptance rules of other projects' tests, applied to the problems of a gate.

The rules were read in November 2026. Each gets the float64 truth in place of the peer's own
reference, which can only help it. No verdict of attncheck's depends on their numbers.
flash-attention applies its rule to 16-bit gradients only; here it is applied in fp32 and tf32 too.

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

_CAPPED = 3.0  # flash-attention's factor with softcap, in place of 2
_MORE_OF_CAPPED_GRADIENTS = 3e-4
_COMPARED: tuple[TensorName, ...] = ("dq", "dk", "dv")  # No peer tests a sink's gradient.


@dataclass(frozen=True)
class PeerReference:
    """Inputs and exact result of a problem, and the references that peers' rules compute."""

    inputs: Inputs  # the tensors
    truth: Outputs  # out, LSE and gradients in float64

    @property
    def compares_gradients(self) -> bool:
        """Return whether there are gradients to compare; the rules have none in fp8."""
        problem = self.inputs.problem
        return problem.backward and not problem.formats.scaled

    @property
    def is_capped(self) -> bool:
        """Return whether the scores have a softcap."""
        return any(part.name == "softcap" for part in self.inputs.problem.score.walk())

    @cached_property
    def out(self) -> Tensor:
        """Return the true out in the output's dtype."""
        # A peer compares in the kernel's own dtype.
        output = self.inputs.problem.formats.output
        return round_to(self.truth.out, output).to(output.torch_dtype)

    @cached_property
    def gradients(self) -> dict[TensorName, Tensor]:
        """Return the true gradients in the storage dtype."""
        fmt, exact = self.inputs.problem.formats.output, self.truth.gradients()
        return {name: round_to(exact[name], fmt).to(fmt.torch_dtype) for name in _COMPARED}

    @cached_property
    def magnitude(self) -> Tensor:
        """Return Σ p |v|, float64 with the shape of out."""
        v = self.inputs.v
        return oracles.truth(self.inputs.replace(v=v.float().abs().to(v.dtype))).out

    @cached_property
    def unfused(self) -> Tensor:
        """Return out of flash-attention's attention_ref(upcast=False, reorder_ops=True)."""
        q, k, v = self._operands
        products = self._multiply(q, self._round(k * self.inputs.problem.scale).mT)
        return self._attend(self._round(self._apply_score_mod(products)), v)

    @cached_property
    def eager(self) -> Tensor:
        """Return out of flex_attention's eager formula: q·k in the dtype, softmax in fp32."""
        q, k, v = self._operands
        products = self._multiply(q, k.mT) * self.inputs.problem.scale
        return self._attend(self._apply_score_mod(products), v)

    @cached_property
    def unfused_gradients(self) -> dict[TensorName, Tensor]:
        """Return the gradients of ``unfused`` by autograd's steps, each result rounded."""
        inputs, problem = self.inputs, self.inputs.problem
        assert inputs.dout is not None, "asked of what has gradients"
        q, k, v = self._operands
        scaled, dout = self._round(k * problem.scale), inputs.dout.float()
        scores, slopes = self._multiply(q, scaled.mT), torch.ones(())
        if problem.score != NONE:
            mod, at = problem.score_mod(str(scores.device)), self._indices
            slopes = slope(mod, scores, Index(b=at[0], h=at[1], q_idx=at[2], kv_idx=at[3]))
            scores = self._round(self._apply_score_mod(scores))
        p = self._round(self._softmax(scores))
        dp = self._multiply(dout, v.mT)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        if inputs.dlse is not None:
            ds = ds + p * inputs.dlse[..., None]
        ds = self._round(self._round(ds) * slopes)
        dk = self._round(self._multiply(ds.mT, q) * problem.scale)
        return {
            "dq": self._multiply(ds, scaled),
            "dk": self._sum_group(dk),
            "dv": self._sum_group(self._multiply(p.mT, dout)),
        }

    @cached_property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._round(x.float()) for x in self.inputs.promoted())
        group = self.inputs.problem.group
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    @cached_property
    def _indices(self) -> tuple[Tensor, ...]:
        problem, device = self.inputs.problem, self.inputs.device
        sizes = (problem.batch, problem.heads, problem.query, problem.kv)
        return torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij")

    def _apply_score_mod(self, products: Tensor) -> Tensor:
        """Apply the problem's score mod to scores ``(batch, heads, query, kv)``."""
        problem = self.inputs.problem
        if problem.score == NONE:
            return products
        mod = problem.score_mod(str(products.device))
        return mod(products, *self._indices).to(products.dtype)

    def _softmax(self, scores: Tensor) -> Tensor:
        """Return P without the sink's column, 0 in rows that see nothing."""
        seen = attention_mask(self.inputs.problem, str(self.inputs.device))
        scores = torch.where(seen, scores, -torch.inf)
        sink = self.inputs.sink
        if sink is None:
            return torch.nan_to_num(torch.softmax(scores, -1))
        column = sink.float()[:, None, None].expand(*scores.shape[:3], 1)
        return torch.nan_to_num(torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1])

    def _attend(self, scores: Tensor, v: Tensor) -> Tensor:
        p = self._round(self._softmax(scores))
        if self.inputs.problem.formats.scaled:  # FlashAttention-3: intermediate_dtype
            p = Ideal().operand(p, self.inputs.problem.formats.weights)
        return self._multiply(p, v)

    def _sum_group(self, gradient: Tensor) -> Tensor:
        """Sum over the heads of a group, and round to the storage dtype."""
        batch, heads, *rest = gradient.shape
        group = self.inputs.problem.group
        return self._round(gradient.view(batch, heads // group, group, *rest).sum(2))

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self.inputs.problem.formats.output.torch_dtype).float()

    def _multiply(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return a matrix product in the arithmetic of the dtype, rounded to the dtype."""
        # tf32 tensors are stored as fp32, and rounded to tf32 for a product.
        if self.inputs.problem.dtype == "tf32":
            rows, columns = (Ideal().operand(x, FORMATS["tf32"]) for x in (rows, columns))
        with fp32_products("ieee"):
            return self._round(rows @ columns)


def _close(got: Tensor, expected: Tensor, tolerance: tuple[float, float]) -> bool:
    atol, rtol = tolerance
    return torch.allclose(got.double(), expected.double(), atol=atol, rtol=rtol)


def _max_error(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().max().double()


def _within(factor: float, got: Tensor, unfused: Tensor, exact: Tensor, more: float = 0.0) -> bool:
    """Return whether max error ≤ ``factor`` × that of the unfused formula, plus a floor."""
    # flash-attention's guard against a floor of 0: the error of a rounding at another magnitude.
    floor = 2 * ((exact + 0.3 - 0.3) - exact).abs().max().double() + more
    allowed = factor * _max_error(unfused.to(exact.dtype), exact) + floor
    return bool(_max_error(got, exact) <= allowed)


Accepts = Callable[[Outputs, PeerReference], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """Another project's conditions to accept a kernel's outputs."""

    forward: Accepts  # for out, and for LSE if the rule compares it
    gradients: Accepts  # for dQ, dK and dV

    def refuses(self, outputs: Outputs, reference: PeerReference) -> bool:
        """Return whether the rule rejects the outputs, or the gradients if it compares them."""
        if not self.forward(outputs, reference):
            return True
        return reference.compares_gradients and not self.gradients(outputs, reference)


def _elementwise(table: dict[str, tuple[float, float]]) -> Rule:
    """Return the rule |got − expected| ≤ atol + rtol |expected| by dtype; NaN is never close."""

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
    """Return the rule max error ≤ ``factor`` × that of the unfused formula, plus a floor."""
    return lambda got, reference: _within(factor, got.out, reference.unfused, reference.out)


def _twice(got: Outputs, reference: PeerReference) -> bool:
    return times_rule(_CAPPED if reference.is_capped else 2.0)(got, reference)


def _twice_gradients(got: Outputs, reference: PeerReference) -> bool:
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


def _mean_gradients(got: Outputs, reference: PeerReference) -> bool:
    dtype = reference.inputs.problem.formats.output.name
    gradients, exact = got.gradients(), reference.truth.gradients()
    unfused = reference.unfused_gradients
    return all(_mean_within(gradients[n], unfused[n], exact[n], dtype) for n in _COMPARED)


RULES: dict[str, Rule] = {
    "allclose(1e-2)": _elementwise(ALLCLOSE),
    "2×": Rule(_twice, _twice_gradients),
    "1.1× mean": Rule(mean_rule, _mean_gradients),
    "torch": _elementwise(TORCH),
    "gpucheck": _elementwise(GPUCHECK),
}
FAULT_RULES = ("allclose(1e-2)", "2×", "1.1× mean")
"""Rules in a report of faults."""
MUTANT_RULES = ("torch", "allclose(1e-2)", "2×", "gpucheck")
"""Rules in a report of mutants."""


def is_plain(case: Case) -> bool:
    """Return whether a case is one call of attention and its outputs, as in peers' tests.

    That is ``compare``, or a probe's inputs.
    """
    one_call = case.question == "compare" or case.question in PROBES
    return one_call and case.problem.operation == "attention"


def refusing_rules(
    result: Execution | Failure, reference: PeerReference, rules: Iterable[str]
) -> set[str]:
    """Return those of ``rules`` that reject a kernel's result; all reject a kernel that raises."""
    if isinstance(result, Failure):
        return set(rules)
    return {rule for rule in rules if RULES[rule].refuses(result.outputs, reference)}


class RecordingExecutor(InProcess):
    """Calls a kernel in this process, and stores the first call since ``forget``."""

    def __init__(self) -> None:
        super().__init__()
        self.first_call: tuple[Inputs, Execution | Failure] | None = None

    def run(self, subject: Subject, inputs: Inputs, **how: Any) -> Execution | Failure:
        """Run the kernel as ``InProcess`` does; store the first call and its result."""
        result = super().run(subject, inputs, **how)
        if self.first_call is None:
            self.first_call = inputs, result
        return result

    def forget(self) -> None:
        """Forget the first call: the next one takes its place."""
        self.first_call = None


class PeerRules:
    """Counts the problems that each rule needs to catch a fault.

    A rule that rejects the right kernel on the same problem has caught nothing there: nobody would
    keep a test that always fails.
    """

    def __init__(self, right: Subject, rules: Iterable[str] = FAULT_RULES) -> None:
        self._right = right
        self._verdicts = {rule: PeerVerdict(rule=rule) for rule in rules}

    @property
    def verdicts(self) -> tuple[PeerVerdict, ...]:
        """Return the verdict of each rule so far."""
        return tuple(self._verdicts.values())

    def apply(self, case: Case, call: tuple[Inputs, Execution | Failure] | None) -> None:
        """Apply the rules that have caught nothing yet to the first call of a question.

        Questions that are not plain (``is_plain``) are ignored.
        """
        rules = [rule for rule, verdict in self._verdicts.items() if not verdict.caught]
        if not is_plain(case) or call is None or not rules:
            return
        inputs, result = call
        # Peers' tests would not use problems that the kernel refuses.
        if isinstance(result, Failure) and result.kind == "refused":
            return
        reference = PeerReference(inputs, oracles.truth(inputs))
        refused = refusing_rules(result, reference, rules)
        # Run the right kernel only if a rule rejects the faulty one.
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
        # A separate executor, so that the recorded call stays the faulty kernel's.
        executor = InProcess()
        refusal = executor.refusal(self._right, inputs.problem, inputs.device.type)
        return executor.run(self._right if refusal is None else Ideal(), inputs)
