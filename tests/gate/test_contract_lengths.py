"""The contract stage tests lengths that are whole tiles of one size but of no larger one."""

from pathlib import Path

import pytest
from tests.gate.gate_driver import answers, drive

from attncheck import demo
from attncheck.records.record import FAILED_STATUSES

pytestmark = pytest.mark.usefixtures("shared_evidence")

SOURCE = Path(demo.__file__).with_name("flash_attention.py").read_text()
CHOSEN_FOR = "EVEN=key.shape[2] % 32 == 0"  # where the kernel skips bounds checks


def failing_variants(path, *, chosen_for, tile):
    text = SOURCE.replace(CHOSEN_FOR, CHOSEN_FOR.replace("32", str(chosen_for)))
    path.write_text(text.replace("TILE = 64\n", f"TILE = {tile}\n"))
    _, results = drive(f"{path}::attention", stages="contract")
    return {
        answer.record.variant
        for answer in answers(results)
        if answer.record.status in FAILED_STATUSES
    }


@pytest.mark.parametrize(("chosen_for", "tile"), [(16, 128), (32, 64), (64, 128)])
def test_missing_bounds_checks_for_smaller_tiles_fail(tmp_path, chosen_for, tile):
    assert f"whole tiles of {chosen_for}" in failing_variants(
        tmp_path / "kernel.py", chosen_for=chosen_for, tile=tile
    )


def test_skipping_bounds_checks_at_whole_tiles_passes(tmp_path):
    assert not failing_variants(tmp_path / "kernel.py", chosen_for=64, tile=64)
