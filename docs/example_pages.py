"""How the site runs the examples: each as a script, in a state of its own; the picture that it saves is shown."""

import os
import pathlib
import shutil
import sys

import jax

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
# What shortens a run.
SHORTER = {"frozen_digits": ["--seeds", "4"], "adapters": ["--steps", "60"]}


def arguments(_, script_vars):
    """The arguments with which a script runs here."""
    return SHORTER.get(pathlib.Path(script_vars["src_file"]).stem, [])


def saved_picture(_, block_vars, gallery_conf):
    """Move the picture that a block saved to where the page looks for it, and refer to it."""
    from sphinx_gallery.scrapers import figure_rst

    found = []
    for picture in sorted(pathlib.Path(block_vars["src_file"]).parent.glob("*.png")):
        target = next(block_vars["image_path_iterator"])
        shutil.move(picture, target)
        found.append(target)
    return figure_rst(found, gallery_conf["src_dir"])


def reset(_, name):
    """Give a script the settings of a new process."""
    jax.config.update("jax_enable_x64", False)
    jax.clear_caches()


# Eight devices for the example that spreads a model; it has to be said before JAX counts them.
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, str(EXAMPLES))
os.environ.setdefault("MPLBACKEND", "Agg")

# Functions by name, so that Sphinx can keep its configuration.
SETTINGS = {
    "examples_dirs": str(EXAMPLES),
    "gallery_dirs": "examples",
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"(kernels|multihost_fit)\.py$",
    "image_scrapers": ("example_pages.saved_picture",),
    "reset_argv": "example_pages.arguments",
    "reset_modules": ("example_pages.reset",),
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 1_000_000,
    "nested_sections": False,
    "within_subsection_order": "FileNameSortKey",
}
