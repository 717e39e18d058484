"""What tests of several rooms need."""

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

# What is found of a kernel is kept for the next run: of the tests' own, not of a user's.
if "ATTNCHECK_CACHE_DIR" not in os.environ:  # processes of pytest-xdist share that of the first
    _FOUND = tempfile.TemporaryDirectory(prefix="attncheck-tests-")
    os.environ["ATTNCHECK_CACHE_DIR"] = _FOUND.name

# Processes of several threads each wait for one another on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton decides at its import whether it compiles or interprets; without a GPU it must interpret.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Of ``pytest -m quick``: from each room what is fast and says most. Whole files, or tests of a file
# whose others take longer. What the list leaves out, the whole suite runs.
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
    "standalone/test_standalone.py::test_script_fails_wrong_kernel",
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

# Sweeps of dear tests: of each the README's command runs about one in so many, ``pytest -m slow``
# the others. A sweep shows one thing of many kernels, faults, rows or pages.
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
    "verify/test_determinism_checks.py::test_planted_nondeterminism_fails": 4,
    "verify/test_isolated_faults.py::test_daemon_of_a_dead_worker_is_killed": 9,
    "verify/test_long_sums.py::test_long_sum_detects_16_bit_sums_at_any_usual_tile_size": 3,
    "verify/test_long_sums.py::test_longer_sum_detects_bf16_sums_of_fp8_products": 6,
    "verify/test_long_sums.py::test_contract_detects_gradients_summed_in_bf16": 6,
    "verify/test_settled_rows.py::test_records_equal_those_with_all_bounds": 6,
}
# The same of properties/, which are asked of every kernel: of each property the first stays.
_PROPERTIES = "../properties/"
_SLOW_PROPERTIES = 12
# The same of any other sweep that is long.
_LONG, _SLOW_OTHERS = 8, 6

_FEATURES = """
try:
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
except ImportError:
    from numpy.core._multiarray_umath import __cpu_dispatch__, __cpu_features__
on = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
"""


def pytest_configure(config: pytest.Config) -> None:
    """Collect nothing else where ``-m quick`` asks for these alone: that would take longer."""
    # A process of pytest-xdist has the command line, and finds its own way to the default.
    by_default = config.args_source is not pytest.Config.ArgsSource.ARGS
    if config.option.markexpr == "quick" and by_default:
        here = Path(__file__).parent
        config.args[:] = [str(here / name) for name in _QUICK]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of ``pytest -m quick`` and of ``pytest -m slow``."""
    here = Path(__file__).parent
    names = [f"{os.path.relpath(item.path, here)}::{item.name}" for item in items]
    sizes = Counter(name.partition("[")[0] for name in names)
    seen: set[str] = set()
    for item, name in zip(items, names, strict=True):
        file, sweep = name.partition("::")[0], name.partition("[")[0]
        if file in _QUICK or sweep in _QUICK:
            item.add_marker("quick")
        ours = file.startswith(_PROPERTIES)
        others = _SLOW_PROPERTIES if ours else _SLOW_OTHERS if sizes[sweep] > _LONG else 1
        one_in = _SLOW.get(sweep, others)
        # The first of each (of each family of hostile rows), and by name: each third might be of
        # one dtype.
        family = name.partition(": ")[0] if file.startswith("hostile/") else sweep
        if family in seen and zlib.crc32(name.encode()) % one_in:
            item.add_marker("slow")
        seen.add(family)


def _python(code: str, **environment: str) -> str:
    """What ``code`` prints in a Python process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def one_thread():
    """Many small calls: threads of torch would wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library_as_before():
    """Other tests go through all distributions, masks and score mods there are."""
    from attncheck.inputs.distributions import DISTRIBUTIONS
    from attncheck.mods import library, mod_files

    registries = (DISTRIBUTIONS, library.MASKS, library.SCORES)
    before = [dict(registry) for registry in registries]
    yield
    mod_files._import_mod.cache_clear()
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.fixture(scope="module")
def forked_workers():
    """Workers that a file starts are forks of this process: each would import torch anew."""
    import torch

    from attncheck.workers import process

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has none of its threads
    with pytest.MonkeyPatch.context() as patch:
        if not sees_gpu(os.environ):  # which no fork can use
            names = vars(subprocess) | {"Popen": Forked}
            patch.setattr(process, "subprocess", SimpleNamespace(**names))
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared_evidence():
    """Kernels of a file that are asked the same Case are held against one exact result.

    Not where a test changes an oracle or the judge.
    """
    from tests.kept_evidence import Kept

    with pytest.MonkeyPatch.context() as patch:
        Kept(64).stands_in(patch.setattr)
        yield


@pytest.fixture(scope="session")
def warm_python():
    """``warm_python.run("attncheck", …, cwd=…)``: a process that has imported torch already."""
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def vector_features():
    """Optional vector instructions that NumPy uses on this machine."""
    features = _python(f"{_FEATURES}\nprint(*on)").split()
    if not features:
        pytest.skip("NumPy finds no optional vector instructions on this machine")
    return features


@pytest.fixture
def without_vectors(vector_features):
    """Run code in a process whose NumPy uses no optional vector instructions; what it prints.

    It finds tests as modules.
    """
    disabled = " ".join(vector_features)
    root = str(Path(__file__).parents[1])
    check = f"import sys\nsys.path.insert(0, {root!r})\n{_FEATURES}\nassert not on, on\n"
    return lambda code: _python(check + code, NPY_DISABLE_CPU_FEATURES=disabled)
