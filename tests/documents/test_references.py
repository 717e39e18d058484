"""README and docs against the program: commands, tables, links, public names and numbers agree."""

import configparser
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(
        p.relative_to(ROOT).as_posix()
        for p in ROOT.glob("docs/**/*.md")
        if p.name not in {"fault-models.md", "relations.md"}  # written by docs/conf.py
    ),
)

# The common beginning of the README's two commands; the tox environment follows.
SET_UP = "python3 -m venv .venv && .venv/bin/pip install --quiet tox && .venv/bin/tox -q -e "


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def prose(name):
    """Return a document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", read(name), flags=re.MULTILINE | re.DOTALL)


def rows(name, heading):
    """Return the cells of all tables of a document whose first column is ``heading``, by row."""
    table = re.compile(rf"^\| {re.escape(heading)} \|.*\n\|[-| ]+\n((?:\|.*\n?)+)", re.MULTILINE)
    lines = "".join(table.findall(read(name))).splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code_in(cell):
    return [text.replace("\\|", "|") for text in re.findall(r"`([^`]+)`", cell)]


# The README's two commands cannot be run here: the second one runs these tests.


@pytest.fixture(scope="module")
def tox():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    return parser


def set_up_commands(reader):
    return [source.strip() for info, source in reader.blocks(ROOT / "README.md") if info == "sh"]


def test_set_up_commands_run_tox_environments(reader, tox):
    commands = set_up_commands(reader)
    assert commands == [SET_UP + "rmse", SET_UP + "tests"]
    assert tox["testenv:rmse"]["commands"] == "attncheck rmse {posargs:--dtype bf16}"
    assert tox["testenv:tests"]["commands"].startswith("pytest -n ")
    for environment in ("rmse", "tests"):
        assert "skip_install" not in tox[f"testenv:{environment}"]


def test_ci_runs_the_second_set_up_command(reader):
    lines = read(".ci/run").splitlines()
    assert set_up_commands(reader)[1] in lines
    assert "set -euo pipefail" in lines[: lines.index(SET_UP + "tests")]


def test_contributing_guide_has_the_commands_of_ci(tox):
    (environments,) = re.findall(r"^\.venv/bin/tox -q -e (\S+)$", read(".ci/run"), re.MULTILINE)
    for environment in environments.split(","):
        for command in tox[f"testenv:{environment}"]["commands"].strip().splitlines():
            assert f".venv/bin/{command}" in read("CONTRIBUTING.md")


def test_page_of_properties_names_every_property_profile_and_longest_length():
    from attncheck.cases.tier import TIERS
    from attncheck.suite.pytest_options import PROFILES

    properties = [row[0] for row in rows("docs/reference/properties.md", "property")]
    assert sorted(properties) == sorted(p.stem for p in ROOT.glob("properties/test_*.py"))
    text = " ".join(prose("docs/reference/properties.md").split())
    assert all(f"`{profile}`" in text for profile in PROFILES)
    cpu, gpu = (
        "{:,}, {:,} and {:,}".format(*(getattr(tier, name) for tier in TIERS.values()))
        for name in ("longest", "longest_gpu")
    )
    assert f"Lengths go up to {cpu} on a CPU and up to {gpu} on a GPU" in text


def test_tables_list_all_distributions_masks_score_mods_dtypes_and_columns():
    from attncheck.core.formats import MEASURED_DTYPES
    from attncheck.core.tensor_names import GRADIENTS
    from attncheck.inputs.distributions import DISTRIBUTIONS
    from attncheck.mods.masks import MASKS
    from attncheck.mods.scores import SCORES
    from attncheck.reporting.measurement_document import COLUMNS

    def names(document, heading):
        return [name for row in rows(document, heading) for name in code_in(row[0])]

    assert names("docs/explanation/concepts.md", "name") == list(DISTRIBUTIONS)
    assert names("docs/reference/masks.md", "mask") == list(MASKS)
    assert names("docs/reference/masks.md", "score mod") == list(SCORES)
    dtypes = [row[0] for row in rows("docs/explanation/concepts.md", "dtype")]
    assert dtypes == list(MEASURED_DTYPES)
    columns = ", ".join(row[0] for row in rows("docs/reference/rmse.md", "column"))
    assert columns == (
        "verdict, err/bound, LSE/bound, RMSE, ×floor, ×ideal, inputs, max error, at, bias, "
        "LSE error, time"
    )
    left_out = {"environment", *GRADIENTS}
    shown = [name for key, name in COLUMNS.items() if key.partition("_")[0] not in left_out]
    shown = [name.removesuffix(" b,h,q,d") for name in shown]
    assert columns == ", ".join(shown)


def test_table_of_example_mods_has_the_statuses_of_the_reports():
    """The page lists every mod of the examples, with the statuses in the reports of CPU and GPU."""
    from attncheck.core.source_files import import_file
    from attncheck.mods.mod_files import mods_in

    answers = {}
    for machine in ("cpu", "h200"):
        records = json.loads(read(f"reports/{machine}/mods.json"))["records"]
        answers[machine] = {record["name"]: record["answers"] for record in records}
    table = rows("docs/reference/mods.md", "mod of examples/mods.py")
    names = [code_in(row[0])[0] for row in table]
    assert names == list(mods_in(import_file(ROOT / "examples" / "mods.py", "the examples")))
    assert set(names) == set(answers["cpu"]) == set(answers["h200"])
    worlds = [("mpmath", "cpu"), ("triton-flash2", "cpu"), ("triton-flash2", "h200")]
    worlds += [("flex", "cpu"), ("flex", "h200")]
    for name, row in zip(names, table, strict=True):
        statuses = [answers[machine][name][world]["status"] for world, machine in worlds]
        assert row[3:] == statuses
        for machine in answers:  # the table's column of Triton is for both kernels
            flash1, flash2 = (answers[machine][name][f"triton-flash{i}"]["status"] for i in (1, 2))
            assert flash1 == flash2, name


def test_check_page_lists_its_questions_conventions_and_keywords():
    from attncheck.cases.check_cases import check_cases
    from attncheck.subjects.conventions.declarations import CONVENTIONS

    compared = {q.name: q.summary for q in check_cases("bf16") if q.case.question == "compare"}
    shown = rows("docs/how-to/check.md", "layout") + rows("docs/how-to/check.md", "numbers")
    assert {code_in(name)[0]: summary for name, summary in shown} == compared
    assert [code_in(row[0])[0] for row in rows("docs/how-to/check.md", "convention")] == list(
        CONVENTIONS
    )
    keywords = {code_in(row[0])[0] for row in rows("docs/how-to/check.md", "keyword")}
    plain = (each for each in CONVENTIONS["sdpa"].parameters if not each.by_name)
    assert keywords == {each.spellings[0] for each in plain}
    assert kernel_of("docs/how-to/check.md") == read("examples/my_kernel.py")


def kernel_of(name):
    """Return the file ``my_kernel.py`` that a document shows."""
    (source,) = re.findall(r"^```python my_kernel\.py$\n(.*?)^```$", read(name), re.M | re.S)
    return source


def test_kernel_of_the_ci_page_needs_its_detached_maximum(tmp_path):
    """Gradients through the maximum, which would be rounded, are not within the bounds."""
    from attncheck.inputs.problem import Case, Problem
    from attncheck.subjects.load import load_subject
    from attncheck.verify.run_case import run_case

    source = kernel_of("docs/tutorial/ci.md")
    sizes = {"query": 1, "kv": 129, "head_dim": 64, "dtype": "bf16", "backward": True}
    problem = Problem(**sizes, distribution="uniform", seed=1)
    statuses = []
    for name, text in (("detached", source), ("attached", source.replace(".detach()", ""))):
        (tmp_path / f"{name}.py").write_text(text)
        kernel = load_subject(f"{tmp_path / name}.py::attention", None)
        statuses.append(run_case(kernel, Case(problem=problem), device="cpu").status)
    assert statuses == ["pass", "fail"]


def test_page_of_masks_lists_the_arguments_of_every_mod():
    from attncheck.mods.masks import MASKS
    from attncheck.mods.scores import SCORES

    for heading, entries in (("mask", MASKS), ("score mod", SCORES)):
        for first, arguments, *_ in rows("docs/reference/masks.md", heading):
            for name in code_in(first):
                composed = ["of"] if entries[name].compose else []
                assert code_in(arguments) == [*entries[name].arguments, *composed]


def test_rmse_of_sdpa_math_on_a_cpu_is_at_the_floor_as_in_the_readme():
    from attncheck.core.mod_spec import Spec
    from attncheck.inputs.problem import Case, Problem
    from attncheck.reporting.number_text import ratio
    from attncheck.subjects.capabilities.named_kernels import subject_named
    from attncheck.verify.evidence_builder import EvidenceBuilder
    from attncheck.verify.run_case import run_case

    evidence = EvidenceBuilder(
        Case(problem=Problem(heads=4, query=256, mask=Spec.of("causal"))), "cpu"
    )
    out = run_case(
        subject_named("sdpa-math"),
        evidence.case,
        device=evidence.device,
        evidence=evidence,
        variant="causal",
        timed=True,
    ).out
    assert ratio(out.rmse, out.floor_rmse) == "1.00×"
    assert out.rmse < out.ideal_rmse


def test_floors_of_the_design_page_are_those_that_import_linter_checks():
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    checked = [set(layer.split(" | ")) for layer in contracts[0]["layers"]]
    floors = {}
    for number, names, _ in rows("docs/explanation/design.md", "floor"):
        rooms = {name.rstrip("/").removesuffix(".py") for name in code_in(names)}
        floors.setdefault(int(number), set()).update(rooms)
    assert list(floors) == sorted(floors, reverse=True)
    assert [{"__main__"}, *floors.values()] == checked


# Links.


def anchors(name):
    """Return GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(name), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(text, folder):
    """Return the relative links of ``text`` without a target in the repository."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (ROOT / folder / path).resolve()
        if file.name in {"fault-models.md", "relations.md"}:  # written by docs/conf.py
            continue
        inside = file.is_file() and file.is_relative_to(ROOT)
        if not inside or (anchor and anchor not in anchors(file.relative_to(ROOT))):
            dead.append(target)
    return dead


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_have_targets(name):
    assert dead_links(prose(name), Path(name).parent) == []


def test_dead_link_is_detected():
    text = "[a](rmse.md#exit-codes) [b](rmse.md#gone) [c](gone.md) [d](../../../beside.md)"
    assert dead_links(text, "docs/reference") == ["rmse.md#gone", "gone.md", "../../../beside.md"]


def test_index_lists_every_page():
    listed = re.findall(r"^[\w-]+/[\w-]+\.md$", read("docs/index.md"), re.MULTILINE)
    pages = {name.removeprefix("docs/") for name in DOCUMENTS if name.startswith("docs/")}
    assert set(listed) == pages - {"index.md"} | {
        "reference/fault-models.md",
        "reference/relations.md",
    }


# Public names.

EXPORTS = """
import importlib, json, pkgutil
import attncheck

exports, faults = {}, []
modules = pkgutil.walk_packages(attncheck.__path__, "attncheck.")
for name in ["attncheck", *(module.name for module in modules)]:
    # The properties, which are tests, are in the package only once it is installed from a wheel.
    if name.rpartition(".")[2].startswith("_") or ".properties" in name:
        continue
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:  # a module without public names
        continue
    faults += [f"{name}.{n} does not exist" for n in names if not hasattr(module, n)]
    if len(set(names)) != len(names):
        faults.append(f"{name}.__all__ names one thing twice")
    exports[name] = list(names)
print(json.dumps([exports, faults]))
"""


@pytest.fixture(scope="module")
def exports():
    """Names of ``__all__`` by module and faults in them, from a new process."""
    run = subprocess.run(
        [sys.executable, "-c", EXPORTS], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def test_names_in_all_exist_and_documented_names_are_in_all(exports):
    names, faults = exports
    assert faults == []
    documented = re.findall(r":: ([\w.]+)\.(\w+)$", read("docs/reference/api.md"), re.MULTILINE)
    assert len(documented) > 10
    assert [(module, n) for module, n in documented if n not in names.get(module, ())] == []


def test_calibration_table_of_the_bounds_page_has_the_numbers_of_the_report():
    runs = json.loads(read("reports/h200/calibration.json"))
    groups = [group for run in runs for group in run["groups"]]
    table = rows("docs/explanation/bounds.md", "dtype")
    assert [row[0] for row in table] == ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"]
    for dtype, count, out, lse, *_ in table:
        of_dtype = [group for group in groups if group["dtype"] == dtype]
        judged = sum(sum(group["statuses"].values()) for group in of_dtype)
        assert int(count.replace(",", "")) == judged
        for cell, name in ((out, "out_over_bound"), (lse, "lse_over_bound")):
            largest = max(r[name][0] for group in of_dtype if (r := group["ratios"])[name])
            assert cell == f"{largest:.3f}"
    assert sum(group["statuses"]["fail"] for group in groups) == 0
    text = read("docs/explanation/bounds.md")
    for what in ("problems", "judgements"):
        assert f"{sum(run[what] for run in runs):,}" in text
