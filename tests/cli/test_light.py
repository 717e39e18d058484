"""What the command line imports before a verb runs: nothing heavy."""

from __future__ import annotations

import subprocess
import sys

from attncheck.cli import attncheck

HEAVY = {"torch", "triton", "numpy", "rich", "mpmath", "hypothesis", "jinja2", "attncheck.verify"}
PROGRAM = """
import sys
from attncheck.cli import main

heavy = set(sys.argv[1].split())
for verb in sys.argv[2:]:
    sys.argv = ["attncheck", *verb.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        print(verb, end.code, *sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def test_the_help_of_no_verb_imports_anything_heavy(tmp_path):
    verbs = ["", *attncheck.commands, "baseline write", "baseline diff", "baseline accept"]
    words = [sys.executable, "-c", PROGRAM, " ".join(HEAVY), *verbs]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines() == [f"{verb} 0" for verb in verbs]
    assert done.stdout.count("Usage: attncheck") == len(verbs)


def test_list_runs_without_the_room_that_runs_kernels(tmp_path):
    # But with torch, whose dispatcher says which calls PyTorch's own kernels take.
    program = """
import sys
from attncheck.cli import attncheck

attncheck(["list", "--device", "cpu"], standalone_mode=False)
print(*sys.modules)
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "attncheck.verify" not in done.stdout.splitlines()[-1].split()
