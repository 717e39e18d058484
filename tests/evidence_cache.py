"""A cache of the exact results that kernels are compared with, one for each Case.

In pytest's process, the fixture ``shared_evidence`` installs it. In a server of ``warm_python.py``,
the forks inherit it: most of them first find out which problems a function takes, always with the
same tiny Problems.
"""

import importlib
import tempfile
from pathlib import Path

from attncheck.inputs.problem import Case
from attncheck.verify import evidence_builder

# Modules that run a kernel on a Case without further arguments for its evidence.
_MODULES = (
    "attncheck.diagnose.confirmation",
    "attncheck.diagnose.failing_kernel",
    "attncheck.diagnose.out_of_bounds_reads",
    "attncheck.verify.run_case",
    "attncheck.verify.verify",
)
# Most plain functions in tests have one of these two signatures.
_FUNCTIONS = """
from torch.nn.functional import scaled_dot_product_attention as right
def plain(q, k, v):
    return right(q, k, v)
def masked(q, k, v, is_causal=False):
    return right(q, k, v, is_causal=is_causal)
def wrong(q, k, v):
    return right(q, k, v) / 2
"""


class EvidenceCache:
    """Replaces ``EvidenceBuilder`` and returns the same builder for the same Case and device.

    Args:
        capacity: Number of builders; the oldest is dropped for a new one.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evidence: dict[tuple[str, str], evidence_builder.EvidenceBuilder] = {}

    def __call__(self, case: Case, device: str, *arguments, **options):
        if arguments or options:
            return evidence_builder.EvidenceBuilder(case, device, *arguments, **options)
        key = case.id, device
        if key not in self.evidence:
            if len(self.evidence) == self.capacity:
                oldest = next(iter(self.evidence))
                del self.evidence[oldest]
            self.evidence[key] = evidence_builder.EvidenceBuilder(case, device)
        return self.evidence[key]

    def install(self, setattr_=setattr) -> None:
        """Replace ``EvidenceBuilder`` in every module that the cache is for."""
        for name in _MODULES:
            setattr_(importlib.import_module(name), "EvidenceBuilder", self)

    def uninstall(self) -> None:
        """Put the real ``EvidenceBuilder`` back."""
        for name in _MODULES:
            importlib.import_module(name).EvidenceBuilder = evidence_builder.EvidenceBuilder


def fill_cache_for_forks() -> EvidenceCache:
    """Install a cache of evidence: claim trials, question ``plain`` and its diagnosis."""
    import torch

    from attncheck.cases.check_cases import check_cases
    from attncheck.diagnose.diagnosis import diagnose_failure
    from attncheck.subjects.load import load_subject
    from attncheck.verify import claims
    from attncheck.verify.run_case import run_case

    cache = EvidenceCache(256)
    cache.install()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork inherits no threads
    questions = [
        question
        for dtype in ("bf16", "fp32")
        for question in check_cases(dtype)
        if question.name == "plain"
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(_FUNCTIONS)
        for name in ("plain", "masked", "wrong"):
            subject = load_subject(f"{file}::{name}")
            claims.find_claims(subject, kernel=f"{file}::{name}", device="cpu")
            for question in questions:
                record = run_case(subject, question.case, device="cpu")
                if name == "wrong":
                    diagnose_failure(record, subject, device="cpu")
    torch.set_num_threads(threads)
    return cache
