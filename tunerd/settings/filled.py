"""What is not given of a tuning, and follows from what is: its sizes, its folder, its password."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunerd.settings import texts
from tunerd.settings.texts import AUTO


def filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that were given, and those that follow from them."""
    values = {name: value for name, value in given.items() if value is not None}
    if "model" in values:
        values.setdefault("out", _default_out(values))
    values |= _with_sizes(values)
    values.setdefault("slice_kind", "mps" if "gpu_pct" in values else "cpu")
    for share in ("gpu_pct", "cpu_pct"):
        if values.get(share) == AUTO:
            values |= {share: 100, "share_from": AUTO}
    if values.get("precision") == AUTO:
        values |= {"precision": None, "precision_from": AUTO}
    return _with_password_apart(values)


def _with_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what sizes that are listed give: of the first run, and of all."""
    tenants = texts.tenants(values.get("tenants", ()))
    if len(tenants) > 1 and not values.get("sizes"):
        return {"sizes": tuple({texts.TENANTS: count} for count in tenants)} | (
            _with_sizes({**values, "tenants": ()})
        )
    dims, batches = values.get("dims", ()), texts.listed_batches(values.get("batch"))
    if len(batches) == 1:
        return {"batch": batches[0]} | _with_sizes({"dims": dims})
    if batches:
        named = (
            dims if isinstance(dims, Mapping) else dict(text.rpartition("=")[::2] for text in dims)
        )
        if texts.BATCH in named:
            raise ValueError(
                f"--batch and --dim {texts.BATCH} both list the batch; leave one of the two out"
            )
        of_batch = f"{texts.BATCH}={','.join(map(str, batches))}"
        is_named = isinstance(dims, Mapping)
        dims = {texts.BATCH: batches, **dims} if is_named else [of_batch, *dims]
    sizes = texts.listed_sizes(dims)
    if not sizes:
        return {}
    found: dict[str, Any] = {"dims": sizes[0]} | ({"sizes": sizes} if len(sizes) > 1 else {})
    if batches:
        first = {name: size for name, size in sizes[0].items() if name != texts.BATCH}
        found |= {"dims": first, "batch": sizes[0][texts.BATCH]}
        found |= {"batches": batches} if len(sizes) > 1 else {}
    return found


def _default_out(values: Mapping[str, Any]) -> Path:
    unit = "gpu" if "gpu_pct" in values else "cpu"
    name = texts.sized_name(
        Path(str(values["model"])).stem,
        batch=values.get("batch"),
        shapes=values.get("shapes"),
        dims=values.get("dims"),
        tenants=texts.tenants(values.get("tenants", ())),
    )
    precision = f"-{values['precision']}" if values.get("precision") else ""
    precision += f"-io-{values['io_precision']}" if values.get("io_precision") else ""
    return Path("runs") / f"{name}{precision}-{unit}{values.get(f'{unit}_pct')}"


def _with_password_apart(values: dict[str, Any]) -> dict[str, Any]:
    given = values.get("store")
    if not isinstance(given, str):
        return values
    from tunerd.system.store_address import StoreAddress

    try:
        address = StoreAddress.parse(given, values.get("store_password"))
    except ValueError as error:
        raise ValueError(f"--store cannot be used: {error}") from None
    return values | {"store": address.shown, "store_password": address.password}
