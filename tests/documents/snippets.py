"""Runs the snippets of one Markdown document: ``python snippets.py DOCUMENT``, in an empty folder.

``python snippets.py DOCUMENT SERVERS`` runs ``attncheck`` and ``pytest`` by ``warm_python.py``.

A process of its own, since one process either compiles Triton kernels or interprets them.

What a fenced block says after its fence decides what is done with it:

* ``python``: executed, or checked as a doctest where it begins with ``>>>``. The blocks of one
  document share their names, as in one session.
* ``python NAME.py``: written to that file, which a later command must name.
* ``console``: each ``$`` line is executed. The lines below it must be its output (with standard
  error if it fails), where ``...`` stands for anything; a last line ``(exit code N)`` is its exit
  code. Without that line it must end with 0, and without any lines it may print anything. Lines of
  progress on standard error are left out (``_PROGRESS``): attncheck prints them only after 10
  seconds, so they depend on the machine's speed.
* ``console figures``: the same for measurements: numbers and units of time must be at the same
  places, but may have other values.
* ``json KIND``: read by attncheck's reader of such JSON and written back, which must give the same.
* Any other kind fails, unless ``EXEMPT`` lists it.
"""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from sybil import Example, Region

ROOT = Path(__file__).parents[2]

# Number of blocks that are not run here, by document and kind. The README's set-up commands run
# these very tests: test_references compares them with tox.ini and .ci/run instead. test_workflows
# compares steps of workflows with the files that ship, test_adapters runs the adapters of installed
# packages, and tests/cli/test_check.py checks the kernels of claims. The design's diagram is a
# picture.
EXEMPT = {
    ("README.md", "sh"): 2,
    ("docs/tutorial/ci.md", "yaml"): 2,
    ("docs/explanation/design.md", "text"): 1,
    ("docs/how-to/adapters.md", "py"): 10,
    ("docs/how-to/check.md", "text"): 3,
    ("docs/index.md", "{toctree}"): 4,
    ("docs/reference/api.md", "{eval-rst}"): 4,
    ("docs/reference/cli.md", "{eval-rst}"): 1,
}

_JSON = ("mask", "score", "problem", "case")
_PROGRAMS = {
    "attncheck": (sys.executable, "-m", "attncheck"),
    "pytest": (sys.executable, "-m", "pytest"),
    "python": (sys.executable,),
}
_WARM = {"attncheck", "pytest"}
_SECONDS = 300
_EXIT_CODE = re.compile(r"\(exit code (\d+)\)")
_FIGURE = re.compile(r"(?<![\w.])[-+]?\d+(?:[.,]\d+)*(?:e[-+]\d+)?")
_UNIT = re.compile(r"# (?:ns|µs|ms|s)\b")
# ``question 3 of 40, about 35 s left (ragged)``, ``bounds 120/243, 2 failed, about 35 s left``.
_PROGRESS = re.compile(
    r"^[a-z][\w ,-]* \d+(?: of \d+(?:, about \d+ (?:s|min) left)? \(.*\)|/\d+(?:, .*)?)\n",
    re.MULTILINE,
)
_BLOCKS = RawFencedCodeBlockLexer(
    info_pattern=re.compile(r"(?P<info>[^\n]*)$\n", re.MULTILINE),
    mapping={"info": "info", "source": "source"},
)
# Few examples are enough: a document shows how properties run, and need not test a kernel again.
_FEW_EXAMPLES = """
from hypothesis import Phase, settings
settings.register_profile(
    "few", max_examples=2, deadline=None, derandomize=True, database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
"""


@dataclass(frozen=True)
class Command:
    """One ``$`` line of a console block."""

    words: list[str]
    shown: str
    exit_code: int

    @classmethod
    def all_of(cls, block: str) -> list[Command]:
        parts = re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)
        assert len(parts) > 1, "a console block has a line that begins with '$ '"
        assert not parts[0].strip(), f"a console block begins with a command, not {parts[0]!r}"
        return [cls._of(part) for part in parts[1:]]

    @classmethod
    def _of(cls, part: str) -> Command:
        line, _, shown = part.partition("\n")
        lines = shown.rstrip().splitlines()
        exit_code = _EXIT_CODE.fullmatch(lines[-1]) if lines else None
        shown = "\n".join(lines[:-1] if exit_code else lines)
        return cls(shlex.split(line), shown, int(exit_code[1]) if exit_code else 0)


def _read_and_write(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Read ``data`` as a ``kind``, and return the JSON that is written for it."""
    from attncheck.core.mod_spec import Spec
    from attncheck.inputs.problem import Case, Problem

    if kind == "mask":
        return Problem(query=128, mask=Spec.from_json(data)).mask.to_json()
    if kind == "score":
        return Problem(query=128, score=Spec.from_json(data)).score.to_json()
    return {"problem": Problem, "case": Case}[kind].from_json(data).to_json()


class Snippets:
    """The snippets of one document, run in ``folder``."""

    def __init__(self, folder: Path, servers: Path | None = None) -> None:
        self.folder = folder
        self._warm = _module(ROOT / "tests/warm_python.py").Servers(servers) if servers else None
        self._files: set[str] = set()
        for name in ("examples", "properties", "pyproject.toml"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "few_examples.py").write_text(_FEW_EXAMPLES)

    def run(self, path: Path) -> int:
        """Evaluate every block of ``path``; return how many were executed or read."""
        parsers = (PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), self._blocks)
        document = Document.parse(str(path), *parsers)
        # Sybil sets no ``__name__``, which class definitions need.
        document.namespace["__name__"] = "document"
        warnings.simplefilter("error")  # as in every test
        examples = list(document)
        for example in examples:
            example.evaluate()
        assert not self._files, f"no command uses the files {sorted(self._files)}"
        return len(examples)

    def _blocks(self, document: Document) -> Iterator[Region]:
        for region in _BLOCKS(document):
            info = region.lexemes["info"]
            if info == "python" or (_name(document.path), info) in EXEMPT:
                continue
            region.parsed = region.lexemes["source"]
            region.evaluator = self._evaluator(info)
            yield region

    def _evaluator(self, info: str) -> Callable[[Example], str]:
        kind, _, rest = info.partition(" ")
        if kind == "python" and re.fullmatch(r"\w+\.py", rest):
            return lambda example: self._file(rest, example.parsed)
        if info in {"console", "console figures"}:
            return lambda example: self._console(example.parsed, figures=rest == "figures")
        if kind == "json" and rest in _JSON:
            return lambda example: _json(rest, example.parsed)
        return lambda _: f"nothing runs a block of kind {info!r}"

    def _file(self, name: str, source: str) -> str:
        (self.folder / name).write_text(source)
        self._files.add(name)
        return ""

    def _console(self, block: str, *, figures: bool) -> str:
        for command in Command.all_of(block):
            self._files -= {word.partition("::")[0] for word in command.words}
            problem = self._problem(command, figures=figures)
            if problem:
                return f"$ {shlex.join(command.words)}\n{problem}"
        return ""

    def _problem(self, command: Command, *, figures: bool) -> str:
        """Run the command; return how it differs from the document, or nothing."""
        program, *arguments = command.words
        if program not in _PROGRAMS:
            return f"{program!r} is none of {', '.join(_PROGRAMS)}"
        run = self._run_command(program, arguments)
        output = run.stdout + (without_progress(run.stderr) if run.returncode else "")
        if run.returncode != command.exit_code:
            return f"exit code {run.returncode}, not {command.exit_code}:\n{output}{run.stderr}"
        return _difference(command.shown, output, figures=figures) if command.shown else ""

    def _run_command(self, program: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"cwd": self.folder, "env": environment(self.folder)}
        if self._warm and program in _WARM:
            return self._warm.run(program, *arguments, timeout=_SECONDS, **options)
        words = [*_PROGRAMS[program], *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, **options)


def without_progress(errors: str) -> str:
    """Return standard error without its lines of progress, which only a slow machine has."""
    return _PROGRESS.sub("", errors)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a shell without a GPU, without width, colours and this pytest."""
    unset = ("PYTEST_", "TRITON_INTERPRET", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "HYPOTHESIS_")
    others = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    return others | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # documents run side by side, and waiting threads spin
        "PYTHONPATH": str(folder),
        "PYTHONIOENCODING": "utf-8",
        "PYTEST_ADDOPTS": "-p few_examples --hypothesis-profile few -p no:cacheprovider",
    }


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"attncheck_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _json(kind: str, source: str) -> str:
    shown = json.loads(source)
    written = _read_and_write(kind, shown)
    different = sorted(name for name in shown if shown[name] != written[name])
    return f"read back otherwise: {different}" if different else ""


def _difference(shown: str, output: str, *, figures: bool) -> str:
    if figures:
        shown, output = _without_figures(shown), _without_figures(output)
    want, got = (
        "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"
        for text in (shown, output)
    )
    if doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        return ""
    return f"shown:\n{want}\nprinted:\n{got}"


def _without_figures(text: str) -> str:
    text = _UNIT.sub("# time", _FIGURE.sub("#", text))
    return re.sub(r" +", " ", text)


def _name(path: str) -> str:
    """Return ``path`` as in EXEMPT; a document outside the repository has no exemptions."""
    resolved = Path(path).resolve()
    return resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else path


def blocks(path: Path) -> list[tuple[str, str]]:
    """Return the kind and the text of every fenced block of a document."""
    document = Document(path.read_text(encoding="utf-8"), str(path))
    return [(r.lexemes["info"], str(r.lexemes["source"])) for r in _BLOCKS(document)]


if __name__ == "__main__":
    _folders = (Path(argument) for argument in sys.argv[2:])
    _count = Snippets(Path.cwd(), *_folders).run(Path(sys.argv[1]))
    print(_count, "snippets")  # noqa: T201  # a program's output
