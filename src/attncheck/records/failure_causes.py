"""Group failures by their cause, so that a report names each mistake once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from attncheck.core.grouping import group_by
from attncheck.core.judgement import Rule
from attncheck.core.tensor_names import GRADIENTS
from attncheck.records.record import FAILED_STATUSES, Diagnosis, Explanation, Record

Key = tuple[str, ...]
MOST_WITHOUT_OUT = 12  # Answers without an out, and no other, after which no more are asked.
_MOST_NAMED = 3  # Causes listed for a group that several causes explain equally well.

# Rules about the call rather than about numbers: the judge's reason is already the cause.
_CALL_RULES: frozenset[Rule] = frozenset(
    {"contract", "alias", "mutation", "memory", "state", "leak"}
)
# For these rules the symptom includes the question, since one relation may fail without others.
_QUESTION_RULES: frozenset[Rule] = frozenset({"relation", "determinism"})
# What is wrong by each of the other rules, where no cause is known.
_OF_RULES: dict[str, str] = {
    "finite": "NaN or infinity where the exact result is finite",
    "empty rows": "rows that see no key are not exactly 0 with an LSE of −∞",
    "structure": "another answer than the exact one",
    "bound": "errors beyond their bound",
    "improbable": "errors too large to be those of rounding by chance",
    "precision": "less accurate than other kernels of its arithmetic",
    "relation": "two runs that do not agree as they must",
    "determinism": "other bits when called again",
    "regression": "worse than the baseline",
}
_BEYOND = "beyond its claims"
# What to do about a way to fail beyond the claims, by its beginning.
_REMEDIES = {
    "returns out in ": "cast it to q.dtype, or ",
    "returns lse in ": "keep it in fp32, or ",
    "wrong out.shape": "give it q's length and v's head_dim, or ",
}
_WRONG = "wrong, not refused,"
# The signal and last words of a process that died vary from call to call; this part does not.
_HEAP = ": its heap is broken"
# The number of a call, and the shape and dtype of a tensor: they differ from Case to Case.
_PROBLEM = re.compile(r"^call \d+ of \d+: | \([\d, ]*\) of \w+")
# Where a kernel raised, as ``source_files.kernel_place`` writes it.
_PLACE = re.compile(r" at (?:(?! at )[^/:])*\.py:\d+ in [\w<>]+")
# The result is none, or another object; out is no tensor, or one of another shape.
_NO_OUT = re.compile(r"(it )?returned |out( is |\.shape=)")
_NUMBER = re.compile(r"[-+−]?\d[\d.,]*(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseGroup:
    """Failures of one kernel that seem to have a common cause."""

    kernel: str
    cause: str  # The cause in plain words; the broken rule if the cause is unknown.
    # Whether a fault model explains each member, or the failure itself states the cause: the
    # kernel raised, died, or wrote to its inputs, for example.
    known: bool
    model: str = ""  # Id of the fault model or sign; empty if there is none.
    members: tuple[int, ...]  # Indices of the failures in the sequence that was grouped.
    keys: frozenset[Key]  # Models or symptoms; each member has at least one of them.

    def has(self, record: Record) -> bool:
        """Return whether ``record``, for example a member's smaller Case, fails for this cause."""
        # A failure that a model explains is not matched by its symptom.
        keys_of_record = set(_certain_models(record)) or {symptom(record)}
        return record.kernel == self.kernel and bool(self.keys & keys_of_record)


def certain_explanations(record: Record) -> tuple[Explanation, ...]:
    """Return the confirmed faults that each explain all of a failure; empty if there are none."""
    diagnosis = record.diagnosis
    if not isinstance(diagnosis, Diagnosis) or not diagnosis.ranked:
        return ()
    if diagnosis.level != "named":
        return ()
    if not diagnosis.tried:  # the failure itself states its cause
        return diagnosis.ranked[:1]
    return diagnosis.ranked[: max(1, diagnosis.tied)] if diagnosis.ranked[0].explains_all else ()


def _doubtful_explanations(record: Record) -> tuple[Explanation, ...]:
    """Return the unconfirmed faults that would each explain all of a failure."""
    diagnosis = record.diagnosis
    if not isinstance(diagnosis, Diagnosis) or diagnosis.level == "named":
        return ()
    return tuple(one for one in diagnosis.ranked if one.explains_all)


def fault_text(explanation: Explanation) -> str:
    """Return an explanation as text: ``the last tile of keys is never visited [tile 64]``."""
    form = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in explanation.parameters.items()
    )
    return f"{explanation.sentence}{f' [{form}]' if form else ''}"


# How the aspects of ``Unclaimed`` are named in a report.
_ASPECTS = {
    "dtypes": "dtype ",
    "head_dims": "head_dim ",
    "lengths": "lengths ",
    "gqa": "fewer key heads: ",
    "rectangular": "other lengths of queries than of keys: ",
    "causal": "",
    "backward": "gradients of ",
    "strides": "tensors that are not contiguous: ",
    "slopes": "slopes of ",
    "attn_mask": "an attn_mask of ",
}


def unclaimed_findings(records: Iterable[Record]) -> list[str]:
    """Return the ways in which a kernel fails beyond its claims instead of refusing.

    A line names all ways with the same remedy, and then the remedy.
    """
    failed = [record for record in records if record.status in FAILED_STATUSES]
    beyond = [record for record in failed if record.unclaimed is not msgspec.UNSET]
    ways: dict[str, dict[str, dict[str, None]]] = {}
    for record in beyond:
        claim = record.unclaimed
        assert claim is not msgspec.UNSET
        ways.setdefault(_unclaimed_way(record), {}).setdefault(claim.aspect, {})[claim.what] = None
    # Reports show these causes where nothing fails within the claims.
    wrong = [record for record in beyond if _unclaimed_way(record) == _WRONG]
    cause_is_shown = len(beyond) == len(failed) and all(map(certain_explanations, wrong))
    by_remedy: dict[str, list[str]] = {}
    for way, aspects in ways.items():
        parts = [f"{_ASPECTS.get(name, name)}{', '.join(each)}" for name, each in aspects.items()]
        of_way = (remedy for beginning, remedy in _REMEDIES.items() if way.startswith(beginning))
        remedy = next(of_way, "mask the last tile, or " if "lengths" in aspects else "")
        if not remedy and way == _WRONG:
            remedy = "mend it, or " if cause_is_shown else _search_for_mistake(aspects)
        by_remedy.setdefault(remedy, []).append(f"{way} for {'; '.join(parts)}")
    return [
        f"{'; '.join(alike)}: {remedy}refuse them by ValueError"
        for remedy, alike in by_remedy.items()
    ]


def _search_for_mistake(aspects: Mapping[str, Iterable[str]]) -> str:
    """Return how to find what is wrong in a dtype or gradient that may be meant to work."""
    if set(aspects) == {"dtypes"}:
        return f"find the mistake with `check --dtype {next(iter(aspects['dtypes']))}`, or "
    if set(aspects) == {"backward"}:
        # Gradients of out alone are right, then: the backward ignores that of LSE.
        if set(aspects["backward"]) == {"out and LSE"}:
            return "add LSE's gradient, or ctx.mark_non_differentiable(lse), or "
        return "mend the backward, or "
    return ""


def _unclaimed_way(record: Record) -> str:
    judgement = record.judgement
    if judgement is not None and judgement.rule == "memory":
        return "writes past its tensors, no refusal,"
    if judgement is not None and judgement.rule == "contract":
        # ``out.dtype=torch.float32, but should be …``; the sizes in a shape differ by question.
        fact, _, value = judgement.reason.partition(", but should be ")[0].partition("=")
        if fact.endswith(".dtype"):
            return f"returns {fact.removesuffix('.dtype')} in {value}"
        return f"wrong {fact}, not refused," if value else f"{fact.rstrip('.')}, no refusal,"
    return _WRONG if record.status == "fail" else f"{record.status}, no refusal,"


def without_numbers(reason: str) -> str:
    """Return ``reason`` with ``#`` for each number, so that equal mistakes have equal texts."""
    return _NUMBER.sub("#", reason)


def without_place(reason: str) -> str:
    """Return ``reason`` without the line that raised, so that equal mistakes have equal texts."""
    return _PLACE.sub("", reason)


def gives_no_out(records: Sequence[Record]) -> bool:
    """Return whether a kernel gave no out in any answer so far, and enough of them settle it.

    The result is none, or out is no tensor or one of another shape. A wrong dtype, LSE or gradient
    may be right in another question.
    """
    asked = [one for one in records if one.status != "unsupported"]
    symptoms = {symptom(one) for one in asked}
    if len(asked) < MOST_WITHOUT_OUT or len(symptoms) > 1:
        return False
    _, rule, what = symptoms.pop()
    return rule == "contract" and _NO_OUT.match(what) is not None


def symptom(record: Record) -> Key:
    """Return how a Record fails: its status, its rule, and a detail without sizes and places."""
    judgement = record.judgement
    if record.unclaimed is not msgspec.UNSET:
        return record.status, _unclaimed_way(record), _BEYOND
    if judgement is None:
        what, broken, _ = record.reason.partition(_HEAP)
        # Without the line that raised: edits move it, and one mistake may raise in two places.
        return record.status, "", broken or without_numbers(without_place(what))
    rule = judgement.rule
    if rule in _CALL_RULES:
        # Only up to the semicolon: how the process died varies from call to call.
        what = _PROBLEM.sub("", judgement.reason.partition("; ")[0])
        return record.status, rule, without_numbers(what)
    if rule in _QUESTION_RULES:
        return record.status, rule, str(record.case.get("question", ""))
    backward = judgement.worst is not None and judgement.worst.tensor in GRADIENTS
    return record.status, rule, "gradients" if backward else ""


def group_by_cause(
    failures: Sequence[Record], smaller: Mapping[int, Sequence[Record]] | None = None
) -> tuple[CauseGroup, ...]:
    """Group failures by the fewest causes that explain them, kernel by kernel.

    A Record that several fault models explain joins the model that explains the most Records.
    Records that no confirmed model explains are grouped by symptom, and several symptoms are joined
    if one unconfirmed model would explain them all.

    Args:
        smaller: The smaller Cases that a failure was shrunk to, by its index: a model has to
            explain these as well.
    """
    kernels = group_by(range(len(failures)), lambda i: failures[i].kernel)
    return tuple(
        group
        for places in kernels.values()
        for group in _groups_of_kernel(failures, places, smaller or {})
    )


def _groups_of_kernel(
    failures: Sequence[Record], indices: list[int], smaller: Mapping[int, Sequence[Record]]
) -> Iterator[CauseGroup]:
    kernel = failures[indices[0]].kernel
    models = dict(zip(indices, _with_alike_signs([failures[i] for i in indices]), strict=True))
    for i in indices:
        for record in smaller.get(i, ()):
            common = {k: one for k, one in models[i].items() if k in _certain_models(record)}
            models[i] = common or models[i]
    confirmed = {key for each in models.values() for key in each}
    for i in indices:  # a model that is confirmed for one failure may explain others
        doubtful = _models(_doubtful_explanations(failures[i]))
        models[i] = models[i] or {key: one for key, one in doubtful.items() if key in confirmed}
    for members, key, cause in _fewest_causes(models):
        yield CauseGroup(
            kernel=kernel,
            cause=cause,
            known=True,
            model=key[0],
            members=members,
            keys=frozenset([key]),
        )
    yield from _groups_of_symptoms(failures, [i for i in indices if not models[i]])


def _groups_of_symptoms(failures: Sequence[Record], indices: list[int]) -> Iterator[CauseGroup]:
    """Yield groups of failures that no confirmed model explains."""
    alike = group_by(indices, lambda i: symptom(failures[i]))
    symptoms = [key for key in alike if key[-1] != _BEYOND]
    shared = {n: _shared_doubts([failures[i] for i in alike[k]]) for n, k in enumerate(symptoms)}
    for numbers, key, cause in _fewest_causes(shared):
        if numbers[1:]:
            keys = [symptoms[n] for n in numbers]
            members = tuple(sorted(i for each in keys for i in alike.pop(each)))
            yield CauseGroup(
                kernel=failures[members[0]].kernel,
                cause=f"perhaps {cause}",
                known=False,
                members=members,
                keys=frozenset([key, *keys]),
            )
    for symptom_key, rest in alike.items():
        if symptom_key[-1] == _BEYOND:
            (cause,), known = unclaimed_findings(failures[i] for i in rest), True
        else:
            cause, known = _plain_cause(failures[rest[0]])
        yield CauseGroup(
            kernel=failures[rest[0]].kernel,
            cause=cause,
            known=known,
            members=tuple(rest),
            keys=frozenset([symptom_key]),
        )


def _fewest_causes(
    models: Mapping[int, Mapping[Key, Explanation]],
) -> Iterator[tuple[tuple[int, ...], Key, str]]:
    """Yield (indices of failures, model key, text) for the fewest models, largest group first."""
    unexplained = [i for i in models if models[i]]
    while unexplained:
        counts = Counter(key for i in unexplained for key in models[i])
        best = max(counts, key=counts.__getitem__)  # the first if several are equal
        members = tuple(i for i in unexplained if best in models[i])
        unexplained = [i for i in unexplained if best not in models[i]]
        # The text names all models that explain every member, since they cannot be told apart, but
        # one form of each.
        equals = {best[0]: best}
        for key in counts:
            if all(key in models[i] for i in members):
                equals.setdefault(key[0], key)
        texts = [_common_text([models[i][key] for i in members]) for key in equals.values()]
        distinct = list(dict.fromkeys(texts))
        more = [f"{len(distinct) - _MOST_NAMED} more"] if distinct[_MOST_NAMED:] else []
        yield members, best, ", or ".join(distinct[:_MOST_NAMED] + more)


def _shared_doubts(records: Iterable[Record]) -> dict[Key, Explanation]:
    """Return the unconfirmed models that would explain every Record that has a diagnosis."""
    diagnosed = [one for one in records if isinstance(one.diagnosis, Diagnosis)]
    each = [_models(_doubtful_explanations(record)) for record in diagnosed]
    return {k: one for k, one in each[0].items() if all(k in o for o in each)} if each else {}


def _certain_models(record: Record) -> dict[Key, Explanation]:
    return _models(certain_explanations(record))


def _models(explanations: Iterable[Explanation]) -> dict[Key, Explanation]:
    """Return explanations by fault, in each of its forms: the model's id and its words."""
    models: dict[Key, Explanation] = {}
    for one in explanations:
        for form in (one.parameters, *one.others):
            # A tensor's name distinguishes faults. Numbers, and the arguments in brackets after the
            # name of a mask, only depend on the size of the Problem.
            words = (v.partition("(")[0] for v in form.values() if isinstance(v, str))
            models.setdefault((one.model, *words), replace(one, parameters=dict(form)))
    return models


def _with_alike_signs(records: list[Record]) -> list[dict[Key, Explanation]]:
    """Return the confirmed models of each Record; undiagnosed Records inherit a proven sign.

    Proving a sign takes many calls. A Record inherits it only from Records of the same question,
    parameters and symptom, and only if these have no other cause.
    """
    models = [_certain_models(record) for record in records]
    # Parameters are included because they name the tensor that a relation is about.
    keys = [
        (*(str(record.case.get(name)) for name in ("question", "parameters")), *symptom(record))
        for record in records
    ]
    causes: dict[Key, dict[Key, Explanation]] = {}
    proven = set()
    for key, record, certain in zip(keys, records, models, strict=True):
        causes.setdefault(key, {}).update(certain)
        if certain and isinstance(record.diagnosis, Diagnosis) and not record.diagnosis.tried:
            proven.add(key)
    return [
        causes[key]
        if key in proven and len(causes[key]) == 1 and not isinstance(record.diagnosis, Diagnosis)
        else certain
        for key, record, certain in zip(keys, records, models, strict=True)
    ]


def _common_text(forms: list[Explanation]) -> str:
    """Return a fault's text with only those parameters that all ``forms`` share."""
    first = forms[0]
    shared = {
        name: value
        for name, value in first.parameters.items()
        if all(one.parameters.get(name) == value for one in forms)
    }
    return fault_text(replace(first, parameters=shared))


def _plain_cause(record: Record) -> tuple[str, bool]:
    """Return a text for a failure that no model explains, and whether it is the actual cause."""
    judgement, is_failure = record.judgement, record.status in FAILED_STATUSES
    if judgement is None:
        prefix = "" if is_failure else f"{record.status}, "
        prefix = "it raises " if record.status == "error" else prefix
        return f"{prefix}{record.reason or record.status}", is_failure
    if judgement.rule in _CALL_RULES:
        return judgement.reason, is_failure
    _, rule, what = symptom(record)
    return f"{_OF_RULES.get(rule, record.status)}{f': {what}' if what else ''}", False
