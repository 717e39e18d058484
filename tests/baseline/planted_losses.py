"""A FlashAttention forward that keeps less than it could, and what a run of it measures."""

import math

import torch
from msgspec.structs import replace

from attncheck.core.judgement import Judgement
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import Environment, Record
from attncheck.records.run_reports import Answer
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.accuracy import accuracies
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution
from attncheck.verify.obligations import outputs_digest
from attncheck.verify.run_case import new_record

FULL = 24  # significant bits of fp32

ENVIRONMENT = Environment(
    device="cpu",
    machine="x86_64",
    python="3.12.0",
    torch="2.11.0",
    numpy="2.0.0",
    attncheck="0.1.0",
)
ENVIRONMENTS = {"here": ENVIRONMENT}


def evidence(**sizes: object) -> EvidenceBuilder:
    return EvidenceBuilder(Case(problem=Problem(**{"heads": 2, **sizes})), "cpu")


def kept(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to so many significant bits."""
    if bits >= FULL:
        return numbers
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits)


def lossy(
    inputs: Inputs,
    *,
    tile: int = 64,
    weights: bool = True,
    accumulator: int = FULL,
    products: int = FULL,
    rounds_twice: bool = False,
) -> Outputs:
    """Out and LSE: of a right kernel unless a loss is asked for.

    Args:
        inputs: Without a score mod.
        tile: Keys a step.
        weights: Whether P is rounded to the format of V, as is usual.
        accumulator: Significant bits that O keeps from step to step.
        products: Significant bits of the operands of products; tf32's are 11.
        rounds_twice: Whether O is rounded before it is divided by the row sum, and after.
    """
    problem, dtype = inputs.problem, inputs.problem.formats.storage.torch_dtype
    q, k, v = (kept(tensor.float(), products) for tensor in (inputs.q, inputs.k, inputs.v))
    mask, at, rows = problem.mask_mod("cpu"), torch.tensor(0), torch.arange(problem.query)[:, None]
    top, total = torch.full(q.shape[:3], -math.inf), torch.zeros(q.shape[:3])
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    for start in range(0, problem.kv, tile):
        keys = torch.arange(start, min(start + tile, problem.kv))
        scores = q @ k[:, :, keys].transpose(-1, -2) * problem.scale
        scores = torch.where(mask(at, at, rows, keys[None]), scores, -math.inf)
        higher = torch.maximum(top, scores.amax(-1))
        known = torch.where(higher.isinf(), 0.0, higher)
        p, rescale = torch.exp(scores - known[..., None]), torch.exp(top - known)
        total, top = total * rescale + p.sum(-1), higher
        p = kept(p.to(dtype).float() if weights else p, products)
        out = kept(out * rescale[..., None] + p @ v[:, :, keys], accumulator)
    out = out.to(dtype).float() if rounds_twice else out
    return Outputs((out / total[..., None]).to(dtype), top + torch.log(total))


def ideal(known: EvidenceBuilder, tiling: Tiling) -> Outputs:
    return Ideal(tiling).run(known.inputs)


def answer(known: EvidenceBuilder, outputs: Outputs) -> Answer:
    """What a gate would keep of these outputs, judged right."""
    problem = known.case.problem
    arithmetic = Ideal().arithmetic(problem, "cpu")
    result = Execution(outputs=outputs, seconds=None, tiling=None, arithmetic=arithmetic)
    record = new_record(
        Ideal(), known.case, device="cpu", variant=str(problem.mask), environment="here"
    )
    record = replace(
        record,
        status="pass",
        judgement=Judgement(status="pass"),
        digest=outputs_digest(outputs),
        accuracy=accuracies(result, known),
    )
    return answered(record)


def answered(record: Record) -> Answer:
    return Answer(unit="unit", stage="baseline", record=record)
