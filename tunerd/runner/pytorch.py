"""A PyTorch module beside a tuned model, in the process of a slice's runner.

PyTorch is no dependency: it is imported here, when it is asked for, and nowhere else. TVM, which is
there before it, is kept from importing it (`tunerd.system.without_torch`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.runner.base import TorchModule
from tunerd.runner.sampling import calls_per_sample
from tunerd.system.arrays import is_floating
from tunerd.vocabulary import Arrays, Profile
from tunerd.vocabulary.outcome import CHANNELS_LAST, COMPILED, EAGER

# Of an output's largest value: what another order of sums, fp16 and bf16 stay far below, and what
# other weights exceed.
LOOSE = 0.1
WARM_UPS = 5  # calls before one is captured: libraries choose their kernels in them
_HALF = {"fp16": "float16", "bf16": "bfloat16"}
_SPIN_SECS = 0.02  # threads of OpenMP spin for 10 ms behind a call (PyTorch 2, two cores)
_MESSAGE_CHARS = 600


class UnfitError(Exception):
    """A module that cannot be timed, or is another than the model; says what to do."""


# --- one way to run a module -------------------------------------------------------------------


def set_precision(precision: str) -> None:
    """Allow TF32 where it is asked for alone, and have cuDNN measure its algorithms."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def placed(
    module: Any, inputs: Sequence[Any], precision: str, *, device: str, channels_last: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """Return a module in evaluation mode, and its inputs, on a device and in a precision.

    Inputs of floating point get the type of the module's parameters.

    Args:
        precision: "fp32", "tf32", "fp16" or "bf16"; "" leaves the module as it is, and has no TF32.
        channels_last: whether tensors of four dimensions have their channels last.
    """
    import torch

    set_precision(precision)
    module, tensors = module.eval().to(device), [x.to(device) for x in inputs]
    if precision in _HALF:
        dtype = getattr(torch, _HALF[precision])
        module = module.to(dtype)
    else:
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    if channels_last:
        last = torch.channels_last
        module = module.to(memory_format=last)
        tensors = [x.contiguous(memory_format=last) if x.dim() == 4 else x for x in tensors]
    return module, tuple(tensors)


@dataclass(frozen=True)
class Graph:
    """A captured call, which calling it replays on the current stream, and what it lives by."""

    graph: Any
    stream: Any  # on which it was captured
    kept: Any  # whose memory the graph uses

    def __call__(self) -> None:
        self.graph.replay()


def as_graph(call: Callable[..., Any], inputs: Sequence[Any], stream: Any = None) -> Graph:
    """Capture a call as one CUDA graph, on a stream of its own if none is given."""
    import torch

    stream = stream or torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call(*inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            made = call(*inputs)
    return Graph(graph, stream, (call, inputs, made))


def compiled(module: Any, mode: str = "max-autotune-no-cudagraphs") -> Any:
    """Return a module as torch.compile has it, with no CUDA graphs of its own.

    One graph of ours is around it: in its own, each call waits for Python's part of it.
    """
    import torch

    return torch.compile(module, mode=mode)


class TimedCall:
    """A call to sample, as `sampling.Timed` has it: calls in a row, with one wait at the end.

    Args:
        rest_secs: after a sample, until what it began would disturb nothing else.
    """

    def __init__(
        self, call: Callable[[], object], wait: Callable[[], None], *, rest_secs: float = 0.0
    ) -> None:
        self._call, self._wait, self._rest_secs = call, wait, rest_secs
        self.calls = 1

    def secs(self, calls: int) -> float:
        """Return the mean seconds of a call over so many in a row."""
        self._wait()
        started = time.perf_counter()
        for _ in range(calls):
            self._call()
        self._wait()
        return (time.perf_counter() - started) / calls

    def sample(self) -> float:
        secs = self.secs(self.calls)
        if self._rest_secs:
            time.sleep(self._rest_secs)
        return secs


# --- in a runner -------------------------------------------------------------------------------


class PyTorchWays:
    """The ways to run one module that are ready in a runner's process."""

    def __init__(self, device: str, cores: Sequence[int]) -> None:
        self._device, self._cores = device, cores
        self._ready: dict[str, TimedCall] = {}

    def prepare(self, way: str, of: TorchModule) -> str:
        """Make a way ready to be timed, and return how, for people.

        Args:
            way: a key of PYTORCH.

        Raises UnfitError for what the module's author can mend, and what PyTorch raises.
        """
        torch = self._imported()
        module, inputs = placed(
            _made(of.made_by, torch),
            [_tensor(array, torch) for array in of.inputs.values()],
            of.precision,
            device="cuda" if self._device == "cuda" else "cpu",
            channels_last=way != EAGER and bool(ways_for(of.inputs, (CHANNELS_LAST,))),
        )
        said = [f"torch {torch.__version__}"]
        with torch.no_grad():
            if way == COMPILED:
                said.append("max-autotune")
                module, outputs = _compiled(module, inputs, said)
            else:
                outputs = _called(module, inputs, of.inputs)
            apart = difference(outputs, of.outputs)
            rest_secs = _SPIN_SECS if len(self._cores) > 1 else 0.0
            call, wait = self._call(module, inputs, said), self._wait(torch)
            self._ready[way] = TimedCall(call, wait, rest_secs=rest_secs)
        if self._device == "cuda":
            torch.cuda.empty_cache()  # of what autotuning tried; the others need the memory
        said.append(f"outputs off by at most {apart:.2g} of their largest value")
        return ", ".join(said)

    def timed(self, way: str, profile: Profile) -> TimedCall:
        """Return a way that is ready, to be sampled as a profile says."""
        call = self._ready[way]
        call.secs(2)
        call.calls = calls_per_sample(call.secs(3), profile, 10_000)
        return call

    def _imported(self) -> Any:
        try:
            import torch
        except ImportError as error:
            raise UnfitError(
                f"PyTorch does not load in {sys.executable} ({error}); install it beside tunerd: "
                "pip install torch"
            ) from error
        if self._device == "cuda" and not torch.cuda.is_available():
            raise UnfitError(
                f"torch {torch.__version__} finds no GPU here; install a build of PyTorch for the "
                "CUDA version of the driver"
            )
        if self._cores:
            torch.set_num_threads(len(self._cores))
        return torch

    def _call(self, module: Any, inputs: Sequence[Any], said: list[str]) -> Callable[[], object]:
        if self._device == "cuda":
            try:
                graph = as_graph(module, inputs)
            except Exception as error:  # it waits for the GPU, or takes memory in another way
                said.append(f"call by call, as no CUDA graph can be made of it ({_short(error)})")
            else:
                said.append("one CUDA graph")
                return graph

        def call() -> None:
            import torch

            with torch.no_grad():
                module(*inputs)

        return call

    def _wait(self, torch: Any) -> Callable[[], None]:
        if self._device == "cuda":
            wait: Callable[[], None] = torch.cuda.synchronize
            return wait
        return lambda: None


def ways_for(given: Mapping[str, np.ndarray[Any, Any]], ways: Sequence[str]) -> list[str]:
    """Return which ways to run a module differ for inputs of these shapes."""
    has_images = any(array.ndim == 4 for array in given.values())
    return [way for way in ways if way != CHANNELS_LAST or has_images]


def difference(outputs: Sequence[Any], expected: Arrays) -> float:
    """Return how far outputs are from those expected, in their largest value.

    Integers need the shape alone: where floating numbers are close, a first of many may be another.

    Raises UnfitError where they are others.
    """
    must = "the function must return the module that the ONNX file was exported from"
    shapes = [list(output.shape) for output in outputs]
    wanted = [list(array.shape) for array in expected.values()]
    if shapes != wanted:
        raise UnfitError(
            f"the module's outputs have the shapes {shapes}, and the model's {wanted}; {must}, "
            "with outputs in the order of the file"
        )
    worst = 0.0
    for output, (name, array) in zip(outputs, expected.items(), strict=True):
        if not is_floating(array.dtype) or not array.size:
            continue
        found, near = output.detach().cpu().double().numpy(), array.astype(np.float64)
        is_known = np.isfinite(near)
        scale = float(np.abs(near[is_known]).max(initial=0.0)) or 1.0
        apart = float(np.abs(found - near)[is_known].max(initial=0.0)) / scale
        if not apart <= LOOSE:  # nor NaN
            raise UnfitError(
                f"the module's output for '{name}' is off by {apart:.2g} of its largest value from "
                f"the reference's; {must}, with the same weights"
            )
        worst = max(worst, apart)
    return worst


def _tensor(array: np.ndarray[Any, Any], torch: Any) -> Any:
    if array.dtype.name == "bfloat16":  # of which PyTorch reads no arrays
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _made(against: str, torch: Any) -> Any:
    """Call FUNCTION of FILE.py:FUNCTION, in the file's folder, and return its module."""
    path, _, name = against.rpartition(":")
    if not Path(path).is_file():
        raise UnfitError(f"there is no file {path} on this node; put it where all nodes see it")
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location("tunerd_against", path)
    assert spec is not None  # of a name that ends with .py
    assert spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = source
    with _working_in(folder):
        try:
            spec.loader.exec_module(source)
        except Exception as error:
            raise UnfitError(f"{path} does not run: {_short(error)}") from error
        function = getattr(source, name, None)
        if not callable(function):
            raise UnfitError(f"{path} has no function {name}; name one that returns the module")
        try:
            module = function()
        except Exception as error:
            raise UnfitError(f"{name}() of {path} failed: {_short(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise UnfitError(
            f"{name}() of {path} returned {type(module).__name__}; it must return the "
            "torch.nn.Module that the ONNX file was exported from"
        )
    return module


def _called(module: Any, inputs: Sequence[Any], given: Arrays) -> list[Any]:
    try:
        return _tensors(module(*inputs))
    except Exception as error:
        listed = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in given.items())
        raise UnfitError(
            f"the module does not take the model's inputs, in the order of the file ({listed}): "
            f"{_short(error)}; have the function return a module whose forward takes them so"
        ) from error


def _compiled(module: Any, inputs: Sequence[Any], said: list[str]) -> tuple[Any, list[Any]]:
    """Return a compiled module and its outputs; without autotuning where that fails."""
    try:
        made = compiled(module)
        return made, _tensors(made(*inputs))
    except Exception as error:
        said[-1] = f"without max-autotune, which failed ({_short(error)})"
    made = compiled(module, "default")
    return made, _tensors(made(*inputs))


def _tensors(outputs: Any) -> list[Any]:
    """Return the tensors of what a module returned, in their order."""
    if hasattr(outputs, "shape"):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, tuple | list):
        return [tensor for each in outputs for tensor in _tensors(each)]
    return []


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _short(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}…"
