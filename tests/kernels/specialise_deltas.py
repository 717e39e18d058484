"""Prints what Triton compiles delta's kernel for on Hopper, a line for each layout of dO.

Needs no GPU. One line more than once is one kernel: a row is added up in one order then.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from attncheck.kernels import gradient_terms

SHAPE = (2, 1, 40, 40)


def layouts() -> dict[str, torch.Tensor]:
    like = {"dtype": torch.float16}
    return {
        "contiguous": torch.empty(SHAPE, **like),
        "gapped": torch.empty(2, 1, 41, 48, **like)[:, :, :40, :40],
        "expanded": torch.empty(1, **like).expand(SHAPE),
        "offset": torch.empty(2 * 40 * 40 + 1, **like)[1:].view(SHAPE),
        "transposed": torch.empty(SHAPE, **like).mT,
    }


def main() -> None:
    kernel = gradient_terms._row_deltas
    if "specialised" in sys.argv:  # as it would be without what is said of its arguments
        for parameter in kernel.params:
            parameter.do_not_specialize = parameter.do_not_specialize_on_alignment = False
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    out, rows = torch.empty(SHAPE, dtype=torch.float16), torch.empty(SHAPE[:3])
    for dout in layouts().values():
        _, compiled_for, _ = bind(
            out, dout, rows, rows, (), *out.stride(), *dout.stride(), 1, 40, 40, DLSE=False,
            BLOCK_Q=64, BLOCK_V=64, num_warps=4, debug=False,
        )  # fmt: skip
        sys.stdout.write(f"{compiled_for}\n")


main()
