"""The values that cross a boundary between modules, in the order in which a run makes them.

    Model -> Task -> Candidate -> Build -> Measurement | Failure -> Record -> Outcome

Every value is a frozen dataclass with units in its names; `outcome` has the last. A trial is one
candidate of one task on its way through a run:

    proposed ----> running ----> measured
       |  ^           |
       |  |           +--------> failed      (stage, kind)
       |  +-- collateral, interrupted        (back to the queue, without blame)
       +-----------------------> failed      (in the build)

A failure is never a number: a trial ends measured or failed, once.
"""

from __future__ import annotations

from tunerd.vocabulary.json import finite, to_json
from tunerd.vocabulary.measurement import MODEL, SEARCH, Conditions, Measurement, Profile
from tunerd.vocabulary.model import (
    AS_EXPORTED,
    BF16,
    FP16,
    FP32,
    SLOT_BYTES,
    STORED_AS,
    TF32,
    Arrays,
    Behind,
    Graph,
    Layout,
    Model,
    Packed,
    TargetSpec,
    Task,
    TensorSpec,
    Ways,
    architecture,
    in_lanes,
)
from tunerd.vocabulary.search import (
    Proposal,
    Result,
    TrainingRow,
    TransferredResults,
)
from tunerd.vocabulary.slices import (
    CapProof,
    Share,
    SliceRequest,
    SliceSpec,
    unit_name,
)
from tunerd.vocabulary.time_use import Activity, Phase, PhaseTime, Span
from tunerd.vocabulary.trials import (
    CUBLASLT,
    CUDNN,
    DEFAULT_SOURCE,
    FMA,
    LIBRARIES,
    METASCHEDULE,
    TRITON,
    VNNI,
    Build,
    Candidate,
    Failure,
    Kind,
    LibraryCall,
    Record,
    Stage,
    TrialState,
    candidate_id,
    default_candidate,
    origin_of,
    source_of,
)

__all__ = [
    "CUBLASLT",
    "CUDNN",
    "DEFAULT_SOURCE",
    "FMA",
    "LIBRARIES",
    "METASCHEDULE",
    "AS_EXPORTED",
    "STORED_AS",
    "BF16",
    "FP16",
    "FP32",
    "TF32",
    "TRITON",
    "VNNI",
    "MODEL",
    "SEARCH",
    "SLOT_BYTES",
    "Activity",
    "Arrays",
    "Build",
    "Candidate",
    "CapProof",
    "Conditions",
    "Failure",
    "Kind",
    "Layout",
    "LibraryCall",
    "Measurement",
    "Model",
    "Phase",
    "PhaseTime",
    "Profile",
    "Proposal",
    "Record",
    "Result",
    "Share",
    "SliceRequest",
    "SliceSpec",
    "Span",
    "Stage",
    "TargetSpec",
    "Task",
    "Behind",
    "Graph",
    "Packed",
    "TensorSpec",
    "Ways",
    "TrainingRow",
    "TransferredResults",
    "TrialState",
    "architecture",
    "candidate_id",
    "default_candidate",
    "finite",
    "in_lanes",
    "origin_of",
    "source_of",
    "to_json",
    "unit_name",
]
