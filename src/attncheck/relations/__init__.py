"""What must hold between runs of a kernel on related inputs, without an oracle."""

from __future__ import annotations

from attncheck.errors import UnknownName
from attncheck.relations.alone_in_batch import ALONE_IN_BATCH
from attncheck.relations.batch_permutation import BATCH_PERMUTATION
from attncheck.relations.call_order import CALL_ORDER
from attncheck.relations.descale import DESCALE
from attncheck.relations.documents import DOCUMENTS
from attncheck.relations.empty_rows import EMPTY_ROWS
from attncheck.relations.euler import EULER
from attncheck.relations.finding import Finding
from attncheck.relations.first_row import FIRST_ROW
from attncheck.relations.future_keys import FUTURE_KEYS, FUTURE_KEYS_HUGE, FUTURE_KEYS_NAN
from attncheck.relations.gqa_repeat import GQA_REPEAT, GROUP_SUMS
from attncheck.relations.head_permutation import HEAD_PERMUTATION
from attncheck.relations.hidden_keys import HIDDEN_KEYS, HIDDEN_KEYS_HUGE, HIDDEN_KEYS_NAN
from attncheck.relations.key_permutation import KEY_PERMUTATION
from attncheck.relations.key_shift import KEY_SHIFT
from attncheck.relations.launches import LAUNCHES
from attncheck.relations.logit_shift import LOGIT_SHIFT
from attncheck.relations.mask_order import MASK_ORDER
from attncheck.relations.neighborhood_order import NEIGHBORHOOD_ORDER
from attncheck.relations.one_hot import ONE_HOT
from attncheck.relations.pad_head_dim import PAD_HEAD_DIM
from attncheck.relations.pad_value_dim import PAD_VALUE_DIM
from attncheck.relations.pages import PAGES
from attncheck.relations.prefill_rows import PREFILL_ROWS
from attncheck.relations.prefix_ends import PREFIX_FULL, PREFIX_ZERO
from attncheck.relations.rectangular import RECTANGULAR
from attncheck.relations.relation import Relation
from attncheck.relations.repeat import REPEAT
from attncheck.relations.scaled_query import SCALED_QUERY
from attncheck.relations.softcap_infinite import SOFTCAP_INFINITE
from attncheck.relations.softmax_columns import SOFTMAX_COLUMNS
from attncheck.relations.softmax_rows import SOFTMAX_ROWS
from attncheck.relations.softmax_shift import SOFTMAX_SHIFT
from attncheck.relations.split_merge import SPLIT_MERGE
from attncheck.relations.strides import STRIDES
from attncheck.relations.strides_far import STRIDES_FAR
from attncheck.relations.values_added import VALUES_ADDED
from attncheck.relations.values_scaled import VALUES_SCALED
from attncheck.relations.window_beyond import WINDOW_BEYOND
from attncheck.relations.zero_loss import LSE_LOSS, ZERO_LOSS
from attncheck.relations.zero_query import ZERO_QUERY
from attncheck.relations.zero_values import ZERO_VALUES

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
