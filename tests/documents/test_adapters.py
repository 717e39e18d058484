"""The adapters of ``docs/how-to/adapters.md``; those of installed packages are run."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from attncheck.core.mod_spec import FULL, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Case, Problem
from attncheck.verify.environment import prepare
from attncheck.verify.isolated import IsolatedKernel
from attncheck.verify.verify import iter_records

PAGE = Path(__file__).parents[2] / "docs/how-to/adapters.md"
ADAPTERS = dict(re.findall(r"```py\n# (\w+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
MOST_LINES = 10  # of a function

_OPS = "sglang.srt.layers.attention.triton_ops"
_CAUSAL, _LAST = Spec.of("causal"), Spec.of("causal_bottom_right")
_LENGTHS = Spec.of("padding", lengths=(40, 33))
CALLS = {
    "jax_attention.py::attention": (
        "jax",
        "cpu",
        [
            {"mask": FULL, "query": 24, "kv": 40},
            {"mask": _CAUSAL, "query": 33, "kv_heads": 2, "dtype": "bf16"},
            {"mask": Spec.of("sliding_window", window=9), "query": 24, "scale": 0.5},
        ],
    ),
    "pallas_attention.py::attention": (
        "jax",
        "cpu",
        [{"mask": FULL, "query": 64}, {"mask": _CAUSAL, "query": 64, "scale": 0.5}],
    ),
    "torch_varlen.py::attention": ("torch", "cuda", [{"mask": _CAUSAL, "dtype": "bf16"}]),
    "flashinfer_prefill.py::attention": ("flashinfer", "cuda", [{"mask": _CAUSAL, "head_dim": 64}]),
    "flashinfer_paged.py::attention": (
        "flashinfer",
        "cuda",
        [{"mask": FULL, "head_dim": 64, "paging": Paging(size=16, seed=1)}],
    ),
    "flashinfer_paged.py::decode": (
        "flashinfer",
        "cuda",
        [{"mask": FULL, "head_dim": 64, "query": 1, "kv": 40, "paging": Paging(size=16, seed=1)}],
    ),
    "xformers_attention.py::attention": ("xformers", "cuda", [{"mask": _CAUSAL}]),
    "sglang_extend.py::attention": (
        f"{_OPS}.extend_attention",
        "cpu",
        [
            {"mask": _LAST, "query": 24, "kv": 40, "kv_heads": 2},
            {"mask": _CAUSAL, "sink": True},
            {"mask": Spec.of("sliding_window", window=9), "scale": 0.5},
            {"mask": FULL, "score": Spec.of("softcap", cap=5.0), "dtype": "bf16"},
        ],
    ),
    "sglang_decode.py::attention": (
        f"{_OPS}.decode_attention",
        "cpu",
        [{"mask": FULL, "query": 1, "kv": 40, "kv_heads": 2}],
    ),
    "sglang_prefill.py::attention": (
        f"{_OPS}.prefill_attention",
        "cpu",
        [{"mask": _CAUSAL, "kv_heads": 2}, {"mask": FULL}],
    ),
    "vllm_unified.py::attention": (
        "vllm.v1.attention.ops.triton_unified_attention",
        "cpu",
        [
            {"mask": _LENGTHS, "query": 1, "kv": 40, "paging": Paging(size=16, seed=1)},
            {"mask": _LAST, "kv": 40, "kv_heads": 2, "paging": Paging(size=16, seed=1)},
        ],
    ),
}


def test_adapters_of_the_page_are_short_and_have_calls_here():
    functions = [
        (file, statement)
        for file, text in ADAPTERS.items()
        for statement in ast.parse(text, file).body
        if isinstance(statement, ast.FunctionDef)
    ]
    names = {f"{file}::{function.name}" for file, function in functions}
    assert {name for name in names if not name.endswith("::pages_of")} == set(CALLS)
    for _, function in functions:
        assert function.body[-1].end_lineno - function.body[0].lineno < MOST_LINES


def is_installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


@pytest.mark.parametrize(
    ("name", "call"), [(n, call) for n, (*_, calls) in CALLS.items() for call in calls]
)
def test_adapter_of_an_installed_package_is_right(name, call, tmp_path):
    package, device, _ = CALLS[name]
    if not is_installed(package):
        pytest.skip(f"{package} is not installed: install it to try its adapter")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{package} needs a GPU")
    prepare(device)
    file = name.partition("::")[0]
    (tmp_path / file).write_text(ADAPTERS[file])
    dtype = "fp32" if package == "jax" else "fp16"
    sizes = {"batch": 2, "heads": 4, "head_dim": 32, "query": 24, "dtype": dtype}
    problem = Problem(**{**sizes, **call})
    # In another process: JAX starts threads, and pytest's process could no longer fork.
    with IsolatedKernel(str(tmp_path / name)) as host:
        (record,) = iter_records([host.subject], [Case(problem=problem)], device=device)
    assert record.status == "pass", record
