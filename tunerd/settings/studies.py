"""The settings of what is made of many runs, or looked at before and after them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from tunerd.settings import texts
from tunerd.settings.fields import (
    FROZEN,
    Batch,
    Cache,
    Dims,
    Inputs,
    Precision,
    Secs,
    Shapes,
    SliceKind,
    Tuners,
    Values,
    slice_option,
)
from tunerd.settings.option import Option
from tunerd.settings.texts import MAX_COUNT, MAX_SECS
from tunerd.settings.tune import TuneSettings


class ProfileSettings(BaseModel):
    """One `tunerd profile`."""

    model_config = FROZEN

    model: Annotated[
        Path,
        Option(
            "An ONNX file, which gets its default schedules, or what a run has tuned.",
            metavar="MODEL|RUN|ARTIFACT",
            is_argument=True,
        ),
    ]
    shares: Annotated[
        tuple[int, ...],
        Option(
            "Shares in percent; the whole device always is one.",
            takes=str,
            default="10,20,30,40,50,60,70,80,90,100",
        ),
        BeforeValidator(texts.numbers(most=100, example="--shares 10,25,50,100")),
    ] = tuple(range(10, 101, 10))
    batches: Annotated[
        tuple[int, ...] | None,
        Option("Batch sizes of an ONNX file: 1,8. [default: as exported]", takes=str),
        BeforeValidator(texts.numbers(most=MAX_COUNT, example="--batches 1,8")),
    ] = None
    gpu: Annotated[bool, Option("Shares of a GPU.")] = False
    cpu: Annotated[bool, Option("Shares of this machine's cores.")] = False
    slice_kind: Annotated[
        SliceKind | None,
        slice_option("Kind of slice. [default: mps with a GPU, else cpu]"),
    ] = None
    loss: Annotated[
        float,
        Option(
            "How much slower than the whole device: 10%.",
            metavar="PERCENT",
            takes=str,
            default="10%",
        ),
        BeforeValidator(texts.fraction(least="above 0")),
    ] = 0.1
    slo_ms: Annotated[
        float | None,
        Option("Say which share answers 95 of 100 inferences in so long."),
        Field(ge=0.001, le=MAX_SECS),
    ] = None
    rounds: Annotated[int, Option("How often each share is visited."), Field(ge=1, le=1000)] = 5
    duration_secs: Annotated[
        float,
        Option("Of a visit, at least: 0.5s, 2s.", flag="--duration", takes=str, default="2s"),
        BeforeValidator(texts.visit),
    ] = 2.0
    seed: Annotated[int, Option("Of the order of visits."), Field(ge=0, le=MAX_COUNT)] = 0
    shapes: Shapes = Field(default_factory=dict)
    dims: Dims = Field(default_factory=dict)
    out: Annotated[
        Path | None,
        Option("Folder; a profile goes on in its own. [default: profiles/NAME-gpu]"),
    ] = None

    @model_validator(mode="after")
    def _one_device(self) -> Self:
        if self.gpu and self.cpu:
            raise ValueError("--gpu and --cpu ask for two devices; leave one of them out")
        return self


class MatrixSettings(BaseModel):
    """One `tunerd matrix`."""

    model_config = FROZEN

    model: Annotated[Path, Option("An ONNX file.", is_argument=True)]
    shares: Annotated[
        tuple[int, ...],
        Option("The shares, in percent: 10,25,40,50,75,100.", takes=str),
        BeforeValidator(texts.numbers(most=100, example="--shares 10,25,40,50,75,100")),
    ]
    out: Annotated[
        Path | None,
        Option("A folder for all of it; goes on there. [default: runs/MODEL-matrix]"),
    ] = None
    slice_kind: Annotated[
        SliceKind | None,
        slice_option(
            "Kind of slice: mps for shares of a GPU, cpu for shares of the cores. [default: mps "
            "where it works, else cpu]"
        ),
    ] = None
    trials: Annotated[
        int | None,
        Option(
            "Trials of the first level; a later one has 15% of them, an independent one all. "
            "[default: 1000]"
        ),
        Field(ge=1, le=MAX_COUNT),
    ] = None
    budget_secs: Annotated[
        Secs | None,
        Option("Search time of the first level: 90s, 10m.", flag="--budget", takes=str),
        BeforeValidator(texts.budget),
    ] = None
    rounds: Annotated[
        int, Option("How often every model is run at every share."), Field(ge=1, le=100)
    ] = 8
    shapes: Shapes = Field(default_factory=dict)
    dims: Dims = Field(default_factory=dict)
    batch: Batch = None
    precision: Annotated[
        Precision | None,
        Option("What kernels compute in, as of tunerd tune. [default: as exported]"),
    ] = None
    inputs: Inputs = None
    values: Values = Field(default_factory=dict)
    independent: Annotated[
        bool,
        Option(
            "Tune at each share as if it were the only one, with all trials, and let it keep its "
            "own kernels. Costs a whole search for each."
        ),
    ] = False
    seed: Annotated[
        int, Option("Seed of the searches and of the order."), Field(ge=0, le=MAX_COUNT)
    ] = 0
    tuners: Tuners = None
    l2: Cache = "model"

    @model_validator(mode="after")
    def _several_shares(self) -> Self:
        if len(self.shares) < 2:
            raise ValueError(
                f"--shares '{self.shares[0]}' is one share; a matrix takes two at least"
            )
        return self


class CompareSettings(BaseModel):
    """One `tunerd compare`."""

    model_config = FROZEN

    base: Annotated[
        str,
        Option(
            "A run, an artifact, or a store's run: ADDRESS#model=NAME,share=gpu40,precision=fp16.",
            metavar="BASE",
            is_argument=True,
        ),
    ]
    new: Annotated[str, Option("The one that is judged.", metavar="NEW", is_argument=True)]
    fail_above: Annotated[
        float,
        Option("How much slower NEW may be: 5%.", metavar="PERCENT", takes=str, default="5%"),
        BeforeValidator(texts.fraction(least="of 0 or more")),
    ] = 0.05
    cannot_tell: Annotated[
        Literal["pass", "fail"],
        Option("The exit code where it cannot be told: 2, or 0 with pass."),
    ] = "fail"
    measure: Annotated[bool, Option("Measure both now, in turns; artifacts always are.")] = False
    gpu_pct: Annotated[
        int | None,
        Option("Measure at this share of a GPU. [default: as tuned]"),
        Field(ge=1, le=100),
    ] = None
    cpu_pct: Annotated[
        int | None,
        Option("Measure at this share of the cores. [default: as tuned]"),
        Field(ge=1, le=100),
    ] = None


class BenchSettings(BaseModel):
    """One `tunerd bench`."""

    model_config = FROZEN

    artifact: Annotated[Path, Option("An artifact folder.", is_argument=True)]
    gpu_pct: Annotated[
        int | None, Option("Share of a GPU. [default: as tuned]"), Field(ge=1, le=100)
    ] = None
    cpu_pct: Annotated[
        int | None,
        Option("Share of this machine's cores. [default: as tuned]"),
        Field(ge=1, le=100),
    ] = None
    beside: Annotated[
        str | None,
        Option(
            "What the device's other slices run: copies, memory-hog, or another artifact's "
            "folder. [default: nothing]"
        ),
    ] = None
    replicas: Annotated[
        int | None,
        Option("Slices that run the artifact. [default: 1, or all with copies]"),
        Field(ge=1),
    ] = None
    duration_secs: Annotated[
        float,
        Option(
            "Measure this long, alone and again beside neighbours.",
            flag="--duration",
            takes=str,
            default="10s",
        ),
        BeforeValidator(texts.duration),
    ] = 10.0
    to: Annotated[
        Path | None, Option("Write every inference's start and latency to this file.")
    ] = None


class PreflightSettings(BaseModel):
    """One `tunerd preflight`."""

    model_config = FROZEN

    max_load: Annotated[
        float, Option("Load average of the last minute, per core."), Field(ge=0)
    ] = 0.5
    max_mem_pct: Annotated[float, Option("GPU memory in use, in percent."), Field(ge=0, le=100)] = (
        2.0
    )
    max_busy_pct: Annotated[float, Option("GPU utilisation, in percent."), Field(ge=0, le=100)] = (
        5.0
    )
    mps: Annotated[
        Literal["none", "external"],
        Option("An MPS daemon of somebody is to be used: external."),
    ] = "none"
    cpu_only: Annotated[bool, Option("Look at the cores alone, not at GPUs.")] = False
    wait_secs: Annotated[
        float,
        Option(
            "Look again until it is quiet, for so long: 90s, 10m.",
            flag="--wait",
            takes=str,
        ),
        BeforeValidator(texts.duration),
    ] = 0.0


COMMANDS: dict[str, type[BaseModel]] = {
    "tune": TuneSettings,
    "profile": ProfileSettings,
    "matrix": MatrixSettings,
    "compare": CompareSettings,
    "bench": BenchSettings,
    "preflight": PreflightSettings,
}
