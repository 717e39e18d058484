"""The order of questions in `attncheck check`: first what separates most faults at least cost.

    python benchmarks/question_order.py [--json PATH]

A question catches a form of a forward's fault model if the predicted out is outside the judge's
bound of an ideal kernel in bf16. LSE, which many kernels do not give, counts only where out is
exact. Repeatedly the question with the largest gain for its cost comes next. The gain is the share
of all models (the forms of a model in equal parts) that it is the first to catch, plus the share of
all pairs of models of different tables that it is the first to tell apart.

The cost follows from sizes: 30 ms for the exact result and its bounds, and 3 ms for each 64 rows
and 64 keys of a head, as in Triton's interpreter. Nothing is measured: the table is the same on
every machine, and ``cases.check_cases`` has the order.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attncheck.cases.check_cases import check_cases
from attncheck.core.errors import AttncheckError
from attncheck.fault_models import FAULT_MODELS, ExactAttention
from attncheck.fault_models import mask_models as masks
from attncheck.fault_models import precision_models as precision
from attncheck.fault_models import softmax_models as softmax
from attncheck.fault_models import tile_models as tiles
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from attncheck.fault_models.fault_model import Prediction
    from attncheck.inputs.problem import Case, Problem
    from attncheck.judge.allowance import Allowance

Forms = dict[str, dict[str, bool]]
"""By question: whether each form of a model, ``model#number``, is caught."""

_JUDGED, _TILE = 0.030, 0.003  # seconds
_TABLES = (masks.MODELS, softmax.MODELS, precision.RECURRENCE, precision.MODELS, tiles.MODELS)
_PARTS = 64  # rows, and keys, of a tile


def expected_cost(problem: Problem) -> float:
    """Return the seconds that a question is expected to take."""
    tiles_of = (math.ceil(length / _PARTS) for length in (problem.query, problem.kv))
    return _JUDGED + _TILE * problem.batch * problem.heads * math.prod(tiles_of)


def caught_forms(case: Case, models: Collection[str]) -> dict[str, bool]:
    """Return whether the question catches each form of ``models`` that its problem can have."""
    evidence = EvidenceBuilder(case, "cpu")
    evidence.establish(reference_errors=False)
    bound = evidence.allowance(Ideal().arithmetic(case.problem, "cpu"))
    call = ExactAttention(evidence.inputs, tile=(_PARTS, _PARTS))
    caught = {}
    for name in models:
        model = FAULT_MODELS[name]
        if model.of == "forward" and model.applies(case.problem):
            # A problem may not have the later forms; the others keep their numbers.
            with suppress(AttncheckError, RuntimeError, IndexError, ValueError), torch.no_grad():
                for number, one in enumerate(model.predictions(call)):
                    caught[f"{name}#{number}"] = _leaves(one, evidence, bound)
    return caught


def _leaves(one: Prediction, evidence: EvidenceBuilder, bound: Allowance) -> bool:
    free = torch.zeros_like(evidence.alive) if one.free is None else one.free
    off = (one.outputs.out.double() - evidence.truth.out).abs()
    beyond = ~(off <= bound.out) & ~free[..., None]
    if bool(beyond.any()) or one.outputs.lse is None:
        return bool(beyond.any())
    exact = evidence.truth.lse
    same = (one.outputs.lse == exact) | ((one.outputs.lse - exact).abs() <= bound.lse) | free
    return bool((off == 0).all()) and not bool(same.all())


def plan(forms: Forms, costs: Mapping[str, float]) -> list[str]:
    """Return the questions in the order in which to ask them."""
    names = sorted({form for of_one in forms.values() for form in of_one})
    count = {m: sum(n.startswith(f"{m}#") for n in names) for m in {_model(n) for n in names}}
    weight = torch.tensor([1.0 / count[_model(name)] for name in names], dtype=torch.float64)
    family = torch.tensor([_family(_model(name)) for name in names])
    answers = {
        question: torch.tensor([of_one.get(name, False) for name in names])
        for question, of_one in forms.items()
    }
    seen = torch.zeros(len(names), dtype=torch.bool)
    alike = torch.zeros(len(names), dtype=torch.int64)  # equal if all answers so far are equal
    first_pairs, order, left = _unlike(alike, family, weight), [], list(forms)

    def gain(question: str) -> tuple[float, float]:
        new = answers[question] & ~seen
        refined = alike * 2 + answers[question]
        pairs = _unlike(alike, family, weight) - _unlike(refined, family, weight)
        share = float(weight[new].sum() / weight.sum()) + pairs / (first_pairs or 1.0)
        # Without a gain, prefer what catches most: it may catch a fault in another form.
        every = float(weight[answers[question]].sum() / weight.sum())
        return share / costs[question], every / costs[question]

    while left:
        best = max(left, key=gain)  # of equals the first
        seen |= answers[best]
        alike = torch.unique(alike * 2 + answers[best], return_inverse=True)[1]
        left.remove(best)
        order.append(best)
    return order


def _unlike(alike: torch.Tensor, family: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the weight of all pairs from different tables that are still alike."""
    classes = torch.zeros(int(alike.max()) + 1, len(_TABLES) + 1, dtype=torch.float64)
    classes.index_put_((alike, family), weight, accumulate=True)
    return float((classes.sum(1).square() - classes.square().sum(1)).sum() / 2)


def _model(form: str) -> str:
    return form.partition("#")[0]


def _family(model: str) -> int:
    return next((i for i, table in enumerate(_TABLES) if model in table), len(_TABLES))


def table(order: Sequence[str], forms: Forms, costs: Mapping[str, float]) -> str:
    """Return a line for each question: its cost, and which forms (1) of each model it catches."""
    lines = []
    for question in order:
        models: dict[str, str] = {}
        for form, caught in forms[question].items():
            models[_model(form)] = models.get(_model(form), "") + str(int(caught))
        entry = {"cost": round(costs[question], 4), "forms": models}
        lines.append(f"{json.dumps(question)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_table(text: str) -> tuple[Forms, dict[str, float]]:
    """Return the forms and costs that ``table`` wrote."""
    entries = json.loads(text)
    forms = {
        question: {
            f"{model}#{number}": caught == "1"
            for model, each in entry["forms"].items()
            for number, caught in enumerate(each)
        }
        for question, entry in entries.items()
    }
    return forms, {question: entry["cost"] for question, entry in entries.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the order, and write what each question catches."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    cases = {one.name: one.case for one in check_cases("bf16")}
    forms = {name: caught_forms(case, FAULT_MODELS) for name, case in cases.items()}
    costs = {name: expected_cost(case.problem) for name, case in cases.items()}
    order = plan(forms, costs)
    print("\n".join(order))
    if options.json:
        options.json.write_text(table(order, forms, costs), encoding="utf-8")


if __name__ == "__main__":
    main()
