"""Elements of HTML and SVG in which plain text cannot become markup.

A `str` is text and is escaped where it is used; only `Markup`, which this module alone makes,
goes into a page as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from tunerd.system.text import printable

_VOID = frozenset({"meta", "col", "br", "wbr"})


class Markup(str):
    """Text that is HTML already, made by `element` and `join`, never from what is outside."""

    __slots__ = ()


Child = str | Markup | None
Attribute = str | int | float | bool | None


def _text(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Markup) else escape(printable(child))


def join(children: Iterable[Child]) -> Markup:
    """Return the children one after another, those that are text escaped."""
    return Markup("".join(_text(child) for child in children))


def element(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """Return one element.

    Attributes that are None or False are left out. A trailing underscore is dropped and others
    become hyphens: `class_="a"`, `data_label="b"`.
    """
    parts = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(name)
        else:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            parts.append(f'{name}="{escape(printable(shown))}"')
    opened = f"<{' '.join(parts)}>"
    if tag in _VOID:
        return Markup(opened)
    return Markup(f"{opened}{join(children)}</{tag}>")


def stylesheet(css: str) -> Markup:
    """Return a style element. `css` is the package's own file, with nothing put into it."""
    return _raw("style", css)


def script(js: str) -> Markup:
    """Return a script element. `js` is the package's own file, with nothing put into it."""
    return _raw("script", js)


def _raw(tag: str, content: str) -> Markup:
    if "</" in content or "<!--" in content:
        raise ValueError(f"a {tag} must not close its own element")
    return Markup(f"<{tag}>\n{content}</{tag}>")
