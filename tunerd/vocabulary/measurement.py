"""How a kernel is measured, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """How to measure. Part of every record, because it changes the numbers.

    weights: "model", "cold" or "warm"; `profiles` says what they mean.
    model_bytes: that an inference of the model touches, about; 0 where nobody knows.
    hopeless_after, hopeless_over: what has so many samples gets no more, where each of them is so
        many times as long as all of its best rival's.
    """

    name: str
    weights: str = "model"
    model_bytes: int = 0
    min_samples: int = 3
    max_samples: int = 5
    min_sample_secs: float = 0.002  # a sample averages as many calls as fill this
    max_total_secs: float = 0.2  # stop sampling when this much time was spent
    cuda_graph: bool = True
    hopeless_after: int = 8
    hopeless_over: float = 2.0


SEARCH = Profile("search-v6", hopeless_after=2)


MODEL = Profile(
    "model-v1", min_samples=20, max_samples=60, min_sample_secs=0.05, max_total_secs=8.0
)


@dataclass(frozen=True)
class Conditions:
    """The device while a trial ran. None: not known here.

    `disturbed_by` says what made the trial slower than it is, "" where nothing was seen: processes
    or memory of others on the device, or clocks that heat or power held down.
    """

    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    neighbours: int | None = None  # other busy slices of the device
    strangers: int | None = None  # processes of others on the device
    disturbed_by: str = ""

    @property
    def is_disturbed(self) -> bool:
        return bool(self.disturbed_by)


@dataclass(frozen=True)
class Measurement:
    """Raw samples: each the mean time of one call, in seconds."""

    run_secs: tuple[float, ...]
    calls_per_sample: int
    profile: str
    slice_id: str
    sm_count: int
    conditions: Conditions = Conditions()

    @property
    def median_secs(self) -> float:
        ordered = sorted(self.run_secs)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return 0.5 * (ordered[middle - 1] + ordered[middle])
