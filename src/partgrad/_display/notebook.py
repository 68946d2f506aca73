"""A tree as treescope shows it in a notebook, with the symbol of each leaf's kind."""

import html
import importlib.util
from collections.abc import Mapping
from typing import Any

from jax.tree_util import all_leaves, keystr, tree_flatten_with_path

from .look import LOOKS
from .values import written_integer

# An integer of more bits may have more digits than Python writes; the limit can be set to this and not below.
_BITS = 2048


def is_available() -> bool:
    """Whether treescope is installed."""
    return importlib.util.find_spec("treescope") is not None


def kinds_by_path(tree: Any, kinds: list[str]) -> dict[str, str]:
    """The kind of each leaf, under its path as treescope writes it."""
    paths = [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]
    return dict(zip(paths, kinds, strict=True))


def rendered(tree: Any, kinds: Mapping[str, str], caption: str) -> str:
    """The HTML of a tree; it needs scripts."""
    import treescope
    from treescope import rendering_parts

    def with_symbol(node: Any, path: str | None, node_renderer: Any) -> Any:
        # A mark that is printed around a leaf has the path of the leaf.
        kind = kinds.get(path) if path is not None and all_leaves([node]) else None
        if kind is None:
            return NotImplemented
        look = LOOKS[kind]
        symbol = rendering_parts.custom_text_color(rendering_parts.text(f"{look.symbol} "), look.colour)
        # The symbol is left out of code that is copied from the drawing.
        return rendering_parts.siblings_with_annotations(
            rendering_parts.roundtrip_condition(not_roundtrip=symbol), node_renderer(node, path)
        )

    def long_integer(node: Any, path: str | None, subtree_renderer: Any) -> Any:
        # Python, and so treescope, writes no more than some thousand digits.
        is_long = type(node) is int and node.bit_length() > _BITS
        return rendering_parts.text(written_integer(node)) if is_long else NotImplemented

    renderer = treescope.active_renderer.get().extended_with(handlers=[long_integer], wrapper_hooks=[with_symbol])
    with treescope.active_renderer.set_scoped(renderer):
        drawing = treescope.render_to_html(tree)
    return f'{drawing}\n<p style="white-space:pre-line">{html.escape(caption)}</p>'
