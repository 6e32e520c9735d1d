"""Run ONNX models in ONNX Runtime: the reference that everything else must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.unsigned import with_unsigned_weights
from tunerd.frontend.onnx.weights import (
    MESSAGE_BYTES,
    NO_FOLDER,
    tensors_apart,
    values_of,
    whole,
    whole_bytes,
)
from tunerd.vocabulary import Arrays

if TYPE_CHECKING:
    import onnx


class Reference:
    """A session of ONNX Runtime on this machine's CPU."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        *,
        threads: int = 0,
        optimize: bool = False,
        exact: bool = True,
    ) -> None:
        """Load `proto`. Without `optimize` the graph runs as written, which loads faster.

        exact: products of eight bits are added whole on any CPU, as ONNX has it; ONNX Runtime is
            faster, and wrong, without where a CPU lacks VNNI.
        """
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # what goes wrong is raised; the log would repeat it
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = (
            level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        )
        if exact:
            proto = with_unsigned_weights(proto)
        is_read = optimize  # what optimizes reads all weights
        if is_read and whole_bytes(proto) <= MESSAGE_BYTES:
            proto, is_read = whole(proto), False
        self._weights = {
            tensor.name: ort.OrtValue.ortvalue_from_numpy(values_of(tensor))
            for tensor in tensors_apart(proto)
        }
        if is_read:
            options.add_external_initializers(list(self._weights), list(self._weights.values()))
        elif self._weights:
            entry = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(entry, NO_FOLDER)
            options.add_session_config_entry("session.disable_prepacking", "1")  # which copies
            for name, value in self._weights.items():
                options.add_initializer(name, value)
        self._session = ort.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.output_names = tuple(o.name for o in self._session.get_outputs())

    def run(self, inputs: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
        """Return the outputs by name."""
        names = list(outputs or self.output_names)
        return dict(zip(names, self._session.run(names, inputs), strict=True))


def agree(got: np.ndarray, expected: np.ndarray, *, rtol: float = 1e-3, slack: float = 0.0) -> bool:
    """Say whether two arrays are the same up to `rtol` of the expected array's largest value.

    `slack` is allowed besides, in the array's own unit.

    Integers and booleans must be equal; NaN and infinity must be at the same places.
    """
    if got.shape != expected.shape:
        return False
    if not np.issubdtype(expected.dtype, np.floating):
        return bool(np.array_equal(got, expected))
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return False
    if not finite.any():
        return True
    scale = float(np.abs(expected[finite]).max()) or 1.0
    return bool(
        np.all(np.abs(got[finite].astype(np.float64) - expected[finite]) <= rtol * scale + slack)
    )


def last_line(error: Exception) -> str:
    """Return the last line of an error's message: libraries put stack traces before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
