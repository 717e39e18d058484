"""examples/train_transformer.py."""

import os
import subprocess
import sys

import torch

from attncheck import oracles
from attncheck.inputs import input_tensors
from attncheck.inputs.recording_file import load


def test_example_trains_and_records_each_layer(tmp_path, request):
    script = request.config.rootpath / "examples" / "train_transformer.py"
    out = tmp_path / "trained.safetensors"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), "--seconds", "1", "--out", str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "trained: loss" in done.stdout
    recordings = load(out)
    assert [r.call.name for r in recordings] == [f"blocks.{i}.attention/0" for i in range(4)]
    for recording in recordings:
        problem = recording.problem()
        assert (
            f"{problem.dtype} {problem.mask} {problem.shape}" == "bf16 causal B1 H4 Q128 K128 D32"
        )
        drawn = input_tensors.draw_inputs(problem)
        assert torch.equal(drawn.q, recording.q)
        assert oracles.streaming(drawn).out.isfinite().all()
