"""Standalone scripts of a failure: they compare out and LSE, and there is none for gradients."""

import pytest

from attncheck.core.errors import UsageError
from attncheck.diagnose import standalone_script
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case


def test_script_for_gradients_is_refused(tmp_path):
    arguments = {"kernel": "ideal", "convention": "", "device": "cpu", "facts": {}}
    plain = Case(problem=Problem(query=16, head_dim=16, dtype="fp32"))
    record = run_case(Ideal(), plain, device="cpu")
    path = tmp_path / "repro.py"
    assert standalone_script.render_script(Ideal(), plain, record, path=path, **arguments)
    case = Case(problem=plain.problem.replace(backward=True))
    with pytest.raises(UsageError, match=r"^the script would ask for out and LSE: .*gradients\.$"):
        standalone_script.render_script(Ideal(), case, record, path=path, **arguments)
