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
CALLS = {
    "jax_attention.py": [
        {"mask": FULL, "query": 24, "kv": 40},
        {"mask": Spec.of("causal"), "query": 33, "kv_heads": 2, "dtype": "bf16"},
        {"mask": Spec.of("sliding_window", window=9), "query": 24, "scale": 0.5},
    ],
    "pallas_attention.py": [
        {"mask": FULL, "query": 64},
        {"mask": Spec.of("causal"), "query": 64, "scale": 0.5},
    ],
}


def test_adapters_are_short_functions():
    assert len(ADAPTERS) == 5
    for name, text in ADAPTERS.items():
        _, found, body = text.partition("def attention(")
        assert found
        compile(text, name, "exec")
        assert len(body.strip().splitlines()) <= 10


@pytest.mark.parametrize(
    ("name", "call"), [(n, call) for n, calls in CALLS.items() for call in calls]
)
def test_jax_is_right(name, call, tmp_path):
    pytest.importorskip("jax", reason="jax is no dependency: install it to try its adapters")
    prepare("cpu")
    (tmp_path / name).write_text(ADAPTERS[name])
    kernel = load_subject(f"{tmp_path / name}::attention")
    problem = Problem(**{"batch": 2, "heads": 4, "head_dim": 32, "dtype": "fp32", **call})
    record = run_case(kernel, Case(problem=problem), device="cpu")
    assert record.status == "pass", record
