"""The action and the example workflows: what they run, with what rights, and what they pass on."""

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
OURS = "./third_party/attncheck"  # a clone in the repository, as a submodule
SHA = re.compile(r"[0-9a-f]{40}")


def data_of(name):
    return yaml.safe_load(FILES[name].read_text())


def steps_of(name):
    """Every step of a file, in order."""
    if name == "action":
        return ACTION["runs"]["steps"]
    return [step for job in data_of(name)["jobs"].values() for step in job["steps"]]


def test_there_is_a_workflow_for_each_purpose():
    # YAML 1.1 reads the word ``on`` as true.
    events = {name: set(data_of(name)[True]) for name in WORKFLOWS}
    pull_request = {"pull_request"}
    on_schedule = {"schedule", "workflow_dispatch"}
    assert events == {"cpu": pull_request, "gpu": pull_request, "nightly": on_schedule}


# Rights.


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_can_only_read(name):
    workflow = data_of(name)
    assert "pull_request_target" not in FILES[name].read_text()
    assert workflow["permissions"] == {"contents": "read"}
    assert not [job for job in workflow["jobs"].values() if "permissions" in job]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_checkout_leaves_no_token_behind_for_the_code_of_the_pull_request(name):
    checkouts = [s for s in steps_of(name) if s.get("uses", "").startswith("actions/checkout")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_gpu_runs_no_code_of_a_fork():
    for job in data_of("gpu")["jobs"].values():
        assert job["if"] == "github.event.pull_request.head.repo.full_name == github.repository"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_job_ends_and_a_newer_run_replaces_an_older_one(name):
    workflow = data_of(name)
    assert all(job["timeout-minutes"] <= 150 for job in workflow["jobs"].values())
    assert "${{ github.workflow }}" in workflow["concurrency"]["group"]


@pytest.mark.parametrize("name", FILES)
def test_no_expression_is_pasted_into_a_script(name):
    """The text of a branch's name would be a command there."""
    assert pasted(steps_of(name)) == []


def pasted(steps):
    return [step["run"] for step in steps if "${{" in step.get("run", "")]


def test_a_pasted_expression_is_found():
    assert pasted([{"run": "echo ${{ github.event.pull_request.title }}"}]) != []


@pytest.mark.parametrize("name", FILES)
def test_actions_of_others_are_pinned(name):
    for step in steps_of(name):
        if "uses" in step:
            ours = step["uses"] == OURS
            assert ours or re.fullmatch(rf"[\w-]+/[\w./-]+@(v\d+|{SHA.pattern})", step["uses"])


_OF_A_RELEASE = re.compile(r"attncheck@v\d|rev: v\d|pip install '?attncheck\b")


def promised(text):
    """Lines that work once attncheck is released, and do not say so."""
    lines = text.splitlines()
    # Prose is wrapped: the words may stand at the end of the line before.
    return [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if _OF_A_RELEASE.search(line)
        and "once released" not in " ".join(f"{before} {line}".split())
    ]


# What the program itself prints is for who has installed it: pip then takes an extra from there.
PAGES = sorted({*ROOT.glob("docs/**/*.md")} - {ROOT / "docs/reference/hostile.md"})


@pytest.mark.parametrize(
    "path",
    [*FILES.values(), ROOT / "README.md", ROOT / ".pre-commit-hooks.yaml", *PAGES],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_what_needs_a_release_says_so(path):
    assert promised(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line", ["- uses: attncheck/attncheck@v0", "rev: v0.1.0", "`pip install 'attncheck[exact]'`"]
)
def test_a_promise_is_found(line):
    assert promised(line) == [line]
    assert promised(f"{line} # once released") == []


def test_a_job_that_takes_the_clone_checks_it_out():
    for name in WORKFLOWS:
        for job in data_of(name)["jobs"].values():
            if "third_party/attncheck" in str(job):
                (checkout,) = [s for s in job["steps"] if "checkout" in s.get("uses", "")]
                assert checkout["with"]["submodules"] is True


def test_the_hook_of_the_page_works_from_a_clone(tmp_path):
    """What pre-commit does: the commit of the clone has the hook, and its entry is run."""
    page = (ROOT / "docs/tutorial/ci.md").read_text()
    (shown,) = [b for b in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "hooks:" in b]
    (entry,) = yaml.safe_load(shown)
    assert SHA.fullmatch(entry["rev"])
    hooks = {
        hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    }
    (used,) = entry["hooks"]
    words = shlex.split(hooks[used["id"]]["entry"])
    assert hooks[used["id"]]["language"] == "system"
    (tmp_path / "attncheck.toml").write_text('[kernels.mine]\nentry = "ideal"\n')
    done = subprocess.run(
        [sys.executable, "-m", *words, "attncheck.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_gives_the_action_are_its_inputs(name):
    ours = [step for step in steps_of(name) if step.get("uses") == OURS]
    assert ours
    for step in ours:
        assert set(step["with"]) <= set(ACTION["inputs"])
        assert "kernels" in step["with"]


def test_every_input_is_used_and_described():
    text = FILES["action"].read_text()
    for name, given in ACTION["inputs"].items():
        assert given["description"].strip(), name
        assert f"inputs.{name}" in text, name


def test_parts_that_draw_draw_the_same():
    (step,) = [each for each in steps_of("nightly") if "shard" in each.get("with", {})]
    assert step["with"]["tier"] == "nightly"
    assert step["with"]["args"] == "--seed ${{ github.run_id }}"


# Command lines.


def commands_in(script):
    """Words of every ``attncheck …`` of a script, without what the shell does around them."""
    for line in script.replace("\\\n", " ").splitlines():
        for found in re.finditer(r"(?:^|[|&;]\s*|\s)attncheck ([^|&;>]*)", line):
            yield shlex.split(found[1])


def check_words(words):
    """Raises click.UsageError unless the real verb takes them."""
    from attncheck.cli import attncheck

    command, context = attncheck, click.Context(attncheck, **attncheck.context_settings)
    while isinstance(command, click.Group):
        verb, *words = words
        command = command.commands[verb]
        parent = context
        context = click.Context(command, parent=parent, info_name=verb)
    command.make_context(verb, list(words), parent=parent)


def shown_commands():
    """Where → words: what the workflows run, and what the pages on them show."""
    for name in FILES:
        for step in steps_of(name):
            for words in commands_in(step.get("run", "")):
                if "${options[@]}" not in words:  # the gate's own step is run below
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
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    for hook in hooks:
        yield ".pre-commit-hooks.yaml", [*shlex.split(hook["entry"])[1:], "pyproject.toml"]


SHOWN = dict(shown_commands())


@pytest.mark.parametrize("where", SHOWN)
def test_every_command_line_is_one_that_there_is(where):
    check_words(SHOWN[where])


def test_a_line_that_has_rotted_is_noticed():
    with pytest.raises(click.NoSuchOption):
        check_words(["check", "x.py::f", "--gone"])
    with pytest.raises(KeyError):
        check_words(["gone"])
    assert {words[0] for words in SHOWN.values()} >= {"config", "demo", "gate", "merge", "report"}


# The action, step by step, with an attncheck that does what it is told.

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
def act(tmp_path):
    """``act(code, files, **inputs)``: exit codes of the scripts by name, and all that they left."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("attncheck", "python"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(STUB)
        program.chmod(0o755)

    def run(code=0, files="summary.md gate.json results.jsonl", **inputs):
        given = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        return {
            step["name"]: subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=folder,
                env=environment(tmp_path, step.get("env", {}), given)
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
    """Of a step: the runner's files, and its own ``env`` with the inputs in it."""
    filled = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
        for name, value in env.items()
    }
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "STUB": str(folder),
        "GITHUB_ACTION_PATH": "/the/action",
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
        **filled,
    }


def words_of(folder, verb):
    """The command lines that the stub was called by, without the verb."""
    return [
        call.split("\n")[1:-1] for call in (folder / f"{verb}.words").read_text().split("====\n")
    ][:-1]


@pytest.mark.parametrize("code", [0, 1, 2, 3, 5, 130])
def test_the_exit_code_passes_through_and_reports_come_all_the_same(act, tmp_path, code):
    done = act(code, kernels="myfa")
    assert done["Gate"].returncode == code
    assert f"exit-code={code}\n" in (tmp_path / "output").read_text()
    assert f"reports={tmp_path}/project/reports/gate\n" in (tmp_path / "output").read_text()
    after = done["Summary and annotations"]
    assert after.returncode == 0
    assert after.stdout == "::error file=kernel.py::planted\n"
    assert (tmp_path / "summary").read_text() == "text of summary.md\n"
    assert words_of(tmp_path, "report") == [["reports/gate/gate.json", "--format", "github"]]


def test_what_follows_the_gate_runs_whatever_it_found():
    after = ACTION["runs"]["steps"][-3:]
    assert [step["name"] for step in after] == [
        "Summary and annotations",
        "Reports",
        "Code scanning",
    ]
    assert all(step["if"].startswith("always() && ") for step in after)


def test_what_a_kernel_prints_is_no_command_to_the_runner(act):
    lines = act(0, kernels="myfa")["Gate"].stdout.splitlines()
    token = lines[0].removeprefix("::stop-commands::")
    assert re.fullmatch(r"[0-9a-f]{32}", token)
    assert lines[1:] == ["::error::said by a kernel", f"::{token}::"]


def test_a_gate_that_was_killed_is_read_from_its_journal(act, tmp_path):
    done = act(137, "results.jsonl", kernels="myfa")
    assert done["Gate"].returncode == 137
    source = "reports/gate/results.jsonl"
    assert words_of(tmp_path, "report") == [
        [source, "--format", "md"],
        [source, "--format", "github"],
    ]
    assert "planted" in (tmp_path / "summary").read_text()


def test_a_gate_that_left_nothing_says_so(act, tmp_path):
    assert act(2, "", kernels="myfa")["Summary and annotations"].returncode == 0
    assert "left no report" in (tmp_path / "summary").read_text()


def test_every_input_reaches_the_gate_and_the_gate_takes_it(act, tmp_path):
    act(
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
    check_words(["gate", *words])


@pytest.mark.parametrize("name", ["kernels", "tier", "baseline", "args", "out", "install"])
def test_an_input_is_text_and_never_a_command(act, tmp_path, name):
    planted = "$(touch planted);`touch planted`&&touch${IFS}planted|*"
    act(**({"kernels": "myfa"} | {name: planted}))
    assert not list(tmp_path.rglob("planted"))
    said = [word for path in tmp_path.glob("*.words") for word in path.read_text().splitlines()]
    assert any(planted.split(maxsplit=1)[0] in word for word in said)


def test_what_is_installed(act, tmp_path):
    act(kernels="myfa")
    act(kernels="myfa", install="torch\n\nattncheck[properties] @ file:///x y")
    pip = ["pip", "install", "--disable-pip-version-check"]
    assert words_of(tmp_path, "-m") == [
        [*pip, "/the/action[properties]"],
        [*pip, "torch", "attncheck[properties] @ file:///x y"],
    ]


# The pages.


@pytest.mark.parametrize("page", ["docs/tutorial/ci.md"])
def test_a_page_shows_what_is_shipped(page):
    """Each of its YAML blocks is a part of one of the files, to the letter."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    files = [path.read_text() for path in FILES.values()]
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text().replace("\n# ", "\n")
    assert blocks
    for block in blocks:
        yaml.safe_load(block)
        assert any(block in file for file in [*files, hooks]), block


def test_the_page_has_a_table_of_all_inputs():
    text = (ROOT / "docs/tutorial/ci.md").read_text()
    (table,) = re.findall(r"^\| input \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M)
    named = [re.match(r"\| `([\w-]+)` \|", line)[1] for line in table.splitlines()]
    assert named == list(ACTION["inputs"])


def test_every_sweep_of_the_slow_ones_is_there():
    """Of one that has another name all tests would run, or none of ``-m slow``."""
    text = (ROOT / "tests" / "conftest.py").read_text().partition("_SLOW = {")[2].partition("}")[0]
    sweeps = re.findall(r'^    "(.+)::(\w+)": \d+,$', text, re.M)
    assert len(sweeps) == text.count("::")
    for file, test in sweeps:
        source = ast.parse((ROOT / "tests" / file).read_text())
        (found,) = (each for each in source.body if getattr(each, "name", "") == test)
        assert any("parametrize(" in ast.unparse(each) for each in found.decorator_list), test


def test_the_first_of_a_sweep_stays_and_of_long_ones_a_part():
    """So the README's command has each test function, and each family of hostile rows."""
    from tests import conftest

    def stay(file, names):
        marks = {name: [] for name in names}
        path = ROOT / file
        conftest.pytest_collection_modifyitems(
            [SimpleNamespace(path=path, name=name, add_marker=marks[name].append) for name in names]
        )
        return [name for name in names if "slow" not in marks[name]]

    short, long = ([f"test_it[{n}]" for n in range(count)] for count in (8, 90))
    assert stay("tests/judge/test_it.py", short) == short
    (first, *others) = stay("tests/judge/test_it.py", long)
    assert first == long[0]
    assert 10 <= len(others) <= 30
    of_each_kernel = stay("properties/test_it.py", long)
    assert of_each_kernel[0] == long[0]
    assert 3 <= len(of_each_kernel) <= 15
    row = "test_hostile_entry_ends_as_the_table_says[{}: {}]"
    rows = [row.format(family, n) for family in "ab" for n in range(40)]
    hostile = stay("tests/hostile/test_hostile.py", rows)
    assert {rows[0], rows[40]} <= set(hostile)
    assert len(hostile) < len(rows) / 4


def test_every_file_of_the_quick_subset_is_there():
    """A file that is gone would leave ``pytest -m quick`` with nothing, and say so to nobody."""
    text = (ROOT / "tests" / "conftest.py").read_text()
    names = re.findall(
        r'^    "([^"]+)",$', text.partition("_QUICK = (")[2].partition("\n)")[0], re.M
    )
    assert len(names) > 30
    assert [name for name in names if not (ROOT / "tests" / name.split("::")[0]).is_file()] == []
