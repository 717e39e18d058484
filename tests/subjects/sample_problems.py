"""Problems for tests of attention kernels, and masks and score mods that fit lengths up to 150."""

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem

MASKS = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "causal_bottom_right": Spec.of("causal_bottom_right"),
    "window": Spec.of("sliding_window", window=7),
    "prefix_lm": Spec.of("prefix_lm", prefix=5),
    "document": Spec.of("document", lengths=[20, 0, 21, 109]),
    "padding": Spec.of("padding", lengths=[0, 33]),
    "and": Spec.of("and", Spec.of("causal"), Spec.of("padding", lengths=[9, 40])),
    "or": Spec.of("or", Spec.of("causal"), Spec.of("document", lengths=[20, 21, 109])),
    "not": Spec.of("not", Spec.of("causal")),
}
SCORES = {
    "alibi": Spec.of("alibi"),
    "softcap": Spec.of("softcap", cap=5.0),
    "relative_bias": Spec.of("relative_bias", distance=9, seed=1),
    "temperature": Spec.of("temperature", temperature=0.7),
    "chain": Spec.of("chain", Spec.of("softcap", cap=5.0), Spec.of("alibi")),
}


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 40, "head_dim": 16}
    return Problem(**(sizes | changes))
