"""Kernels that have exactly one fault: what a fault model predicts, rounded as a kernel rounds."""

from functools import cache

import torch

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.paged_layout import Paging
from attncheck.diagnose.explanations import explain
from attncheck.fault_models.exact_attention import ExactAttention
from attncheck.inputs.problem import Case, Problem
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution

OF = Spec.of
RAGGED = {"heads": 2, "query": 37, "kv": 77, "head_dim": 32, "dtype": "fp16"}
GRADIENTS = RAGGED | {"backward": True, "dlse": True}
PROBLEMS = (
    RAGGED,
    RAGGED | {"mask": OF("causal")},
    RAGGED | {"mask": OF("causal_bottom_right")},
    RAGGED | {"mask": OF("sliding_window", window=9)},
    RAGGED | {"mask": OF("prefix_lm", prefix=21)},
    RAGGED | {"mask": OF("document", lengths=[20, 30, 27])},
    RAGGED | {"mask": OF("and", OF("causal"), OF("padding", lengths=[50, 30])), "batch": 2},
    RAGGED
    | {"mask": OF("offset", OF("causal"), rows=40), "score": OF("offset", OF("alibi"), rows=40)},
    RAGGED | {"query": 77, "kv": 40, "mask": OF("causal_bottom_right")},
    RAGGED | {"score": OF("softcap", cap=2.0), "mask": OF("causal")},
    RAGGED | {"score": OF("alibi"), "heads": 6, "kv_heads": 3},
    RAGGED | {"score": OF("bias", seed=1, per_batch=1, per_head=1), "batch": 2},
    RAGGED | {"sink": True},
    RAGGED | {"batch": 2, "heads": 6, "kv_heads": 3},
    RAGGED | {"value_dim": 16},
    RAGGED | {"scale": 0.7},
    RAGGED | {"dtype": "e4m3", "heads": 4, "kv_heads": 2, "batch": 2},
    RAGGED | {"dtype": "e4m3", "distribution": "one_hot"},
    RAGGED | {"dtype": "fp32"},
    RAGGED | {"dtype": "fp32", "distribution": "negative_logits"},
    RAGGED | {"paging": Paging(size=16), "dtype": "fp16"},
    RAGGED | {"distribution": "large_logits", "score": OF("softcap", cap=0.5)},
    GRADIENTS,
    GRADIENTS | {"mask": OF("causal")},
    GRADIENTS | {"mask": OF("sliding_window", window=9)},
    GRADIENTS | {"score": OF("softcap", cap=2.0), "heads": 4, "kv_heads": 2},
    GRADIENTS | {"query": 77, "kv": 40, "mask": OF("causal_bottom_right")},
    GRADIENTS | {"value_dim": 16},
    GRADIENTS | {"dtype": "fp32"},
)  # fmt: skip


# Words of models' names, and which of PROBLEMS shows such a fault: to ask all in turn is slow.
FIRST = {"window": 3, "prefix": 4, "document": 5, "padding": 6, "batch": 6, "empty": 8}
FIRST |= {"sentinel": 8, "softcap": 9, "head-order": 10, "kv-heads": 10, "score-mod": 7, "alibi": 7}
FIRST |= {"bias": 7, "sink": 12, "descale": 16, "weights": 16, "products": 16, "maximum": 19}
FIRST |= {"page": 20, "tanh": 21, "slope": 25, "group-last": 25}
FIRST |= {"gradient-rounded": 28}


def problems_showing(model):
    """Numbers of PROBLEMS, a likely one first."""
    word = next((word for word in FIRST if word in model.id), "")
    first = max(FIRST.get(word, 0), 22 if model.of == "backward" else 0)
    return [*range(first, len(PROBLEMS)), *range(first)]


@cache
def evidence_of(number):
    return EvidenceBuilder(Case(problem=Problem(**PROBLEMS[number])), "cpu")


def execution(problem, outputs):
    """What a kernel gave that computed this exactly and rounded it once."""
    formats = problem.formats
    dtypes = {"out": formats.output, "dq": formats.storage, "dk": formats.storage}
    dtypes["dv"] = formats.storage
    rounded = {
        name: x.to(dtypes[name].torch_dtype if name in dtypes else torch.float32)
        for name, x in outputs.tensors().items()
        if name != "dcaptured"
    }
    if problem.backward and outputs.dq is None:
        return None
    return Execution(
        outputs=Outputs(**rounded),
        seconds=None,
        tiling=None,
        arithmetic=default_arithmetic(formats, None),
    )


def faulty(model, number):
    """Executions of the model's forms on one of PROBLEMS."""
    evidence = evidence_of(number)
    problem = evidence.case.problem
    if not model.applies(problem) or problem.backward != (model.of == "backward"):
        return
    for variant in model.predictions(ExactAttention(evidence.inputs)):
        yield variant, evidence, execution(problem, variant.outputs)


def exact(number):
    evidence = evidence_of(number)
    return explain(execution(evidence.case.problem, evidence.truth), evidence)
