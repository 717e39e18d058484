"""Plant a fault in a changed copy of attncheck's kernels; the real sources carry no switches.

The copy is a package of its own. It includes all modules that import a changed one, and they import
the copy, so that the unchanged kernel can run beside it. The ideal kernel needs no copy for a fault
that consists of other ``Steps``.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.faults.catalogue import SHARED_PATCHES
from attncheck.faults.patching import NotPlanted, apply_patches
from attncheck.subjects.capabilities import named_kernels

if TYPE_CHECKING:
    from attncheck.fault_models.steps import Steps
    from attncheck.faults.catalogue import Control, Fault, HostName

_ROOT = Path(__file__).parents[1]
_SHARED = {"compilation"}  # prepares Triton for all kernels, and is not copied

COPIED = (
    *sorted(
        f"kernels.{file.stem}"
        for file in (_ROOT / "kernels").glob("[!_]*.py")
        if file.stem not in _SHARED
    ),
    "mods.block_mask",
    "subjects.conventions.call_tensors",
    "subjects.conventions.empty_rows",
    "subjects.ideal",
    "subjects.kernel_mods",
    "subjects.softmax_kernels",
    "subjects.triton_caches",
    "subjects.triton_flash",
)
"""Modules below attncheck that are copied, and so may be changed.

The interpreter's repairs are not: they are global. Nor are modules that oracles share with kernels.
"""

_IMPORTED = re.compile(r"\battncheck\.(" + "|".join(map(re.escape, COPIED)) + r")\b")
_FROM_KERNELS = re.compile(r"\bfrom attncheck\.kernels import\b")

_KERNEL = '''"""{summary}"""

import sys
from pathlib import Path

folder = str(Path(__file__).parent)
if folder not in sys.path:
    sys.path.insert(0, folder)

from {module} import {host} as Host
{imports}

class Planted(Host):
    name = "{name}"
    summary = {summary!r}
{body}'''

_ARGUMENTS = """
    def __init__(self, *arguments):
        super().__init__(*(arguments or {arguments!r}))
"""
_STEPS_IMPORT = "from attncheck.faults.planting import model_steps\n"
_STEPS = "    steps = model_steps({model!r})\n"


def plant(fault: Fault | Control, host: HostName, folder: Path) -> str:
    """Write the kernel of ``host`` with ``fault`` in it below ``folder``.

    Args:
        folder: Gets a file ``<fault>_<host>.py``, and a package beside it if sources are changed;
            existing ones are overwritten.

    Returns:
        The kernel's name for ``subjects.load.load``: ``FILE::Planted``.

    Raises:
        NotPlanted: where a text to be changed is not found exactly once.
    """
    how = fault.hosts[host]
    label = f"{fault.id}_{host}".replace("-", "_")
    kernel = named_kernels.BUILTIN[how.kernel]
    module = kernel.module
    # Shared patches go before or after the fault's own patch: their order matters.
    own_patches = [how.patch] if how.patch else []
    shared = [[SHARED_PATCHES[name] for name in names] for names in (how.first, how.last)]
    patches = [*shared[0], *own_patches, *shared[1]]
    if patches:
        try:
            _copy(patches, folder / f"planted_{label}")
        except NotPlanted as error:
            raise NotPlanted(f"{fault.id} in {how.kernel}: {error}") from None
        module = f"planted_{label}.{module.removeprefix('attncheck.')}"
    # The kernel's process imports the class, and looks up its steps there.
    body = _STEPS.format(model=how.model) if how.model else ""
    if kernel.arguments:
        body += _ARGUMENTS.format(arguments=kernel.arguments)
    text = _KERNEL.format(
        summary=f"{fault.id}: {fault.summary}".replace('"', "'"),
        module=module,
        host=kernel.name,
        imports=_STEPS_IMPORT if how.model else "",
        name=f"{fault.id} in {how.kernel}",
        body=body,
    )
    path = folder / f"{label}.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}::Planted"


def _copy(patches: list[str], package: Path) -> None:
    """Write a package of the ``COPIED`` modules, changed by ``patches``."""
    sources = {
        name: (_ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        for name in COPIED
    }
    # Patch before anything is written, so that a failing patch leaves no incomplete package.
    texts = apply_patches(sources, patches)
    shutil.rmtree(package, ignore_errors=True)
    for name, text in texts.items():
        path = package / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(package).parents:
            (package / parent / "__init__.py").touch()
        # Imports of copied modules become imports of the copies.
        own = _IMPORTED.sub(rf"{package.name}.\1", text)
        own = _FROM_KERNELS.sub(f"from {package.name}.kernels import", own)
        path.write_text(own, encoding="utf-8")


def model_steps(model: str) -> Steps:
    """Return the Steps of the fault model that ``Host.model`` names."""
    from attncheck.fault_models import FAULT_MODELS

    name, _, number = model.partition(":")
    return FAULT_MODELS[name].steps[int(number or 0)]
