"""What must hold exactly between runs of a kernel on related inputs: no oracle, no tolerance."""

from __future__ import annotations

from attncheck.errors import UnknownName
from attncheck.relations.finding import Finding
from attncheck.relations.first_row import FIRST_ROW
from attncheck.relations.future_keys import FUTURE_KEYS, FUTURE_KEYS_HUGE, FUTURE_KEYS_NAN
from attncheck.relations.relation import Relation
from attncheck.relations.repeat import REPEAT
from attncheck.relations.zero_values import ZERO_VALUES

__all__ = ["RELATIONS", "Finding", "Relation", "relation_named"]

RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        FUTURE_KEYS,
        FUTURE_KEYS_NAN,
        FUTURE_KEYS_HUGE,
        FIRST_ROW,
        ZERO_VALUES,
        REPEAT,
    )
}


def relation_named(name: str) -> Relation:
    """The relation called ``name``; raises UnknownName with the valid names."""
    if name not in RELATIONS:
        raise UnknownName("relation", name, RELATIONS)
    return RELATIONS[name]
