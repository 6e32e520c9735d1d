"""Errors for people: each says what was found, what was allowed and what to do.

    TunerdError
    ├── InputError            exit 10   a flag, a model or a recipe that cannot be used
    │   └── ModelError        exit 11   the ONNX file
    ├── FolderError           exit 12   the run folder: not writable, locked, of another model
    │   └── DiskError         exit 17   a disk: full, or it fails
    ├── HostError             exit 13   this machine cannot do what was asked: no GPU, no MPS
    ├── WrongResultError      exit 14   the tuned model disagrees with ONNX Runtime
    ├── InfrastructureError   exit 15   Ray, a slice or the MPS daemon failed and stayed down
    │   ├── StoreError                  so did the store of --store
    │   └── DeviceError       exit 20   every device faulted again and again, and was given up
    ├── StoreMissError        exit 18   --require-hit, and the store lacks tasks of the model
    └── Interrupted           exit 16   stopped on request; the same command goes on, or begins anew

Exit 0-9 is an answer: of a run with a valid artifact 0 faster, 1 no gain, 2 cannot tell; of a gate
0 better or same, 2 cannot tell, 3 slower than is allowed, 4 not comparable.
Errors of trials are values (`vocabulary.Failure`), never exceptions.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    BETTER = 0
    NO_GAIN = 1
    CANNOT_TELL = 2
    REGRESSION = 3
    NOT_COMPARABLE = 4
    BAD_INPUT = 10
    BAD_MODEL = 11
    BAD_FOLDER = 12
    HOST_NOT_CAPABLE = 13
    WRONG_RESULT = 14
    INFRASTRUCTURE = 15
    INTERRUPTED = 16
    DISK_FULL = 17
    STORE_MISS = 18
    NOT_QUIET = 19  # `tunerd preflight`: somebody uses the GPU or the cores; nothing was started
    FAULTY_DEVICE = 20
    BUG = 70  # an exception that none of these names; sysexits.h EX_SOFTWARE


class TunerdError(Exception):
    """Base of the errors that tunerd raises for people."""

    exit_code = ExitCode.BUG


class InputError(TunerdError):
    exit_code = ExitCode.BAD_INPUT


class ModelError(InputError):
    exit_code = ExitCode.BAD_MODEL


class FolderError(TunerdError):
    exit_code = ExitCode.BAD_FOLDER


class DiskError(FolderError):
    exit_code = ExitCode.DISK_FULL


class HostError(TunerdError):
    exit_code = ExitCode.HOST_NOT_CAPABLE


class WrongResultError(TunerdError):
    exit_code = ExitCode.WRONG_RESULT


class InfrastructureError(TunerdError):
    exit_code = ExitCode.INFRASTRUCTURE


class StoreError(InfrastructureError):
    """A team's store cannot be reached or used."""


class DeviceError(InfrastructureError):
    """No device is left on which anything could be measured: on each, everything faulted."""

    exit_code = ExitCode.FAULTY_DEVICE


class StoreMissError(TunerdError):
    exit_code = ExitCode.STORE_MISS


class Interrupted(TunerdError):
    exit_code = ExitCode.INTERRUPTED
