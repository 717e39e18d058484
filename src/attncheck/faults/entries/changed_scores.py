"""Edits by which a kernel gets another score mod than it was asked for, on both hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attncheck.faults.fault import Edit

if TYPE_CHECKING:
    from attncheck.faults.fault import HostName

__all__ = ["changed_entry", "changed_score", "changed_slope"]

Edits = dict["HostName", tuple[Edit, ...]]

_ENTRY = '''def _other_score(problem, device):
    """The score mod as this kernel has it."""
    import dataclasses
    from attncheck.mods import entries
    from attncheck.mods.library import SCORES

    if all(part.name != "{name}" for part in problem.score.walk()):
        return problem.score_mod(device)
    other = dataclasses.replace(SCORES["{name}"], {field}=_other)
    table = SCORES | {{"{name}": other}}
    return entries.build(table, problem.score, problem.dimensions, device)


{text}


'''

_IDEAL, _TRACED = "subjects.ideal_attention", "subjects.traced"
_IN_IDEAL, _IN_TRACED = "def _in_nats(problem: Problem)", "def _stays(spec: Spec)"
_OF_TRACED = "asked.problem.score_mod(asked.device)"
_OTHER = "_other_score(asked.problem, asked.device)"


def changed_score(text: str) -> Edits:
    """Both hosts' score mod, its derivatives included, is what ``text`` says.

    Args:
        text: Python of a function ``_other_score(problem, device)``.
    """
    text = text.strip() + "\n\n\n"
    return {
        "ideal": (
            Edit(
                module=_IDEAL,
                old="problem.score_mod(self.device)",
                new="_other_score(problem, self.device)",
            ),
            Edit(module=_IDEAL, old=_IN_IDEAL, new=text + _IN_IDEAL),
        ),
        "triton": (
            Edit(module=_TRACED, old=_IN_TRACED, new=text + _IN_TRACED),
            *(
                Edit(module=_TRACED, old=before + _OF_TRACED, new=before + _OTHER)
                for before in ("mod = ", "derivative(", "captured.reads(")
            ),
        ),
    }


def changed_entry(name: str, text: str, field: Literal["build", "compose"] = "build") -> Edits:
    """The same with one score mod of the library, wherever it is a part.

    Args:
        name: Which.
        text: Python of a function ``_other``: its entry's ``field``, with the same arguments.
        field: What of the entry is another.
    """
    return changed_score(_ENTRY.format(name=name, field=field, text=text.strip()))


def changed_slope(name: str, text: str) -> Edits:
    """The same of the derivative alone: the score mod itself is right."""
    helper = _ENTRY.format(name=name, field="build", text=text.strip())
    gradients, before = "subjects.ideal_gradients", "def _in_tiles("
    return {
        "ideal": (
            Edit(
                module=gradients,
                old="kernel.slope(self.score, x, at)",
                new="kernel.slope(_other_score(self.problem, self.device), x, at)",
            ),
            Edit(
                module=gradients,
                old=before + "x: torch.Tensor",
                new=helper + before + "x: torch.Tensor",
            ),
        ),
        "triton": (
            Edit(module=_TRACED, old=_IN_TRACED, new=helper + _IN_TRACED),
            Edit(module=_TRACED, old="derivative(" + _OF_TRACED, new="derivative(" + _OTHER),
        ),
    }
