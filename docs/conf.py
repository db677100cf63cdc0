"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import tfdist  # noqa: E402
from tfdist.compat import import_tensorflow  # noqa: E402

import_tensorflow()  # Without its greeting.

project = "tfdist"
author = "the founders of tfdist"
version = release = tfdist.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "generated",
]
html_theme = "furo"
html_title = "tfdist"
html_static_path = ["static"]
html_css_files = ["tfdist.css"]
copybutton_selector = "div:not(.output) > div.highlight > pre"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
