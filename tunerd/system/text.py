"""Values as people read them: units chosen per value, nothing that a terminal would obey."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from tunerd.vocabulary.verdict import Interval

EN_DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
UNKNOWN = EN_DASH

# C0 and C1 controls, and the marks that reorder text: names and messages come from files.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with control characters, direction marks and lone surrogates replaced."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return `text` printable and with every run of white space as one blank."""
    return printable(" ".join(text.split()))


def reason_of(error: BaseException) -> str:
    """Return why something cannot be read or written, without a number or a bare key."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(getattr(error, "strerror", None) or error)


def is_known(value: float | None) -> bool:
    """Say whether `value` is a number that can be shown: neither None nor infinite nor NaN."""
    return value is not None and math.isfinite(value)


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, without an exponent."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, decimals)}f}"


def split_secs(secs: float) -> tuple[str, str]:
    """Return the number and the unit, one of µs, ms and s, that fit a latency."""
    if secs == 0:
        return "0", "s"
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if float(f"{secs * scale:.2e}") < 1000:
            return significant(secs * scale), unit
    return significant(secs), "s"


def secs_text(secs: float | None) -> str:
    """Return a latency such as `12.3 ms`; a dash where it is not known."""
    if secs is None or not is_known(secs):
        return UNKNOWN
    return "\N{NO-BREAK SPACE}".join(split_secs(secs))


def secs_range_text(low: float, high: float) -> str:
    """Return two latencies in one unit, with the digits that tell them apart."""
    number, unit = split_secs(high)
    scale = {"µs": 1e6, "ms": 1e3, "s": 1.0}[unit]
    decimals = len(number.partition(".")[2])
    while decimals < 4 and (high - low) * scale < 2 * 10**-decimals:
        decimals += 1
    shown = EN_DASH.join(f"{value * scale:,.{decimals}f}" for value in (low, high))
    return f"{shown}\N{NO-BREAK SPACE}{unit}"


def duration_text(secs: float | None) -> str:
    """Return how long something took or takes: `43 s`, `2 min 30 s`, `1 h 05 min`."""
    if secs is None or not is_known(secs):
        return UNKNOWN
    whole = max(0, round(secs))
    if whole < 60:
        return f"{whole} s" if whole >= 10 or secs == whole else f"{max(0.0, secs):.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def moment_text(epoch_secs: float) -> str:
    """Return a time of day such as `2026-11-21 13:48 UTC`; a dash for what is none."""
    try:
        return f"{datetime.fromtimestamp(epoch_secs, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def percent_text(fraction: float | None) -> str:
    """Return a fraction of one as a percentage with one decimal; `<0.1%` for a trace."""
    if fraction is None or not is_known(fraction):
        return UNKNOWN
    if 0 < fraction < 0.0005:
        return "<0.1%"
    return f"{100 * fraction:.1f}%"


def ratio_texts(interval: Interval) -> tuple[str, str]:
    """Return a ratio and its interval, both with the decimals that the interval deserves."""
    ratio, low, high = interval.value, interval.low, interval.high
    if not is_known(ratio):
        return UNKNOWN, UNKNOWN
    decimals = 2 if ratio < 10 else 1 if ratio < 100 else 0
    if not (is_known(low) and is_known(high)):
        return f"{ratio:.{decimals}f}", UNKNOWN
    while decimals < 4 and high - low < 2 * 10**-decimals:
        decimals += 1
    return f"{ratio:.{decimals}f}", f"{low:.{decimals}f}{EN_DASH}{high:.{decimals}f}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Return numbers in order and as ranges: `0-15,32`."""
    ordered = sorted(set(numbers))
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)


def count_text(number: int, one: str, many: str = "") -> str:
    """Return `1 trial`, `2,310 trials`; `many` where the plural is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
