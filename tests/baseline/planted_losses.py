"""A FlashAttention forward with planted losses of precision, and the answers of a run of it."""

import math

import torch
from msgspec.structs import replace

from attncheck.core.judgement import Judgement
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import Environment, Record
from attncheck.records.run_reports import Answer
from attncheck.subjects.ideal import Ideal
from attncheck.verify.accuracy import accuracies
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution
from attncheck.verify.obligations import outputs_digest
from attncheck.verify.run_case import new_record

FP32_BITS = 24  # significant bits

ENVIRONMENT = Environment(
    device="cpu",
    machine="x86_64",
    python="3.12.0",
    torch="2.11.0",
    numpy="2.0.0",
    attncheck="0.1.0",
)
ENVIRONMENTS = {"here": ENVIRONMENT}


def make_evidence(**sizes: object) -> EvidenceBuilder:
    return EvidenceBuilder(Case(problem=Problem(**{"heads": 2, **sizes})), "cpu")


def round_to_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers rounded to ``bits`` significant bits."""
    if bits >= FP32_BITS:
        return numbers
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits)


def run_lossy(
    inputs: Inputs,
    *,
    tile: int = 64,
    weights: bool = True,
    accumulator: int = FP32_BITS,
    products: int = FP32_BITS,
    rounds_twice: bool = False,
) -> Outputs:
    """Out and LSE of a tiled forward, correct unless an argument plants a loss.

    Args:
        inputs: Without a score mod.
        tile: Keys per step.
        weights: Whether P is rounded to the format of V, as is usual.
        accumulator: Significant bits that O keeps between steps.
        products: Significant bits of the operands of products; tf32 has 11.
        rounds_twice: Whether O is rounded both before and after the division by the row sum.
    """
    problem, dtype = inputs.problem, inputs.problem.formats.storage.torch_dtype
    q, k, v = (round_to_bits(tensor.float(), products) for tensor in (inputs.q, inputs.k, inputs.v))
    mask, at, rows = problem.mask_mod("cpu"), torch.tensor(0), torch.arange(problem.query)[:, None]
    top, total = torch.full(q.shape[:3], -math.inf), torch.zeros(q.shape[:3])
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    for start in range(0, problem.kv, tile):
        keys = torch.arange(start, min(start + tile, problem.kv))
        scores = q @ k[:, :, keys].transpose(-1, -2) * problem.scale
        scores = torch.where(mask(at, at, rows, keys[None]), scores, -math.inf)
        higher = torch.maximum(top, scores.amax(-1))
        finite = torch.where(higher.isinf(), 0.0, higher)
        p, rescale = torch.exp(scores - finite[..., None]), torch.exp(top - finite)
        total, top = total * rescale + p.sum(-1), higher
        p = round_to_bits(p.to(dtype).float() if weights else p, products)
        out = round_to_bits(out * rescale[..., None] + p @ v[:, :, keys], accumulator)
    out = out.to(dtype).float() if rounds_twice else out
    return Outputs((out / total[..., None]).to(dtype), top + torch.log(total))


def measure(evidence: EvidenceBuilder, outputs: Outputs) -> Answer:
    """The Answer that a gate would store for these outputs, with the status "pass"."""
    problem = evidence.case.problem
    arithmetic = Ideal().arithmetic(problem, "cpu")
    result = Execution(outputs=outputs, seconds=None, tiling=None, arithmetic=arithmetic)
    record = new_record(
        Ideal(), evidence.case, device="cpu", variant=str(problem.mask), environment="here"
    )
    record = replace(
        record,
        status="pass",
        judgement=Judgement(status="pass"),
        digest=outputs_digest(outputs),
        accuracy=accuracies(result, evidence),
    )
    return baseline_answer(record)


def baseline_answer(record: Record) -> Answer:
    return Answer(unit="unit", stage="baseline", record=record)
