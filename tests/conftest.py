"""Fixtures of all tests, and the marks ``quick`` and ``slow``."""

import os
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.warm_python import Forked, Servers, sees_gpu

# attncheck caches what it finds out about a kernel. The tests must not read or fill a user's cache.
if "ATTNCHECK_CACHE_DIR" not in os.environ:  # processes of pytest-xdist inherit the first one's
    _CACHE = tempfile.TemporaryDirectory(prefix="attncheck-tests-")
    os.environ["ATTNCHECK_CACHE_DIR"] = _CACHE.name

# With several threads in each process, threads wait for each other on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton decides at its import whether it compiles or interprets; without a GPU it must interpret.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Run by ``pytest -m quick``: the fast tests that cover the most in each room. Whole files, or
# single tests of a file whose others take longer.
_QUICK = (
    "baseline/test_baseline_record.py",
    "benchmarks/test_rules.py",
    "cases/strategies/test_lengths.py",
    "cases/strategies/test_nearest.py",
    "cases/test_choose.py",
    "cases/test_plan.py",
    "cli/test_config.py",
    "diagnose/test_signs.py",
    "fault_models/test_fault_models.py::test_exact_attention_and_gradients_match_oracle",
    "fault_models/test_fault_models.py::test_noise_is_explained_by_no_model",
    "faults/test_catalogue.py::test_catalogue_entries_are_complete",
    "faults/test_catalogue.py::test_control_passes_where_it_differs_from_its_host",
    "faults/test_patching.py",
    "gate/test_covering.py",
    "gate/test_shrinking.py",
    "hostile/test_hostile.py::test_bad_option_is_one_line",
    "hostile/test_hostile.py::test_documentation_page_shows_the_table",
    "judge/test_arithmetic.py",
    "judge/test_metrics.py",
    "kernels/test_assembler.py",
    "mods/test_expression.py",
    "mods/test_running_error.py",
    "oracles/test_indices.py",
    "oracles/test_nonfinite.py",
    "probes/test_planted_faults.py::test_decode_names_the_first_wrong_row_and_key",
    "recordings/test_example.py",
    "relations/test_excerpt.py",
    "relations/test_relations.py",
    "reporting/test_likely.py",
    "reporting/test_map_text.py",
    "reporting/test_reporting_pages.py",
    "standalone/test_standalone.py::test_script_fails_wrong_kernel",
    "subjects/test_conventions_diagonals.py",
    "subjects/test_declared.py",
    "subjects/test_load.py",
    "suite/test_gpu.py",
    "suite/test_variations.py",
    "surveys/test_doctor_assembler.py",
    "test_draws.py",
    "test_formats.py",
    "test_inputs.py",
    "test_problem.py",
    "test_source_files.py",
    "verify/test_answer.py",
    "verify/test_digest.py",
    "workers/test_frames.py",
    "workers/test_shards.py",
)

# Expensive sweeps: one behaviour for many kernels, faults, rows or pages. The README's command runs
# about one in N tests of a sweep, ``pytest -m slow`` the others.
_SLOW = {
    "cases/strategies/test_masks.py::test_mask_of_a_failing_problem_shrinks_to_its_cause": 4,
    "cases/test_crossed.py::test_correct_kernel_passes_all_crossed_questions": 3,
    "cases/test_crossed.py::test_fault_at_one_value_of_a_parameter_is_found": 5,
    "cases/test_quick.py::test_correct_kernels_pass_the_questions_that_they_take": 4,
    "cli/test_check.py::test_tutorial_kernel_is_checked_within_its_claims": 4,
    "cli/test_foreign_code.py::test_effects_on_the_kernels_process_are_reported_and_contained": 4,
    "cli/test_foreign_code.py::test_repro_runs_the_kernel_in_another_process": 5,
    "cli/test_interrupts.py::test_interrupt_while_a_kernel_runs": 5,
    "cli/test_interrupts.py::test_results_before_an_interrupt_are_shown_and_written": 4,
    "cli/test_rmse.py::test_json_is_alone_on_stdout": 9,
    "cli/test_standard_output.py::test_closed_pipe_keeps_files_and_exit_code": 4,
    "cli/test_standard_output.py::test_full_disk_is_one_line_and_exits_3": 4,
    "cli/test_standard_output.py::test_verbs_end_quietly_on_a_closed_pipe": 5,
    "diagnose/test_confirmation.py::test_family_is_recognised_without_its_models": 4,
    "diagnose/test_confirmation.py::test_fault_is_named_and_without_its_model_never_misnamed": 6,
    "diagnose/test_observation.py::test_misread_inputs_are_mapping_family": 6,
    "diagnose/test_observation.py::test_unknown_fault_is_observed_in_every_dtype": 5,
    "documents/test_documents.py::test_a_broken_snippet_is_found": 5,
    "documents/test_documents.py::test_every_snippet_does_what_it_says": 8,
    "fault_models/test_fault_models.py::test_layout_fault_is_named": 3,
    "fault_models/test_fault_models.py::test_model_of_planted_fault_is_named": 8,
    "faults/test_catalogue.py::test_gate_catches_one_fault_of_each_category": 5,
    "faults/test_catalogue.py::test_planted_fault_runs_and_returns_the_right_shapes": 6,
    "faults/test_mutant_scoring.py::test_mutant_with_a_wrong_mask_is_caught": 9,
    "gate/test_contract_lengths.py::test_missing_bounds_checks_for_smaller_tiles_fail": 7,
    "gate/test_covering.py::test_ideal_kernel_passes_at_every_value_of_every_axis": 6,
    "gate/test_fault_table.py::test_fault_gets_its_verdict_and_the_next_right_case_passes": 4,
    "gate/test_gate_against.py::test_kernel_absent_from_the_commit_is_new": 9,
    "gate/test_gate_work.py::test_each_stage_finds_its_planted_fault": 4,
    "gate/test_gate_work.py::test_failures_are_grouped_into_one_cause_per_fault": 4,
    "gate/test_gate_work.py::test_plain_function_is_tested_within_its_documented_claims": 9,
    "hostile/test_hostile.py::test_bad_option_is_one_line": 5,
    "hostile/test_hostile.py::test_hostile_entry_ends_as_the_table_says": 16,
    "judge/test_gradients_of_kernels.py::test_right_backward_stays_within_the_bounds": 6,
    "judge/test_sink.py::test_right_kernels_stay_within_the_bounds": 3,
    "kernels/test_backwards.py::test_gradients_are_within_bounds_in_every_dtype": 4,
    "kernels/test_captured_gradients.py::test_planted_fault_exceeds_the_bounds": 4,
    "kernels/test_flash3_forward.py::test_output_is_within_the_bounds_at_every_scale": 9,
    "kernels/test_hopper.py::test_all_layouts_of_dout_share_one_delta_kernel": 9,
    "kernels/test_hopper.py::test_backwards_fit_and_hardly_spill": 5,
    "kernels/test_hopper.py::test_flash3_backward_fits_and_its_products_overlap": 7,
    "kernels/test_hopper.py::test_flash3_fits_and_hardly_spills": 8,
    "kernels/test_hopper.py::test_forwards_fit": 9,
    "oracles/test_backward_many_digits.py::test_gradients_equal_difference_quotients": 7,
    "probes/test_right_kernels.py::test_every_right_design_passes_every_probe": 8,
    "probes/test_right_kernels.py::test_exact_rule_passes_ideal_kernel": 8,
    "probes/test_right_kernels.py::test_function_that_renormalises_by_tile_passes_check": 9,
    "probes/test_right_kernels.py::test_probe_run_passes_ideal_kernel": 6,
    "probes/test_right_kernels.py::test_scale_rounded_into_operands_passes": 8,
    "properties/test_each_property.py::test_property_fails_its_planted_fault": 4,
    "properties/test_paged_properties.py::test_correct_kernel_passes": 7,
    "relations/test_right_kernels.py::test_ideal_kernel_passes": 8,
    "subjects/test_flash.py::test_accuracy_equals_that_of_the_ideal_kernel_with_the_same_tiles": 7,
    "subjects/test_flash.py::test_largest_finite_scores_do_not_overflow": 4,
    "suite/test_outcomes.py::test_summary_covers_all_processes": 9,
    "suite/test_workers.py::test_kernel_that_dies_fails_its_test_and_the_next_one_passes": 9,
    "surveys/test_fingerprint.py::test_fingerprint_reads_tile_size_and_order": 4,
    "surveys/test_fingerprint.py::test_triton_kernels_agree_with_their_declarations": 6,
    "verify/test_determinism_checks.py::test_planted_nondeterminism_fails": 4,
    "verify/test_isolated_faults.py::test_daemon_of_a_dead_worker_is_killed": 9,
    "verify/test_long_sums.py::test_contract_detects_gradients_summed_in_bf16": 6,
    "verify/test_long_sums.py::test_long_sum_detects_16_bit_sums_at_any_usual_tile_size": 3,
    "verify/test_long_sums.py::test_longer_sum_detects_bf16_sums_of_fp8_products": 6,
    "verify/test_settled_rows.py::test_records_equal_those_with_all_bounds": 6,
}
# N of properties/, each of which is a sweep over every kernel.
_PROPERTIES = "../properties/"
_SLOW_PROPERTIES = 12
# N of any other sweep of more than 8 tests.
_LONG, _SLOW_OTHERS = 8, 6

_FEATURES = """
try:
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
except ImportError:
    from numpy.core._multiarray_umath import __cpu_dispatch__, __cpu_features__
on = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
"""


def pytest_configure(config: pytest.Config) -> None:
    """With ``-m quick`` collect the quick files only: collecting all files takes longer."""
    # A process of pytest-xdist gets the same command line, and so does the same.
    without_arguments = config.args_source is not pytest.Config.ArgsSource.ARGS
    if config.option.markexpr == "quick" and without_arguments:
        here = Path(__file__).parent
        config.args[:] = [str(here / name) for name in _QUICK]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marks ``quick`` and ``slow``."""
    here = Path(__file__).parent
    names = [f"{os.path.relpath(item.path, here)}::{item.name}" for item in items]
    sizes = Counter(name.partition("[")[0] for name in names)
    seen: set[str] = set()
    for item, name in zip(items, names, strict=True):
        file, sweep = name.partition("::")[0], name.partition("[")[0]
        if file in _QUICK or sweep in _QUICK:
            item.add_marker("quick")
        is_property = file.startswith(_PROPERTIES)
        default = _SLOW_PROPERTIES if is_property else _SLOW_OTHERS if sizes[sweep] > _LONG else 1
        one_in = _SLOW.get(sweep, default)
        # The first test of a sweep (of a family of hostile rows) is never slow. The others are
        # chosen by a hash of their names: every third one, say, might always be of the same dtype.
        family = name.partition(": ")[0] if file.startswith("hostile/") else sweep
        if family in seen and zlib.crc32(name.encode()) % one_in:
            item.add_marker("slow")
        seen.add(family)


def _python(code: str, **environment: str) -> str:
    """Run ``code`` in a new Python process and return what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


@pytest.fixture
def one_thread():
    """Run torch with one thread: in many small calls, threads mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library_as_before():
    """Remove the distributions, masks and score mods that a test registers.

    Other tests go through all that are registered.
    """
    from attncheck.inputs.distributions import DISTRIBUTIONS
    from attncheck.mods import library, mod_files

    registries = (DISTRIBUTIONS, library.MASKS, library.SCORES)
    before = [dict(registry) for registry in registries]
    yield
    mod_files._import_mod.cache_clear()
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture(scope="module")
def forked_workers():
    """Start a file's workers as forks of this process, so that they need not import torch again."""
    import torch

    from attncheck.workers import process

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork inherits no threads
    with pytest.MonkeyPatch.context() as patch:
        if not sees_gpu(os.environ):  # no fork can use a GPU
            names = vars(subprocess) | {"Popen": Forked}
            patch.setattr(process, "subprocess", SimpleNamespace(**names))
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared_evidence():
    """Compute the exact result of a Case once for all kernels of a file.

    Not for a file that changes an oracle or the judge.
    """
    from tests.evidence_cache import EvidenceCache

    with pytest.MonkeyPatch.context() as patch:
        EvidenceCache(64).install(patch.setattr)
        yield


@pytest.fixture(scope="session")
def warm_python():
    """Servers whose ``run("attncheck", …, cwd=…)`` need not import torch again."""
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def vector_features():
    """Names of the optional vector instructions that NumPy uses on this machine."""
    features = _python(f"{_FEATURES}\nprint(*on)").split()
    if not features:
        pytest.skip("NumPy finds no optional vector instructions on this machine")
    return features


@pytest.fixture
def without_vectors(vector_features):
    """Run code where NumPy uses no optional vector instructions, and return what it prints.

    The code can import modules of tests.
    """
    disabled = " ".join(vector_features)
    root = str(Path(__file__).parents[1])
    check = f"import sys\nsys.path.insert(0, {root!r})\n{_FEATURES}\nassert not on, on\n"
    return lambda code: _python(check + code, NPY_DISABLE_CPU_FEATURES=disabled)
