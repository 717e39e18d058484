"""Failures by their cause: what one mistake explains is told once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from attncheck.core.judgement import Rule
from attncheck.core.tensor_names import GRADIENTS
from attncheck.records.record import FAILED_STATUSES, Diagnosis, Explanation, Record

Key = tuple[str, ...]
_MOST_NAMED = 3  # of several causes that explain all of a group

# Of the call and not of numbers: what the judge says of it is the cause already.
_CALL_RULES: frozenset[Rule] = frozenset(
    {"contract", "alias", "mutation", "memory", "state", "leak"}
)
# Here the question says what is wrong: one relation may hold where another does not.
_QUESTION_RULES: frozenset[Rule] = frozenset({"relation", "determinism"})
_BEYOND = "beyond its claims"
# Of a process that died: what it said then, and of which signal, differs from call to call.
_HEAP = ": its heap is broken"
# Of several calls which one, and the shape and dtype of a tensor: they go with the problem.
_PROBLEM = re.compile(r"^call \d+ of \d+: | \([\d, ]*\) of \w+")
_NUMBER = re.compile(r"[-+−]?\d[\d.,]*(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseGroup:
    """Failures of one kernel that have one cause, as far as is known."""

    kernel: str  # whose
    cause: str  # in plain words; of an unknown one the rule that is broken
    # Whether a fault model was shown to explain each of them, or each says by itself what is
    # wrong: it raised, died, or wrote to its inputs, for example.
    known: bool
    model: str = ""  # id of the fault model or sign; empty where there is none
    members: tuple[int, ...]  # places of the failures among those that were grouped
    keys: frozenset[Key]  # of which each of them has one

    def has(self, record: Record) -> bool:
        """Return whether ``record`` fails in the same way, such as a smaller Case of a member."""
        # What a model explains is no failure of unknown cause, be its symptom the same.
        own = set(_certain_models(record)) or {symptom(record)}
        return record.kernel == self.kernel and bool(self.keys & own)


def certain_explanations(record: Record) -> tuple[Explanation, ...]:
    """Return the faults of which each explains all of a failure; none where nobody knows one."""
    diagnosis = record.diagnosis
    if not isinstance(diagnosis, Diagnosis) or not diagnosis.ranked:
        return ()
    if diagnosis.level != "named":
        return ()
    if not diagnosis.tried:  # the failure says it by itself
        return diagnosis.ranked[:1]
    return diagnosis.ranked[: max(1, diagnosis.tied)] if diagnosis.ranked[0].explains_all else ()


def _doubtful_explanations(record: Record) -> tuple[Explanation, ...]:
    """Return the faults of which each would explain all of a failure, and none was confirmed."""
    diagnosis = record.diagnosis
    if not isinstance(diagnosis, Diagnosis) or diagnosis.level == "named":
        return ()
    return tuple(one for one in diagnosis.ranked if one.explains_all)


def fault_text(explanation: Explanation) -> str:
    """``the last tile of keys is never visited [tile 64]``."""
    form = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in explanation.parameters.items()
    )
    return f"{explanation.sentence}{f' [{form}]' if form else ''}"


# Aspects of what lies beyond a kernel's claims, as its author would say them.
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
}


def unclaimed_findings(records: Iterable[Record]) -> list[str]:
    """Return what a kernel does beyond its claims and must not, a line for each way of it."""
    ways: dict[str, dict[str, dict[str, None]]] = {}
    for record in records:
        which = record.unclaimed
        if which is msgspec.UNSET or record.status not in FAILED_STATUSES:
            continue
        ways.setdefault(_unclaimed_way(record), {}).setdefault(which.aspect, {})[which.what] = None
    lines = []
    for way, aspects in ways.items():
        parts = [f"{_ASPECTS.get(name, name)}{', '.join(each)}" for name, each in aspects.items()]
        mask = "mask the last tile, or " if "lengths" in aspects else ""
        lines.append(f"{way} for {'; '.join(parts)}: {mask}refuse them by ValueError")
    return lines


def _unclaimed_way(record: Record) -> str:
    judgement = record.judgement
    if judgement is not None and judgement.rule == "memory":
        return "writes past its tensors, no refusal,"
    return "wrong, not refused," if record.status == "fail" else f"{record.status}, no refusal,"


def without_numbers(reason: str) -> str:
    """Return ``reason`` with a sign in place of each size and place: it differs from Case to Case.

    What remains is alike where the same thing is wrong.
    """
    return _NUMBER.sub("#", reason)


def symptom(record: Record) -> Key:
    """Return how a Record fails: its status and rule, and what of the numbers or the call is wrong.

    Sizes and places in a message are left out: they differ from Case to Case.
    """
    judgement = record.judgement
    if record.unclaimed is not msgspec.UNSET:
        return record.status, _unclaimed_way(record), _BEYOND
    if judgement is None:
        what, broken, _ = record.reason.partition(_HEAP)
        return record.status, "", broken or without_numbers(what)
    rule = judgement.rule
    if rule in _CALL_RULES:
        # Behind it how the process died as well, which differs from call to call.
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

    A Record that several fault models explain equally belongs to the one that explains the most
    others. Where no model is known to explain all of a Record, those of one rule and symptom are
    alike, and of several rules those that one model would explain.

    Args:
        smaller: Smaller Cases that a failure was shrunk to, by its place: what explains it has to
            explain these, too.
    """
    kernels: dict[str, list[int]] = {}
    for i, record in enumerate(failures):
        kernels.setdefault(record.kernel, []).append(i)
    return tuple(
        group
        for places in kernels.values()
        for group in _groups_of_kernel(failures, places, smaller or {})
    )


def _groups_of_kernel(
    failures: Sequence[Record], places: list[int], smaller: Mapping[int, Sequence[Record]]
) -> Iterator[CauseGroup]:
    kernel = failures[places[0]].kernel
    models = dict(zip(places, _with_alike_signs([failures[i] for i in places]), strict=True))
    for i in places:
        for record in smaller.get(i, ()):
            both = {k: one for k, one in models[i].items() if k in _certain_models(record)}
            models[i] = both or models[i]
    known = {key for each in models.values() for key in each}
    for i in places:  # what was confirmed of one failure, and would explain all of another
        doubts = _models(_doubtful_explanations(failures[i]))
        models[i] = models[i] or {key: one for key, one in doubts.items() if key in known}
    for members, key, cause in _fewest_causes(models):
        yield CauseGroup(
            kernel=kernel,
            cause=cause,
            known=True,
            model=key[0],
            members=members,
            keys=frozenset([key]),
        )
    yield from _groups_of_symptoms(failures, [i for i in places if not models[i]])


def _groups_of_symptoms(failures: Sequence[Record], places: list[int]) -> Iterator[CauseGroup]:
    """Failures that no model is known to explain."""
    alike: dict[Key, list[int]] = {}
    for i in places:
        alike.setdefault(symptom(failures[i]), []).append(i)
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
    for symptom_key, left in alike.items():
        if symptom_key[-1] == _BEYOND:
            (cause,), known = unclaimed_findings(failures[i] for i in left), True
        else:
            cause, known = _plain_cause(failures[left[0]])
        yield CauseGroup(
            kernel=failures[left[0]].kernel,
            cause=cause,
            known=known,
            members=tuple(left),
            keys=frozenset([symptom_key]),
        )


def _fewest_causes(
    models: Mapping[int, Mapping[Key, Explanation]],
) -> Iterator[tuple[tuple[int, ...], Key, str]]:
    """Yield the places that one model explains, its key and its text; the most at once first."""
    left = [i for i in models if models[i]]
    while left:
        counts = Counter(key for i in left for key in models[i])
        best = max(counts, key=counts.__getitem__)  # of equals the first
        members = tuple(i for i in left if best in models[i])
        left = [i for i in left if best not in models[i]]
        # Others may explain each of them as well: then nobody can tell which one it is.
        equals = [key for key in counts if all(key in models[i] for i in members)]
        texts = [_common_text([models[i][key] for i in members]) for key in (best, *equals)]
        several = list(dict.fromkeys(texts))
        more = [f"{len(several) - _MOST_NAMED} more"] if several[_MOST_NAMED:] else []
        yield members, best, ", or ".join(several[:_MOST_NAMED] + more)


def _shared_doubts(records: Iterable[Record]) -> dict[Key, Explanation]:
    """Models that would explain all of each of these that somebody looked into."""
    looked = [one for one in records if isinstance(one.diagnosis, Diagnosis)]
    each = [_models(_doubtful_explanations(record)) for record in looked]
    return {k: one for k, one in each[0].items() if all(k in o for o in each)} if each else {}


def _certain_models(record: Record) -> dict[Key, Explanation]:
    return _models(certain_explanations(record))


def _models(explanations: Iterable[Explanation]) -> dict[Key, Explanation]:
    """Explanations by model and by what tells one fault of it from another."""
    models = {}
    for one in explanations:
        # Which tensor it is of tells faults apart. Numbers go with the sizes of the Problem, and so
        # do those in brackets, of a mask that is named.
        words = (v.partition("(")[0] for v in one.parameters.values() if isinstance(v, str))
        models[(one.model, *words)] = one
    return models


def _with_alike_signs(records: list[Record]) -> list[dict[Key, Explanation]]:
    """Return the models of each; of one that nobody looked into the sign that others show.

    A sign takes many calls to prove. It is taken over only where question, rule and symptom are
    the same, and no other cause is known of such.
    """
    models = [_certain_models(record) for record in records]
    # With its parameters: they say which tensor a relation is about.
    keys = [
        (*(str(record.case.get(name)) for name in ("question", "parameters")), *symptom(record))
        for record in records
    ]
    causes: dict[Key, dict[Key, Explanation]] = {}
    proven = set()
    for key, record, own in zip(keys, records, models, strict=True):
        causes.setdefault(key, {}).update(own)
        if own and isinstance(record.diagnosis, Diagnosis) and not record.diagnosis.tried:
            proven.add(key)
    return [
        causes[key]
        if key in proven and len(causes[key]) == 1 and not isinstance(record.diagnosis, Diagnosis)
        else own
        for key, record, own in zip(keys, records, models, strict=True)
    ]


def _common_text(forms: list[Explanation]) -> str:
    """The fault, and those of its parameters that are the same in every form."""
    first = forms[0]
    same = {
        name: value
        for name, value in first.parameters.items()
        if all(one.parameters.get(name) == value for one in forms)
    }
    return fault_text(replace(first, parameters=same))


def _plain_cause(record: Record) -> tuple[str, bool]:
    """Return the cause of failures that no model explains, and whether it is one."""
    judgement = record.judgement
    if judgement is None:
        known = record.status in FAILED_STATUSES
        says = "it raises " if record.status == "error" else "" if known else f"{record.status}, "
        return f"{says}{record.reason or record.status}", known
    if judgement.rule in _CALL_RULES:
        return judgement.reason, record.status in FAILED_STATUSES
    _, rule, what = symptom(record)
    return " of ".join(
        part for part in (f"rule {rule}" if rule else record.status, what) if part
    ), False
