"""Sphinx: the manual as a site; reference pages come from click, docstrings and tables."""

from pathlib import Path

from attncheck.fault_models import FAULT_MODELS
from attncheck.relations import RELATIONS

project = "attncheck"
author = "The attncheck authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
html_theme = "furo"  # dark mode, and nothing is loaded from elsewhere
html_title = "attncheck"
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# The second word of a code block says what the tests do with it; a highlighter need not know it.
suppress_warnings = ["misc.highlighting_failure"]

_REFERENCE = Path(__file__).with_name("reference")


def _write_table(name: str, title: str, text: str, header: tuple[str, str], rows: dict) -> None:
    """Write a page of one table from what the program itself says."""
    lines = [f"# {title}", "", text, "", f"| {header[0]} | {header[1]} |", "|---|---|"]
    lines += [f"| `{key}` | {value} |" for key, value in rows.items()]
    (_REFERENCE / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


_write_table(
    "fault-models.md",
    "Fault models",
    "What a [diagnosis](../explanation/diagnosis.md) may name. Generated from the program.",
    ("model", "the fault"),
    {model.id: model.sentence for model in FAULT_MODELS.values()},
)
_write_table(
    "relations.md",
    "Relations",
    "What must hold between runs of a kernel on related inputs, without an oracle; see"
    " [properties](properties.md#relations). Generated from the program.",
    ("relation", "what must hold"),
    {name: relation.summary for name, relation in RELATIONS.items()},
)
