"""Settings as people write them: durations, shares, shapes and lists of numbers.

Each function takes a value that is parsed already as it is, and raises ValueError otherwise.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tunerd.vocabulary import LIBRARIES

MAX_SECS = 366 * 24 * 3600.0
MAX_COUNT = 2**31 - 1  # of trials, and the largest seed and dimension: what 32 bits hold
AUTO = "auto"  # a share or a precision that is chosen
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)?")
_UNIT_SECS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
BATCH = "batch"  # what the leading dimension of all inputs is called, where --batch lists sizes
TENANTS = "tenants"  # what --tenants is called among sizes
MAX_TENANTS = 256  # of one launch
_PERCENT = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%?")
_T = TypeVar("_T")


def parse_duration(text: str) -> float:
    """Return the seconds that `90`, `90s`, `500ms`, `10m` or `1.5h` is; ValueError otherwise."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ValueError(f"'{text}' is not a duration; write for example 90s, 10m or 1.5h")
    secs = float(match[1]) * _UNIT_SECS[match[2]]
    if secs > MAX_SECS:
        raise ValueError(f"'{text}' is longer than a year; write for example 90s, 10m or 1.5h")
    return secs


def duration(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


def budget(value: Any) -> Any:
    """Read the time for a search, which is more than none."""
    secs = duration(value)
    if isinstance(value, str) and secs <= 0:
        raise ValueError(f"{value} leaves no time; give more than 0s")
    return secs


def against(value: Any) -> Any:
    """Read FILE.py:FUNCTION, where a PyTorch module is made, and return it with a whole path."""
    if not isinstance(value, str):
        return value
    path, _, function = value.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise ValueError(
            f"'{value}' names no function; give FILE.py:FUNCTION, where FUNCTION() returns the "
            "torch.nn.Module that the ONNX file was exported from"
        )
    return f"{os.path.abspath(path)}:{function}"


def against_limit(value: Any) -> Any:
    """Read how long one way to run PyTorch may take to be ready."""
    secs = duration(value)
    if isinstance(secs, int | float) and not 1 <= secs <= 3000:
        raise ValueError(f"{value} of a limit must be 1s to 50m")
    return secs


def visit(value: Any) -> Any:
    """Read how long one share of a profile is measured at a time."""
    secs = duration(value)
    if isinstance(value, str) and not 0.05 <= secs <= 600:
        raise ValueError(f"{value} of a visit must be 0.05s to 10m")
    return secs


def share(value: Any) -> Any:
    """Read a share in percent, or `auto`."""
    if not isinstance(value, str) or value == AUTO:
        return value
    if not (value.isascii() and value.isdecimal() and len(value) <= 9 and 1 <= int(value) <= 100):
        raise ValueError(f"'{value}' is neither a whole number from 1 to 100 nor {AUTO}")
    return int(value)


def fraction(*, least: str) -> Callable[[Any], Any]:
    """Return what reads `5%`; `least` is `above 0` or `of 0 or more`."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = _PERCENT.fullmatch(value.strip())
        if not match or (least == "above 0" and not float(match[1])):
            raise ValueError(f"'{value}' is no percentage {least}; write for example 5%")
        return float(match[1]) / 100

    return read


def numbers(*, most: int, example: str) -> Callable[[Any], Any]:
    """Return what reads `10,25,40`: distinct whole numbers from 1 on, in order."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        words = [word.strip().removesuffix("%") for word in value.split(",")]
        found = {int(word) for word in words if _NUMBER.fullmatch(word)}
        if not all(map(_NUMBER.fullmatch, words)) or not all(1 <= n <= most for n in found):
            limit = most if most < MAX_COUNT else "more"
            raise ValueError(
                f"'{value}' is no list of whole numbers from 1 to {limit}; write for example "
                f"{example}"
            )
        return tuple(sorted(found))

    return read


def libraries(value: Any) -> Any:
    """Read `cublaslt,cudnn`: distinct names of libraries, in the order in which tunerd has them."""
    if not isinstance(value, str):
        return value
    names = {name.strip() for name in value.split(",")}
    if unknown := sorted(names - set(LIBRARIES)):
        raise ValueError(f"'{unknown[0]}' is no library; give some of {', '.join(LIBRARIES)}")
    return tuple(name for name in LIBRARIES if name in names)


def shapes(value: Any) -> Any:
    """Read what --shape says, by the inputs' names."""
    return value if isinstance(value, Mapping) else _once([_shape(text) for text in value])


def dims(value: Any) -> Any:
    """Read what --dim says, by the dimensions' names."""
    return value if isinstance(value, Mapping) else _once([_dim(text) for text in value])


def batch(value: Any) -> Any:
    """Read what --batch says, of one size."""
    return _batches(str(value))[0] if isinstance(value, str | int) else value


def listed_batches(value: Any) -> tuple[int, ...]:
    """Return the batch sizes that a value of --batch lists; none where it names one.

    Raises ValueError for what is no list of sizes.
    """
    if isinstance(value, str):
        return _batches(value) if "," in value else ()
    return tuple(value) if isinstance(value, Sequence) else ()


def _batches(text: str) -> tuple[int, ...]:
    sizes = [_size(word) for word in text.split(",")]
    found = tuple(size for size in sizes if size is not None)
    if len(found) != len(sizes):
        raise ValueError(
            f"'{text}' is no batch size of 1 or more, up to {MAX_COUNT}, and no list of such; "
            "write for example --batch 1,4,8"
        )
    return found


def tenants(value: Any) -> Any:
    """Read how many models one launch serves, one number or several, fewest first."""
    if isinstance(value, str):
        return numbers(most=MAX_TENANTS, example="--tenants 8 or --tenants 1,2,4,8")(value)
    return (value,) if isinstance(value, int) else tuple(sorted(set(value)))


def listed_sizes(value: Any) -> tuple[dict[str, int], ...]:
    """Return the sizes that a value of --dim lists, one after another; none where it lists none.

    Lists of several dimensions are read side by side: the first of each belong together, and a
    dimension of one size has it in all. Raises ValueError where lists are of other lengths.
    """
    if not isinstance(value, Mapping):
        texts = [str(text) for text in value]
        if not any("," in text for text in texts):
            return ()
        value = _once([_dims(text) for text in texts])
    lists = {
        str(name): tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
        for name, sizes in value.items()
    }
    if all(isinstance(sizes, int) for sizes in value.values()):
        return ()
    lengths = {len(sizes) for sizes in lists.values()} - {1}
    if len(lengths) > 1:
        said = " and ".join(f"{len(sizes)} of '{name}'" for name, sizes in lists.items())
        raise ValueError(
            f"--dim lists {said}: sizes belong together side by side, so list as many of each, for "
            "example --dim batch=1,8 --dim length=128,32"
        )
    count = max(lengths, default=1)
    columns = {name: sizes * count if len(sizes) == 1 else sizes for name, sizes in lists.items()}
    chosen = tuple({name: each[n] for name, each in columns.items()} for n in range(count))
    for sizes in chosen:
        if not all(type(s) is int and 1 <= s <= MAX_COUNT for s in sizes.values()):
            raise ValueError(f"--dim has sizes of 1 or more, up to {MAX_COUNT}, and not {sizes}")
        if chosen.count(sizes) > 1:
            raise ValueError(f"--dim lists {sizes_text(sizes)} twice; list it once")
    return chosen


def sizes_label(sizes: Mapping[str, int]) -> str:
    """Return the name of a folder or a file for sizes: batch4-length128."""
    return "-".join(re.sub(r"[^\w.]+", "_", f"{name}{size}") for name, size in sizes.items())


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as people say them: "batch=4, length=128"."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def values(flag: str) -> Callable[[Any], Any]:
    """Return what reads NAME=NUMBER of a flag, by the inputs' names."""

    def read(value: Any) -> Any:
        if isinstance(value, Mapping):
            return value
        return _once([_value(text, flag) for text in value], "numbers")

    return read


def _value(text: str, flag: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        found = float(number)
    except ValueError:
        found = math.nan
    if not name or not math.isfinite(found):
        raise ValueError(
            f"'{text}' is not NAME=NUMBER; write for example {flag} sampling_rate=16000"
        )
    return name, found


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition(":")
    found = tuple(size for each in sizes.split(",") if (size := _size(each)) is not None)
    if not name or len(found) != len(sizes.split(",")):
        raise ValueError(
            f"'{text}' is not NAME:SIZES with sizes of 1 or more, up to {MAX_COUNT}; write for "
            "example --shape images:1,3,224,224"
        )
    return name, found


def _dim(text: str) -> tuple[str, int]:
    name, _, text_of_size = text.rpartition("=")
    size = _size(text_of_size)
    if not name or size is None:
        raise ValueError(
            f"'{text}' is not NAME=SIZE with a size of 1 or more, up to {MAX_COUNT}; write for "
            "example --dim batch=1"
        )
    return name, size


def _dims(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition("=")
    return name, tuple(_dim(f"{name}={size}")[1] for size in sizes.split(","))


def _size(text: str) -> int | None:
    """Return a dimension's size, None where the text is not one."""
    found = int(text) if _NUMBER.fullmatch(text := text.strip()) else 0
    return found if 1 <= found <= MAX_COUNT else None


def _once(given: Sequence[tuple[str, _T]], what: str = "sizes") -> dict[str, _T]:
    values: dict[str, _T] = {}
    for name, value in given:
        if values.setdefault(name, value) != value:
            raise ValueError(f"is given twice for '{name}', with other {what}; give it once")
    return values


def sized_name(
    name: str, *, batch: Any = None, shapes: Any = None, dims: Any = None, tenants: Any = ()
) -> str:
    """Return a model's name for a folder, with the sizes that are given to it: `model-b4`."""
    said = []
    if batch is not None:
        said = [f"b{batch.replace(',', 'x') if isinstance(batch, str) else _joined(batch)}"]
    for sizes in (shapes or (), dims or ()):
        if isinstance(sizes, Mapping):
            sizes = [f"{of}{_joined(size)}" for of, size in sizes.items()]
        said += [re.sub("[:=]", "", str(text).replace(",", "x")) for text in sizes]
    said += [f"{TENANTS}{_joined(tenants)}"] if tenants else []
    return "-".join((name, *(re.sub(r"[^\w.]+", "_", text) for text in said)))


def _joined(size: int | Sequence[int]) -> str:
    return str(size) if isinstance(size, int) else "x".join(map(str, size))
