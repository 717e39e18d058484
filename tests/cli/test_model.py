"""``attncheck model`` records a wrong call, which repro, check and rmse accept as input."""

import pytest

pytest.importorskip("transformers", reason="the extra `model` is not installed")

KERNEL = '''
import torch


def window(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """Called as flash_attn_func; a window is one key too narrow."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones(len(rows), len(keys), dtype=torch.bool)
    if right >= 0:
        seen &= keys <= rows + right
    if left >= 0:
        seen &= keys > rows - left
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=softmax_scale
    )
    return out.transpose(1, 2)
'''
SIZE = ("--layers", "2", "--length", "24", "--batch", "1", "--steps", "1", "--right", "2", "-q")


def test_wrong_call_is_recorded_and_reproduced_by_every_verb(attncheck, tmp_path):
    (tmp_path / "mine.py").write_text(KERNEL)
    words = ("mistral", "llama", "--kernel", "mine.py::window", *SIZE, "--plot", "m.svg")
    run = attncheck("model", *words, cwd=tmp_path)
    assert run.returncode == 1, run.stderr
    assert "FAIL mine.py::window in mistral: layer 0 (model.layers.0.self_attn)" in run.stdout
    failures = tmp_path / "reports" / "failures"
    (recording,) = failures.glob("*.safetensors")
    (failure,) = failures.glob("*.json")
    assert f"attncheck repro {failure.stem}" in run.stdout
    assert {path.suffix for path in (tmp_path / "reports").glob("model.*")} == {
        ".json",
        ".md",
        ".html",
    }
    assert "llama · decode" in (tmp_path / "m.svg").read_text()
    shown = attncheck("report", "reports/model.json", "--format", "md", cwd=tmp_path)
    assert shown.stdout == (tmp_path / "reports" / "model.md").read_text()
    again = attncheck("repro", failure.stem, cwd=tmp_path)
    assert again.returncode == 1
    assert "one key too narrow" in again.stdout
    words = ("--inputs", str(recording), "-q")
    assert attncheck("check", "mine.py::window", *words, cwd=tmp_path).returncode == 1
    passed = attncheck("check", "ideal", *words, cwd=tmp_path)
    assert (passed.returncode, passed.stdout.splitlines()[0]) == (0, "PASS ideal: 1 question")
    other = attncheck("check", "ideal", *words, "--question", "x", cwd=tmp_path)
    assert other.returncode == 2
    assert "question 'x' is not known" in other.stderr
    rmse = attncheck("rmse", "--kernel", "mine.py::window", *words, cwd=tmp_path)
    assert (rmse.returncode, "fail" in rmse.stdout) == (1, True)
