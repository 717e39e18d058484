"""Documents as one self-contained page of HTML: it works offline, and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from attncheck.core.sanitize_text import shortened
from attncheck.reporting.document import BOTTOM, LEFT, RIGHT, Document, Look

_TEMPLATES = Path(__file__).with_name("templates")
_SIGNS: dict[Look, str] = {"good": "✓", "bad": "✗", "notable": "!", "plain": "–", "dim": "–"}


def html_text(document: Document) -> str:
    """``document`` as a page, with a policy that lets nothing in but its own style and script."""
    css, script = (
        Markup((_TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704  # our own
        for name in ("page.css", "page.js")
    )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # By the name of its class: a template cannot say isinstance.
    environment.filters["script"] = _script
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    look: Look = document.verdict.look if document.verdict else "plain"
    page = environment.get_template("page.html.j2")
    return page.render(
        page=document,
        look=look,
        sign=_SIGNS[look],
        css=css,
        script=script,
        policy=_policy(css, script),
        left=LEFT,
        right=RIGHT,
        bottom=BOTTOM,
    )


def _harmless(value: Any) -> Any:
    """Return an expression's value as text in one line; what is markup already is our own."""
    return shortened(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _script(text: str) -> Markup:
    """Several lines, as they are but for what is not seen."""
    return escape("".join(c for c in text if c in "\n\t" or c.isprintable()))


def _policy(css: str, script: str) -> Markup:
    """Nothing is loaded, and of styles and scripts those of this page alone."""
    style, code = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (css, script)
    )
    # Hashes, and no unsafe-inline: a script in foreign text would not run even unescaped.
    return Markup(  # noqa: S704  # base64
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{code}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
