"""Where a resized axis reads its input, as ONNX Runtime computes it.

Source: the ONNX operators' documentation, Resize, coordinate_transformation_mode and nearest_mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Axis:
    """An axis of `size` elements that becomes `new_size`.

    `scale` is what the model says; it may be other than the sizes' ratio, as those are whole.
    """

    size: int
    new_size: int
    scale: float

    @property
    def is_whole(self) -> bool:
        """Whether the sizes alone tell the scale, up to its rounding in float32."""
        return bool(np.isclose(self.new_size, self.size * self.scale, rtol=1e-6, atol=0))

    def positions(self, transformation: str) -> np.ndarray:
        """Return the place in the input of each output element, in elements, as float32.

        Raises NotImplementedError for a transformation that takes more than the sizes and scale.
        """
        x = np.arange(self.new_size, dtype=np.float32)
        scale, half = np.float32(self.scale), np.float32(0.5)
        match transformation:
            case "half_pixel":
                return (x + half) / scale - half
            case "pytorch_half_pixel":
                return (x + half) / scale - half if self.new_size > 1 else x
            case "half_pixel_symmetric":
                exact_size = scale * np.float32(self.size)
                margin = np.float32(self.size) / 2 * (1 - np.float32(self.new_size) / exact_size)
                return margin + (x + half) / scale - half
            case "asymmetric":
                return x / scale
            case "tf_half_pixel_for_nn":
                return (x + half) / scale
            case "align_corners":
                steps = max(1, self.new_size - 1)
                return x * np.float32(self.size - 1) / np.float32(steps)
        raise NotImplementedError(f"coordinate_transformation_mode={transformation}")

    def nearest(self, transformation: str, rounding: str) -> np.ndarray:
        """Return the index that each output element copies, as int64.

        Raises NotImplementedError for a transformation or a rounding that ONNX does not have.
        """
        at = self.positions(transformation)
        match rounding:
            case "round_prefer_floor":
                at = np.ceil(at - np.float32(0.5))
            case "round_prefer_ceil":
                at = np.floor(at + np.float32(0.5))
            case "floor":
                at = np.floor(at)
            case "ceil":
                at = np.ceil(at)
            case _:
                raise NotImplementedError(f"nearest_mode={rounding}")
        return np.asarray(np.clip(at, 0, self.size - 1), np.int64)

    def linear(self, transformation: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the two indices, as int64, that each output element lies between.

        The third array is the weight of the second, as float32.
        """
        at = np.clip(self.positions(transformation), 0, self.size - 1)
        low = np.floor(at).astype(np.int64)
        return low, np.minimum(low + 1, self.size - 1), (at - low).astype(np.float32)
