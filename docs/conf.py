"""Configuration of the documentation site (`make docs`).

The build needs no network: `intersphinx` is off, because its inventories are downloads. References to Celery, kombu,
redis-py and Python are therefore listed in `nitpick_ignore_regex`; every other reference has to resolve.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parent.parent
# autodoc imports the package from this tree; nothing is installed.
sys.path.insert(0, str(ROOT))

project = "celery-dlock"
author = "celery-dlock contributors"
project_copyright = author
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]

# References that leave the site.
nitpicky = True
nitpick_ignore_regex = [
    # Internals that a public docstring names.
    (r"py:.*", r"celery_dlock\.(control\.reading|worker\.request)\..*"),
    (r"py:obj", r"celery_dlock\.store\.operator_model\.T"),
    (r"py:exc", r"InvalidTaskError"),
    (r"py:.*", r"(celery|kombu|redis|billiard|amqp|vine)\..*"),
    (r"py:.*", r"(collections|concurrent|contextlib|datetime|logging|threading|types|typing|typing_extensions)\..*"),
    (r"py:class", r"(bool|bytes|dict|float|frozenset|int|list|object|optional|set|str|tuple|type|timedelta)"),
    (r"py:exc", r"(BaseException|Exception|ImportError|RuntimeError|TimeoutError|TypeError|ValueError)"),
]

# Markdown as GitHub renders it, plus definition lists and directives between ::: fences.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
autodoc_class_signature = "separated"
autodoc_typehints = "none"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "celery-dlock"
html_static_path: list[str] = []
html_show_sphinx = False
