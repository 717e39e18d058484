"""Adapters that ``docs/how-to/adapters.md`` shows; those of packages that are here run."""

import re
from pathlib import Path

import pytest

from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.load import load_subject
from attncheck.verify.environment import prepare
from attncheck.verify.run_case import run_case

PAGE = Path(__file__).parents[2] / "docs/how-to/adapters.md"
ADAPTERS = dict(re.findall(r"```py\n# (\w+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
CALLS = [
    {"mask": FULL, "query": 24, "kv": 40},
    {"mask": Spec.of("causal"), "query": 33, "kv_heads": 2},
    {"mask": Spec.of("sliding_window", window=9), "query": 24, "scale": 0.5},
]


def test_adapters_are_short_functions():
    assert len(ADAPTERS) == 4
    for name, text in ADAPTERS.items():
        code = compile(text, name, "exec")
        assert "attention" in code.co_names
        assert len(text.strip().splitlines()) <= 10 + text.count("import")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call["mask"].name)
def test_jax_is_right(call, dtype, tmp_path):
    pytest.importorskip("jax", reason="jax is no dependency: install it to try its adapter")
    prepare("cpu")
    (tmp_path / "jax_attention.py").write_text(ADAPTERS["jax_attention.py"])
    kernel = load_subject(f"{tmp_path}/jax_attention.py::attention")
    problem = Problem(batch=2, heads=4, head_dim=32, dtype=dtype, **call)
    record = run_case(kernel, Case(problem=problem), device="cpu")
    assert record.status == "pass", record
