"""Sphinx: the manual as a site, with the command line read from click and the API from docstrings."""

project = "attncheck"
author = "The attncheck authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns: list[str] = []
html_theme = "furo"  # dark mode and no scripts from elsewhere
html_title = "attncheck"
myst_heading_anchors = 4
# A snippet's first line says what the tests do with it (`console figures`); a lexer need not know it.
suppress_warnings = ["misc.highlighting_failure"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
