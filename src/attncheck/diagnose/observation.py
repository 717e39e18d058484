"""Observe a failure without a confirmed fault model, and infer the family of its fault.

The kernel is called again: without a mask, with fewer keys, with unit vectors as values (so that
each output column is a key's weight), with parts of an input negated, and with its keys sorted.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.errors import ProblemError
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.diagnose.confirmation import independent_cases, nearest_taken
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case
from attncheck.judge.fault_explanation import FaultPrediction

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from attncheck.core.tensor_names import TensorName
    from attncheck.diagnose.explanations import Response
    from attncheck.diagnose.failing_kernel import FailingKernel
    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.fault_models.fault_model import Family
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem

_SECONDS = 0.5  # time after which no further length is tried
_INDEPENDENT = 6  # independent problems that the kernel is called on
_LENGTHS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 129)
_TILE = 16  # keys in the smallest tile that kernels use
_WHOLE_TILES = 128  # a multiple of this many rows or keys is whole tiles of every size
_HALF = 0.5  # A key's count is certain where its doubt is smaller.
_OF_ONE_SIGN = 0.5  # share of errors' mean in their mean magnitude that rounding does not have
_MOST_CALLS = 4  # calls to measure the weights of all keys
_ROUNDING = FORMATS["bf16"].unit_roundoff
_LEAST_OF_FP16 = FORMATS["fp16"].subnormal_spacing
_FEW_ROWS = 8  # A head with fewer rows may be right in all of them by chance.
_PLAINLY = 16.0  # An error this many times the rounding allowance is no rounding error.
_FEW_SCORES = 64  # The errors of fewer scores may look like a smooth function by chance.
_SOME = 0.05  # share of the scores that must be plainly off
_SMOOTH = 0.25  # roughness of errors that are a function of the score; that of noise exceeds 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Facts on a failure that no fault model was confirmed for, and the family they suggest."""

    family: Family | None = None
    facts: tuple[str, ...] = ()
    sign: str = ""  # key in ``SIGNS`` of a fault that the facts prove


def observe(response: Response, kernel: FailingKernel, *, varies: bool) -> Observations:
    """Return facts on where and when a kernel is wrong, and the fault family they suggest.

    Args:
        response: The kernel's wrong response.
        varies: Whether the result changes with the contents of free memory.
    """
    case = kernel.case
    facts = [nan_everywhere(response) or _wrong_places(response)]
    facts += ["what it gives changes with what free memory holds"] if varies else []
    needed, changes = set(), []
    for name, (words, change) in _simplifications(case.problem).items():
        if responses := _responses_with(change, kernel):
            wrong = any(run.error.proven for run in responses)
            changes.append(f"{'wrong as well' if wrong else 'right'} {words}")
            needed |= set() if wrong else {name}
    facts += sorted(changes)  # what makes it right tells more
    runs = [response]
    for other in itertools.islice(independent_cases(case, kernel.takes), _INDEPENDENT):
        runs += kernel.ask(other)
    runs = [run for run in runs if run.error.proven]
    # Count the keys of the failure, and of the other wrong run with the most keys.
    runs[1:] = sorted(runs[1:], key=_measured_keys, reverse=True)
    counts = [_KeyCounts.of(run, kernel) for run in runs[:2]]
    facts += next((line for one in counts if one is not None and (line := one.facts())), [])
    facts.append(_shortest_failure(kernel))
    family = _common_family(runs, counts)
    if varies:
        family = "memory"
    elif case.question.startswith("strides_"):
        family = "mapping"
    # A wrong score mod changes weights as missing rescaling or missing keys would.
    elif family is None or (family != "gradient" and needed & {"score", "sink"}):
        family = next((family for name, family in _BY_FEATURE.items() if name in needed), family)
    if "score" in needed and (cap_family := _cap_family(runs[0], kernel)):
        sign = "softcap-of-another-function" if cap_family == "score" else ""
        return Observations(family=cap_family, facts=tuple(filter(None, facts)), sign=sign)
    if family in {None, "mapping"} and (fact := _misplacement(runs, kernel)):
        family, facts = "mapping", [*facts, fact]
    if family is None and (fact := _order_effect(kernel)):
        family, facts = "rescaling", [*facts, fact]
    return Observations(family=family, facts=tuple(filter(None, facts)))


def _cap_family(run: Response, kernel: FailingKernel) -> Family | None:
    """Return “score” if softcap computes another function, “precision” if it only rounds a score.

    The weights are measured in fp32 if the kernel supports it: they reveal a score best there.
    """
    score = kernel.case.problem.score
    if score.name != "softcap":
        return None
    cap: Any = score.values["cap"]
    for one in [*_responses_with({"dtype": "fp32"}, kernel), run]:
        counts = _KeyCounts.of(one, kernel) if one.error.proven else None
        errors = None if counts is None else counts.score_errors()
        if errors is not None and errors[1] < _SMOOTH:
            return "score"
        # Errors below bf16's rounding error that are unlike those of neighbouring scores.
        if errors is not None and one.call.problem.dtype == "fp32":
            return "precision" if errors[0] < _ROUNDING * cap and errors[1] > 2 * _SMOOTH else None
    return None


def _common_family(runs: Sequence[Response], counts: Sequence[_KeyCounts | None]) -> Family | None:
    """Return the family that all wrong runs agree on: a single run may fit several by chance."""
    pairs = itertools.zip_longest(runs, counts)
    families = {_own_family(run, counts=one) for run, one in pairs}
    if len(families) > 1:
        families -= {None, *_FALLBACK_FAMILIES}
    family = families.pop() if len(families) == 1 else None
    # With runs of one shape only, a wrong mask may happen to affect just the empty rows.
    alike = len({run.call.shape for run in runs}) == 1
    return None if family == "empty rows" and alike else family


def _own_family(run: Response, *, counts: _KeyCounts | None) -> Family | None:
    """Return the family that the numbers of a single run suggest."""
    error, alive = run.error, run.call.parts.lse > -torch.inf
    if not error.forward:
        return "gradient"
    beyond = {name: error.beyond(name) for name in error.wrong}
    off = [x.any(-1) if x.dim() > alive.dim() else x for x in beyond.values()]
    rows = torch.stack(off).any(0)
    if not bool((rows & alive).any()):
        # Where no row sees a key, a kernel that ignores the mask is wrong in the same rows.
        return "empty rows" if bool(alive.any()) else None
    if set(error.wrong) == {"lse"}:
        return "precision" if _is_lse_rounded(run) else "lse"
    if _is_wrong_by_heads(run.call, rows):
        return "mapping"
    wrong = [error.got[name][off & _broadcast_rows(off, alive)] for name, off in beyond.items()]
    family = None if counts is None else counts.family()
    if not all(bool(x.isfinite().all()) for x in wrong):
        # An overflow, if all wrong numbers are NaN or infinite, and no input is that may be read.
        alone = all(not bool(x.isfinite().any()) for x in wrong)
        return "overflow" if alone and is_finite(run.call) else family
    return family or _row_factor_family(run)


def _is_lse_rounded(run: Response) -> bool:
    """Return whether errors of LSE are no larger than roundings to 16 bits, and of either sign.

    Scores that were rounded show in LSE, where out rounds to 16 bits itself.
    """
    call, alive = run.call, run.call.parts.lse > -torch.inf
    off = (run.error.got["lse"] - call.parts.lse)[alive]
    largest = torch.where(call.seen, torch.maximum(call.s.abs(), call.x.abs()), 0.0).amax(-1)[alive]
    small = bool((off.abs() <= _ROUNDING * (1.0 + largest)).all())
    return (
        small and len(off) >= _FEW_ROWS and bool(off.mean().abs() < _OF_ONE_SIGN * off.abs().mean())
    )


def _is_wrong_by_heads(call: ExactAttention, rows: Tensor) -> bool:
    """Return whether each head is wrong in all rows or in none, and the first head in none.

    A fault in scores, weights or tiles would affect every sequence and head alike.
    """
    problem = call.problem
    alike = bool((call.seen == call.seen[:1, :1]).all()) and problem.score == NONE
    if not alike or problem.sink or problem.formats.scaled or rows.shape[2] < _FEW_ROWS:
        return False
    some, every = rows.any(-1).flatten(), rows.all(-1).flatten()
    return bool((some == every).all()) and bool(some.any()) and not bool(some[0])


def _row_factor_family(run: Response) -> Family | None:
    """Return “factor” or “rescaling” where each output row is the exact one times a number.

    Problems with a padded last tile, hidden keys or a sink are left out: these shrink rows, too.
    """
    problem, call, error = run.call.problem, run.call, run.error
    plain = problem.mask == FULL and not problem.sink and problem.kv % _WHOLE_TILES == 0
    if not plain or "out" not in error.wrong or problem.value_dim < _TILE:
        return None
    got, exact, allowed = error.got["out"], call.parts.out, error.allowed["out"]
    # A row of zeros is 0 times any row, and says nothing of a factor.
    if bool((got == 0).all(-1).any()):
        return None
    row_factors = (got * exact).sum(-1, keepdim=True) / exact.square().sum(-1, keepdim=True)
    common_factor = row_factors.median()

    def fits(factor: Tensor) -> bool:
        most = allowed * factor.abs().clamp(min=1.0)
        return bool(((got - factor * exact).abs() <= most).all())

    return "factor" if fits(common_factor) else "rescaling" if fits(row_factors) else None


def _broadcast_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return ``rows`` in a shape that broadcasts to ``tensor``, out or LSE."""
    return rows[..., None] if tensor.dim() > rows.dim() else rows


def is_finite(call: ExactAttention) -> bool:
    """Return whether all numbers that the kernel may read are finite."""
    problem, inputs = call.problem, call.inputs.tensors().values()
    # Pages that belong to no sequence hold NaN.
    return problem.paging is None and all(bool(x.float().isfinite().all()) for x in inputs)


_FALLBACK_FAMILIES: tuple[Family, ...] = ("empty rows", "lse", "gradient", "overflow")
"""Families inferred from which tensors or rows are right; any other family outweighs them."""

_BY_FEATURE: dict[str, Family] = {
    "score": "score",
    "sink": "score",
    "batch": "mapping",
    "heads": "mapping",
}
"""The family of a fault that vanishes when a feature is removed from the problem."""


def _simplifications(problem: Problem) -> dict[str, tuple[str, dict[str, object]]]:
    """Return changes that simplify the problem, as name → (words, change of fields)."""
    if problem.backward or problem.operation != "attention":
        return {}
    one_group = problem.kv_heads == 1
    causal: dict[str, object] = {"mask": Spec.of("causal")}
    narrow = problem.dtype != "fp32" and not problem.formats.scaled
    square = problem.mask == FULL and problem.query == problem.kv
    lengths: dict[str, object] = {"query": problem.query, "kv": problem.kv}
    step = math.lcm(_WHOLE_TILES, problem.paging.size if problem.paging else 1)
    # A single row stays one: kernels decode in other code.
    rows = problem.query if problem.query == 1 else -(-problem.query // _WHOLE_TILES) * _WHOLE_TILES
    keys = -(-problem.kv // step) * step
    whole: dict[str, object] = {"query": rows, "kv": keys}
    table: tuple[tuple[bool, str, str, dict[str, object]], ...] = (
        (
            problem.score != NONE,
            "score",
            "without the score mod",
            {"score": NONE, "dcaptured": False},
        ),
        (problem.sink, "sink", "without the sink", {"sink": False}),
        (problem.mask != FULL, "mask", "without the mask", {"mask": FULL}),
        (square, "causal", "with a causal mask", causal),
        (problem.paging is not None, "paging", "without pages", {"paging": None}),
        (problem.batch > 1, "batch", "with one sequence alone", {"batch": 1}),
        (not one_group, "heads", "with one head alone", {"heads": 1, "kv_heads": 1}),
        (one_group and problem.heads > 1, "group", "with one query head alone", {"heads": 1}),
        (narrow, "dtype", "in fp32", {"dtype": "fp32"}),
        (whole != lengths, "tail", f"with whole tiles ({rows} × {keys})", whole),
    )
    return {name: (words, change) for holds, name, words, change in table if holds}


def _responses_with(change: dict[str, object], kernel: FailingKernel) -> Sequence[Response]:
    case = kernel.case
    try:
        other = case.problem.replace(**change)
        return kernel.ask(Case(problem=other, question=case.question, parameters=case.parameters))
    except ProblemError:
        return ()


def _shortest_failure(kernel: FailingKernel) -> str:
    """Return, in words, from how many keys on the kernel is wrong; tries ``_LENGTHS`` in order."""
    problem, most_right, end = kernel.case.problem, 0, time.monotonic() + _SECONDS
    for kv in _LENGTHS:
        if kv >= problem.kv or time.monotonic() > end:
            break
        change: dict[str, object] = {"kv": kv}
        if problem.query == problem.kv:
            change["query"] = kv
        runs = _responses_with(change, kernel)
        if any(run.error.proven for run in runs):
            return f"wrong from {kv} keys on, right with {most_right}" if most_right else ""
        most_right = kv if runs else most_right
    return f"right with up to {most_right} keys, wrong with {problem.kv}" if most_right else ""


def nan_everywhere(response: Response) -> str:
    """Return a fact on tensors in which every element is NaN; "" if a wrong one has any other."""
    error = response.error
    if not error.wrong or not all(bool(error.got[name].isnan().all()) for name in error.wrong):
        return ""
    fact = f"every element of {', '.join(error.wrong)} is NaN"
    remedy = "look for memory never written, 0/0, or −∞ − −∞"
    return f"{fact} on finite inputs: {remedy}" if is_finite(response.call) else fact


def _wrong_places(response: Response) -> str:
    """Return, in words, which tensors are wrong, and in which sequences, heads, rows or keys."""
    parts = []
    for name in response.error.wrong:
        beyond = response.error.beyond(name)
        axes = ("sequence", "head", "row" if name in {"out", "lse", "dq"} else "key", "column")
        if beyond.dim() < 3 or not bool(beyond.any()):
            continue
        where = []
        for axis, word in enumerate(axes[: beyond.dim()]):
            others = [n for n in range(beyond.dim()) if n != axis]
            is_wrong = beyond.any(dim=others) if others else beyond
            if not bool(is_wrong.all()):
                index = is_wrong.nonzero().flatten()
                index = response.call.rows[index] if word == "row" and name != "dq" else index
                where.append(f"{word}s {_ranges(index.tolist())}")
        parts.append(f"{name} is wrong in {', '.join(where)}" if where else f"{name} is wrong")
    return "; ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``numbers`` as ranges such as ``0–31, 64``, at most the first four."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in spans[:4]]
    return ", ".join([*texts, "…"] if spans[4:] else texts)


def _measured_keys(run: Response) -> int:
    """Return the number of keys whose weights can be measured: all of them, or 0."""
    problem = run.call.problem
    fits = problem.operation == "attention" and run.call.whole and run.error.forward
    return problem.kv if fits and problem.kv <= _MOST_CALLS * problem.value_dim else 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _KeyCounts:
    """How often a kernel counts each key in each row; in a right one 1 if the row sees it, else 0.

    With unit vectors as values the output is the weights. ``counts (batch, heads, rows, kv)`` are
    weights ÷ exp(score − LSE), the weight of a key that counts once; ``doubt`` bounds their error.
    """

    counts: Tensor
    doubt: Tensor
    seen: Tensor
    response: Response
    with_lse: bool  # without LSE a missing tile looks as if the other tiles weighed more
    other_sum: bool  # whether LSE is wrong or missing

    @classmethod
    def of(cls, response: Response, kernel: FailingKernel) -> _KeyCounts | None:
        exact, error, problem = response.call, response.error, response.call.problem
        columns = problem.value_dim
        if not _measured_keys(response):
            return None
        inputs = exact.inputs.forward()
        weights, allowed = [], []
        for start in range(0, problem.kv, columns):
            keys = min(columns, problem.kv - start)
            v = torch.zeros(inputs.v.shape)
            v[:, :, start : start + keys, :keys] = torch.eye(keys)
            run = kernel.call(inputs.replace(v=v.to(inputs.v.dtype)))
            if run is None or not bool(run.error.got["out"].isfinite().all()):
                return None
            unit = run.call.v[:, :, start, :1, None]  # in fp8 times its descale
            weights.append(run.error.got["out"][..., :keys] / unit)
            allowed.append(run.error.allowed["out"][..., :keys] / unit)
        dead, all_weights = exact.parts.dead, torch.cat(weights, -1)
        lse = error.got.get("lse", exact.parts.lse)
        # Rows in which no key counts: all weights are 0, and LSE is −∞.
        empty = dead | ((lse == -torch.inf) & (all_weights == 0).all(-1))
        if not bool(lse[~empty].isfinite().all()):
            return None
        odds, own = (
            (torch.where(without, 0.0, x)[..., None] - exact.s).exp()
            for x, without in ((lse, empty), (exact.parts.lse, dead))
        )
        counts = all_weights * odds
        # A weight that is too large also has a larger rounding error than the exact one.
        doubt = torch.cat(allowed, -1) * torch.maximum(odds, own)
        if "lse" in error.got:
            doubt = doubt + counts.abs() * error.allowed["lse"].expm1()[..., None]
        # The allowance of a weight that must be 0 is 0: use the row's largest relative doubt.
        usual = torch.where(exact.seen & (doubt < _HALF), doubt, 0.0).amax(-1, keepdim=True)
        doubt = torch.maximum(doubt, counts.abs() * usual)
        is_known = ~dead[..., None] & doubt.isfinite()
        with_lse = "lse" in error.got
        return cls(
            counts=counts,
            doubt=torch.where(is_known, doubt, torch.inf),
            seen=exact.seen.expand(counts.shape),
            response=response,
            with_lse=with_lse,
            other_sum="lse" in error.wrong or not with_lse,
        )

    def _whole_counts(self) -> Tensor | None:
        """Return the counts as whole numbers; None if they are not whole."""
        sure = self.doubt < _HALF
        near = (self.counts - self.counts.round()).abs() <= self.doubt
        if not bool(sure.any()) or not bool(near[sure].all()):
            return None
        whole = torch.where(sure, self.counts.round(), self.seen.double()).clamp(min=0.0)
        # Whole counts must also reproduce the kernel's result with the original values.
        call = self.response.call
        parts = call.softmax(call.s + whole.log(), sink=call.sink)
        predicted = FaultPrediction(name="", tensors=parts.outputs.tensors())
        return whole if self.response.error.agrees(predicted) else None

    def facts(self) -> list[str]:
        """Return, in words, which keys count too often and which too rarely."""
        whole = self._whole_counts()
        if whole is None:
            return []
        kinds = {
            "do not count": (whole == 0) & self.seen,
            "count although they are hidden": (whole > 0) & ~self.seen,
            "count more than once": (whole > 1) & self.seen,
        }
        return [
            f"keys {_ranges(where.any(dim=(0, 1, 2)).nonzero().flatten().tolist())} {says} in "
            f"rows {_ranges(where.any(dim=(0, 1, 3)).nonzero().flatten().tolist())}"
            for says, where in kinds.items()
            if bool(where.any())
        ]

    def family(self) -> Family | None:
        """Return the family that the counts suggest: tile, mask, factor or rescaling, or None."""
        whole = self._whole_counts()
        if whole is not None:
            return self._family_of_whole(whole)
        if self._fits_scaled_scores():
            return "factor"
        # Each tile of a row may have a factor of its own, where one for all does not fit.
        low = torch.where(self.seen, self.counts - self.doubt, -torch.inf)
        high = torch.where(self.seen, self.counts + self.doubt, torch.inf)
        hidden = bool((self.counts.abs() > self.doubt)[~self.seen].any())
        least, most = self._tiles(low, -torch.inf).amax(-1), self._tiles(high, torch.inf).amin(-1)
        apart = least.amax(-1) > most.amin(-1)
        by_tile = bool((least <= most).all() & (most > 0).all()) and bool(apart.any())
        # A tile whose factor is whole is missing or repeated, and not wrongly rescaled.
        by_tile = by_tile and bool((least.ceil() > most).any())
        return "rescaling" if by_tile and self.with_lse and not hidden else None

    def _family_of_whole(self, whole: Tensor) -> Family | None:
        """Return the family where keys count too often or not at all."""
        wrong = whole != self.seen.double()
        # Where LSE is right the right keys count, and their values are wrong.
        if not bool(wrong.any()) or not self.other_sum:
            return None
        if bool((wrong & ~self.seen).any()):
            return "mask"
        # Weights below fp16's smallest number may just have underflowed.
        if not bool((self.response.call.parts.weights[wrong] >= _LEAST_OF_FP16).any()):
            return None
        # A lost tile loses all its keys that a row sees; a tile lost in part means a mask.
        right_tiles = self._tiles((self.seen & (self.doubt < _HALF) & ~wrong).double()).sum(-1) > 0
        broken_tiles = self._tiles(wrong.double()).sum(-1) > 0
        if bool((right_tiles & broken_tiles).any()):
            return "mask"
        # Where sequences differ in length, the length of one may have been misread.
        wrong_sequences = wrong.any(dim=(1, 2, 3))
        if not bool(wrong_sequences.all()) and not bool((self.seen == self.seen[:1]).all()):
            return None
        # Tiles lost before any other is summed may have been rescaled by 0. Where no row has any
        # right tile, the running sum or output itself may be lost.
        some = right_tiles.any(-1)
        later = bool((broken_tiles & (right_tiles.cumsum(-1) > 0)).any())
        return "tile" if later or bool((broken_tiles.any(-1) & ~some).any() & some.any()) else None

    def score_errors(self) -> tuple[float, float] | None:
        """Return the largest error of a score, and the roughness of the errors.

        Roughness is how far each error is from its two neighbours' mean, in order of score, as the
        root mean square relative to that of all errors. It is small for another function of the
        score, and large for roundings. None for few weights, or, except in fp32, few clear errors.
        """
        sure = self.seen & (self.counts > 2 * self.doubt)
        if not self.with_lse or int(sure.sum()) < _FEW_SCORES:
            return None
        call = self.response.call
        order = call.x.expand(sure.shape)[sure].argsort()
        off, doubt = self.counts[sure].log()[order], (self.doubt / self.counts)[sure][order]
        far = (off.abs() > 2 * doubt).double().mean()
        if call.problem.dtype != "fp32" and float(far) < _SOME:
            return None
        deviations = off[1:-1] - (off[:-2] + off[2:]) / 2
        rough = deviations.square().mean().sqrt() / off.square().mean().sqrt()
        return float(off.abs().amax()), float(rough)

    def _fits_scaled_scores(self) -> bool:
        """Return whether the weights are the softmax of all scores times one number."""
        call = self.response.call
        sure = self.seen & (self.counts > 2 * self.doubt)
        count = sure.sum(-1, keepdim=True).clamp(min=1)

        def centred(x: Tensor) -> Tensor:
            x = torch.where(sure, x, 0.0)
            return torch.where(sure, x - x.sum(-1, keepdim=True) / count, 0.0)

        s, logs = centred(call.s), centred(self.counts.log())
        factor = 1.0 + (s * logs).sum() / s.square().sum()

        def fits(times: Tensor | float) -> bool:
            z = torch.where(call.seen, call.s * times, -torch.inf)
            predicted = call.softmax(z, sink=call.sink).outputs.tensors()
            return self.response.error.agrees(FaultPrediction(name="", tensors=predicted))

        # A factor of 0 makes all scores equal, as does a missing operand of q·k.
        return call.problem.score == NONE and fits(factor) and not fits(0.0)

    def _tiles(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return ``x`` with its keys in padded tiles, ``(…, tiles, keys of a tile)``."""
        missing = -x.shape[-1] % _TILE
        padded: Tensor = torch.nn.functional.pad(x, (0, missing), value=fill)
        return padded.view(*x.shape[:-1], -1, _TILE)


def _misplacement(runs: Sequence[Response], kernel: FailingKernel) -> str:
    """Return evidence that numbers are read or written in the wrong place; empty if there is none.

    A right row changes only with its own query, and with the keys and values of its own sequence
    and key head, each output column only with that column of the values.
    """
    some = [run for run in runs if run.error.forward and run.call.whole]
    if not some or some[0].call.problem.operation != "attention":
        return ""

    def order(run: Response) -> tuple[bool, int]:
        problem = run.call.problem
        return problem.batch * problem.kv_heads == 1, problem.query * problem.kv

    inputs = min(some, key=order).call.inputs.forward()
    plain = kernel.call(inputs)
    if plain is None or not bool(plain.error.got["out"].isfinite().any()):
        return ""
    for finding in _Dependencies(inputs, plain, kernel).wrong():
        # A result that changes from call to call proves no dependency.
        again = kernel.call(inputs)
        if again is not None and not bool(_changes(plain, again).any()):
            return finding
    return ""


class _Dependencies:
    """Tests what a kernel's outputs depend on by negating parts of its inputs, which is exact."""

    def __init__(self, inputs: Inputs, plain: Response, kernel: FailingKernel) -> None:
        self._inputs, self._plain, self._kernel = inputs, plain, kernel
        self._problem = inputs.problem

    def wrong(self) -> Iterator[str]:
        """Yield, in words, each dependency that should not exist, and each that is missing."""
        yield from self._of_rows()
        yield from self._of_groups()
        yield from self._of_values()
        yield from self._of_keys()
        yield from self._of_columns()

    def _negate(self, **where: Tensor) -> tuple[Tensor, Tensor]:
        """Negate marked parts of inputs; return the numbers that change and rows that should."""
        change = {}
        for name, of in where.items():
            tensor = getattr(self._inputs, name)
            change[name] = (tensor.double() * torch.where(of, -1.0, 1.0)).to(tensor.dtype)
        run = self._kernel.call(self._inputs.replace(**change))
        if run is None:
            nothing = torch.zeros_like(_changes(self._plain, self._plain))
            return nothing, nothing.any(-1)
        return _changes(self._plain, run), _must_change(self._plain, run)

    def _of_rows(self) -> Iterator[str]:
        problem = self._problem
        b, h, i = map(torch.arange, (problem.batch, problem.heads, problem.query))
        # An irregular pattern, which no wrong stride maps onto itself.
        negated = (i.square() + 3 * h[:, None] + 5 * b[:, None, None]) % 7 < 3
        changes, must = self._negate(q=negated[..., None])
        moved = changes.any(-1)
        if bool((moved & ~negated).any()) and bool((must & ~moved)[negated].any()):
            yield "rows change with the queries of others, and not with their own"

    def _of_groups(self) -> Iterator[str]:
        batch, kv_heads, heads = (self._problem.batch, self._problem.kv_heads, self._problem.heads)
        b, h = torch.arange(batch)[:, None], torch.arange(heads)
        for n in (0, batch * kv_heads - 1) if batch * kv_heads > 1 else ():
            own_rows = (b * kv_heads + h // self._problem.group == n)[..., None]
            negated = (torch.arange(batch * kv_heads) == n).view(batch, kv_heads, 1, 1)
            changes, _ = self._negate(k=negated, v=negated)
            if bool((changes.any(-1) & ~own_rows).any()):
                at = f"sequence {n // kv_heads}, key head {n % kv_heads}"
                yield f"other sequences or heads change with the keys and values of {at}"

    def _of_values(self) -> Iterator[str]:
        odd = torch.arange(self._problem.value_dim) % 2 == 1
        changes, _ = self._negate(v=odd)
        if bool(changes[..., -1].any()):
            yield "LSE changes with the values"
        if bool(changes[..., :-1][..., ~odd].any()):
            yield "columns change with other columns of the values"

    def _of_keys(self) -> Iterator[str]:
        kv = self._problem.kv
        late = torch.arange(kv)[:, None] >= kv // 4
        words = {"k": "keys", "v": "values"}
        unread = [name for name in words if self._is_unread(name, late)]
        if len(unread) == 1:
            one = words.pop(unread[0])
            (other,) = words.values()
            first = f"nothing changes with {one} {kv // 4}–{kv - 1}, though it does with the others"
            yield f"{first}, and with their {other}"

    def _is_unread(self, name: str, part: Tensor) -> bool:
        """Return whether no output changes with a part of a tensor, but some do with the rest."""
        changes, must = self._negate(**{name: part})
        if not bool(must.any()) or bool(changes.any()):
            return False
        return bool(self._negate(**{name: ~part})[0].any())

    def _of_columns(self) -> Iterator[str]:
        first = self._problem.head_dim // 4
        far = torch.arange(self._problem.head_dim) >= first
        for name in ("q", "k"):
            if self._is_unread(name, far):
                yield f"nothing changes with columns {first} and more of {name}"


def _changes(one: Response, other: Response) -> Tensor:
    """Return which numbers of two calls differ by more than rounding, out and then LSE.

    The shape is ``(batch, heads, rows, value_dim + 1)``; without LSE its column is False.
    """

    def differ(name: TensorName) -> Tensor:
        a, b = one.error.got[name], other.error.got[name]
        allowed = one.error.allowed[name] + other.error.allowed[name]
        return ~(((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan()))

    out = differ("out")
    lse = differ("lse")[..., None] if "lse" in one.error.got else torch.zeros_like(out[..., :1])
    return torch.cat([out, lse], -1)


def _must_change(one: Response, other: Response) -> Tensor:
    """Return rows ``(batch, heads, rows)`` whose exact outputs differ by far more than rounding."""
    distance = (one.call.parts.out - other.call.parts.out).abs()
    allowed = one.error.allowed["out"] + other.error.allowed["out"]
    return (distance > _PLAINLY * allowed).any(-1)


def _order_effect(kernel: FailingKernel) -> str:
    """Return a fact if the kernel is right with each row's largest score first, but not last.

    All rows of a head get the same query, so that one order of the keys sorts every row's scores.
    Empty if the fact does not hold.
    """
    problem = kernel.case.problem
    if problem.operation != "attention" or problem.backward:
        return ""
    try:
        wanted = problem.replace(
            mask=FULL, score=NONE, dcaptured=False, sink=False, kv=150, distribution="normal"
        )
    except ProblemError:
        return ""
    plain = nearest_taken(wanted, kernel.takes)
    if plain is None or plain.mask != FULL or plain.score != NONE:
        return ""
    inputs = draw_inputs(plain, "cpu")
    # Through float64, because torch cannot gather fp8.
    query = inputs.q[:, :: plain.group, :1].double().repeat_interleave(plain.group, 1)
    inputs = inputs.replace(q=query.expand(inputs.q.shape).to(inputs.q.dtype).contiguous())
    q, k, _ = inputs.promoted()
    scores = (q[:, :: plain.group, :1] @ k.mT)[:, :, 0] * plain.scale

    def sorted_by(*, descending: bool) -> Response | None:
        place = scores.argsort(-1, descending=descending)[..., None]
        k, v = (x.double().take_along_dim(place, 2).to(x.dtype) for x in (inputs.k, inputs.v))
        return kernel.call(inputs.replace(k=k, v=v))

    first = sorted_by(descending=True)
    if first is None or first.error.proven:
        return ""
    last = sorted_by(descending=False)
    if last is None or not last.error.proven:
        return ""
    off = (last.error.got["out"] - last.call.parts.out).abs() > _PLAINLY * last.error.allowed["out"]
    fact = "right where the largest score of each row comes first, wrong where it comes last"
    return fact if bool(off.any()) else ""
