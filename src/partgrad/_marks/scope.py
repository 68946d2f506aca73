"""How other libraries show models and wrappers: treescope, and wadler_lindig, which prints equinox's modules.

treescope shows them with the symbols and colours of `partgrad.show`. Either is imported only when it asks.
"""

import contextvars
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .._trees import LOOKS, is_differentiable

# Whether a mark above holds what is being rendered.
_is_held: contextvars.ContextVar[bool] = contextvars.ContextVar("_is_held", default=False)
_KINDS = {"NonDiff": "held", "Static": "static"}


def render_fields(
    instance: Any, wrappers: Mapping[str, str], static: Iterable[str], path: "str | None", subtree_renderer: Any
) -> Any:
    """A dataclass as treescope writes one, with its marks, and a symbol for whatever is marked or a leaf.

    The wrappers are the marks of its fields, as written; the static fields are those that its class declares.
    """
    from treescope import rendering_parts as parts

    children = []
    for name in _shown(instance):
        value, wrapper = vars(instance)[name], wrappers.get(name)
        kind = "static" if name in static else _KINDS.get(wrapper or "") or _kind_of(value)
        inner = _rendered(kind, value, None if path is None else f"{path}.{name}", subtree_renderer)
        wrapped = (f"{wrapper}(", inner, ")") if wrapper else (inner,)
        children.append(parts.siblings_with_annotations(*_symbol(kind), f"{name}=", *wrapped))
    start = parts.render_dataclass_constructor(instance)
    return parts.build_foldable_tree_node_from_children(
        prefix=start, children=children, suffix=")", comma_separated=True, path=path
    )


def _shown(instance: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(instance) if field.repr and field.name in vars(instance)]


def document_of(instance: Any, wrappers: Mapping[str, str], **kwargs: Any) -> Any:
    """A dataclass as wadler_lindig writes one, with its marks."""
    from wadler_lindig import TextDoc, bracketed, comma, pdoc

    fields = []
    for name in _shown(instance):
        value, wrapper = pdoc(vars(instance)[name], **kwargs), wrappers.get(name)
        value = TextDoc(f"{wrapper}(") + value + TextDoc(")") if wrapper else value
        fields.append(TextDoc(f"{name}=") + value)
    start = TextDoc(f"{type(instance).__name__}(")
    return bracketed(begin=start, docs=fields, sep=comma, end=TextDoc(")"), indent=kwargs["indent"])


def render_wrapper(self: Any, path: "str | None", subtree_renderer: Any) -> Any:
    """A `NonDiff` or a `Static`."""
    from treescope import rendering_parts as parts

    name = type(self).__name__
    inner = _rendered(_KINDS[name], self.value, None if path is None else f"{path}.value", subtree_renderer)
    return parts.siblings_with_annotations(*_symbol(_KINDS[name]), f"{name}(", inner, ")")


def _kind_of(value: Any) -> "str | None":
    if not is_differentiable(value):
        return None
    return "held" if _is_held.get() else "differentiated"


def _rendered(kind: "str | None", value: Any, path: "str | None", subtree_renderer: Any) -> Any:
    token = _is_held.set(_is_held.get() or kind == "held")
    try:
        return subtree_renderer(value, path=path)
    finally:
        _is_held.reset(token)


def _symbol(kind: "str | None") -> "list[Any]":
    """The symbol of a kind, which is left out of code copied from the drawing."""
    from treescope import rendering_parts as parts

    if kind is None:
        return []
    look = LOOKS[kind]
    coloured = parts.custom_text_color(parts.text(f"{look.symbol} "), look.colour)
    return [parts.roundtrip_condition(not_roundtrip=coloured)]
