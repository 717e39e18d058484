"""Other projects' acceptance rules, applied to the problems that a gate asks.

Read in November 2026. Every rule gets the float64 truth in place of the peer's own reference, which
can only help it. Their literals decide nothing of ours. Of gradients: ``gradient_peers``.

=================  ===============================================================================
allclose(1e-2)     triton.testing.assert_close's defaults: atol 1e-2, rtol 0
2×                 Dao-AILab/flash-attention, tests: max error ≤ 2× (3× with softcap) that of the
                   same formula in the kernel's own dtype, + 2 max |(ref + 0.3 − 0.3) − ref|
1.1× mean          pytorch/pytorch, test/inductor/test_flex_attention.py: mean error ≤ 1.1× (10× in
                   fp32) that of eager flex_attention in the same dtype
=================  ===============================================================================

As in ``peers``, with the float64 truth in place of the peer's own reference. flash-attention
asks its rule of 16-bit gradients only; here it is asked in fp32 and tf32 too.

=================  ===============================================================================
allclose(1e-2)     triton.testing.assert_close's defaults: atol 1e-2, rtol 0
2×                 Dao-AILab/flash-attention, hopper/test_flash_attn.py: max error ≤ 2× (with
                   softcap 3× and 3e-4 more) that of the same formula in the kernel's own dtype,
                   + 2 max |(ref + 0.3 − 0.3) − ref|
1.1× mean          pytorch/pytorch, test/inductor/test_flex_attention.py, _check_out_and_grad: mean
                   error ≤ 1.1× (10× in fp32) that of eager attention in the same dtype
=================  ===============================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from attncheck import oracles
from attncheck.conventions.call_tensors import attention_mask
from attncheck.conventions.torch_arithmetic import fp32_products
from attncheck.core.formats import FORMATS, round_to
from attncheck.mods import library
from attncheck.probes import PROBES
from attncheck.records.fault_scores import PeerVerdict
from attncheck.subjects.ideal import Ideal, Index, slope
from attncheck.verify.executor import Execution, Failure, InProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attncheck.capabilities.subject import Subject
    from attncheck.core.outputs import Outputs, TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Case

    Gradients = dict[TensorName, Tensor]

__all__ = [
    "ALLCLOSE",
    "FORWARD_RULES",
    "GRADIENT_RULES",
    "PeerGradients",
    "PeerReference",
    "PeerRules",
    "RecordingExecutor",
    "elementwise_gradient_rule",
    "elementwise_rule",
    "mean_rule",
    "scores_after_mod",
    "times_rule",
]


ALLCLOSE = dict.fromkeys(("fp32", "fp16", "bf16"), (1e-2, 0.0))
"""atol and rtol by the output's dtype."""

_CAPPED = 3.0  # flash-attention's factor in place of 2 where the scores have a cap


@dataclass(frozen=True)
class PeerReference:
    """What a peer knows of a problem before it sees a kernel's outputs.

    Attributes:
        inputs: The tensors.
        truth: Out and LSE in float64.
    """

    inputs: Inputs
    truth: Outputs

    @cached_property
    def out(self) -> torch.Tensor:
        """The truth in the output's dtype."""
        output = self.inputs.problem.formats.output
        return round_to(self.truth.out, output).to(output.torch_dtype)

    @cached_property
    def magnitude(self) -> torch.Tensor:
        """Σ p |v|, float64 like out."""
        return oracles.truth(self.inputs.replace(v=_size(self.inputs.v))).out

    @cached_property
    def unfused(self) -> torch.Tensor:
        """flash-attention's attention_ref(upcast=False, reorder_ops=True): each result rounded."""
        q, k, v = self._operands
        scale = self.inputs.problem.scale
        products = self._product(q, self._rounded(k * scale).mT)
        return self._weighted(self._rounded(scores_after_mod(self.inputs, products)), v)

    @cached_property
    def eager(self) -> torch.Tensor:
        """flex_attention's eager formula: q·k in the dtype, softmax in fp32."""
        q, k, v = self._operands
        products = self._product(q, k.mT) * self.inputs.problem.scale
        return self._weighted(scores_after_mod(self.inputs, products), v)

    @cached_property
    def _operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (self._rounded(x.float()) for x in self.inputs.promoted())
        group = self.inputs.problem.group
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.inputs.problem.formats.output.torch_dtype).float()

    def _product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """A matrix product as the dtype has it, rounded to it."""
        if self.inputs.problem.dtype == "tf32":
            rows, columns = (Ideal().operand(x, FORMATS["tf32"]) for x in (rows, columns))
        with fp32_products("ieee"):
            return self._rounded(rows @ columns)

    def _weighted(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = attention_mask(self.inputs.problem, str(self.inputs.device))
        scores = torch.where(seen, scores, -torch.inf)
        if (sink := self.inputs.sink) is not None:
            beside = sink.float()[:, None, None].expand(*scores.shape[:3], 1)
            p = torch.softmax(torch.cat([scores, beside], -1), -1)[..., :-1]
        else:
            p = torch.softmax(scores, -1)
        p = self._rounded(torch.nan_to_num(p))
        if self.inputs.problem.formats.scaled:  # FlashAttention-3: intermediate_dtype
            p = Ideal().operand(p, self.inputs.problem.formats.weights)
        return self._product(p, v)


def scores_after_mod(inputs: Inputs, products: torch.Tensor) -> torch.Tensor:
    """``products`` (batch, heads, query, kv) through the score mod of the problem."""
    problem = inputs.problem
    if problem.score == library.NONE:
        return products
    sizes = (problem.batch, problem.heads, problem.query, problem.kv)
    indices = [
        torch.arange(size, device=products.device).view([-1 if i == n else 1 for i in range(4)])
        for n, size in enumerate(sizes)
    ]
    mod = problem.score_mod(str(products.device))
    return mod(products, *indices).to(products.dtype)


def _size(values: torch.Tensor) -> torch.Tensor:
    return values.float().abs().to(values.dtype)


def elementwise_rule(
    table: dict[str, tuple[float, float]],
) -> Callable[[Outputs, PeerReference], bool]:
    """|got − expected| ≤ atol + rtol |expected| by dtype; NaN is never close."""

    def accepts(got: Outputs, given: PeerReference) -> bool:
        output = given.inputs.problem.formats.output.name
        close = [_close(got.out, given.out, table[output])]
        if got.lse is not None and given.truth.lse is not None:
            close.append(_close(got.lse, given.truth.lse.float(), table["fp32"]))
        return all(close)

    return accepts


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float]) -> bool:
    atol, rtol = tolerance
    return torch.allclose(got.double(), expected.double(), atol=atol, rtol=rtol)


def times_rule(factor: float) -> Callable[[Outputs, PeerReference], bool]:
    """Max error ≤ ``factor`` × that of ``Given.unfused``, and a little more."""

    def accepts(got: Outputs, given: PeerReference) -> bool:
        ref = given.out
        floor = 2 * ((ref + 0.3 - 0.3) - ref).abs().max().double()
        allowed = factor * (given.unfused.to(ref.dtype) - ref).abs().max().double() + floor
        return bool((got.out - ref).abs().max().double() <= allowed)

    return accepts


def mean_rule(got: Outputs, given: PeerReference) -> bool:
    """Mean error ≤ 1.1× (10× in fp32) that of ``Given.eager``."""
    factor = 10.0 if given.out.dtype == torch.float32 else 1.1
    error, reference = ((x.double() - given.truth.out).abs().mean() for x in (got.out, given.eager))
    return bool(error <= factor * reference)


def _twice(got: Outputs, given: PeerReference) -> bool:
    capped = "softcap" in {part.name for part in given.inputs.problem.score.walk()}
    return times_rule(_CAPPED if capped else 2.0)(got, given)


FORWARD_RULES: dict[str, Callable[[Outputs, PeerReference], bool]] = {
    "allclose(1e-2)": elementwise_rule(ALLCLOSE),
    "2×": _twice,
    "1.1× mean": mean_rule,
}
"""Those of which a report of faults tells."""


_COMPARED: tuple[TensorName, ...] = ("dq", "dk", "dv")


@dataclass(frozen=True)
class PeerGradients:
    """What a peer knows of a problem before it sees a kernel's gradients.

    Attributes:
        inputs: The tensors.
        truth: Gradients in float64.
    """

    inputs: Inputs
    truth: Outputs

    @cached_property
    def exact(self) -> Gradients:
        """The truth in the storage dtype; a sink's gradient, which no peer asks about, is not."""
        fmt = self.inputs.problem.formats.output
        given = self.truth.gradients()
        return {name: round_to(given[name], fmt).to(fmt.torch_dtype) for name in _COMPARED}

    @cached_property
    def unfused(self) -> Gradients:
        """Autograd of attention_ref(upcast=False, reorder_ops=True): each result is rounded."""
        inputs, problem = self.inputs, self.inputs.problem
        assert inputs.dout is not None
        q, k, v = (self._rounded(x.float()) for x in (inputs.q, inputs.k, inputs.v))
        k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
        scaled, dout = self._rounded(k * problem.scale), inputs.dout.float()
        p, slopes = self._weights(self._product(q, scaled.mT))
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

    def _weights(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """P without a sink, and the slopes of the score mod."""
        inputs, problem = self.inputs, self.inputs.problem
        slopes = torch.ones_like(scores)
        if problem.score != library.NONE:
            sizes = (problem.batch, problem.heads, problem.query, problem.kv)
            indices = (torch.arange(n, device=scores.device) for n in sizes)
            shaped = (
                x.view([-1 if i == n else 1 for i in range(4)]) for n, x in enumerate(indices)
            )
            b, h, row, key = shaped
            mod = problem.score_mod(str(scores.device))
            slopes = slope(mod, scores, Index(b=b, h=h, q_idx=row, kv_idx=key))
            scores = self._rounded(mod(scores, b, h, row, key).to(scores.dtype))
        scores = torch.where(attention_mask(problem, str(scores.device)), scores, -torch.inf)
        if inputs.sink is None:
            return self._rounded(torch.nan_to_num(torch.softmax(scores, -1))), slopes
        sink = inputs.sink[:, None, None].expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat([scores, sink], -1), -1)
        return self._rounded(torch.nan_to_num(p[..., :-1])), slopes

    def _of_keys(self, gradient: Tensor) -> Tensor:
        """Summed over the heads of a group, in the storage dtype at last."""
        problem = self.inputs.problem
        batch, _, keys, dim = gradient.shape
        parts = gradient.reshape(batch, problem.kv_heads, problem.group, keys, dim)
        return self._rounded(parts.sum(2))

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.inputs.problem.formats.output.torch_dtype).float()

    def _product(self, rows: Tensor, columns: Tensor) -> Tensor:
        if self.inputs.problem.dtype == "tf32":
            rows, columns = (Ideal().operand(x, FORMATS["tf32"]) for x in (rows, columns))
        with fp32_products("ieee"):
            return self._rounded(rows @ columns)


def elementwise_gradient_rule(
    table: dict[str, tuple[float, float]],
) -> Callable[[Outputs, PeerGradients], bool]:
    """|got − expected| ≤ atol + rtol |expected| by dtype; NaN is never close."""

    def accepts(got: Outputs, given: PeerGradients) -> bool:
        atol, rtol = table[given.inputs.problem.formats.output.name]
        mine = got.gradients()
        return all(
            torch.allclose(mine[name].double(), exact.double(), atol=atol, rtol=rtol)
            for name, exact in given.exact.items()
        )

    return accepts


def _twice_of_gradient_peers(got: Outputs, given: PeerGradients) -> bool:
    capped = "softcap" in {part.name for part in given.inputs.problem.score.walk()}
    factor, more = (3.0, 3e-4) if capped else (2.0, 0.0)
    mine = got.gradients()

    def accepts(name: TensorName, ref: Tensor) -> bool:
        floor = 2 * ((ref + 0.3 - 0.3) - ref).abs().max().double() + more
        allowed = factor * _largest(given.unfused[name].to(ref.dtype), ref) + floor
        return bool(_largest(mine[name], ref) <= allowed)

    return all(accepts(name, ref) for name, ref in given.exact.items())


def _largest(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().max().double()


def _mean(got: Outputs, given: PeerGradients) -> bool:
    factor = 10.0 if given.inputs.problem.formats.output.name == "fp32" else 1.1
    mine, exact = got.gradients(), given.truth.gradients()

    def accepts(name: TensorName) -> bool:
        error, reference = (
            (x[name].double() - exact[name]).abs().mean() for x in (mine, given.unfused)
        )
        return bool(error <= factor * reference)

    return all(accepts(name) for name in _COMPARED)


GRADIENT_RULES: dict[str, Callable[[Outputs, PeerGradients], bool]] = {
    "allclose(1e-2)": elementwise_gradient_rule(ALLCLOSE),
    "2×": _twice_of_gradient_peers,
    "1.1× mean": _mean,
}


class RecordingExecutor(InProcess):
    """Calls a kernel in this process, and keeps what the last question's first call gave."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: tuple[Inputs, Execution | Failure] | None = None

    def run(self, subject: Subject, inputs: Inputs, **how: Any) -> Execution | Failure:
        """As ``InProcess``."""
        given = super().run(subject, inputs, **how)
        if self.heard is None:
            self.heard = inputs, given
        return given

    def forget(self) -> None:
        """The next call is the first one."""
        self.heard = None


class PeerRules:
    """Counts, rule by rule, up to the first problem where it catches the fault.

    A rule that refuses the right kernel on the same problem has caught nothing there: nobody would
    keep a test that fails whatever is tested.

    Args:
        right: The kernel without the fault.
    """

    def __init__(self, right: Subject) -> None:
        self._right = right
        self._said = {rule: PeerVerdict(rule=rule) for rule in FORWARD_RULES}

    @property
    def said(self) -> tuple[PeerVerdict, ...]:
        """What each said so far."""
        return tuple(self._said.values())

    def hear(self, case: Case, heard: tuple[Inputs, Execution | Failure] | None) -> None:
        """Asks those that have caught nothing yet.

        Of a plain problem of attention alone, that is one call and what comes of it: ``compare``,
        or a probe's inputs. What raises, no test of theirs accepts. Of fp8 their rules say nothing
        of gradients.
        """
        plain = case.question == "compare" or case.question in PROBES
        asking = [rule for rule, said in self._said.items() if not said.caught]
        if not plain or case.problem.operation != "attention" or heard is None or not asking:
            return
        inputs, given = heard
        if isinstance(given, Failure) and given.kind == "refused":
            return
        beside = _Beside(inputs)
        refused = beside.refused(given, asking)
        alarms = beside.refused(self._by_right(inputs), list(refused)) if refused else set()
        for rule in asking:
            said = self._said[rule]
            self._said[rule] = PeerVerdict(
                rule=rule,
                problems=said.problems + 1,
                caught=rule in refused - alarms,
                alarms=said.alarms + (rule in alarms),
            )

    def _by_right(self, inputs: Inputs) -> Execution | Failure:
        executor = InProcess()
        said = executor.refusal(self._right, inputs.problem, inputs.device.type)
        if said is not None:
            return executor.run(Ideal(), inputs)
        return executor.run(self._right, inputs)


class _Beside:
    """What the rules know of one problem."""

    def __init__(self, inputs: Inputs) -> None:
        truth = oracles.truth(inputs)
        self._forward = PeerReference(inputs, truth)
        gradients = inputs.problem.backward and not inputs.problem.formats.scaled
        self._backward = PeerGradients(inputs, truth) if gradients else None

    def refused(self, given: Execution | Failure, rules: list[str]) -> set[str]:
        """Those of ``rules`` that do not accept what a kernel gave."""
        if isinstance(given, Failure):
            return set(rules)
        outputs = given.outputs
        found = {rule for rule in rules if not FORWARD_RULES[rule](outputs, self._forward)}
        if self._backward is not None:
            accepts = GRADIENT_RULES
            found |= {r for r in set(rules) - found if not accepts[r](outputs, self._backward)}
        return found
