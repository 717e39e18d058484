"""The text that all standalone scripts share: what is below the marked line.

A script has it after its own call of the kernel. Scripts need only torch and the kernel, so that
nothing here may import attncheck.
"""

from __future__ import annotations

# --- The text of every script.
import base64
import importlib
import importlib.util
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch


def tensor(memory: dict[str, Any], told: dict[str, Any], device: str) -> torch.Tensor:
    """Return a tensor in its own memory, with the strides it had."""
    dtype, text = memory[told["memory"]]
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    flat = flat.view(getattr(torch, dtype)).to(device)
    if "within" in told:  # Rows lie far apart, and the gaps are not stored.
        whole = torch.empty(told["within"], dtype=flat.dtype, device=device)
        view = whole.as_strided(told["shape"], told["stride"], told["offset"])
        return view.copy_(flat.view(told["shape"]))
    return flat.as_strided(told["shape"], told["stride"], told["offset"])


def of_file(file: str, name: str) -> Any:
    """Return ``name`` of a Python file, whose path is relative to this script."""
    path = Path(__file__).parent / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and Triton look it up
    sys.path.insert(0, str(path.resolve().parent))  # it may import its siblings
    spec.loader.exec_module(module)
    return getattr(module, name)


def of_module(folder: str, module: str, names: str) -> Any:
    """Return ``names`` of a module, which may lie in a folder relative to this script."""
    sys.path.insert(0, str(Path(__file__).parent / folder))
    member: Any = importlib.import_module(module)
    for name in names.split("."):
        member = getattr(member, name)
    return member


def answered(asked: dict[str, Any], run: dict[str, Any], kernel: Any, names: dict[str, Any]) -> Any:
    """Run the kernel once; return (out, LSE or None). Raise ValueError for a bad shape or dtype."""
    tensors = {
        n: tensor(asked["memory"], data, asked["device"]) for n, data in run["inputs"].items()
    }
    names.update(tensors)  # The call reads a mask, descales and a sink as globals.
    with torch.no_grad():
        out, lse = run["call"](kernel, tensors["q"], tensors["k"], tensors["v"])
    for name, got in (("out", out), ("lse", lse)):
        shape = tuple(run[name]["exact"]["shape"])
        if got is not None and tuple(got.shape) != shape:
            raise ValueError(f"{name}.shape={tuple(got.shape)}, but should be {shape}")
    if str(out.dtype) != run["dtype"]:
        raise ValueError(f"out.dtype={out.dtype}, but should be {run['dtype']}")
    return out, lse


def compared(got: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> dict[str, Any]:
    """Compare with the exact result: the worst element, and how many are beyond the allowance.

    Elements with an allowance of NaN or infinity are not compared. Elsewhere NaN and infinities are
    wrong where the exact result is finite.
    """
    counted = ~allowed.isnan() & ~allowed.isposinf()
    value = got.double().cpu()
    distance = torch.where(value == exact, 0.0, (value - exact).abs()).nan_to_num(nan=math.inf)
    wrong = counted & (distance > allowed)
    share = torch.where(distance == 0, 0.0, distance / allowed)
    share = torch.where(counted, share.nan_to_num(nan=0.0, posinf=math.inf), -1.0)
    place = tuple(int(i) for i in torch.unravel_index(share.argmax(), share.shape))
    return {
        "place": place,
        "share": float(share[place]),
        "got": float(value[place]),
        "exact": float(exact[place]),
        "allowed": float(allowed[place]),
        "wrong": int(wrong.sum()),
        "compared": int(counted.sum()),
    }


def described(name: str, found: dict[str, Any], which: str) -> list[str]:
    """Return lines on the worst element of an output."""
    return listed(
        {
            "worst": f"{name}{list(found['place'])}{which}",
            "got": f"{found['got']:.9g}",
            "should be": f"{found['exact']:.9g}",
            "allowed": f"{found['allowed']:.2e}" if found["allowed"] else "0",
            "wrong": f"{found['wrong']} of {found['compared']} elements",
        }
    )


def bounds(asked: dict[str, Any], outputs: list[Any]) -> tuple[list[str], bool]:
    """Compare every run with the exact result; return lines, and whether any is out of bounds."""
    lines, failed = [], False
    for number, (run, output) in enumerate(zip(asked["runs"], outputs, strict=True), start=1):
        for name, got in zip(("out", "lse"), output, strict=True):
            parts = (run[name][part] for part in ("exact", "allowed"))
            exact, allowed = (tensor(asked["memory"], part, "cpu") for part in parts)
            if got is None or exact.numel() == 0:
                continue
            worst = compared(got, exact, allowed)
            failed = failed or worst["wrong"] > 0
            which = f" of run {number} of {len(outputs)}" if len(outputs) > 1 else ""
            lines += described(name, worst, which)
    return lines, failed


def relation(must: dict[str, Any], outputs: Any) -> tuple[list[str], bool]:
    """Check the element that a relation is about; return lines, and whether it is broken."""
    got, place = outputs[("out", "lse").index(must["tensor"])], must["place"]
    value = math.nan if got is None else float(got.double()[place])
    broken = got is None or not agrees(value, must)
    exactly = "" if must["allowed"] else " (bit for bit)"
    facts = {
        "relation": f"{'broken' if broken else 'holds'} at {must['tensor']}{list(place)}",
        "got": "nothing" if got is None else f"{value:.9g}",
        "should be": f"{must['value']:.9g}, which is what the other runs made of it",
        "allowed": (f"{must['allowed']:.2e}" if must["allowed"] else "0") + exactly,
    }
    return listed(facts), broken


def agrees(value: float, must: dict[str, Any]) -> bool:
    """Return whether an element is right; zeros of either sign are, unless ``signed`` is set."""
    expected = must["value"]
    if value == expected:
        same = math.copysign(1.0, value) == math.copysign(1.0, expected)
        return same or not must["signed"]
    both = math.isnan(value) and math.isnan(expected)
    return both or abs(value - expected) <= must["allowed"]


def listed(facts: dict[str, str]) -> list[str]:
    """Return an indented line for each fact."""
    return [f"  {label:<11}{text}" for label, text in facts.items()]


def main(asked: dict[str, Any], names: dict[str, Any]) -> int:
    """Run the kernel and print its results; return the exit code, 0 if all are within bounds."""
    torch.set_float32_matmul_precision(asked["products"])
    lines = listed(asked["facts"])
    try:
        kernel = asked["kernel"]()
        outputs = [answered(asked, run, kernel, names) for run in asked["runs"]]
    except Exception as error:  # noqa: BLE001  # The kernel may raise anything.
        failed = True
        message = "".join(c if c.isprintable() else " " for c in f"{type(error).__name__}: {error}")
        lines += listed({"raised": " ".join(message.split())})
    else:
        beside, failed = bounds(asked, outputs)
        if asked["must"]:
            facts, broken = relation(asked["must"], outputs[-1])
            beside, failed = facts + beside, failed or broken
        lines += beside
    if asked["note"] and not failed:
        lines += listed({"note": asked["note"]})
    text = "\n".join([f"{'FAIL' if failed else 'PASS'} {asked['title']}", *lines, ""])
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    return 1 if failed else 0
