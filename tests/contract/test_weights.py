"""Tensors in one piece of memory, and libraries that models have in common."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np
import pytest

from tests.lib.artifact_fixtures import tiny_artifact
from tests.lib.colocation_plans import inputs
from tunerd.artifacts import loading
from tunerd.artifacts.loading import LoadedModel, load
from tunerd.artifacts.manifest import read_variants
from tunerd.artifacts.weights import in_one_piece, map_weights

pytestmark = pytest.mark.filterwarnings("ignore::tunerd.artifacts.loading.MismatchWarning")


def empty(shape: Any, dtype: str) -> Any:
    import tvm

    return tvm.runtime.empty(shape, dtype, tvm.cpu())


def test_tensors_of_any_type_lie_in_one_piece_one_behind_the_other() -> None:
    import tvm

    tensors = {
        "halves": np.arange(15, dtype="float16").reshape(3, 5),
        "flags": np.array([True, False, True]),
        "number": np.array(7, "int64"),
        "nothing": np.zeros((0, 4), "float32"),
        "brain": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
        "turned": np.arange(6, dtype="float32").reshape(2, 3).T,
        "tvm": tvm.runtime.tensor(np.arange(4, dtype="int32")),
    }
    placed = in_one_piece(tensors, empty)
    begins = [tensor.data_ptr() for tensor in placed.values()]
    gc.collect()  # the views keep their piece
    for name, tensor in placed.items():
        known = tensors[name]
        known = known if isinstance(known, np.ndarray) else known.numpy()
        found = tensor.numpy()
        assert (found.shape, str(tensor.dtype)) == (known.shape, str(known.dtype))
        assert found.tobytes() == np.ascontiguousarray(known).tobytes()
    assert begins == sorted(begins)
    assert all((begin - begins[0]) % 256 == 0 for begin in begins)
    assert begins[-1] - begins[0] <= 256 * len(begins)


def test_a_model_reads_its_weights_in_one_piece(tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "a")
    variants = read_variants(tmp_path / "a")
    placed = in_one_piece(map_weights(tmp_path / "a" / "weights.bin"), empty)
    own = {variants[0]["files"]["weights.bin"]: placed}
    model = LoadedModel(tmp_path / "a", variants, device=None, known={}, own=own)
    usual = load(tmp_path / "a")(inputs())
    for name, array in model(inputs()).items():
        assert np.array_equal(array, usual[name])


def test_models_with_one_library_load_it_once_and_keep_their_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Models of other tests may live on in this process, with the same library.
    monkeypatch.setattr(loading, "_libraries", WeakValueDictionary())
    for seed in (0, 1):
        tiny_artifact(tmp_path / f"a{seed}", seed=seed)
    one, other = (load(tmp_path / f"a{seed}") for seed in (0, 1))
    assert one._library is other._library
    first, second = one(inputs()), other(inputs())
    assert not np.array_equal(first["scores"], second["scores"])
    assert np.array_equal(one(inputs())["scores"], first["scores"])
    key = one.manifest["files"]["model.so"]
    del one, other
    gc.collect()
    assert key not in loading._libraries
    assert np.array_equal(load(tmp_path / "a0")(inputs())["scores"], first["scores"])
