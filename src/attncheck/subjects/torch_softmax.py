"""torch's own softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.outputs import Outputs
from attncheck.subjects.contract import Call, Subject

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["TorchSoftmax"]


class TorchSoftmax(Subject):
    """``torch.softmax`` in the input's dtype; it exposes no LSE.

    Rows that are −inf throughout give NaN.
    """

    name = "torch-softmax"
    summary = "torch.softmax in the input's dtype; no LSE"

    def concerns(self, problem: Problem) -> bool:
        """Softmax alone."""
        return problem.operation == "softmax"

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes every softmax."""
        del problem, device
        return None

    def prepare(self, inputs: Inputs) -> Call:
        """Nothing is prepared."""
        x = inputs.x
        assert x is not None, "Inputs of a softmax have their scores"

        def call() -> Outputs:
            with torch.no_grad():
                return Outputs(torch.softmax(x, -1))

        return call
