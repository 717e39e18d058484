"""What the command line imports before a verb runs: nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


# The table asks torch, whose dispatcher says which calls PyTorch's own kernels take.
@pytest.mark.parametrize(
    ("options", "absent"), [((), HEAVY), (("--support", "--device", "cpu"), {"attncheck.verify"})]
)
def test_list_imports_nothing_heavy_that_it_needs_not(tmp_path, options, absent):
    program = """
import sys
from attncheck.cli import attncheck

attncheck(sys.argv[1:], standalone_mode=False)
print(*sys.modules)
"""
    words = [sys.executable, "-c", program, "list", *options]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not absent & set(done.stdout.splitlines()[-1].split())
    assert ("what supports what on cpu" in done.stdout) is bool(options)
