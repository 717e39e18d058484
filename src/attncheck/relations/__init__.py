"""Relations that hold between runs of a kernel on related inputs, without an oracle."""

from __future__ import annotations

from attncheck.core.errors import UnknownName
from attncheck.relations.closed_forms import FIRST_ROW, ONE_HOT, ZERO_QUERY, ZERO_VALUES
from attncheck.relations.equivalent_mods import (
    PREFIX_FULL,
    PREFIX_ZERO,
    SOFTCAP_INFINITE,
    WINDOW_BEYOND,
)
from attncheck.relations.gradient_relations import (
    EULER,
    GQA_REPEAT,
    GROUP_SUMS,
    LSE_LOSS,
    ZERO_LOSS,
)
from attncheck.relations.hidden_keys import (
    EMPTY_ROWS,
    FUTURE_KEYS,
    FUTURE_KEYS_HUGE,
    FUTURE_KEYS_NAN,
    HIDDEN_KEYS,
    HIDDEN_KEYS_HUGE,
    HIDDEN_KEYS_NAN,
)
from attncheck.relations.linearity import (
    KEY_SHIFT,
    LOGIT_SHIFT,
    PAD_HEAD_DIM,
    PAD_VALUE_DIM,
    SCALED_QUERY,
    SOFTMAX_SHIFT,
    VALUES_ADDED,
    VALUES_SCALED,
)
from attncheck.relations.parts import (
    ALONE_IN_BATCH,
    DOCUMENTS,
    PREFILL_ROWS,
    RECTANGULAR,
    SPLIT_MERGE,
)
from attncheck.relations.permutations import (
    BATCH_PERMUTATION,
    HEAD_PERMUTATION,
    KEY_PERMUTATION,
    NEIGHBORHOOD_ORDER,
    SOFTMAX_COLUMNS,
    SOFTMAX_ROWS,
)
from attncheck.relations.relation import Finding, Relation
from attncheck.relations.same_numbers import (
    CALL_ORDER,
    DESCALE,
    LAUNCHES,
    MASK_ORDER,
    PAGES,
    REPEAT,
    STRIDES,
    STRIDES_FAR,
)

__all__ = ["RELATIONS", "Finding", "Relation", "relation_named"]

RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        FUTURE_KEYS,
        FUTURE_KEYS_NAN,
        FUTURE_KEYS_HUGE,
        HIDDEN_KEYS,
        HIDDEN_KEYS_NAN,
        HIDDEN_KEYS_HUGE,
        EMPTY_ROWS,
        FIRST_ROW,
        ONE_HOT,
        ZERO_QUERY,
        ZERO_VALUES,
        VALUES_SCALED,
        VALUES_ADDED,
        KEY_SHIFT,
        LOGIT_SHIFT,
        KEY_PERMUTATION,
        HEAD_PERMUTATION,
        BATCH_PERMUTATION,
        SPLIT_MERGE,
        RECTANGULAR,
        PREFILL_ROWS,
        DOCUMENTS,
        NEIGHBORHOOD_ORDER,
        WINDOW_BEYOND,
        PREFIX_ZERO,
        PREFIX_FULL,
        SOFTCAP_INFINITE,
        GQA_REPEAT,
        PAD_HEAD_DIM,
        PAD_VALUE_DIM,
        SCALED_QUERY,
        DESCALE,
        *STRIDES,
        STRIDES_FAR,
        PAGES,
        REPEAT,
        CALL_ORDER,
        MASK_ORDER,
        ALONE_IN_BATCH,
        LAUNCHES,
        ZERO_LOSS,
        LSE_LOSS,
        EULER,
        GROUP_SUMS,
        SOFTMAX_SHIFT,
        SOFTMAX_COLUMNS,
        SOFTMAX_ROWS,
    )
}


def relation_named(name: str) -> Relation:
    """The relation called ``name``; raises UnknownName with the valid names."""
    if name not in RELATIONS:
        raise UnknownName("relation", name, RELATIONS)
    return RELATIONS[name]
