"""Relations that hold between runs of a kernel on related inputs, without an oracle."""

from __future__ import annotations

from attncheck.core.errors import look_up
from attncheck.relations import closed_forms as closed
from attncheck.relations import equivalent_mods as mods
from attncheck.relations import gradient_relations as gradients
from attncheck.relations import hidden_keys as hidden
from attncheck.relations import linearity, parts
from attncheck.relations import permutations as orders
from attncheck.relations import same_numbers as same
from attncheck.relations.relation import Finding, Relation

__all__ = ["RELATIONS", "Finding", "Relation", "relation_named"]

# Reports and plans list them in this order.
RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        # hidden keys, and known results
        *(hidden.FUTURE_KEYS, hidden.FUTURE_KEYS_NAN, hidden.FUTURE_KEYS_HUGE),
        *(hidden.HIDDEN_KEYS, hidden.HIDDEN_KEYS_NAN, hidden.HIDDEN_KEYS_HUGE),
        hidden.EMPTY_ROWS,
        *(closed.FIRST_ROW, closed.ONE_HOT, closed.ZERO_QUERY, closed.ZERO_VALUES),
        # linearity, shifts and permutations
        *(linearity.VALUES_SCALED, linearity.VALUES_ADDED),
        *(linearity.KEY_SHIFT, linearity.LOGIT_SHIFT),
        *(orders.KEY_PERMUTATION, orders.HEAD_PERMUTATION, orders.BATCH_PERMUTATION),
        # parts of a problem, and equivalent problems
        *(parts.SPLIT_MERGE, parts.RECTANGULAR, parts.PREFILL_ROWS, parts.DOCUMENTS),
        orders.NEIGHBORHOOD_ORDER,
        *(mods.WINDOW_BEYOND, mods.PREFIX_ZERO, mods.PREFIX_FULL, mods.SOFTCAP_INFINITE),
        gradients.GQA_REPEAT,
        *(linearity.PAD_HEAD_DIM, linearity.PAD_VALUE_DIM, linearity.SCALED_QUERY),
        # other layouts, and repeated calls
        *(same.DESCALE, *same.STRIDES, *same.STRIDES_ALONE, same.STRIDES_FAR, same.PAGES),
        *(same.REPEAT, same.CALL_ORDER, same.MASK_ORDER),
        parts.ALONE_IN_BATCH,
        same.LAUNCHES,
        # gradients
        *(gradients.ZERO_LOSS, gradients.LSE_LOSS, gradients.EULER, gradients.GROUP_SUMS),
        # a softmax of scores
        *(linearity.SOFTMAX_SHIFT, orders.SOFTMAX_COLUMNS, orders.SOFTMAX_ROWS),
    )
}


def relation_named(name: str) -> Relation:
    """Return the relation called ``name``; raise UnknownName with the valid names."""
    return look_up("relation", name, RELATIONS)
