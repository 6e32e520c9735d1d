"""One size of an artifact that has several, as an artifact of its own: FOLDER#batch=4."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunerd.artifacts.manifest import (
    MANIFEST,
    PACKED_VERSION,
    TENANTS_VERSION,
    by_sizes,
    read_all_variants,
    sealed,
)
from tunerd.errors import InputError
from tunerd.records.paths import Paths
from tunerd.system.version import __version__


@contextmanager
def size_of(source: Path) -> Iterator[Path]:
    """Yield a source as it is; of FOLDER#batch=4 a folder with this size alone, as long as needed.

    FOLDER is an artifact of several sizes, or the folder of the run that left it; its files are
    linked, not copied. Sizes of several dimensions have commas between them. Raises InputError for
    a size that the artifact does not have, LoadError where it is none.
    """
    name, mark, asked = str(source).rpartition("#")
    if not mark or source.exists():
        yield source
        return
    folder = Path(name)
    if (Paths(folder).artifact / MANIFEST).is_file():
        folder = Paths(folder).artifact
    sizes = by_sizes(read_all_variants(folder))
    wanted = sorted(word.strip() for word in asked.split(","))
    chosen = [said for said in sizes if sorted(said.split(", ")) == wanted]
    if not chosen:
        has = "; ".join(filter(None, sizes)) or "one size, which is named without '#'"
        raise InputError(f"{folder} has no size '{asked}'; it has {has}")
    variants = [
        {key: value for key, value in variant.items() if key not in ("sizes", "axes")}
        for variant in sizes[chosen[0]]
    ]
    with tempfile.TemporaryDirectory(prefix="tunerd-size-") as scratch:
        own = Path(scratch) / f"{folder.name}#{asked}"
        own.mkdir()
        for file in {n for v in variants for n in (*v["files"], *v["stored_as"].values())}:
            if (at := (folder / file).resolve()).is_file():
                (own / file).symlink_to(at)
        packed = {
            "format_version": TENANTS_VERSION if "tenants" in variants[0] else PACKED_VERSION,
            "created_at": time.time(),
            "versions": {"tunerd": __version__},
            "variants": variants,
        }
        (own / MANIFEST).write_text(json.dumps(sealed(packed)))
        yield own
