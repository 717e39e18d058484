"""Folders of the kernels hub: choice of a build, and functions of transformers' interface."""

import sys

import pytest
import torch

from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.diagnose.standalone_script import _reference
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects import hub_kernels
from attncheck.subjects.hub_kernels import is_hub_folder
from attncheck.subjects.load import load_subject
from attncheck.verify.environment import prepare
from attncheck.verify.run_case import run_case

OPS = """
import torch


def exact(q, k, v, scale, causal, window, softcap, sinks, seen):
    group, rows, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = q.float() @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    hidden = (key > row) if causal else torch.zeros(rows, keys, dtype=torch.bool)
    if window:
        hidden = hidden | (key <= row - window)
    if seen is not None:
        hidden = hidden | ~seen[:, None, None, :]
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., :keys].nan_to_num(0.0)
    return (weights @ v).transpose(1, 2).to(q.dtype)
"""
INTERFACE = '''
from .ops import exact

__all__ = ["interface", "flash_attn_func"]


def interface(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
              sliding_window=None, softcap=None, s_aux=None, **kwargs):
    """transformers' attention interface."""
    return exact(query, key, value, scaling, module.is_causal, sliding_window, softcap, s_aux,
                 attention_mask), None


def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    """flash-attn's."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return exact(q, k, v, scale, causal, None, None, None, None)
'''
ELSEWHERE = "torch21-cxx11-cu118-x86_64-linux"
PROBLEMS = {
    "causal": {"mask": Spec.of("causal"), "kv_heads": 2},
    "decoding": {"mask": FULL, "query": 1, "kv": 37},
    "window": {"mask": Spec.of("sliding_window", window=9), "scale": 0.5},
    "softcap": {"mask": Spec.of("causal"), "score": Spec.of("softcap", cap=5.0)},
    "sinks": {"mask": Spec.of("causal"), "sink": True},
    "padding": {"mask": Spec.of("padding", lengths=(20, 11))},
}


@pytest.fixture(autouse=True)
def _prepare_cpu():
    prepare("cpu")


def make_hub_folder(folder, *variants, old=False):
    for variant in variants:
        package = folder / "build" / variant / (folder.name if old else "")
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(INTERFACE)
        (package / "ops.py").write_text(OPS)
    (folder / "build.toml").write_text('[general]\nname = "mine"\nuniversal = true\n')
    return folder


@pytest.mark.parametrize("name", PROBLEMS)
def test_function_of_transformers_interface_passes(name, tmp_path):
    folder = make_hub_folder(tmp_path / "mine", "torch-universal", ELSEWHERE)
    subject = load_subject(f"{folder}::interface")
    sizes = {"batch": 2, "heads": 4, "head_dim": 32, "query": 24, "score": NONE}
    record = run_case(subject, Case(problem=Problem(**sizes | PROBLEMS[name])), device="cpu")
    assert (record.kernel, record.status) == ("mine::interface", "pass"), record


def test_folder_without_a_name_loads_flash_attn_func(tmp_path):
    folder = make_hub_folder(tmp_path / "mine", "torch-universal", old=True)
    assert load_subject(str(folder)).summary == "flash_attn convention: takes softmax_scale, causal"
    for file in folder.rglob("__init__.py"):
        file.write_text(INTERFACE.replace("flash_attn_func", "other"))
    with pytest.raises(UsageError, match=r"name its function, .*::NAME: interface, other\."):
        load_subject(str(folder))


def test_interface_that_supports_flash_attn_takes_no_padding_mask(tmp_path):
    folder = make_hub_folder(tmp_path / "mine", "torch-universal")
    init = folder / "build" / "torch-universal" / "__init__.py"
    init.write_text(INTERFACE + "\nsupports_flash_attn = True\n")
    assert "key_padding_mask" not in load_subject(f"{folder}::interface").takes


def test_standalone_script_of_a_folder_is_refused(tmp_path):
    folder = make_hub_folder(tmp_path / "mine", "torch-universal")
    with pytest.raises(UsageError, match=r"no script can be written of .*: a folder of"):
        _reference(f"{folder}::interface")


def test_folders_load_as_separate_modules(tmp_path):
    both = [make_hub_folder(tmp_path / name, "torch-universal") for name in ("one", "two")]
    functions = [load_subject(f"{each}::flash_attn_func").function for each in both]
    modules = [sys.modules[each.__module__] for each in functions]
    assert [each.__file__.split("/")[-4] for each in modules] == ["one", "two"]
    assert functions[0].__globals__["exact"] is not functions[1].__globals__["exact"]


def test_folder_without_a_build_for_this_machine_is_refused(tmp_path):
    folder = make_hub_folder(tmp_path / "mine", ELSEWHERE)
    with pytest.raises(
        UsageError, match=rf"no build is for this machine \(torch .*\): {ELSEWHERE}"
    ):
        load_subject(str(folder))
    assert not is_hub_folder(str(tmp_path))
    assert not is_hub_folder("a\0b")


def test_most_specific_build_ranks_highest_and_unfit_builds_have_no_rank(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    here = "x86_64-linux"
    order = [
        "torch-universal",
        "torch-cuda",
        f"torch210-cxx11-cu126-{here}",
        f"torch210-cu128-{here}",
        f"torch-stable-abi29-cu128-{here}",
    ]
    ranks = [hub_kernels._rank(name, "12.8", here) for name in order]
    assert all(ranks)
    assert ranks == sorted(ranks)
    others = [
        "torch-cpu",
        *(f"{name}-{here}" for name in ("torch29-cxx11-cu128", "torch210-cu129")),
    ]
    others += [f"torch210-cxx98-cu128-{here}", f"torch210-cu118-{here}", "torch210-rocm64-" + here]
    others += [f"torch-stable-abi211-cu128-{here}", "torch210-cu128-aarch64-linux", "src"]
    assert not any(hub_kernels._rank(name, "12.8", here) for name in others)
    assert hub_kernels._rank(f"torch210-cxx11-cpu-{here}", None, here)
    assert not hub_kernels._rank(f"torch210-cxx11-cu128-{here}", None, here)
