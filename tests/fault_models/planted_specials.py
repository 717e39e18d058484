"""Problems that show a fault which most show nothing of, and another fault of the same problem."""

import dataclasses
import math
from functools import cache

import torch
from tests.fault_models.planted_predictions import GRADIENTS, OF, RAGGED

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.outputs import Outputs
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.exact_attention import ExactAttention
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution
from attncheck.verify.relation_runs import relation_inputs

TILES = Tiling(block_query=16, block_kv=32)
FP8 = RAGGED | {"dtype": "e4m3"}
PREFIX = OF("and", OF("prefix_lm", prefix=5), OF("padding", lengths=[12]))
DOCUMENTS = OF("documents", query_lengths=[0, 20, 0, 17], kv_lengths=[20, 20, 20, 17])

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
"""By the model's name: fields of a Problem, and a model of what is no such fault."""


@cache
def evidence_of(name):
    """The exact result, of inputs that the fault needs to be seen."""
    problem = Problem(**SPECIALS[name][0])
    inputs = draw_inputs(problem)
    if name == "offsets-of-32-bits":
        far = Case(problem=problem, question="strides_far", parameters={"tensor": 0})
        inputs = relation_inputs(far, "cpu")[-1]
    if name == "column-scale-of-zero":
        v = inputs.v.clone()
        v[..., 3] = torch.zeros((), dtype=v.dtype)
        inputs = dataclasses.replace(inputs, v=v)
    if name == "slope-of-hidden-scores":  # no row sees the last key
        k = inputs.k.clone()
        k[:, :, -1] = math.nan
        inputs = dataclasses.replace(inputs, k=k)
    return EvidenceBuilder(Case(problem=problem), "cpu", inputs)


def planted(name, evidence):
    """Executions of the forms of model ``name``: rounded as a kernel rounds."""
    problem = evidence.case.problem
    formats = problem.formats
    storage = formats.storage.torch_dtype
    dtypes = {"out": formats.output.torch_dtype, "dq": storage, "dk": storage, "dv": storage}
    tile = TILES.block_query, TILES.block_kv
    for variant in FAULT_MODELS[name].predictions(ExactAttention(evidence.inputs, tile=tile)):
        rounded = {
            n: x.to(dtypes.get(n, torch.float32)) for n, x in variant.outputs.tensors().items()
        }
        yield Execution(
            outputs=Outputs(**rounded),
            seconds=None,
            tiling=TILES,  # or four sizes are tried
            arithmetic=default_arithmetic(formats, None),
        )
