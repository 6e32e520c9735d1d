"""Files of NumPy arrays by name, as numpy.savez writes them."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tunerd.errors import InputError
from tunerd.system.text import reason_of
from tunerd.vocabulary import Arrays


def read_inputs(path: Path, names: Sequence[str]) -> Arrays:
    """Return the arrays of an .npz file of a model's inputs, of any shape and type.

    Args:
        names: of all inputs of the model; the file may leave some out.

    Raises InputError for a file that cannot be read, holds no array, or one of another name.
    """
    known = ", ".join(names)
    try:
        file = np.load(path)
        if isinstance(file, np.ndarray):
            raise ValueError("it holds one array without a name")
        with file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(
            f"{path} cannot be read as inputs ({reason_of(error)}); write it with numpy.savez, "
            f"its arrays named {known}"
        ) from None
    if strange := sorted(arrays.keys() - set(names)):
        raise InputError(f"{path} has an array '{strange[0]}', and the model takes {known}")
    if not arrays:
        raise InputError(f"{path} holds no array; the model takes {known}")
    return arrays
