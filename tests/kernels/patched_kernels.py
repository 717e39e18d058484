"""Copies of kernels' sources in which one text is changed: the planted faults of these tests."""

import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from attncheck.core.source_files import import_file

FLASH2 = ("tile", "gradient_terms", "flash2_backward")


PLANTED = tomllib.loads(Path(__file__).with_name("planted_faults.toml").read_text())
"""Of each kernel what faults are called: what is changed, and what shows it."""


def copy_kernels(
    folder: Path, names: tuple[str, ...], where: str, right: str, wrong: str, more: str = ""
) -> SimpleNamespace:
    """Import copies of the kernel modules ``names``, which import each other's copies.

    Args:
        folder: Gets the copies.
        names: Below ``attncheck.kernels``, in the order of their imports.
        where: The one function or class of them that is changed; empty: the one module that has it.
        right: A text of it.
        wrong: What stands there instead.
        more: Text behind the last copy.

    Returns:
        Each module by its name.
    """
    copies: dict[str, ModuleType] = {}
    changed = 0
    for name in names:
        spec = importlib.util.find_spec(f"attncheck.kernels.{name}")
        assert spec is not None
        source = Path(str(spec.origin)).read_text()
        place = rf"^ *(?:def|class) {where}\b" if where else re.escape(right)
        start = re.search(place, source, re.MULTILINE)
        if start is not None:
            # Two empty lines are behind everything on the top level.
            end = source.find("\n\n\n", start.start()) if where else len(source)
            region = source[start.start() : end]
            assert right in region, right
            source = source[: start.start()] + region.replace(right, wrong) + source[end:]
            changed += 1
        for other in names:
            source = source.replace(
                f"attncheck.kernels.{other} ", f"attncheck_file_patched_{other} "
            )
        copy = folder / f"patched_{name}.py"
        copy.write_text(source + (more if name == names[-1] else ""))
        copies[name] = import_file(copy, "a copy")
    assert changed == 1, where
    return SimpleNamespace(**copies)


def faulty(folder: Path, names: tuple[str, ...], where: str, *fault: str) -> Callable[..., Any]:
    """The function of the last of ``names``, from copies in one of which there is ``fault``."""
    return getattr(vars(copy_kernels(folder, names, where, *fault))[names[-1]], names[-1])


def faulty_forward(folder: Path, kernel: str, right: str, wrong: str) -> Callable[..., Any]:
    """A forward from copies of its source and its tiles', one of which has a fault."""
    return faulty(folder, ("tile", kernel), "", right, wrong)
