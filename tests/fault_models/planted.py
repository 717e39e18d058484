"""Kernels with exactly one fault: what a fault model predicts, rounded as a kernel rounds."""

import math
from functools import cache

import torch

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.paged_layout import Paging
from attncheck.diagnose.explanations import explain
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.exact_attention import ExactAttention
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.fault_explanation import count_ties
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution
from attncheck.verify.relation_runs import relation_inputs

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
    RAGGED | {"scale": 0.0},
    GRADIENTS | {"sink": True, "batch": 2},
    RAGGED | {"paging": Paging(size=16, seed=2), "batch": 2},
    RAGGED | {"mask": OF("sliding_window", window=90)},
    RAGGED | {"mask": OF("documents", query_lengths=[20, 0, 17], kv_lengths=[20, 30, 27])},
    RAGGED | {"mask": OF("causal"), "scale": 20.0},
    RAGGED | {"mask": OF("causal"), "query": 77, "heads": 4, "kv_heads": 2},
    RAGGED | {"mask": OF("sliding_window", window=12)},
)  # fmt: skip


# Part of a model's id → number of a problem that shows such a fault: to try all is slow.
FIRST = {
    "two-sided": 36,
    "maximum-of-hidden": 34,
    "weights-rounded": 18,
    "backward-tail": 26,
    "window": 3,
    "prefix": 4,
    "document": 5,
    "padding": 6,
    "batch": 6,
    "empty": 8,
    "packed": 35,
}
FIRST |= {"sentinel": 8, "softcap": 9, "head-order": 10, "kv-heads": 10, "score-mod": 7, "alibi": 7}
FIRST |= {"bias": 7, "sink": 12, "descale": 16, "weights": 16, "products": 16, "maximum": 19}
FIRST |= {"page-i": 20, "page-t": 20, "page-b": 20, "tanh": 21, "slope": 25, "group-last": 25}
FIRST |= {"gradient-rounded": 28, "scale-of-zero-for": 29, "dsink": 30, "page-0": 31}
FIRST |= {"long-window": 32, "rows-behind": 33}


def problems_showing(model):
    """Numbers of all PROBLEMS, beginning with a likely one."""
    word = next((word for word in FIRST if word in model.id), "")
    first = max(FIRST.get(word, 0), 22 if model.of == "backward" else 0)
    return [*range(first, len(PROBLEMS)), *range(first)]


@cache
def evidence_of(number):
    return EvidenceBuilder(Case(problem=Problem(**PROBLEMS[number])), "cpu")


def execute(problem, outputs, tiling=None):
    """The Execution of a kernel that computes ``outputs`` exactly and rounds them once."""
    formats = problem.formats
    dtypes = {"out": formats.output, "dq": formats.storage, "dk": formats.storage}
    dtypes["dv"] = formats.storage
    rounded = {
        name: x.to(dtypes[name].torch_dtype if name in dtypes else torch.float32)
        for name, x in outputs.tensors().items()
    }
    if problem.backward and outputs.dq is None:
        return None
    return Execution(
        outputs=Outputs(**rounded),
        seconds=None,
        tiling=tiling,
        arithmetic=default_arithmetic(formats, None),
    )


def faulty_executions(model, number):
    """Each form of the model's fault on one of PROBLEMS, with its Execution."""
    evidence = evidence_of(number)
    problem = evidence.case.problem
    if not model.applies(problem) or problem.backward != (model.of == "backward"):
        return
    for variant in model.predictions(ExactAttention(evidence.inputs)):
        yield variant, evidence, execute(problem, variant.outputs)


def best_models(result, evidence):
    """The models that explain what a kernel gave equally well, and better than the others."""
    findings = explain(result, evidence)
    if findings is None:
        return []
    return [one.name for one in findings.ranking[: count_ties(findings.ranking)]]


TILES = Tiling(block_query=16, block_kv=32)
FP8 = RAGGED | {"dtype": "e4m3"}
PREFIX = OF("and", OF("prefix_lm", prefix=5), OF("padding", lengths=[12]))
DOCUMENTS = OF("documents", query_lengths=[0, 20, 0, 17], kv_lengths=[20, 20, 20, 17])
# The first document has 40 keys more than rows, the second as many.
CACHED = OF("documents", query_lengths=[20, 17], kv_lengths=[60, 17])

LENGTHS = [52, 70, 41]
BY_LENGTH = OF("bottom_right", OF("causal"), lengths=LENGTHS)

SPECIALS = {
    "mask-times-infinity": (
        RAGGED | {"query": 77, "kv": 40, "mask": OF("causal_bottom_right")},
        "empty-rows-nan",
    ),
    "scale-of-zero-after-mask": (
        FP8 | {"mask": OF("causal"), "scale": 2.0**-149, "query": 9},
        "mask-one-key-wider",
    ),
    "column-scale-of-zero": (FP8, "descale-v-missing"),
    "tail-in-block-scale": (FP8, "descale-k-missing"),
    "head-dim-padding-read": (RAGGED | {"head_dim": 17}, "scale-missing"),
    "offsets-of-32-bits": (RAGGED | {"query": 5, "kv": 7}, "scale-missing"),
    "empty-documents-not-counted": (RAGGED | {"mask": DOCUMENTS}, "document-ignored"),
    "document-diagonals": (
        RAGGED | {"mask": OF("and", CACHED, OF("causal_bottom_right"))}, "document-ignored",
    ),
    "sequence-diagonals": (RAGGED | {"mask": BY_LENGTH, "batch": 3}, "padding-one-narrower"),
    "window-of-another-end": (
        RAGGED | {"mask": OF("bottom_right", OF("sliding_window", window=9), lengths=LENGTHS),
        "batch": 3}, "window-one-narrower",
    ),
    "one-row-sees-all": (
        RAGGED | {"query": 1, "mask": OF("offset", OF("sliding_window", window=9), rows=76)},
        "window-one-wider",
    ),
    "positions-rounded": (
        RAGGED | {"query": 20, "kv": 320, "mask": OF("offset", OF("causal"), rows=300)},
        "mask-one-key-wider",
    ),
    "padding-as-prefix": (RAGGED | {"mask": PREFIX}, "padding-ignored"),
    "full-tile-beyond-the-end": (
        RAGGED | {"query": 80, "kv": 40, "mask": OF("causal"), "score": OF("alibi")},
        "mask-one-key-wider",
    ),
    "tile-mostly-seen-as-full": (
        RAGGED | {"query": 80, "mask": OF("sliding_window", window=30)},
        "mask-one-key-wider",
    ),
    "mask-dropped-in-whole-tiles": (
        RAGGED | {"query": 48, "kv": 64, "mask": OF("causal")},
        "mask-one-key-wider",
    ),
    "delta-padded-otherwise": (GRADIENTS, "delta-of-another-row"),
    "backward-rows-behind": (GRADIENTS, "dk-without-scale"),
    "gradient-added-again": (GRADIENTS, "dq-without-scale"),
    "slope-of-hidden-scores": (
        GRADIENTS
        | {"query": 8, "kv": 9, "mask": OF("causal"), "score": OF("softcap", cap=2.0)},
        "delta-missing",
    ),
    "captured-not-summed": (
        GRADIENTS | {"score": OF("relative_bias", distance=4, seed=0), "dcaptured": True},
        "delta-missing",
    ),
}  # fmt: skip
"""Model → fields of a Problem that shows its fault, and another model not to be taken for it."""


@cache
def special_evidence(name):
    """The exact result, of inputs on which the fault shows."""
    problem = Problem(**SPECIALS[name][0])
    inputs = draw_inputs(problem)
    if name == "offsets-of-32-bits":
        far = Case(problem=problem, question="strides_far", parameters={"tensor": 0})
        inputs = relation_inputs(far, "cpu")[-1]
    if name == "column-scale-of-zero":
        v = inputs.v.clone()
        v[..., 3] = torch.zeros((), dtype=v.dtype)
        inputs = inputs.replace(v=v)
    if name == "slope-of-hidden-scores":  # no row sees the last key
        k = inputs.k.clone()
        k[:, :, -1] = math.nan
        inputs = inputs.replace(k=k)
    return EvidenceBuilder(Case(problem=problem), "cpu", inputs)


def special_executions(name, evidence):
    """Executions of each form of model ``name``, in declared tiles: undeclared, four are tried."""
    tile = TILES.block_query, TILES.block_kv
    for variant in FAULT_MODELS[name].predictions(ExactAttention(evidence.inputs, tile=tile)):
        yield execute(evidence.case.problem, variant.outputs, TILES)
