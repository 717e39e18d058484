"""Documents as a self-contained page of HTML, which works offline and requests nothing."""

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
    """Return ``document`` as a page whose content policy allows only its own style and script."""
    css, script = (
        Markup((_TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704  # our own
        for name in ("page.css", "page.js")
    )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_one_line,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Tests the name of a block's class, since a template has no isinstance.
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


def _one_line(value: Any) -> Any:
    """Return text of an expression as one line; markup is our own and stays as it is."""
    return shortened(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _script(text: str) -> Markup:
    """Return the lines of ``text`` without characters that are not printable."""
    return escape("".join(c for c in text if c in "\n\t" or c.isprintable()))


def _policy(css: str, script: str) -> Markup:
    """Return a policy that loads nothing and allows only this page's style and script."""
    style, code = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (css, script)
    )
    # Hashes instead of unsafe-inline, so that a script in a report's text could never run.
    return Markup(  # noqa: S704  # base64
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{code}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
