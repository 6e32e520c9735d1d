"""A view as one HTML page, which loads nothing and talks to nobody.

Its policy allows the one style sheet and the one script of this package, by their hashes, and
nothing else: what a name could smuggle in would not run
(https://www.w3.org/TR/CSP3/#framework-directive-source-list).
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tunerd.report.view import View
from tunerd.system.files import write_whole
from tunerd.system.text import printable
from tunerd.system.version import __version__


def page(view: View) -> str:
    """Return the page of a view."""
    css, js = _asset("page.css"), _asset("page.js")
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            view=view,
            css=css,
            js=js,
            policy="; ".join(
                (
                    "default-src 'none'",
                    f"style-src {_source(css)}",
                    f"script-src {_source(js)}",
                    "base-uri 'none'",
                    "form-action 'none'",
                )
            ),
            version=__version__,
        )
    )


def write_page(path: Path, html: str) -> None:
    """Write a page in one step: a reader sees the old page or the new one."""
    write_whole(path, html, sync=False, shared=True)


@functools.cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("tunerd.report"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: Any) -> Any:
    """Return what may be escaped and shown: texts without control characters."""
    if value is None:
        return ""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@functools.cache
def _asset(name: str) -> Markup:
    text = resources.files("tunerd.report").joinpath("templates", name).read_text(encoding="utf-8")
    if "</" in text or "<!--" in text:
        raise ValueError(f"{name} must not close its own element")
    return Markup(f"\n{text}")  # the package's own file, with nothing put into it


def _source(text: str) -> str:
    """Return what names a style sheet or script in a policy: the hash of all within its element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
