"""The frame of a picture that is a file of its own, for light and dark pages."""

from __future__ import annotations

from tunerd.report.markup import Child, element, stylesheet


def svg_file(title: str, style: str, width: int, height: int, *children: Child) -> str:
    """Return an SVG document with a page behind its title and children.

    `style` has the classes `page` and `title`. Sizes in pixels.
    """
    return element(
        "svg",
        stylesheet(style),
        element("rect", class_="page", width=width, height=height),
        element("text", title, class_="title", x=16, y=24),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        role="img",
        aria_label=title,
    )
