"""A row softmax in Triton, one block a row, as many tutorials begin: wrong somewhere, see below."""

import torch
import triton
import triton.language as tl

from attncheck.core.outputs import Outputs
from attncheck.subjects.capabilities.subject import Subject


@triton.jit
def one_row(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    # The fault: what is not there is read as 0, not as -inf, and exp(0 - m) enters the sum.
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    weights = tl.exp(x - tl.max(x, 0))
    weights /= tl.sum(weights, 0)
    tl.store(out_ptr + row * columns + at, weights.to(out_ptr.dtype.element_ty), mask=inside)


def softmax(x):
    """Softmax over the last axis of a contiguous tensor."""
    out = torch.empty_like(x)
    columns = x.shape[-1]
    one_row[(x.numel() // columns,)](x, out, columns, BLOCK=triton.next_power_of_2(columns))
    return out


class OneBlock(Subject):
    """What tells attncheck that it is a softmax; attention's conventions have no word for it."""

    name = "one-block"
    summary = "a row in one block"
    triton = True

    def concerns(self, problem):
        """Softmax alone."""
        return problem.operation == "softmax"

    def unsupported(self, problem, device):
        """Takes every softmax."""
        del problem, device

    def prepare(self, inputs):
        """Nothing is prepared."""
        return lambda: Outputs(softmax(inputs.x.contiguous()))
