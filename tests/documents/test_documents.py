"""The snippets and images of README and docs, and ``snippets.py``, which runs the snippets."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from attncheck.cli import long_runs
from attncheck.cli.faults import FaultProgress
from attncheck.cli.gate import GateProgress

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    *sorted(
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "docs").rglob("*.md")
        if p.name not in {"fault-models.md", "relations.md"}  # written by docs/conf.py
    ),
)

_LARGEST_IMAGE = 300_000  # bytes


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_snippet_does_what_it_says(run_snippets, name):
    # One document runs as in a user's shell; for all, imports of torch would take most of the time.
    run = run_snippets(ROOT / name, fresh=name == "docs/reference/reports.md")
    assert run.returncode == 0, run.stderr


def test_every_image_is_shown_and_small():
    images = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.png")}
    texts = ((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    shown = {i for text in texts for i in re.findall(r"\]\([./]*(images/[\w-]+\.png)\)", text)}
    assert shown == images
    assert all((ROOT / "docs" / image).stat().st_size < _LARGEST_IMAGE for image in images)


def test_all_blocks_are_run_but_the_exempt_ones(reader):
    kinds = Counter((name, info) for name in DOCUMENTS for info, _ in reader.blocks(ROOT / name))
    executed = re.compile(r"python|python \w+\.py|console|console figures|json \w+")
    others = {key: count for key, count in kinds.items() if not executed.fullmatch(key[1])}
    assert others == reader.EXEMPT


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_have_code_in_plain_fences_only(name):
    """A block that the parser does not recognise would not be run."""
    text = (ROOT / name).read_text(encoding="utf-8")
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "```" not in outside
    assert "~~~" not in outside
    # Four spaces after an empty line make a block of code too.
    assert not re.search(r"\n\n(?: {4}|\t)", outside)


def block(info, *lines):
    return "\n".join((f"```{info}", *lines, "```", ""))


LIST = "$ attncheck --version"
FAULTS = {
    "failing assertion": (block("python", "assert 1 + 1 == 3, 'planted'"), "planted"),
    "import of a missing name": (block("python", "from attncheck import nothing"), "nothing"),
    "warning": (block("python", "import warnings", "warnings.warn('planted')"), "planted"),
    "doctest with another result": (block("python", ">>> 1 + 1", "3"), "Got:\n    2"),
    "other output": (block("console", LIST, "attncheck, version 9"), "printed:"),
    "incomplete output": (block("console", LIST, "attncheck"), "printed:"),
    "another exit code": (block("console", LIST, "...", "(exit code 1)"), "exit code 0, not 1"),
    "failure without its exit code": (block("console", "$ attncheck nothing"), "exit code 2"),
    "figures with other words": (block("console figures", LIST, "attncheck, v. 1"), "printed:"),
    "another program": (block("console", "$ rm -r reports"), "'rm' is none of"),
    "no command": (block("console", "attncheck --version"), "begins with"),
    "JSON with an unknown field": (block("json problem", '{"queri": 4}'), "no field 'queri'"),
    "JSON with another value": (block("json problem", '{"query": 4, "kv": 0}'), "['kv']"),
    "JSON without a kind": (block("json", "{}"), "'json'"),
    "shell": (block("sh", "make"), "'sh'"),
    "block without a kind": (block("", "anything"), "''"),
    "unused file": (block("python my.py", "x = 1"), "my.py"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_snippet_is_found(run_snippets, tmp_path, fault):
    text, message = FAULTS[fault]
    document = tmp_path / "broken.md"
    document.write_text(f"# Broken\n\n{text}", encoding="utf-8")
    run = run_snippets(document)
    assert run.returncode == 1
    assert message in run.stderr


def test_correct_document_passes_and_its_snippets_are_counted(run_snippets, tmp_path):
    document = tmp_path / "sound.md"
    document.write_text(
        block("python", "x = 2")
        + block("python", ">>> x + 1", "3")
        + block("python my.py", "print('seven')", "raise SystemExit(4)")
        + block("console", LIST, "attncheck, ...", "$ python my.py", "seven", "(exit code 4)")
        + block("console figures", LIST, "attncheck, version 7.7.7")
        + block("json mask", '{"name": "sliding_window", "window": 8}')
    )
    run = run_snippets(document)
    assert (run.stdout, run.stderr) == ("6 snippets\n", "")


ROW = "flash2  1.29×  4.1e-07  0,1,124,36  9.48 ms†"


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        ("flash2 1.0× -2.00e-05   0,0,0,0  141 µs†", True),
        ("flash3 1.0× 1 0 1 ms†", False),
        ("flash2 exact 1 0 1 ms†", False),
        ("flash2 1.0× 1 0 1 ms", False),
    ],
)
def test_only_numbers_and_times_of_figures_may_differ(run_snippets, tmp_path, shown, same):
    script = block("python row.py", f"print('{ROW}')")
    console = block("console figures", "$ python row.py", shown)
    document = tmp_path / "figures.md"
    document.write_text(script + console, encoding="utf-8")
    run = run_snippets(document)
    assert (run.returncode == 0) == same
    assert same or "printed:" in run.stderr


def test_lines_of_progress_are_not_compared(reader, monkeypatch, capsys):
    """A slow machine prints them and a fast one does not; all other lines are compared."""
    monkeypatch.setattr(long_runs, "_SECONDS_BETWEEN_LINES", 0.0)
    for unit in ("question", long_runs.TRIALS):
        with long_runs.progress(unit, 40, quiet=False) as advance:
            advance("long-sum", done=False)
            advance("head dims (64, 80)")
    lines = capsys.readouterr().err
    assert lines.startswith("question 0 of 40 (long-sum)\nquestion 1 of 40, about ")
    assert lines.count("\n") == 4
    event = SimpleNamespace(finished=120, known=243, seconds_left=35.0)
    for counter in (GateProgress(), FaultProgress()):
        lines += f"{counter.line(event)}\n"
    error = "attncheck: interrupted at 3 of 5: the same command goes on.\n"
    assert reader.without_progress(f"{error}{lines}{error}") == error * 2


def test_progress_of_a_failing_command_is_not_compared(run_snippets, tmp_path):
    script = "import sys; sys.exit('question 9 of 40, about 35 s left (long-sum)\\nwrong')"
    document = tmp_path / "progress.md"
    shown = block("console", "$ python slow.py", "wrong", "(exit code 1)")
    document.write_text(block("python slow.py", script) + shown)
    assert run_snippets(document).returncode == 0
