"""What is seen of a failure of which no model is confirmed, and the family of faults that tells.

The kernel is asked again: without a mask, with fewer keys, with unit vectors for values, of which
each column of the output is a weight, with parts of an input negated, with its keys in order.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.errors import ProblemError
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.diagnose.confirmation import independent_cases
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case
from attncheck.judge.fault_explanation import FaultPrediction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from attncheck.core.tensor_names import TensorName
    from attncheck.diagnose.confirmation import Ask
    from attncheck.diagnose.explanations import Response
    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.fault_models.fault_model import Family
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem

    Call = Callable[[Inputs], Response | None]
    """What the kernel gives of Inputs; None where it does not take them."""

_INDEPENDENT = 6  # problems that are asked
_LENGTHS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 129)
_TILE = 16  # keys of the smallest tile that kernels have
_WHOLE_TILES = 128  # keys that are whole tiles of any size
_HALF = 0.5  # of a key, from which it counts
_MOST_CALLS = 4  # in which the weights of all keys are measured
_ROUNDED = FORMATS["bf16"].unit_roundoff
_LEAST_OF_FP16 = FORMATS["fp16"].subnormal_spacing
_FEW_ROWS = 8  # of a head, of which chance makes all right
_PLAINLY = 16.0  # times what rounding allows that an error is of no rounding
_FEW_SCORES = 64  # of which any look like a function
_SOME = 0.05  # of all scores, so many that are plainly off
_SMOOTH = 0.25  # of what scores are off by, what neighbours differ by: of noise it is more than 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """What is known of a failure that no model was confirmed of."""

    family: Family | None = None
    facts: tuple[str, ...] = ()
    sign: str = ""  # what is proven by it, one of ``SIGNS``


def observe(
    response: Response,
    case: Case,
    ask: Ask,
    call: Call,
    *,
    varies: bool,
    seconds: float,
    takes: Callable[[Problem], bool] = lambda _problem: True,
) -> Observations:
    """Return where and when a kernel is wrong, and the family of faults that this tells.

    Args:
        response: What it gave.
        case: For it.
        ask: Calls the kernel.
        call: Calls it with other numbers.
        varies: Whether it gives something else where memory holds something else.
        seconds: After which no shorter length is asked.
        takes: As of ``independent_cases``.
    """
    facts = [_place(response)]
    facts += ["what it gives changes with what free memory holds"] if varies else []
    needed = set()
    for name, (words, change) in _plainer(case.problem).items():
        if others := _asked_with(case, change, ask):
            wrong = any(run.error.proven for run in others)
            facts.append(f"{'wrong as well' if wrong else 'right'} {words}")
            needed |= set() if wrong else {name}
    runs = [response]
    for other in itertools.islice(independent_cases(case, takes), _INDEPENDENT):
        runs += ask(other)
    runs = [run for run in runs if run.error.proven]
    # Of the failure, and of the other one with the most keys, how often each key counts.
    runs[1:] = sorted(runs[1:], key=_measured_keys, reverse=True)
    counts = [_Counts.of(run, call) for run in runs[:2]]
    facts += next((line for one in counts if one is not None and (line := one.facts())), [])
    facts.append(_shortest(case, ask, time.monotonic() + seconds))
    family = _common_family(runs, counts)
    if varies:
        family = "memory"
    elif case.question.startswith("strides_"):
        family = "mapping"
    # A score mod that is off changes weights as if parts were not rescaled, or keys not there.
    elif family is None or (family != "gradient" and needed & {"score", "sink"}):
        family = next((family for name, family in _TOLD_BY.items() if name in needed), family)
    if "score" in needed and (of_cap := _of_cap(runs[0], case, ask, call)):
        sign = "softcap-of-another-function" if of_cap == "score" else ""
        return Observations(family=of_cap, facts=tuple(filter(None, facts)), sign=sign)
    if family in {None, "mapping"} and (fact := _misplaced(runs, call)):
        family, facts = "mapping", [*facts, fact]
    if family is None and (fact := _by_order(case.problem, call, takes)):
        family, facts = "rescaling", [*facts, fact]
    return Observations(family=family, facts=tuple(filter(None, facts)))


def _of_cap(run: Response, case: Case, ask: Ask, call: Call) -> Family | None:
    """Return whether a cap makes another function of the score than it should, or rounds it.

    In fp32 where the kernel takes it: there weights say most of a score.
    """
    if case.problem.score.name != "softcap":
        return None
    cap: Any = case.problem.score.values["cap"]
    for one in [*_asked_with(case, {"dtype": "fp32"}, ask), run]:
        counts = _Counts.of(one, call) if one.error.proven else None
        slopes = None if counts is None else counts.by_score()
        if slopes is not None and slopes[1] < _SMOOTH:
            return "score"
        # By less than the roundings of one of 16 bits, and not as its neighbours.
        if slopes is not None and one.call.problem.dtype == "fp32":
            return "precision" if slopes[0] < _ROUNDED * cap and slopes[1] > 2 * _SMOOTH else None
    return None


def _common_family(runs: Sequence[Response], counts: Sequence[_Counts | None]) -> Family | None:
    """Return one family for all that is wrong: few numbers alone look like many."""
    every = itertools.zip_longest(runs, counts)
    families = {_own_family(run, counts=one) for run, one in every}
    if len(families) > 1:
        families -= {None, *_THROUGHOUT}
    family = families.pop() if len(families) == 1 else None
    # Few rows of one shape: a mask that is off may be wrong there alone.
    alike = len({run.call.shape for run in runs}) == 1
    return None if family == "empty rows" and alike else family


def _own_family(run: Response, *, counts: _Counts | None) -> Family | None:
    """Return the family that one run's numbers tell by themselves."""
    error, alive = run.error, run.call.parts.lse > -torch.inf
    if not error.forward:
        return "gradient"
    beyond = {name: error.beyond(name) for name in error.wrong}
    off = [x.any(-1) if x.dim() > alive.dim() else x for x in beyond.values()]
    rows = torch.stack(off).any(0)
    if not bool((rows & alive).any()):
        # Where no row sees a key, a mask that is not looked at is wrong alike.
        return "empty rows" if bool(alive.any()) else None
    if set(error.wrong) == {"lse"}:
        return "lse"
    if _of_some_heads(run.call, rows):
        return "mapping"
    wrong = [error.got[name][off & _rows_of(off, alive)] for name, off in beyond.items()]
    family = None if counts is None else counts.family()
    if not all(bool(x.isfinite().all()) for x in wrong):
        # NaN that is read is another's: no input has any, and all that is wrong is it.
        alone = all(not bool(x.isfinite().any()) for x in wrong)
        return "overflow" if alone and _is_finite(run.call) else family
    return family or _of_row_factors(run)


def _of_some_heads(call: ExactAttention, rows: Tensor) -> bool:
    """Return whether all rows of some sequences and heads are wrong, and none of the first.

    What is done to scores, weights and tiles is done to those of each alike.
    """
    problem = call.problem
    alike = bool((call.seen == call.seen[:1, :1]).all()) and problem.score == NONE
    if not alike or problem.sink or problem.formats.scaled or rows.shape[2] < _FEW_ROWS:
        return False
    some, every = rows.any(-1).flatten(), rows.all(-1).flatten()
    return bool((some == every).all()) and bool(some.any()) and not bool(some[0])


def _of_row_factors(run: Response) -> Family | None:
    """Return the family of an output of which each row is the exact one times a number.

    The padding of a last tile, hidden keys and a sink have no values, and make rows smaller, too.
    """
    problem, call, error = run.call.problem, run.call, run.error
    plain = problem.mask == FULL and not problem.sink and problem.kv % _WHOLE_TILES == 0
    if not plain or "out" not in error.wrong or problem.value_dim < _TILE:
        return None
    got, exact, allowed = error.got["out"], call.parts.out, error.allowed["out"]
    # 0 is anything times a factor: of rows of zeros nobody is told.
    if bool((got == 0).all(-1).any()):
        return None
    size = (got * exact).sum(-1, keepdim=True) / exact.square().sum(-1, keepdim=True)
    one = size.median()

    def fits(factor: Tensor) -> bool:
        most = allowed * factor.abs().clamp(min=1.0)
        return bool(((got - factor * exact).abs() <= most).all())

    return "factor" if fits(one) else "rescaling" if fits(size) else None


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """``rows`` as they broadcast to out, or to LSE."""
    return rows[..., None] if tensor.dim() > rows.dim() else rows


def _is_finite(call: ExactAttention) -> bool:
    """Return whether no number is NaN or infinite that the kernel may read."""
    problem, inputs = call.problem, call.inputs.tensors().values()
    # Pages that are nobody's hold NaN.
    return problem.paging is None and all(bool(x.float().isfinite().all()) for x in inputs)


_THROUGHOUT: tuple[Family, ...] = ("empty rows", "lse", "gradient", "overflow")
"""What is told by which numbers are right: by all that it gets wrong, or by nothing."""

_TOLD_BY: dict[str, Family] = {
    "score": "score",
    "sink": "score",
    "batch": "mapping",
    "heads": "mapping",
}
"""What a kernel has wrong that is right without a feature."""


def _plainer(problem: Problem) -> dict[str, tuple[str, dict[str, object]]]:
    """What the problem may be without, in words: what makes the kernel right tells its cause."""
    if problem.backward or problem.operation != "attention":
        return {}
    one_group = problem.kv_heads == 1
    causal: dict[str, object] = {"mask": Spec.of("causal")}
    narrow = problem.dtype != "fp32" and not problem.formats.scaled
    square = problem.mask == FULL and problem.query == problem.kv
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
    )
    return {name: (words, change) for holds, name, words, change in table if holds}


def _asked_with(case: Case, change: dict[str, object], ask: Ask) -> Sequence[Response]:
    try:
        other = case.problem.replace(**change)
        return ask(Case(problem=other, question=case.question, parameters=case.parameters))
    except ProblemError:
        return ()


def _shortest(case: Case, ask: Ask, end: float) -> str:
    """Return from how many keys on the kernel is wrong, as far as short lengths tell."""
    problem, right = case.problem, 0
    for kv in _LENGTHS:
        if kv >= problem.kv or time.monotonic() > end:
            break
        change: dict[str, object] = {"kv": kv}
        if problem.query == problem.kv:
            change["query"] = kv
        runs = _asked_with(case, change, ask)
        if any(run.error.proven for run in runs):
            return f"wrong from {kv} keys on" + (f", right with {right}" if right else "")
        right = kv if runs else right
    return f"right with up to {right} keys, wrong with {problem.kv}" if right else ""


def _place(response: Response) -> str:
    """Return which tensors are wrong, and in which sequences, heads, rows, columns or keys."""
    parts = []
    for name in response.error.wrong:
        beyond = response.error.beyond(name)
        axes = ("sequence", "head", "row" if name in {"out", "lse", "dq"} else "key", "column")
        if beyond.dim() < 3 or not bool(beyond.any()):
            continue
        where = []
        for axis, word in enumerate(axes[: beyond.dim()]):
            others = [n for n in range(beyond.dim()) if n != axis]
            along = beyond.any(dim=others) if others else beyond
            if not bool(along.all()):
                own = along.nonzero().flatten()
                own = response.call.rows[own] if word == "row" and name != "dq" else own
                where.append(f"{word}s {_ranges(own.tolist())}")
        parts.append(f"{name} is wrong in {', '.join(where)}" if where else f"{name} is wrong")
    return "; ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """``0–31, 64``; of many the first few."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in spans[:4]]
    return ", ".join([*texts, "…"] if spans[4:] else texts)


def _measured_keys(run: Response) -> int:
    """Return how many keys have weights that can be measured: all, or none."""
    problem = run.call.problem
    fits = problem.operation == "attention" and run.call.whole and run.error.forward
    return problem.kv if fits and problem.kv <= _MOST_CALLS * problem.value_dim else 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Counts:
    """How often each key counts in each row, ``(batch, heads, rows, kv)``: 1 where it must, else 0.

    Of unit vectors for values the output is the weights, and LSE says what a key has that counts
    once. ``doubt`` is by how much that may be off, from what rounding allows of both.
    """

    counts: Tensor
    doubt: Tensor
    seen: Tensor
    response: Response
    with_lse: bool  # without it a tile that is gone looks like another one that weighs more
    other_sum: bool  # whether LSE is wrong, or not there

    @classmethod
    def of(cls, response: Response, call: Call) -> _Counts | None:
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
            run = call(inputs.replace(v=v.to(inputs.v.dtype)))
            if run is None or not bool(run.error.got["out"].isfinite().all()):
                return None
            one = run.call.v[:, :, start, :1, None]  # in fp8 times its descale
            weights.append(run.error.got["out"][..., :keys] / one)
            allowed.append(run.error.allowed["out"][..., :keys] / one)
        dead, every = exact.parts.dead, torch.cat(weights, -1)
        lse = error.got.get("lse", exact.parts.lse)
        # A row in which no key counts has none, and weighs nothing.
        none = dead | ((lse == -torch.inf) & (every == 0).all(-1))
        if not bool(lse[~none].isfinite().all()):
            return None
        odds, own = (
            (torch.where(gone, 0.0, x)[..., None] - exact.s).exp()
            for x, gone in ((lse, none), (exact.parts.lse, dead))
        )
        counts = every * odds
        # A larger weight is rounded by more than is allowed of the exact one.
        doubt = torch.cat(allowed, -1) * torch.maximum(odds, own)
        if "lse" in error.got:
            doubt = doubt + counts.abs() * error.allowed["lse"].expm1()[..., None]
        # Nothing is allowed of what must be 0: as much of a key that counts as of any other.
        usual = torch.where(exact.seen & (doubt < _HALF), doubt, 0.0).amax(-1, keepdim=True)
        doubt = torch.maximum(doubt, counts.abs() * usual)
        there = ~dead[..., None] & doubt.isfinite()
        with_lse = "lse" in error.got
        return cls(
            counts=counts,
            doubt=torch.where(there, doubt, torch.inf),
            seen=exact.seen.expand(counts.shape),
            response=response,
            with_lse=with_lse,
            other_sum="lse" in error.wrong or not with_lse,
        )

    def _whole(self) -> Tensor | None:
        """Whole counts, where that is what all are; None where they are not."""
        sure = self.doubt < _HALF
        near = (self.counts - self.counts.round()).abs() <= self.doubt
        if not bool(sure.any()) or not bool(near[sure].all()):
            return None
        whole = torch.where(sure, self.counts.round(), self.seen.double()).clamp(min=0.0)
        # These counts have to give what the kernel gave of its own values.
        call = self.response.call
        parts = call.softmax(call.s + whole.log(), sink=call.sink)
        says = FaultPrediction(name="", tensors=parts.outputs.tensors())
        return whole if self.response.error.agrees(says) else None

    def facts(self) -> list[str]:
        """Which keys count too often, and which too rarely, in words."""
        whole = self._whole()
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
        """Return the family: tiles that are gone as a whole, another mask, parts not rescaled."""
        whole = self._whole()
        if whole is not None:
            return self._family_of_whole(whole)
        if self._of_one_factor():
            return "factor"
        # Each tile of a row by a factor of its own, and not all by one.
        low = torch.where(self.seen, self.counts - self.doubt, -torch.inf)
        high = torch.where(self.seen, self.counts + self.doubt, torch.inf)
        hidden = bool((self.counts.abs() > self.doubt)[~self.seen].any())
        least, most = self._tiles(low, -torch.inf).amax(-1), self._tiles(high, torch.inf).amin(-1)
        apart = least.amax(-1) > most.amin(-1)
        by_tile = bool((least <= most).all() & (most > 0).all()) and bool(apart.any())
        # What counts a whole number of times is a tile that is gone, or there again.
        by_tile = by_tile and bool((least.ceil() > most).any())
        return "rescaling" if by_tile and self.with_lse and not hidden else None

    def _family_of_whole(self, whole: Tensor) -> Family | None:
        """Return the family of keys that count too often, or not at all."""
        wrong = whole != self.seen.double()
        # Other values than the keys' own, where the weights of all add up as they must.
        if not bool(wrong.any()) or not self.other_sum:
            return None
        if bool((wrong & ~self.seen).any()):
            return "mask"
        # What weighs less than fp16 can hold is lost where anything underflows.
        if not bool((self.response.call.parts.weights[wrong] >= _LEAST_OF_FP16).any()):
            return None
        # Of each tile either all keys that a row sees are wrong, or none.
        kept = self._tiles((self.seen & (self.doubt < _HALF) & ~wrong).double()).sum(-1) > 0
        gone = self._tiles(wrong.double()).sum(-1) > 0
        if bool((kept & gone).any()):
            return "mask"
        # Of sequences of other lengths one may have lost what its length says.
        own = wrong.any(dim=(1, 2, 3))
        if not bool(own.all()) and not bool((self.seen == self.seen[:1]).all()):
            return None
        # What is lost before others are summed may have been rescaled by 0, and where nothing is
        # kept in any row the sum, or the output, may be what is not kept.
        some = kept.any(-1)
        later = bool((gone & (kept.cumsum(-1) > 0)).any())
        return "tile" if later or bool((gone.any(-1) & ~some).any() & some.any()) else None

    def by_score(self) -> tuple[float, float] | None:
        """Return by how much scores are off at most, and how far each is from its neighbours.

        Of the latter the root mean square, in that of what all are off by: in order of size two
        neighbours are off by the same of any function, and by other roundings. None where few
        weights are there to tell, or, but in fp32, none is plainly off.
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
        apart = off[1:-1] - (off[:-2] + off[2:]) / 2
        rough = apart.square().mean().sqrt() / off.square().mean().sqrt()
        return float(off.abs().amax()), float(rough)

    def _of_one_factor(self) -> bool:
        """Return whether the weights are those of all scores times one number."""
        call = self.response.call
        sure = self.seen & (self.counts > 2 * self.doubt)
        number = sure.sum(-1, keepdim=True).clamp(min=1)

        def centred(x: Tensor) -> Tensor:
            x = torch.where(sure, x, 0.0)
            return torch.where(sure, x - x.sum(-1, keepdim=True) / number, 0.0)

        s, logs = centred(call.s), centred(self.counts.log())
        factor = 1.0 + (s * logs).sum() / s.square().sum()

        def fits(times: Tensor | float) -> bool:
            z = torch.where(call.seen, call.s * times, -torch.inf)
            says = call.softmax(z, sink=call.sink).outputs.tensors()
            return self.response.error.agrees(FaultPrediction(name="", tensors=says))

        # Times 0 all score alike, as where one of both operands is not there.
        return call.problem.score == NONE and fits(factor) and not fits(0.0)

    def _tiles(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Keys in tiles, ``(…, tiles, keys of one)``."""
        missing = -x.shape[-1] % _TILE
        padded: Tensor = torch.nn.functional.pad(x, (0, missing), value=fill)
        return padded.view(*x.shape[:-1], -1, _TILE)


def _misplaced(runs: Sequence[Response], call: Call) -> str:
    """Return what shows that numbers are read, or written, elsewhere; empty where nothing does.

    A row changes with its own query, and with the keys and values of its own sequence and key head,
    column by column of these; parts of each are negated, which rounds nothing.
    """
    some = [run for run in runs if run.error.forward and run.call.whole]
    if not some or some[0].call.problem.operation != "attention":
        return ""

    def order(run: Response) -> tuple[bool, int]:
        problem = run.call.problem
        return problem.batch * problem.kv_heads == 1, problem.query * problem.kv

    inputs = min(some, key=order).call.inputs.forward()
    plain = call(inputs)
    if plain is None or not bool(plain.error.got["out"].isfinite().any()):
        return ""
    for finding in _Dependencies(inputs, plain, call).wrong():
        # What changes from call to call depends on nothing.
        again = call(inputs) if finding else None
        if again is not None and not bool(_changes(plain, again).any()):
            return finding
    return ""


class _Dependencies:
    """What a kernel's outputs depend on: parts of its inputs are negated, which rounds nothing."""

    def __init__(self, inputs: Inputs, plain: Response, call: Call) -> None:
        self._inputs, self._plain, self._call = inputs, plain, call
        self._problem = inputs.problem

    def wrong(self) -> Iterator[str]:
        """Yield what depends on a part that it must not, or does not depend on what it must."""
        yield from self._of_rows()
        yield from self._of_groups()
        yield from self._of_values()
        yield from self._of_keys()
        yield from self._of_columns()

    def _moved(self, **where: Tensor) -> tuple[Tensor, Tensor]:
        """Which numbers change with parts negated, and which rows' exact outputs do."""
        change = {}
        for name, of in where.items():
            tensor = getattr(self._inputs, name)
            change[name] = (tensor.double() * torch.where(of, -1.0, 1.0)).to(tensor.dtype)
        run = self._call(self._inputs.replace(**change))
        if run is None:
            nothing = torch.zeros_like(_changes(self._plain, self._plain))
            return nothing, nothing.any(-1)
        return _changes(self._plain, run), _must_change(self._plain, run)

    def _of_rows(self) -> Iterator[str]:
        problem = self._problem
        b, h, i = map(torch.arange, (problem.batch, problem.heads, problem.query))
        # By a rule that no stride goes with.
        own = (i.square() + 3 * h[:, None] + 5 * b[:, None, None]) % 7 < 3
        changes, must = self._moved(q=own[..., None])
        moved = changes.any(-1)
        if bool((moved & ~own).any()) and bool((must & ~moved)[own].any()):
            yield "rows change with the queries of others, and not with their own"

    def _of_groups(self) -> Iterator[str]:
        batch, kv_heads, heads = (self._problem.batch, self._problem.kv_heads, self._problem.heads)
        b, h = torch.arange(batch)[:, None], torch.arange(heads)
        for n in (0, batch * kv_heads - 1) if batch * kv_heads > 1 else ():
            mine = (b * kv_heads + h // self._problem.group == n)[..., None]
            of = (torch.arange(batch * kv_heads) == n).view(batch, kv_heads, 1, 1)
            changes, _ = self._moved(k=of, v=of)
            if bool((changes.any(-1) & ~mine).any()):
                at = f"sequence {n // kv_heads}, key head {n % kv_heads}"
                yield f"other sequences or heads change with the keys and values of {at}"

    def _of_values(self) -> Iterator[str]:
        odd = torch.arange(self._problem.value_dim) % 2 == 1
        changes, _ = self._moved(v=odd)
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
        """Return whether nothing changes with a part of a tensor, though it does with the rest."""
        changes, must = self._moved(**{name: part})
        if not bool(must.any()) or bool(changes.any()):
            return False
        return bool(self._moved(**{name: ~part})[0].any())

    def _of_columns(self) -> Iterator[str]:
        first = self._problem.head_dim // 4
        far = torch.arange(self._problem.head_dim) >= first
        for name in ("q", "k"):
            if self._is_unread(name, far):
                yield f"nothing changes with columns {first} and more of {name}"


def _changes(one: Response, other: Response) -> Tensor:
    """Which numbers of two calls differ by more than rounding, out and then LSE, if there is any.

    ``(batch, heads, rows, value_dim + 1)``
    """

    def differ(name: TensorName) -> Tensor:
        a, b = one.error.got[name], other.error.got[name]
        allowed = one.error.allowed[name] + other.error.allowed[name]
        return ~(((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan()))

    out = differ("out")
    lse = differ("lse")[..., None] if "lse" in one.error.got else torch.zeros_like(out[..., :1])
    return torch.cat([out, lse], -1)


def _must_change(one: Response, other: Response) -> Tensor:
    """Rows ``(batch, heads, rows)`` whose exact outputs differ plainly."""
    apart = (one.call.parts.out - other.call.parts.out).abs()
    allowed = one.error.allowed["out"] + other.error.allowed["out"]
    return (apart > _PLAINLY * allowed).any(-1)


def _by_order(problem: Problem, call: Call, takes: Callable[[Problem], bool]) -> str:
    """Return that it is right with the largest score of each row first, and wrong with it last.

    All rows of a head have one query, so that one order of the keys is that of each row's scores.
    Empty where that is not so.
    """
    if problem.operation != "attention" or problem.backward:
        return ""
    try:
        plain = problem.replace(
            mask=FULL, score=NONE, dcaptured=False, sink=False, kv=150, distribution="normal"
        )
    except ProblemError:
        return ""
    if not takes(plain):
        from attncheck.cases.strategies.problems import nearest_supported  # loads Hypothesis

        nearest = nearest_supported(plain, takes, ())
        if nearest is None or nearest.mask != FULL or nearest.score != NONE:
            return ""
        plain = nearest
    inputs = draw_inputs(plain, "cpu")
    # Through float64, because torch gathers no fp8.
    query = inputs.q[:, :: plain.group, :1].double().repeat_interleave(plain.group, 1)
    inputs = inputs.replace(q=query.expand(inputs.q.shape).to(inputs.q.dtype).contiguous())
    q, k, _ = inputs.promoted()
    scores = (q[:, :: plain.group, :1] @ k.mT)[:, :, 0] * plain.scale

    def sorted_by(*, descending: bool) -> Response | None:
        place = scores.argsort(-1, descending=descending)[..., None]
        k, v = (x.double().take_along_dim(place, 2).to(x.dtype) for x in (inputs.k, inputs.v))
        return call(inputs.replace(k=k, v=v))

    first = sorted_by(descending=True)
    if first is None or first.error.proven:
        return ""
    last = sorted_by(descending=False)
    if last is None or not last.error.proven:
        return ""
    off = (last.error.got["out"] - last.call.parts.out).abs() > _PLAINLY * last.error.allowed["out"]
    fact = "right where the largest score of each row comes first, wrong where it comes last"
    return fact if bool(off.any()) else ""
