"""The GitHub action and the example workflows: rights, commands, inputs, and the page on them."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
WORKFLOWS = {path.stem: path for path in sorted((ROOT / "examples/workflows").glob("*.yml"))}
FILES = {"action": ROOT / "action.yml", **WORKFLOWS}
OUR_ACTION = "./third_party/attncheck"  # a clone in the repository, as a submodule
SHA = re.compile(r"[0-9a-f]{40}")


def data_of(name):
    return yaml.safe_load(FILES[name].read_text())


def steps_of(name):
    """Return all steps of a file, in order."""
    if name == "action":
        return ACTION["runs"]["steps"]
    return [step for job in data_of(name)["jobs"].values() for step in job["steps"]]


def test_workflows_run_on_pull_requests_and_every_night():
    # YAML 1.1 reads the word ``on`` as true.
    events = {name: set(data_of(name)[True]) for name in WORKFLOWS}
    pull_request = {"pull_request"}
    on_schedule = {"schedule", "workflow_dispatch"}
    assert events == {"cpu": pull_request, "gpu": pull_request, "nightly": on_schedule}


# Rights.


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_has_read_permission_only(name):
    workflow = data_of(name)
    assert "pull_request_target" not in FILES[name].read_text()
    assert workflow["permissions"] == {"contents": "read"}
    assert not [job for job in workflow["jobs"].values() if "permissions" in job]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_checkout_leaves_no_token_for_the_code_of_the_pull_request(name):
    checkouts = [s for s in steps_of(name) if s.get("uses", "").startswith("actions/checkout")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_gpu_runner_runs_no_code_of_a_fork():
    for job in data_of("gpu")["jobs"].values():
        assert job["if"] == "github.event.pull_request.head.repo.full_name == github.repository"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs_have_a_time_limit_and_a_concurrency_group(name):
    """So a hanging kernel blocks no runner, and a newer run replaces an older one."""
    workflow = data_of(name)
    assert all(job["timeout-minutes"] <= 150 for job in workflow["jobs"].values())
    assert "${{ github.workflow }}" in workflow["concurrency"]["group"]


def scripts_with_expressions(steps):
    return [step["run"] for step in steps if "${{" in step.get("run", "")]


@pytest.mark.parametrize("name", FILES)
def test_scripts_contain_no_expressions(name):
    """GitHub pastes an expression's text into the script, where a branch name can be a command."""
    assert scripts_with_expressions(steps_of(name)) == []


def test_expression_in_a_script_is_detected():
    assert scripts_with_expressions([{"run": "echo ${{ github.event.pull_request.title }}"}]) != []


@pytest.mark.parametrize("name", FILES)
def test_third_party_actions_are_pinned(name):
    for step in steps_of(name):
        if step.get("uses", OUR_ACTION) != OUR_ACTION:
            assert re.fullmatch(rf"[\w-]+/[\w./-]+@(v\d+|{SHA.pattern})", step["uses"])


# Releases.


_RELEASE = re.compile(r"attncheck@v\d|rev: v\d|pip install '?attncheck\b")


def unmarked_releases(text):
    """Return lines that need a release of attncheck, but do not say "once released"."""
    lines = text.splitlines()
    # Prose is wrapped: these words may be at the end of the previous line.
    return [
        line
        for previous, line in zip(["", *lines], lines, strict=False)
        if _RELEASE.search(line) and "once released" not in " ".join(f"{previous} {line}".split())
    ]


# Not the page of messages: for its readers attncheck is installed, and pip needs no release.
PAGES = sorted({*ROOT.glob("docs/**/*.md")} - {ROOT / "docs/reference/hostile.md"})


@pytest.mark.parametrize(
    "path",
    [*FILES.values(), ROOT / "README.md", ROOT / ".pre-commit-hooks.yaml", *PAGES],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_lines_that_need_a_release_say_so(path):
    assert unmarked_releases(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line", ["- uses: attncheck/attncheck@v0", "rev: v0.1.0", "`pip install 'attncheck[exact]'`"]
)
def test_line_that_needs_a_release_is_detected(line):
    assert unmarked_releases(line) == [line]
    assert unmarked_releases(f"{line} # once released") == []


def test_job_that_uses_the_submodule_checks_it_out():
    for name in WORKFLOWS:
        for job in data_of(name)["jobs"].values():
            if "third_party/attncheck" in str(job):
                (checkout,) = [s for s in job["steps"] if "checkout" in s.get("uses", "")]
                assert checkout["with"]["submodules"] is True


def test_hook_of_the_ci_page_works_from_a_clone(tmp_path):
    """As pre-commit does, this looks up the page's hook in the clone and runs its entry."""
    page = (ROOT / "docs/tutorial/ci.md").read_text()
    (block,) = [b for b in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "hooks:" in b]
    (entry,) = yaml.safe_load(block)
    assert SHA.fullmatch(entry["rev"])
    hooks = {
        hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    }
    (hook_id,) = (used["id"] for used in entry["hooks"])
    words = shlex.split(hooks[hook_id]["entry"])
    assert hooks[hook_id]["language"] == "system"
    (tmp_path / "attncheck.toml").write_text('[kernels.mine]\nentry = "ideal"\n')
    run = subprocess.run(
        [sys.executable, "-m", *words, "attncheck.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_passes_only_inputs_that_the_action_has(name):
    steps = [step for step in steps_of(name) if step.get("uses") == OUR_ACTION]
    assert steps
    for step in steps:
        assert set(step["with"]) <= set(ACTION["inputs"])
        assert "kernels" in step["with"]


def test_every_input_is_used_and_described():
    text = FILES["action"].read_text()
    for name, declaration in ACTION["inputs"].items():
        assert declaration["description"].strip(), name
        assert f"inputs.{name}" in text, name


def test_nightly_shards_draw_with_the_same_seed():
    """Otherwise they would not be parts of the same problems."""
    (step,) = [each for each in steps_of("nightly") if "shard" in each.get("with", {})]
    assert step["with"]["tier"] == "nightly"
    assert step["with"]["args"] == "--seed ${{ github.run_id }}"


# Command lines.


def commands_in(script):
    """Yield the words of each ``attncheck …`` in a script, without redirections and the like."""
    for line in script.replace("\\\n", " ").splitlines():
        for match in re.finditer(r"(?:^|[|&;]\s*|\s)attncheck ([^|&;>]*)", line):
            yield shlex.split(match[1])


def parse_command(words):
    """Parse the words as attncheck does; raise click.UsageError for an unknown option."""
    from attncheck.cli import attncheck

    command, context = attncheck, click.Context(attncheck, **attncheck.context_settings)
    while isinstance(command, click.Group):
        verb, *words = words
        command = command.commands[verb]
        parent = context
        context = click.Context(command, parent=parent, info_name=verb)
    command.make_context(verb, list(words), parent=parent)


def shown_commands():
    """Yield place and words of the commands in the workflows, the hooks and the tutorials."""
    for name in FILES:
        for step in steps_of(name):
            for words in commands_in(step.get("run", "")):
                if "${options[@]}" not in words:  # the step of the gate is run below
                    yield f"{name}: {shlex.join(words)}", words
    for page in (
        "docs/tutorial/ci.md",
        "docs/tutorial/demo.md",
        "README.md",
        "docs/tutorial/quickstart.md",
    ):
        text = (ROOT / page).read_text()
        blocks = re.findall(r"^```console.*?\n(.*?)^```$", text, re.M | re.S)
        lines = [line[2:] for block in blocks for line in block.splitlines() if line[:2] == "$ "]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        lines += re.findall(r"`(attncheck [a-z]+ [^`]*)`", prose.replace("\n", " "))
        for line in lines:
            for words in commands_in(line):
                yield f"{page}: {shlex.join(words)}", words
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()):
        yield ".pre-commit-hooks.yaml", [*shlex.split(hook["entry"])[1:], "pyproject.toml"]


SHOWN = dict(shown_commands())


@pytest.mark.parametrize("place", SHOWN)
def test_shown_command_line_is_valid(place):
    parse_command(SHOWN[place])


def test_outdated_command_line_is_detected():
    with pytest.raises(click.NoSuchOption):
        parse_command(["check", "x.py::f", "--gone"])
    with pytest.raises(KeyError):
        parse_command(["gone"])
    assert {words[0] for words in SHOWN.values()} >= {"config", "demo", "gate", "merge", "report"}


# The action, step by step, with stubs for attncheck and python that record how they are called.

STUB = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>"$STUB/$1.words"
echo ==== >>"$STUB/$1.words"
if [ "$1" = gate ]; then
  echo "::error::said by a kernel"
  out=reports/gate
  while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; shift; done
  mkdir -p "$out"
  for file in $STUB_FILES; do echo "text of $file" >"$out/$file"; done
  exit "$STUB_CODE"
fi
if [ "$1" = report ]; then
  echo "::error file=kernel.py::planted"
  exit "$STUB_CODE"
fi
"""


@pytest.fixture
def run_action(tmp_path):
    """``run_action(code, files, **inputs)`` runs the action's scripts; returns them by step's name.

    ``code`` is the exit code of the gate, ``files`` are what it leaves.
    """
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("attncheck", "python"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(STUB)
        program.chmod(0o755)

    def run(code=0, files="summary.md gate.json results.jsonl", **inputs):
        values = {name: entry.get("default", "") for name, entry in ACTION["inputs"].items()}
        values |= {name.replace("_", "-"): value for name, value in inputs.items()}
        return {
            step["name"]: subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=folder,
                env=environment(tmp_path, step.get("env", {}), values)
                | {"STUB_CODE": str(code), "STUB_FILES": files},
                capture_output=True,
                text=True,
                timeout=60,
            )
            for step in ACTION["runs"]["steps"]
            if "run" in step
        }

    return run


def environment(folder, env, inputs):
    """Return a step's environment: variables of the runner, and its ``env`` with ``inputs``."""
    own = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: inputs[match[1]], value)
        for name, value in env.items()
    }
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "STUB": str(folder),
        "GITHUB_ACTION_PATH": "/the/action",
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
        **own,
    }


def words_of(folder, verb):
    """Return the words of each call of the stub with a verb, without the verb."""
    calls = (folder / f"{verb}.words").read_text().split("====\n")[:-1]
    return [call.split("\n")[1:-1] for call in calls]


@pytest.mark.parametrize("code", [0, 1, 2, 3, 5, 130])
def test_gates_exit_code_is_passed_on_and_its_reports_are_always_shown(run_action, tmp_path, code):
    runs = run_action(code, kernels="myfa")
    assert runs["Gate"].returncode == code
    assert f"exit-code={code}\n" in (tmp_path / "output").read_text()
    assert f"reports={tmp_path}/project/reports/gate\n" in (tmp_path / "output").read_text()
    summary = runs["Summary and annotations"]
    assert summary.returncode == 0
    assert summary.stdout == "::error file=kernel.py::planted\n"
    assert (tmp_path / "summary").read_text() == "text of summary.md\n"
    assert words_of(tmp_path, "report") == [["reports/gate/gate.json", "--format", "github"]]


def test_steps_after_the_gate_always_run():
    steps = ACTION["runs"]["steps"][-3:]
    names = [step["name"] for step in steps]
    assert names == ["Summary and annotations", "Reports", "Code scanning"]
    assert all(step["if"].startswith("always() && ") for step in steps)


def test_output_of_a_kernel_is_no_workflow_command(run_action):
    """The runner would execute a line such as ``::error::`` or ``::add-path::`` of a kernel."""
    lines = run_action(0, kernels="myfa")["Gate"].stdout.splitlines()
    token = lines[0].removeprefix("::stop-commands::")
    assert re.fullmatch(r"[0-9a-f]{32}", token)
    assert lines[1:] == ["::error::said by a kernel", f"::{token}::"]


def test_reports_of_a_killed_gate_come_from_its_journal(run_action, tmp_path):
    runs = run_action(137, "results.jsonl", kernels="myfa")
    assert runs["Gate"].returncode == 137
    source = "reports/gate/results.jsonl"
    assert words_of(tmp_path, "report") == [
        [source, "--format", "md"],
        [source, "--format", "github"],
    ]
    assert "planted" in (tmp_path / "summary").read_text()


def test_summary_tells_that_a_gate_left_no_report(run_action, tmp_path):
    assert run_action(2, "", kernels="myfa")["Summary and annotations"].returncode == 0
    assert "left no report" in (tmp_path / "summary").read_text()


def test_every_input_reaches_the_gate_as_valid_options(run_action, tmp_path):
    run_action(
        kernels="myfa\nmine.py::attention",
        tier="pr",
        device="cpu",
        baseline="base line.json",
        against="HEAD~1",
        shard="2/4",
        max_time="10m",
        args="--strict  --flaky 1\n--dtype bf16",
        out="reports/other",
    )
    (words,) = words_of(tmp_path, "gate")
    assert words == [
        *("--out", "reports/other", "--tier", "pr", "--device", "cpu"),
        *("--baseline", "base line.json", "--against", "HEAD~1", "--shard", "2/4"),
        *("--max-time", "10m", "--strict", "--flaky", "1", "--dtype", "bf16"),
        *("--", "myfa", "mine.py::attention"),
    ]
    parse_command(["gate", *words])


@pytest.mark.parametrize("name", ["kernels", "tier", "baseline", "args", "out", "install"])
def test_shell_syntax_in_an_input_is_not_executed(run_action, tmp_path, name):
    planted = "$(touch planted);`touch planted`&&touch${IFS}planted|*"
    run_action(**({"kernels": "myfa"} | {name: planted}))
    assert not list(tmp_path.rglob("planted"))
    words = [word for path in tmp_path.glob("*.words") for word in path.read_text().splitlines()]
    assert any(planted.split(maxsplit=1)[0] in word for word in words)


def test_action_installs_itself_or_the_packages_of_its_input(run_action, tmp_path):
    run_action(kernels="myfa")
    run_action(kernels="myfa", install="torch\n\nattncheck[properties] @ file:///x y")
    pip = ["pip", "install", "--disable-pip-version-check"]
    assert words_of(tmp_path, "-m") == [
        [*pip, "/the/action[properties]"],
        [*pip, "torch", "attncheck[properties] @ file:///x y"],
    ]


# The page.


def test_yaml_of_the_ci_page_is_part_of_a_shipped_file():
    text = (ROOT / "docs/tutorial/ci.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    files = [path.read_text() for path in FILES.values()]
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text().replace("\n# ", "\n")
    assert blocks
    for block in blocks:
        yaml.safe_load(block)
        assert any(block in file for file in [*files, hooks]), block


def test_table_of_the_ci_page_lists_all_inputs():
    text = (ROOT / "docs/tutorial/ci.md").read_text()
    (table,) = re.findall(r"^\| input \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M)
    names = [re.match(r"\| `([\w-]+)` \|", line)[1] for line in table.splitlines()]
    assert names == list(ACTION["inputs"])


# The marks of tests/conftest.py.


def test_every_slow_sweep_is_a_parametrized_test():
    """After a renaming, the sweep's share of slow tests would silently become the default."""
    text = (ROOT / "tests" / "conftest.py").read_text().partition("_SLOW = {")[2].partition("}")[0]
    sweeps = re.findall(r'^    "(.+)::(\w+)": \d+,$', text, re.M)
    assert len(sweeps) == text.count("::")
    for file, test in sweeps:
        source = ast.parse((ROOT / "tests" / file).read_text())
        (function,) = (each for each in source.body if getattr(each, "name", "") == test)
        assert any("parametrize(" in ast.unparse(each) for each in function.decorator_list), test


def test_first_test_of_a_sweep_is_never_slow_and_most_of_a_long_one_are():
    """So the README's command runs each test function, and each family of hostile rows."""
    from tests import conftest

    def fast_tests(file, names):
        marks = {name: [] for name in names}
        path = ROOT / file
        conftest.pytest_collection_modifyitems(
            [SimpleNamespace(path=path, name=name, add_marker=marks[name].append) for name in names]
        )
        return [name for name in names if "slow" not in marks[name]]

    short, long = ([f"test_it[{n}]" for n in range(count)] for count in (8, 90))
    assert fast_tests("tests/judge/test_it.py", short) == short
    (first, *others) = fast_tests("tests/judge/test_it.py", long)
    assert first == long[0]
    assert 10 <= len(others) <= 30
    properties = fast_tests("properties/test_it.py", long)
    assert properties[0] == long[0]
    assert 3 <= len(properties) <= 15
    sweep = max((name for name in conftest._SLOW if "hostile/" in name), key=conftest._SLOW.get)
    rows = [f"{sweep.partition('::')[2]}[{family}: {n}]" for family in "ab" for n in range(40)]
    hostile = fast_tests("tests/hostile/test_hostile.py", rows)
    assert {rows[0], rows[40]} <= set(hostile)
    assert len(hostile) < len(rows) / 4


def test_every_file_of_the_quick_subset_exists():
    """Without one of its files, ``pytest -m quick`` would collect nothing."""
    text = (ROOT / "tests" / "conftest.py").read_text()
    names = re.findall(
        r'^    "([^"]+)",$', text.partition("_QUICK = (")[2].partition("\n)")[0], re.M
    )
    assert len(names) > 30
    assert [name for name in names if not (ROOT / "tests" / name.split("::")[0]).is_file()] == []
