"""What an artifact needs of libraries: said in its manifest, and made ready before it is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tunerd.artifacts.manifest import LoadError, Manifest
from tunerd.libraries import calls as library_calls
from tunerd.libraries import packages
from tunerd.libraries.packages import PACKAGES
from tunerd.vocabulary import LibraryCall


def library_needs(calls: Sequence[LibraryCall]) -> list[dict[str, Any]]:
    """Return what a manifest says of the libraries that an artifact calls, and of its calls."""
    texts: dict[str, list[str]] = {}
    for call in dict.fromkeys(calls):
        texts.setdefault(call.library, []).append(call.text)
    return [
        {
            "name": name,
            "title": PACKAGES[name].title,
            "package": PACKAGES[name].wheel,
            "soname": PACKAGES[name].soname,
            "least": packages.version_text(PACKAGES[name].least),
            "version": _version_here(name),
            "calls": own,
        }
        for name, own in texts.items()
    ]


def provide(manifest: Manifest, device: int) -> None:
    """Have the libraries of an artifact and its calls ready; LoadError says what is missing."""
    needs = manifest.get("libraries", [])
    for need in needs:
        if need["name"] not in PACKAGES:
            raise LoadError(
                f"the artifact calls the library '{need['name'][:40]}', which this tunerd does not "
                "know; use the tunerd that wrote it"
            )
        if lacking := packages.missing(need["name"]):
            raise LoadError(f"the artifact calls a library: {lacking}")
    try:
        library_calls.provide(_calls_of(needs), device)
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        raise LoadError(f"a library that the artifact calls: {error}; tune again here") from error


def mismatches(manifest: Manifest) -> Iterator[str]:
    """Say which libraries have another version than where the artifact was made."""
    for need in manifest.get("libraries", []):
        here = _version_here(need["name"])
        if need["version"] and need["version"] != here:
            yield (
                f"{need['title']} is {here} here and was {need['version']} where the artifact was "
                "made; it may choose other kernels"
            )


def _calls_of(needs: Iterable[dict[str, Any]]) -> Iterator[LibraryCall]:
    return (LibraryCall(need["name"], text) for need in needs for text in need["calls"])


def _version_here(name: str) -> str | None:
    with contextlib.suppress(packages.MissingLibraryError):
        return packages.version_text(packages.version(name))
    return None
