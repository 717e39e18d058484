"""A diagnosis leaves out a model that raises, so a slip in one would be silence: here it is not."""

import pytest
import torch

from attncheck.core.mod_spec import Spec
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.exact_attention import ExactAttention
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem

OF = Spec.of
PROBLEMS = {
    "full": {},
    "one key": {"query": 1, "kv": 1},
    "other dims": {"head_dim": 40, "value_dim": 17},
    "causal": {"mask": OF("causal")},
    "bottom right": {"mask": OF("causal_bottom_right"), "query": 20},
    "window": {"mask": OF("sliding_window", window=5)},
    "padding": {"mask": OF("padding", lengths=[9, 33])},
    "prefix": {"mask": OF("prefix_lm", prefix=4)},
    "documents": {"mask": OF("document", lengths=[10, 0, 3, 20])},
    "both": {"mask": OF("and", OF("causal"), OF("padding", lengths=[9, 20]))},
    "softcap": {"score": OF("softcap", cap=5.0)},
    "alibi": {"score": OF("alibi")},
    "bias": {"score": OF("relative_bias", distance=4, seed=0)},
    "fp8": {"dtype": "e4m3"},
    "sink": {"sink": True},
    "backward": {"backward": True},
    "backward, window and softcap": {
        "backward": True,
        "mask": OF("sliding_window", window=5),
        "score": OF("softcap", cap=5.0),
    },
    "gradients of a bias": {
        "backward": True,
        "dcaptured": True,
        "score": OF("relative_bias", distance=4, seed=0),
    },
}


@pytest.mark.parametrize("of", PROBLEMS)
def test_none_raises_where_it_applies(of):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 33, "kv": 33, "head_dim": 16}
    problem = Problem(**sizes | {"dtype": "bf16"} | PROBLEMS[of])
    some = None if problem.backward else torch.arange(0, problem.query, 2)
    given = ExactAttention(draw_inputs(problem), rows=some, tile=None)
    models = [model for model in FAULT_MODELS.values() if model.applies(problem)]
    forms = {model.id: len(list(model.predictions(given))) for model in models}
    assert sum(forms.values()) > len(FAULT_MODELS) // 4
