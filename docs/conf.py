"""The documentation site: Sphinx with MyST and the PyData theme. CONTRIBUTING says why, and how to build it.

The examples run when the site is built (`example_pages.py`). The blocks of all other pages are executed by
`tests/test_docs.py`, which compares what they print.
"""

import os
import pathlib
import sys

from docutils import nodes

import partgrad

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import example_pages
from packages import drawn

project = "partgrad"
author = "The partgrad authors"
copyright = "The partgrad authors, Apache-2.0"
release = partgrad.__version__
version = ".".join(release.split(".")[:2])

extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"),
    *("sphinx_copybutton", "sphinx_design", "sphinx_gallery.gen_gallery"),
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
nitpicky = True
# The parts of a finding, which its entry describes.
nitpick_ignore = [("py:class", f"partgrad._check.finding.{name}") for name in ("Rule", "Figures", "Fix")]
nitpick_ignore += [("py:class", "collections.abc.Mapping")]
default_role = "code"
highlight_language = "default"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 80
add_module_names = False

sphinx_gallery_conf = example_pages.SETTINGS

html_theme = "pydata_sphinx_theme"
html_title = f"partgrad {version}"
html_static_path = ["_static"]
html_css_files = ["partgrad.css"]
html_show_sourcelink = False
html_sidebars = {page: [] for page in ("start", "sharp_bits")}  # they have no pages beside them
html_theme_options = {
    "logo": {"text": "partgrad"},
    "navbar_end": ["version-switcher", "theme-switcher"],
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "show_nav_level": 1,
    # The picture of the packages needs the room.
    "secondary_sidebar_items": {"**": ["page-toc"], "develop/architecture": []},
    "footer_start": ["copyright"],
    "footer_end": [],
    # Each version stands in a folder of its own, with one switcher.json beside them all.
    "switcher": {
        "json_url": os.environ.get("DOCS_SWITCHER", "_static/switcher.json"),
        "version_match": version,
    },
    "check_switcher": False,
}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div.highlight-python pre, div.highlight-sh pre"


def setup(app):
    """Draw mermaid graphs, for which Sphinx would need a script in the browser."""

    def draw(app, doctree):
        for block in list(doctree.findall(nodes.literal_block)):
            if block.get("language") == "mermaid":
                block.replace_self(nodes.raw("", drawn(block.astext()), format="html"))

    app.connect("doctree-read", draw)
