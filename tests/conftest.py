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
    "test_draws.py",
    "test_formats.py",
    "test_inputs.py",
    "test_problem.py",
    "test_source_files.py",
    "baseline/test_baseline_record.py",
    "benchmarks/test_rules.py",
    "cases/strategies/test_lengths.py",
    "cases/strategies/test_nearest.py",
    "cases/test_choose.py",
    "cases/test_plan.py",
    "cli/test_config.py",
    "diagnose/test_signs.py",
    "fault_models/test_fault_models.py::test_a_fault_of_no_model_fits_none",
    "fault_models/test_fault_models.py::test_without_a_fault_it_is_the_exact_result",
    "faults/test_catalogue.py::test_a_control_is_right_where_it_differs",
    "faults/test_catalogue.py::test_every_category_has_its_entries_and_each_says_everything",
    "faults/test_patching.py",
    "gate/test_covering.py",
    "gate/test_shrinking.py",
    "hostile/test_hostile.py::test_a_bad_option_is_one_line",
    "hostile/test_hostile.py::test_the_page_shows_the_table",
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
    "standalone/test_standalone.py::test_a_wrong_kernel_is_not",
    "subjects/test_declared.py",
    "subjects/test_conventions_diagonals.py",
    "subjects/test_load.py",
    "suite/test_gpu.py",
    "suite/test_variations.py",
    "surveys/test_doctor_assembler.py",
    "verify/test_answer.py",
    "verify/test_digest.py",
    "workers/test_frames.py",
    "workers/test_shards.py",
)

# Expensive sweeps: one behaviour for many kernels, faults, rows or pages. The README's command runs
# about one in N tests of a sweep, ``pytest -m slow`` the others.
_SLOW = {
    "cases/strategies/test_masks.py::test_a_failure_shrinks_to_its_cause": 4,
    "cases/test_crossed.py::test_a_fault_of_one_value_is_shown": 5,
    "cases/test_crossed.py::test_a_right_function_passes_all_of_it": 3,
    "cases/test_quick.py::test_other_right_kernels_pass_what_they_take": 4,
    "cli/test_check.py::test_a_kernel_of_a_tutorial_is_asked_within_what_it_takes": 4,
    "cli/test_foreign_code.py::test_what_a_kernel_does_to_its_process_is_said_and_stays_there": 4,
    "cli/test_foreign_code.py::test_what_failed_is_asked_again_in_a_process_of_its_own": 5,
    "cli/test_interrupts.py::test_an_interrupt_while_a_kernel_runs": 5,
    "cli/test_interrupts.py::test_what_was_measured_before_an_interrupt_is_shown_and_written": 4,
    "cli/test_rmse.py::test_json_is_json_alone": 9,
    "cli/test_standard_output.py::test_a_full_disk_is_one_line_and_exit_code_3": 4,
    "cli/test_standard_output.py::test_a_reader_that_left_costs_neither_files_nor_exit_code": 4,
    "cli/test_standard_output.py::test_every_verb_ends_quietly_when_its_reader_leaves": 5,
    "diagnose/test_confirmation.py::test_a_fault_is_named_and_without_its_model_never_another": 6,
    "diagnose/test_confirmation.py::test_what_is_seen_tells_the_family": 4,
    "diagnose/test_observation.py::test_in_any_dtype_nothing_that_is_asked_again_raises": 5,
    "diagnose/test_observation.py::test_numbers_that_are_read_elsewhere_are_told": 6,
    "documents/test_documents.py::test_a_broken_snippet_is_found": 5,
    "documents/test_documents.py::test_every_snippet_does_what_it_says": 8,
    "fault_models/test_fault_models.py::test_a_kernel_with_the_fault_is_named": 8,
    "fault_models/test_fault_models.py::test_a_fault_of_layouts_is_named": 3,
    "faults/test_catalogue.py::test_it_is_planted_and_gives_an_answer_of_the_right_shape": 6,
    "faults/test_catalogue.py::test_one_of_each_category_is_caught": 5,
    "faults/test_mutant_scoring.py::test_a_wrong_mask_is_caught": 9,
    "gate/test_contract_lengths.py::test_a_path_without_bounds_for_smaller_tiles_is_found": 7,
    "gate/test_covering.py::test_a_right_kernel_is_right_at_every_value": 6,
    "gate/test_fault_table.py::test_a_fault_has_its_verdict_and_the_next_right_case_passes": 4,
    "gate/test_gate_against.py::test_what_the_commit_has_not_is_new": 9,
    "gate/test_gate_work.py::test_a_plain_function_is_asked_within_its_claims": 9,
    "gate/test_gate_work.py::test_each_fault_is_one_cause_that_explains_all_it_does": 4,
    "gate/test_gate_work.py::test_each_stage_finds_its_planted_fault": 4,
    "hostile/test_hostile.py::test_a_bad_option_is_one_line": 5,
    "hostile/test_hostile.py::test_it_ends_as_the_table_says": 16,
    "judge/test_gradients_of_kernels.py::test_a_right_backward_is_within": 6,
    "judge/test_sink.py::test_right_kernels_keep_to_the_bounds": 3,
    "kernels/test_backwards.py::test_gradients_are_right_in_every_dtype": 4,
    "kernels/test_captured_gradients.py::test_planted_faults_are_noticed": 4,
    "kernels/test_flash3_forward.py::test_what_it_gives_is_within_the_bounds": 9,
    "kernels/test_hopper.py::test_backwards_fit_and_hardly_spill": 5,
    "kernels/test_hopper.py::test_flash3_fits_and_hardly_spills": 8,
    "kernels/test_hopper.py::test_forwards_fit": 9,
    "kernels/test_hopper.py::test_the_backward_of_flash3_fits_and_its_products_overlap": 7,
    "kernels/test_hopper.py::test_the_layout_of_a_gradient_moves_no_bit_of_delta": 9,
    "oracles/test_backward_many_digits.py::test_they_are_difference_quotients": 7,
    "probes/test_right_kernels.py::test_a_function_that_renormalises_by_tile_passes_check": 9,
    "probes/test_right_kernels.py::test_a_scale_that_is_rounded_into_the_operands": 8,
    "probes/test_right_kernels.py::test_no_probe_asks_for_more_than_every_right_design_gives": 8,
    "probes/test_right_kernels.py::test_the_bound_finds_nothing": 6,
    "probes/test_right_kernels.py::test_the_exact_rule_finds_nothing": 8,
    "properties/test_each_property.py::test_a_property_fails_the_fault_it_is_for": 4,
    "properties/test_paged_properties.py::test_a_right_kernel_passes": 7,
    "relations/test_right_kernels.py::test_the_ideal_kernel_passes": 8,
    "subjects/test_flash.py::test_as_good_as_the_ideal_kernel": 7,
    "subjects/test_flash.py::test_the_largest_finite_scores": 4,
    "suite/test_outcomes.py::test_the_summary_is_of_all_processes": 9,
    "suite/test_workers.py::test_a_kernel_that_dies_fails_its_test_and_the_next_one_passes": 9,
    "surveys/test_fingerprint.py::test_our_triton_kernels_are_what_they_declare": 6,
    "surveys/test_fingerprint.py::test_tiles_are_read_of_the_ideal_kernel_in_other_tilings": 4,
    "verify/test_determinism_checks.py::test_a_planted_fault_is_found": 4,
    "verify/test_isolated_faults.py::test_no_daemon_is_left": 9,
    "verify/test_long_sums.py::test_it_is_seen_in_tiles_of_any_usual_size": 3,
    "verify/test_long_sums.py::test_sums_of_fp8_products_are_seen": 6,
    "verify/test_long_sums.py::test_the_contract_sees_gradients_summed_in_16_bits": 6,
    "verify/test_settled_rows.py::test_records_are_those_of_all_bounds": 6,
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
