"""Winograd's minimal filtering with filters of three taps: F(2, 3) and F(4, 3), in two dimensions.

A tile of m x m outputs takes (m + 2)^2 products of each pair of channels, not 9 m^2: outputs =
A^T [(G filters G^T) * (B^T inputs B)] A. Source: A. Lavin and S. Gray, Fast Algorithms for
Convolutional Neural Networks (arXiv 1509.09308), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

TAPS = 3

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Transforms:
    """The matrices of one size of tiles, each applied to rows and to columns."""

    filters: Matrix  # G, of shape [m + 2, 3]
    inputs: Matrix  # B^T, of shape [m + 2, m + 2]
    outputs: Matrix  # A^T, of shape [m, m + 2]


# By the outputs of a tile in each direction.
TRANSFORMS = MappingProxyType({
    2: Transforms(
        filters=((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
        inputs=((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
        outputs=((1, 1, 1, 0), (0, 1, -1, -1)),
    ),
    4: Transforms(
        filters=(
            (1 / 4, 0, 0),
            (-1 / 6, -1 / 6, -1 / 6),
            (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, -1 / 12, 1 / 6),
            (0, 0, 1),
        ),
        inputs=(
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
        outputs=(
            (1, 1, 1, 1, 1, 0),
            (0, 1, -1, 2, -2, 0),
            (0, 1, 1, 4, 4, 0),
            (0, 1, -1, 8, -8, 1),
        ),
    ),
})  # fmt: skip


def of_both_axes(outputs: int) -> np.ndarray:
    """Return what transforms filters whose taps are one axis: G times itself, by Kronecker.

    outputs: of a tile in each direction, m; the shape is [(m + 2)^2, 9].
    """
    import numpy as np

    matrix = np.array(TRANSFORMS[outputs].filters)
    return np.kron(matrix, matrix)


def transformed(filters: np.ndarray, outputs: int) -> np.ndarray:
    """Return G filters G^T of filters of shape [3, 3, in, out], in their type.

    The result's shape is [(m + 2)^2, in x out].
    """
    found: np.ndarray = of_both_axes(outputs) @ filters.reshape((TAPS**2, -1))
    return found.astype(filters.dtype)


def restored(found: np.ndarray, outputs: int, shape: Sequence[int]) -> np.ndarray:
    """Return the filters of this shape of which `transformed` has made something, but rounding."""
    import numpy as np

    back = np.linalg.pinv(of_both_axes(outputs))
    filters: np.ndarray = back @ found.reshape((len(back[0]), -1))
    return filters.astype(found.dtype).reshape(shape)
