"""The frame of a page: what a browser may do with it, its style sheet and its script.

A page is one file that loads nothing and talks to nobody. Its policy allows the one style sheet
and the one script of this package, by their hashes, and nothing else: what a name could smuggle in
would not run (https://www.w3.org/TR/CSP3/#framework-directive-source-list).
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path

from tunerd.report.markup import Child, Markup, element, join, script, stylesheet
from tunerd.system.files import write_whole
from tunerd.system.version import __version__


def page(title: str, *children: Child, head: Child = None) -> str:
    """Return a whole page with `children` in its main part, under `head`."""
    css, js = _asset("page.css"), _asset("page.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source(css)}",
            f"script-src {_source(js)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return join(
        (
            Markup("<!doctype html>\n"),
            element(
                "html",
                element(
                    "head",
                    element("meta", charset="utf-8"),
                    element("meta", http_equiv="Content-Security-Policy", content=policy),
                    element("meta", name="viewport", content="width=device-width, initial-scale=1"),
                    element("meta", name="color-scheme", content="light dark"),
                    element("meta", name="referrer", content="no-referrer"),
                    element("title", title),
                    stylesheet(css),
                ),
                element("body", head, element("main", *children), _footer(), script(js)),
                lang="en",
            ),
        )
    )


def write_page(path: Path, html: str) -> None:
    """Write a page in one step: a reader sees the old page or the new one."""
    write_whole(path, html, sync=False, shared=True)


def _asset(name: str) -> str:
    return resources.files("tunerd.report").joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """Return what names a style sheet or script in a policy: the hash of all within its element."""
    digest = hashlib.sha256(f"\n{text}".encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _footer() -> Markup:
    return element(
        "footer",
        element(
            "p",
            "“Faster” is said where the whole 95% interval of the ratio allows it, and “cannot "
            "tell” where the samples do not decide. A task keeps its default schedule unless a "
            "tuned one is faster in that sense. A share caps the SMs or cores; caches, memory "
            "bandwidth and power stay shared.",
        ),
        element("p", f"Written by tunerd {__version__}."),
    )
