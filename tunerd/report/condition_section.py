"""The section of the page about the devices while they measured: clocks, power, temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tunerd.report.disturbance_text import disturbance_sentences
from tunerd.report.plot import MOST_LINES, Line, Point, legend, line_plot
from tunerd.report.run_view import RunView
from tunerd.report.scales import Scale, time_scale
from tunerd.report.view import Grid, Plot, Section, caption
from tunerd.system.text import UNKNOWN, count_text, duration_text, percent_text
from tunerd.telemetry.history import ConditionPoint
from tunerd.vocabulary import Conditions

_TITLE = "Clocks, power and temperature"
_BINS = 120  # of time, in each of which a point stands for all trials that ended in it
_SLOWED = 0.95  # of the highest clock: below that a trial ran markedly slower than others


@dataclass(frozen=True)
class _Quantity:
    name: str
    unit: str
    of: Callable[[Conditions], float | None]
    from_zero: bool

    def text(self, value: float) -> str:
        return f"{value:,.0f}\N{NO-BREAK SPACE}{self.unit}"

    def range_text(self, values: Sequence[float]) -> str:
        low, high = min(values), max(values)
        middle = self.text(median(values))
        return middle if f"{low:.0f}" == f"{high:.0f}" else f"{middle} ({low:,.0f} to {high:,.0f})"


_QUANTITIES = (
    _Quantity("SM clock", "MHz", lambda c: c.sm_clock_mhz, from_zero=False),
    _Quantity("Power", "W", lambda c: c.power_w, from_zero=True),
    _Quantity("Temperature", "°C", lambda c: c.temperature_c, from_zero=False),
)


def condition_section(view: RunView) -> Section:
    """Return what is known of the devices; a sentence where nothing is known."""
    if not view.conditions:
        return Section(_TITLE, lead=_nothing(view))
    devices = _by_device(view)
    time = time_scale(
        min(p.elapsed_secs for p in view.conditions), max(p.elapsed_secs for p in view.conditions)
    )
    about = (
        "While trials were measured, over the time of the run: the line is the median, the band "
        "holds all. A GPU has one clock and one power budget for all its slices."
    )
    if len(devices) > MOST_LINES:
        about += f" Drawn are {MOST_LINES} of {len(devices)} GPUs."
    disturbed = disturbance_sentences(view.disturbed, view.tasks, view.model_disturbed_by)
    return Section(
        _TITLE,
        (
            legend(list(devices)),
            *(_figure(quantity, devices, time) for quantity in _QUANTITIES),
            _table(devices),
            caption(about),
        ),
        " ".join([*disturbed, *_unknown(view), _lead(view.conditions)]),
    )


def _nothing(view: RunView) -> str:
    kind = view.facts.slice_kind
    if not any(s.trials for s in view.slices):
        return "No trial was measured."
    if kind in ("cpu", "simulated"):
        return f"None: slices of kind {kind} record no clocks, power or temperature."
    return "None: the driver told none for any trial of this run."


def _by_device(view: RunView) -> dict[str, list[ConditionPoint]]:
    """Return the points by GPU or, where it is not known whose slice it was, by slice."""
    specs = {s.slice_id: s.spec for s in view.slices}
    found: dict[str, list[ConditionPoint]] = {}
    for point in view.conditions:
        spec = specs.get(point.slice_id)
        name = spec.gpu_uuid if spec is not None and spec.gpu_uuid else point.slice_id
        found.setdefault(name, []).append(point)
    return found


def _figure(
    quantity: _Quantity, devices: dict[str, list[ConditionPoint]], time: Scale
) -> Plot | None:
    lines = [
        Line(name, _binned(quantity, points, time, name if len(devices) > 1 else ""))
        for name, points in devices.items()
    ]
    tops = [p.high for line in lines for p in line.points if p.high is not None]
    bottoms = [p.low for line in lines for p in line.points if p.low is not None]
    if not tops or not bottoms:
        return None
    low, high = min(bottoms), max(tops)
    margin = max(0.15 * (high - low), 0.01 * high, 1.0)
    values = Scale(0.0 if quantity.from_zero else max(0.0, low - margin), high + margin)
    plot = line_plot(
        lines,
        label=f"{quantity.name} from {quantity.text(low)} to {quantity.text(high)}",
        time=time,
        values=values,
        value_text=quantity.text,
        height=110,
    )
    return Plot(plot, quantity.name)


def _binned(
    quantity: _Quantity, points: Sequence[ConditionPoint], time: Scale, name: str
) -> list[Point]:
    bins: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        value = quantity.of(point.conditions)
        if value is not None:
            number = int(time.part(point.elapsed_secs) * _BINS)
            bins.setdefault(number, []).append((point.elapsed_secs, float(value)))
    found = []
    for number in sorted(bins):
        values = [value for _, value in bins[number]]
        at = median(secs for secs, _ in bins[number])
        text = (
            f"{name}: " * bool(name) + f"{quantity.range_text(values)} after {duration_text(at)}, "
            f"{count_text(len(values), 'trial')}"
        )
        found.append(Point(at, median(values), text, min(values), max(values)))
    return found


def _table(devices: dict[str, list[ConditionPoint]]) -> Grid:
    heads = ("Device", "Trials", "Disturbed", *(q.name for q in _QUANTITIES))
    rows = []
    for name, points in devices.items():
        disturbed = sum(p.conditions.is_disturbed for p in points)
        cells = [name, f"{len(points):,}", f"{disturbed:,}"]
        for quantity in _QUANTITIES:
            values = [float(v) for p in points if (v := quantity.of(p.conditions)) is not None]
            cells.append(quantity.range_text(values) if values else UNKNOWN)
        rows.append(cells)
    return Grid(heads, rows, class_="conditions")


def _unknown(view: RunView) -> list[str]:
    unknown = sum(p.conditions.strangers is None for p in view.conditions)
    if not unknown:
        return []
    return [f"Whether others had processes there is unknown of {count_text(unknown, 'trial')}."]


def _lead(points: Sequence[ConditionPoint]) -> str:
    clocks = [c for p in points if (c := p.conditions.sm_clock_mhz) is not None]
    if not clocks:
        return "The SM clock is not known."
    slowed = sum(c < _SLOWED * max(clocks) for c in clocks)
    if not slowed:
        return "No trial ran with its SM clock more than 5% under the highest."
    return (
        f"{count_text(slowed, 'trial')} ({percent_text(slowed / len(clocks))}) ran with the SM "
        "clock more than 5% under the highest: their times are longer than they need be."
    )
