"""Sample masks and score mods of the mod tests, and a fault planted in a trace."""

import dataclasses

import torch
from hypothesis import strategies as st

from attncheck.core.mod_spec import Spec
from attncheck.mods.expression import Expression, Structure
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

# Valid with 2 sequences, up to 80 rows and 21 to 80 keys; rows and keys beyond a canvas are hidden.
LIBRARY_MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("causal_bottom_right"),
    Spec.of("sliding_window", window=0),
    Spec.of("sliding_window", window=1),
    Spec.of("sliding_window", window=6),
    Spec.of("prefix_lm", prefix=3),
    Spec.of("document", lengths=[3, 0, 10, 80]),
    Spec.of("padding", lengths=[3, 21]),
    Spec.of("documents", query_lengths=[3, 0, 99], kv_lengths=[0, 9, 99]),
    Spec.of("bottom_right", Spec.of("causal"), lengths=[3, 21]),
    Spec.of("bottom_right", Spec.of("sliding_window", window=6), lengths=[0, 17]),
    Spec.of(
        "documents_bottom_right",
        Spec.of("sliding_window", window=6),
        query_lengths=[3, 0, 99],
        kv_lengths=[0, 9, 99],
    ),
    Spec.of("neighborhood", canvas=[3, 5], kernel=[2, 3]),
    Spec.of("neighborhood_tiled", canvas=[3, 5], kernel=[3, 3], tile=[2, 3]),
    Spec.of("neighborhood_tiled", canvas=[7, 4], kernel=[3, 3], tile=[2, 2]),
    Spec.of("neighborhood_morton", canvas=[3, 5], kernel=[3, 2]),
    Spec.of("offset", Spec.of("causal_bottom_right"), rows=3),
    Spec.of("offset", Spec.of("neighborhood_morton", canvas=[4, 4], kernel=[3, 3]), rows=5),
    Spec.of("expression", text="(minimum(q_idx, 9) % 4 <= kv_idx // 2) | ~(h * 3 - b != 3)"),
]
# In fp32 torch and Triton compute the same bits of each of these.
EXACT_SCORES = [
    Spec.of("none"),
    Spec.of("alibi"),
    Spec.of("alibi_by_sequence"),
    Spec.of("relative_bias", distance=4, seed=1),
    Spec.of("relative_bias", distance=0, seed=1),
    *(
        Spec.of("bias", seed=1, per_batch=batch, per_head=head)
        for batch, head in ((0, 0), (0, 1), (1, 0), (1, 1))
    ),
    Spec.of("offset", Spec.of("alibi"), rows=3),
    Spec.of("offset", Spec.of("bias", seed=1, per_batch=1, per_head=0), rows=3),
    Spec.of("temperature", temperature=2.5),
    Spec.of("temperature", temperature=1),
    Spec.of("expression", text="where(q_idx % 2 == 0, score, -score * 0.5)"),
]
LIBRARY_SCORES = [
    *EXACT_SCORES,
    Spec.of("softcap", cap=30.0),
    Spec.of("softcap", cap=0.7),
    Spec.of("expression", text="tanh(score) * h + abs(score / 8) - maximum(score, 2)"),
]
assert {spec.name for spec in LIBRARY_MASKS} | {"and", "or", "not"} == set(MASKS)
assert {spec.name for spec in LIBRARY_SCORES} | {"chain"} == set(SCORES)


def _compositions(name, parts):
    return st.lists(parts, min_size=1, max_size=3).map(lambda drawn: Spec.of(name, *drawn))


any_mask = st.recursive(
    st.sampled_from(LIBRARY_MASKS),
    lambda parts: st.one_of(
        _compositions("and", parts),
        _compositions("or", parts),
        parts.map(lambda part: Spec.of("not", part)),
        parts.map(lambda part: Spec.of("offset", part, rows=2)),
    ),
    max_leaves=6,
)
any_score = st.recursive(
    st.sampled_from(LIBRARY_SCORES), lambda parts: _compositions("chain", parts), max_leaves=6
)
exact_chain = _compositions("chain", st.sampled_from(EXACT_SCORES))


def replace_operation(expression, op, other):
    """Plant a fault: replace one operation of ``expression`` by another."""
    nodes = expression.structure.nodes
    changed = tuple(dataclasses.replace(n, op=other) if n.op == op else n for n in nodes)
    return Expression(Structure(expression.structure.inputs, changed), expression.captured)


REAL_FUNCTIONS = {
    "neg": lambda s: -s,
    **{name: getattr(torch, name) for name in ("abs", "sign", "floor", "ceil", "tanh", "sigmoid")},
    **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt")},
    **{name: getattr(torch, name) for name in ("sin", "cos")},
}
DIVISIONS = {
    "// 2.5": lambda s: s // 2.5,
    "// -0.7": lambda s: s // -0.7,
    "% 2.5": lambda s: s % 2.5,
    "% -0.7": lambda s: s % -0.7,
    "2 // s": lambda s: torch.full_like(s, 2.0) // s,
    "-2 % s": lambda s: torch.full_like(s, -2.0) % s,
    "1 / s": lambda s: 1.0 / s,
    "s / 0": lambda s: s / 0.0,
    "s - inf": lambda s: s - torch.inf,
    "minimum": lambda s: torch.minimum(s, torch.zeros_like(s)),
    "maximum": lambda s: torch.maximum(s, torch.zeros_like(s)),
    "s < 1": lambda s: torch.where(s < 1.0, s, 0.0),
}
