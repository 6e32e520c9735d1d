"""The settings of one `tunerd tune`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from tunerd.settings import texts
from tunerd.settings.fields import (
    FROZEN,
    RESEARCH,
    Cache,
    Constants,
    Dims,
    Inputs,
    Library,
    Percent,
    Precision,
    Secs,
    Shapes,
    SliceKind,
    Tuners,
    Values,
    slice_option,
)
from tunerd.settings.filled import filled
from tunerd.settings.option import Option
from tunerd.settings.texts import AUTO, MAX_COUNT, MAX_SECS
from tunerd.vocabulary import Share, SliceRequest
from tunerd.vocabulary.outcome import TriedPrecision

if TYPE_CHECKING:
    from tunerd.system.store_address import StoreAddress


class TuneSettings(BaseModel):
    """One `tunerd tune`. Exactly one of gpu_pct and cpu_pct is set.

    What is not given follows from what is: `out` from the model, its sizes and the share, the kind
    of slice from the share. A share of `auto` stands as 100, and in `share_from`; a precision of
    `auto` as none, and in `precision_from`.
    """

    model_config = FROZEN

    model: Annotated[Path, Option("An ONNX file.", is_argument=True)]
    gpu_pct: Annotated[
        Percent | None,
        Option(
            "Tune for this share of a GPU, in percent; auto: choose it by a profile.",
            metavar="N|auto",
            takes=Percent | Literal["auto"],
            parser=texts.share,
        ),
        BeforeValidator(texts.share),
    ] = None
    cpu_pct: Annotated[
        Percent | None,
        Option(
            "Tune for this share of this machine's cores; auto: choose it by a profile.",
            metavar="N|auto",
            takes=Percent | Literal["auto"],
            parser=texts.share,
        ),
        BeforeValidator(texts.share),
    ] = None
    slo_ms: Annotated[
        float | None,
        Option(
            "With auto: the smallest share at which 95 of 100 inferences of the default model take "
            "at most so many milliseconds."
        ),
        Field(ge=0.001, le=MAX_SECS),
    ] = None
    out: Annotated[
        Path,
        Option("Run folder; a run goes on in its own. [default: runs/MODEL-gpu40]", is_filled=True),
    ]
    trials: Annotated[
        int | None,
        Option("Stop after this many trials, earlier ones included."),
        Field(ge=1, le=MAX_COUNT),
    ] = None
    budget_secs: Annotated[
        Secs | None,
        Option("Search for this long: 90s, 10m, 1.5h.", flag="--budget", takes=str),
        BeforeValidator(texts.budget),
    ] = None
    slices: Annotated[
        int | None, Option("Slices per device. [default: as many as fit]"), Field(ge=1)
    ] = None
    shapes: Shapes = Field(default_factory=dict)  # by input name
    dims: Dims = Field(default_factory=dict)  # by dimension name
    batch: Annotated[
        int | None,
        Option("Another batch size; batch sizes 1,4,8 give an artifact of all.", takes=str),
        BeforeValidator(texts.batch),
    ] = None
    tenants: Annotated[
        tuple[Annotated[int, Field(ge=1, le=texts.MAX_TENANTS)], ...],
        Option(
            "Serve so many models of this architecture in one launch, each with weights of its "
            "own; 1,2,4,8 give an artifact for each number. [default: one model]",
            metavar="R",
            takes=str,
        ),
        BeforeValidator(texts.tenants),
    ] = ()
    precision: Annotated[
        Precision | None,
        Option(
            "What kernels compute in; sums are in fp32 in each. auto: on a GPU the first of fp16, "
            "bf16, tf32 and fp32 whose outputs stay within 1% of an output's largest value, on "
            "CPUs fp32. [default: as exported]",
            takes=Literal["fp32", "tf32", "fp16", "bf16", "auto"],
        ),
    ] = None
    io_precision: Annotated[
        Literal["fp32", "fp16"] | None,
        Option(
            "What inputs and outputs of floating point are given and taken in: fp32, fp16. "
            "[default: the file's types]"
        ),
    ] = None
    libraries: Annotated[
        tuple[Library, ...],
        Option(
            "Try kernels of these libraries, too: cublaslt, cudnn. Where they win, serving "
            "needs the library. [default: none]",
            takes=str,
        ),
        BeforeValidator(texts.libraries),
    ] = ()
    inputs: Inputs = None
    values: Values = Field(default_factory=dict)  # by input name
    constants: Constants = Field(default_factory=dict)  # likewise
    against: Annotated[
        str | None,
        Option(
            "Time PyTorch beside the tuned model, too: FUNCTION() of FILE.py returns the module "
            "that the ONNX file was exported from.",
            metavar="FILE.py:FUNCTION",
            is_path=True,
        ),
        BeforeValidator(texts.against),
    ] = None
    against_limit_secs: Annotated[
        float,
        Option(
            "How long each way to run PyTorch may take to be ready; most of it is torch.compile's.",
            flag="--against-limit",
            takes=str,
            default="10m",
        ),
        BeforeValidator(texts.against_limit),
    ] = 600.0
    seed: Annotated[int, Option("Seed of the search."), Field(ge=0, le=MAX_COUNT)] = 0
    slice_kind: Annotated[
        SliceKind,
        slice_option("Kind of slice. [default: mps for GPUs, cpu for cores]", is_filled=True),
    ]
    mps: Annotated[
        Literal["own", "external"],
        Option("Start an MPS daemon of our own, or use the one that is there."),
    ] = "own"
    if_shared: Annotated[
        Literal["narrow", "refuse", "ignore"],
        Option(
            "Where others hold memory of a GPU: have as many slices as they leave room for, do "
            "not use it, or do not look."
        ),
    ] = "narrow"
    serving: Annotated[
        Path | None,
        Option(
            "The plan that serves on this device: have as many slices as slow none of its members "
            "by more than --serving-loss, by the pairs in pairs.jsonl beside it."
        ),
    ] = None
    serving_loss: Annotated[
        float,
        Option(
            "How much slower a member may be beside the slices.",
            metavar="PERCENT",
            takes=str,
            default="10%",
        ),
        BeforeValidator(texts.fraction(least="above 0")),
        Field(gt=0),
    ] = 0.1
    address: Annotated[
        str | None,
        Option(
            "A Ray cluster: HOST:PORT, auto or local. [default: a Ray job's own, else a private "
            "local one]"
        ),
    ] = None  # None: a private local one
    tuners: Tuners = None
    warm_start: Annotated[
        tuple[Path, ...],
        Option("Learn from another run, of any share or model. Repeatable.", is_repeatable=True),
    ] = ()
    store: Annotated[
        str | None,
        Option(
            "A team's store: postgresql+psycopg://user@host/database, sqlite:////a/file.",
            variable="TUNERD_STORE",
        ),
    ] = None  # the password that it came with is below
    no_wait: Annotated[
        bool, Option("Measure finalists at once, also on a device that is not quiet.")
    ] = False
    require_hit: Annotated[bool, Option("Do not tune: build from the store's records.")] = False
    neighbours: Annotated[
        Literal["none", "busy", "as-tuned"],
        Option("What the device's other slices do while finalists are measured.", panel=RESEARCH),
    ] = "none"
    l2: Cache = "model"
    fidelity: Annotated[
        int,
        Option(
            "Measure so many more candidates of each task again, to judge the search's ranking; "
            "each costs its build and 20 to 40 samples of 2 to 5 ms. They never win.",
            panel=RESEARCH,
        ),
        Field(ge=0, le=1000),
    ] = 0
    # Where --dim, --batch or --tenants list several: a run for each.
    sizes: tuple[dict[str, int], ...] = ()
    batches: tuple[int, ...] = ()  # of `sizes`, as "batch", where --batch lists them
    share_from: Literal["flag", "auto"] = "flag"  # auto: until it is chosen the share is 100
    precision_from: Literal["flag", "auto"] = "flag"  # auto: until it is chosen there is none
    precision_tried: tuple[TriedPrecision, ...] = ()  # where it was chosen; the last was taken
    store_password: SecretStr | None = Field(
        default=None, exclude=True, repr=False
    )  # written nowhere

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        return filled(given) if isinstance(given, Mapping) else given

    @field_validator("model", "out")
    @classmethod
    def _is_text(cls, path: Path) -> Path:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ValueError("is no text in UTF-8; rename the file or folder") from None
        return path

    @model_validator(mode="after")
    def _one_share(self) -> Self:
        if (self.gpu_pct is None) == (self.cpu_pct is None):
            raise ValueError("give one share: --gpu-pct for GPUs or --cpu-pct for CPU cores")
        share_of = {"mps": "gpu", "whole": "gpu", "cpu": "cpu"}.get(self.slice_kind)
        if share_of is not None and getattr(self, f"{share_of}_pct") is None:
            raise ValueError(f"--slice {self.slice_kind} takes its share from --{share_of}-pct")
        if self.precision_from == AUTO and self.address is not None:
            raise ValueError(
                "an automatic precision is chosen on this machine, and --address tunes on a "
                "cluster; name one"
            )
        if self.share_from == AUTO:
            self._require_choice()
        elif self.slo_ms is not None:
            raise ValueError(
                "--slo-ms chooses the share; give --gpu-pct auto or --cpu-pct auto with it, or "
                "leave it out"
            )
        if self.mps == "external" and self.slice_kind != "mps":
            raise ValueError(
                f"--mps external is for slices of kind mps, and these are {self.slice_kind}; leave "
                "one of the two out"
            )
        if self.serving is not None and self.address is not None:
            raise ValueError(
                "--serving names what serves on this machine, and --address tunes on a cluster; "
                "leave one of the two out"
            )
        if self.libraries and self.gpu_pct is None:
            raise ValueError("--libraries are for GPUs; give --gpu-pct, or leave them out")
        if self.tenants:
            self._require_one_artifact()
        if self.sizes:
            self._require_one_run_each()
        if self.require_hit and self.store is None:
            raise ValueError("--require-hit builds from a store's records; name it with --store")
        return self

    def _require_one_artifact(self) -> None:
        several = {} if len(self.tenants) == 1 else {"tenants": self.tenants[0]}
        if self.sizes and self.sizes[0] != several:
            raise ValueError(
                "--tenants is of one size, and --dim or --batch lists several; tune each size on "
                "its own"
            )
        if self.against is not None:
            raise ValueError(
                "--against times the module of one model, and --tenants serves several; leave one "
                "of the two out"
            )
        if self.libraries:
            raise ValueError(
                "--libraries take the weights of one model, and --tenants serves several; leave "
                "one of the two out"
            )
        if AUTO in (self.share_from, self.precision_from):
            raise ValueError(
                "an automatic share or precision is chosen for one model, and --tenants serves "
                "several; choose it without, and name it"
            )

    def _require_one_run_each(self) -> None:
        if self.share_from == AUTO:
            raise ValueError(
                "an automatic share is chosen for one size, and --dim or --batch lists several; "
                "run `tunerd profile` with one of them, and give a number"
            )
        if self.precision_from == AUTO:
            raise ValueError(
                "an automatic precision is chosen for one size, and --dim or --batch lists "
                "several; choose it with one of them, and name it"
            )

        if self.inputs is not None and not self.tenants and not self.inputs.is_dir():
            label = texts.sizes_label(self.sizes[0])
            raise ValueError(
                "--inputs is a file of one size, and --dim or --batch lists several; name a folder "
                f"with samples of each, {label}.npz or a folder {label}"
            )

    def _require_choice(self) -> None:
        if self.slice_kind == "whole":
            raise ValueError("--slice whole has one share, so there is none to choose; give 100")
        if self.address is not None:
            raise ValueError(
                "an automatic share is measured on this machine, and --address tunes on a cluster; "
                "run `tunerd profile` on a machine like its nodes, and give a number"
            )

    @property
    def lanes(self) -> int | None:
        """How many models one launch serves; None where the artifact is of one model alone."""
        return self.tenants[0] if self.tenants else None

    @property
    def slo_secs(self) -> float | None:
        return None if self.slo_ms is None else self.slo_ms / 1e3

    @property
    def store_address(self) -> StoreAddress | None:
        from tunerd.system.store_address import StoreAddress

        return None if self.store is None else StoreAddress(self.store, self.store_password)

    @property
    def share(self) -> Share:
        if self.gpu_pct is not None:
            return Share("gpu", self.gpu_pct)
        assert self.cpu_pct is not None
        return Share("cpu", self.cpu_pct)

    @property
    def pct(self) -> int:
        return self.share.pct

    @property
    def slice_request(self) -> SliceRequest:
        return SliceRequest(
            self.slice_kind,
            self.pct,
            per_device=self.slices,
            mps=self.mps,
            if_shared=self.if_shared,
        )
