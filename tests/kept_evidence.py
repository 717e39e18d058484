"""What kernels are held against, made once for all that are asked the same Case.

In a process of tests by the fixture ``shared_evidence``; in a server of ``warm_python.py`` for its
forks, most of which ask a kernel first what it takes: on the same tiny Problems every time.
"""

import importlib
import tempfile
from pathlib import Path

from attncheck.inputs.problem import Case
from attncheck.verify import evidence_builder

# Those that ask kernels by a Case alone.
_MODULES = (
    "attncheck.diagnose.confirmation",
    "attncheck.diagnose.failing_kernel",
    "attncheck.diagnose.out_of_bounds_reads",
    "attncheck.verify.run_case",
    "attncheck.verify.verify",
)
# By both of these, plain functions of tests mostly are what torch's is called by.
_FUNCTIONS = """
from torch.nn.functional import scaled_dot_product_attention as right
def plain(q, k, v):
    return right(q, k, v)
def masked(q, k, v, is_causal=False):
    return right(q, k, v, is_causal=is_causal)
def wrong(q, k, v):
    return right(q, k, v) / 2
"""


class Kept:
    """Stands for ``EvidenceBuilder``: of one Case there is one, as long as it is kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.evidence: dict[tuple[str, str], evidence_builder.EvidenceBuilder] = {}

    def __call__(self, case: Case, device: str, *given, **more):
        if given or more:
            return evidence_builder.EvidenceBuilder(case, device, *given, **more)
        key = case.id, device
        if key not in self.evidence:
            if len(self.evidence) == self.most:  # the oldest
                del self.evidence[next(iter(self.evidence))]
            self.evidence[key] = evidence_builder.EvidenceBuilder(case, device)
        return self.evidence[key]

    def stands_in(self, setattr_=setattr) -> None:
        """Have it called in place of ``EvidenceBuilder``."""
        for name in _MODULES:
            setattr_(importlib.import_module(name), "EvidenceBuilder", self)

    def steps_down(self) -> None:
        """Have each Case's evidence made where it is asked for, as ever."""
        for name in _MODULES:
            importlib.import_module(name).EvidenceBuilder = evidence_builder.EvidenceBuilder


def keep_for_forks() -> Kept:
    """Keep what trials of functions, the plainest question and its diagnosis are held against."""
    import torch

    from attncheck.cases.check_cases import check_cases
    from attncheck.diagnose.diagnosis import diagnose_failure
    from attncheck.subjects.load import load_subject
    from attncheck.verify import claims
    from attncheck.verify.run_case import run_case

    kept = Kept(256)
    kept.stands_in()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has none of its threads
    plain = [one for d in ("bf16", "fp32") for one in check_cases(d) if one.name == "plain"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(_FUNCTIONS)
        for name in ("plain", "masked", "wrong"):
            subject = load_subject(f"{file}::{name}")
            claims.find_claims(subject, kernel=f"{file}::{name}", device="cpu")
            for one in plain:
                record = run_case(subject, one.case, device="cpu")
                if name == "wrong":
                    diagnose_failure(record, subject, device="cpu")
    torch.set_num_threads(threads)
    return kept
