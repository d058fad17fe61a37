"""Sphinx's settings: ``make docs`` builds these pages and the API reference into build/docs."""

from __future__ import annotations

import os

# The reference documents the same functions on every machine.
os.environ.setdefault("TRITON_INTERPRET", "1")

import trifuse

project = "trifuse"
release = version = trifuse.__version__
html_theme = "furo"

extensions = [
    "myst_parser",  # pages in Markdown
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings with "Args:" and "Returns:"
]
exclude_patterns = ["README.md"]
myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 3
# Links to files of the repository are followed on the pages as the repository shows them.
myst_url_schemes = ("http", "https", "mailto")

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
