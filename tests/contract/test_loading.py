"""Loading artifacts and running them, with as little as serving needs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import tunerd
from tests.lib.artifact_fixtures import CORES, LLVM, model_of, tiny_artifact, tiny_convnet
from tests.lib.fresh_python import run_python
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.loading import LoadedModel
from tunerd.artifacts.manifest import LIBRARY, MANIFEST, WEIGHTS, read_manifest, sealed
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax.lowering import lower
from tunerd.system.arrays import verification_inputs
from tunerd.vocabulary import Arrays, Model

pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "artifact"
    tiny_artifact(folder)
    return folder


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_convnet()


@pytest.fixture(scope="module")
def loaded(artifact: Path) -> LoadedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tunerd.load(artifact)


@pytest.fixture(scope="module")
def inputs(model: Model) -> Arrays:
    return verification_inputs(model.inputs, 1)


@pytest.fixture(scope="module")
def expected(model: Model, inputs: Arrays) -> Arrays:
    return Reference(model.graph.proto).run(inputs)


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def edit_manifest(folder: Path, edit: Edit) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    edit(manifest)
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Copy to where DLPack may use it as it is: at a multiple of 64 bytes."""
    buffer = np.empty(array.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copied = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


class Foreign:
    """A tensor of another library: it has DLPack, a shape and a dtype, and is no NumPy array."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, f"torch.{array.dtype}"

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def close(outputs: Arrays, expected: Arrays) -> bool:
    return outputs.keys() == expected.keys() and all(
        np.allclose(outputs[name], expected[name], rtol=1e-4, atol=1e-4) for name in expected
    )


# --- what loading needs and refuses ------------------------------------------------------------


def test_loading_needs_tvm_ffi_and_numpy_alone(artifact: Path, expected: Arrays) -> None:
    done = run_python(f"""
import sys, sysconfig
from importlib.machinery import PathFinder

ALLOWED = {{"tunerd", "tvm", "tvm_ffi", "numpy", "ml_dtypes", "typing_extensions"}}
site = sysconfig.get_paths()["purelib"]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path)
        if spec and spec.origin and spec.origin.startswith(site):
            if name.partition(".")[0] not in ALLOWED:
                raise ModuleNotFoundError(f"refused: {{name}}", name=name)

sys.meta_path.insert(0, Refuse())
import numpy as np
import tunerd
model = tunerd.load({str(artifact)!r})
outputs = model(*(np.ones(spec.shape, spec.dtype) for spec in model.inputs))
assert outputs["scores"].shape == (2, 10)
print(sorted(m for m in sys.modules if m in ("ray", "pandas", "onnx", "onnxruntime", "pydantic")))
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_tunerd_imports_nothing_heavy() -> None:
    done = run_python(
        "import sys, tunerd; tunerd.__version__; print(sorted({'numpy', 'tvm'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = tunerd.nothing_of_this_name  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [LIBRARY, WEIGHTS])
def test_one_changed_byte_is_refused(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(tunerd.LoadError, match=rf"{name} was changed: its sha256 is"):
        tunerd.load(copy)


@pytest.mark.parametrize("name", [LIBRARY, WEIGHTS])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(tunerd.LoadError, match=f"{name} cannot be read"):
        tunerd.load(copy)


def test_weights_that_another_has_are_copied_from_it_and_not_read(
    loaded: LoadedModel, copy: Path, inputs: Arrays
) -> None:
    (copy / WEIGHTS).write_bytes(b"not read")
    with pytest.raises(tunerd.LoadError, match="was changed"):
        tunerd.load(copy)
    alike = tunerd.load(copy, beside=[loaded])
    assert alike.weights.keys() == loaded.weights.keys()
    for name, weight in alike.weights.items():
        mine, theirs = weight.numpy(), loaded.weights[name].numpy()
        assert np.array_equal(mine, theirs)
        assert not np.shares_memory(mine, theirs)
    for name, output in alike(inputs).items():
        assert np.array_equal(output, loaded(inputs)[name])


def test_other_weights_are_read(loaded: LoadedModel, copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["files"].update({WEIGHTS: "0" * 64}))
    with pytest.raises(tunerd.LoadError, match=f"{WEIGHTS} was changed"):
        tunerd.load(copy, beside=[loaded])


def test_a_manifest_that_leaves_out_the_library_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["files"].pop(LIBRARY))
    with pytest.raises(tunerd.LoadError, match=f"no sha256 of {LIBRARY}"):
        tunerd.load(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"format_version": 1}'])
def test_a_damaged_manifest_is_refused(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_text(text)
    with pytest.raises(tunerd.LoadError, match="damaged"):
        tunerd.load(copy)


def test_a_changed_bit_of_a_manifest_is_refused_unless_it_says_the_same(copy: Path) -> None:
    path = copy / MANIFEST
    told = path.read_bytes()
    for place in range(len(told)):
        changed = bytearray(told)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with contextlib.suppress(ValueError):
            if json.loads(changed) == json.loads(told):
                continue
        with pytest.raises(tunerd.LoadError, match=r"damaged|has format"):
            read_manifest(copy)


def test_a_manifest_without_a_sha256_of_itself_is_an_older_one(copy: Path) -> None:
    expected = read_manifest(copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["sha256"]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(tunerd.LoadError, match="damaged"):
        read_manifest(copy)
    (copy / MANIFEST).write_text(json.dumps(manifest | {"format_version": 1}))
    assert read_manifest(copy) == expected | {"format_version": 1}


def test_a_newer_format_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest.update(format_version=99))
    with pytest.raises(tunerd.LoadError, match="has format 99"):
        tunerd.load(copy)


def test_a_manifest_without_a_version_says_what_it_lacks(copy: Path) -> None:
    (copy / MANIFEST).write_text("{}")
    with pytest.raises(tunerd.LoadError, match=r"cannot be read \(it has no 'format_version'\)"):
        tunerd.load(copy)


def test_a_folder_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(tunerd.LoadError, match=r"there is no folder .*none; give the artifact"):
        tunerd.load(tmp_path / "none")


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(tunerd.LoadError, match="holds no manifest"):
        tunerd.load(tmp_path)


def test_a_cpu_artifact_takes_no_device(artifact: Path) -> None:
    with pytest.raises(tunerd.LoadError, match="is for CPUs"):
        tunerd.load(artifact, device=0)


def test_a_gpu_artifact_without_that_gpu_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda manifest: manifest["target"].update(kind="cuda"))
    with pytest.raises(tunerd.LoadError, match="no CUDA device 63"):
        tunerd.load(copy, device=63)


def test_a_cpu_artifact_takes_no_stream_and_is_not_captured(
    loaded: LoadedModel, inputs: Arrays
) -> None:
    with pytest.raises(ValueError, match="runs on CPUs: give none"):
        loaded.run_dlpack(inputs, stream=1)
    with pytest.raises(ValueError, match="runs on CPUs"):
        loaded.captured()


# --- running -----------------------------------------------------------------------------------


def test_arrays_go_in_by_position_or_by_name(
    loaded: LoadedModel, inputs: Arrays, expected: Arrays
) -> None:
    assert close(loaded(inputs), expected)
    assert close(loaded(inputs["x"], inputs["offset"]), expected)


def test_the_specs_are_those_of_the_model(loaded: LoadedModel, model: Model) -> None:
    assert loaded.inputs == model.inputs
    assert loaded.outputs == model.outputs
    assert loaded.manifest["model"]["name"] == "tiny"


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[...].copy(),
        lambda a: np.asfortranarray(a),
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
        lambda a: np.frombuffer(b"\0" * 4 + a.tobytes(), "float32")[1:].reshape(a.shape),
        lambda a: Foreign(aligned_copy(a)),
        lambda a: Foreign(np.repeat(a, 2, axis=-1)[..., ::2]),
    ],
    ids=["copy", "fortran", "strided", "read-only", "foreign", "foreign-strided"],
)
def test_any_layout_of_the_input_gives_the_same_outputs(
    loaded: LoadedModel, inputs: Arrays, expected: Arrays, change: Callable[[np.ndarray], Any]
) -> None:
    assert close(loaded({n: change(a) for n, a in inputs.items()}), expected)


def test_tensors_on_the_device_go_in_and_out_without_copies(
    loaded: LoadedModel, inputs: Arrays, expected: Arrays
) -> None:
    arrays = {n: aligned_copy(a) for n, a in inputs.items()}
    placed = loaded._placed(({n: Foreign(a) for n, a in arrays.items()},))
    for tensor, array in zip(placed, arrays.values(), strict=True):
        assert np.from_dlpack(tensor).ctypes.data == array.ctypes.data
    outputs = loaded.run_dlpack({n: Foreign(a) for n, a in arrays.items()})
    views = {n: np.from_dlpack(o) for n, o in outputs.items()}
    assert close(views, expected)
    assert all(np.from_dlpack(o).ctypes.data == views[n].ctypes.data for n, o in outputs.items())


def test_outputs_of_one_call_outlive_the_next(loaded: LoadedModel, inputs: Arrays) -> None:
    first = {n: np.from_dlpack(o) for n, o in loaded.run_dlpack(inputs).items()}
    kept = {n: o.copy() for n, o in first.items()}
    loaded.run_dlpack({n: a + 1 for n, a in inputs.items()})
    assert all(np.array_equal(first[n], kept[n]) for n in kept)


@pytest.fixture(scope="module")
def of_scalars(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """y = x * scale, and its sum; the scale and the sum are scalars."""
    folder = tmp_path_factory.mktemp("run") / "artifact"
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["sum"], keepdims=0),
    ]
    shapes = {"x": (2, 3), "scale": ()}
    model = model_of(nodes, {}, inputs=shapes, outputs={"y": (2, 3), "sum": ()})
    lowered = lower(model, LLVM)
    compile_artifact(lowered, (), {}, LLVM, folder, model=model, pct=50, proofs=(CORES,))
    return tunerd.load(folder)


@pytest.mark.parametrize(
    "scale",
    [
        np.array(2, np.float32),
        aligned_copy(np.array(2, np.float32)),
        np.frombuffer(b"\0" * 4 + np.float32(2).tobytes(), np.float32)[1:].reshape(()),
        Foreign(np.arange(3, dtype=np.float32)[2:].reshape(())),
    ],
    ids=["as it comes", "aligned", "read-only", "foreign, not aligned"],
)
def test_scalars_go_in_and_out_wherever_they_lie(of_scalars: LoadedModel, scale: Any) -> None:
    outputs = of_scalars(np.ones((2, 3), np.float32), scale)
    assert outputs["sum"].shape == ()
    assert outputs["sum"] == 12
    assert np.array_equal(outputs["y"], np.full((2, 3), 2, np.float32))


def test_calls_from_several_threads_take_turns(tmp_path: Path) -> None:
    """In a process of its own: TVM's virtual machine crashes where two calls meet in it."""
    names = ["x", *(f"h{n}" for n in range(20))]  # a call long enough to be met by others
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in pairwise(names)]
    shape = (64, 64)
    model = model_of(nodes, {"w": np.eye(64)}, inputs={"x": shape}, outputs={names[-1]: shape})
    lowered = lower(model, LLVM)
    compile_artifact(lowered, (), {}, LLVM, tmp_path / "a", model=model, pct=50, proofs=(CORES,))
    done = run_python(f"""
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import tunerd
model = tunerd.load({str(tmp_path / "a")!r})

def call(number):
    x = np.full({shape}, number, np.float32)
    for turn in range(100):
        model.timed_calls({{"x": x}}, 2)
        assert np.array_equal(model(x)[{names[-1]!r}], x)
        assert np.array_equal(np.from_dlpack(model.run_dlpack(x)[{names[-1]!r}]), x)

with ThreadPoolExecutor(3) as pool:
    list(pool.map(call, range(3)))
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("setting", ["", "auto", "-1", "0", "1"])
def test_a_number_of_threads_that_is_none_is_not_looked_at(artifact: Path, setting: str) -> None:
    done = run_python(f"import tunerd; tunerd.load({str(artifact)!r})", TVM_NUM_THREADS=setting)
    assert done.returncode == 0, done.stderr


def test_timed_calls_return_seconds(loaded: LoadedModel, inputs: Arrays) -> None:
    assert loaded.timed_calls(inputs, 3) > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "got 0 arrays; the model takes 2"),
        ((np.zeros((2, 3, 8, 8), "float32"),), "got 1 arrays"),
        (({"x": np.zeros((2, 3, 8, 8), "float32")},), r"got inputs named \['x'\]"),
        (([1.0], [2.0]), "'x' is a list"),
    ],
)
def test_arrays_that_are_missing_or_none_are_refused(
    loaded: LoadedModel, given: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        loaded(*given)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((1, 3, 8, 8), "float32"), r"'x' is float32\[1, 3, 8, 8\]; the model takes"),
        (np.zeros((2, 3, 8, 8), "float64"), r"the model takes float32\[2, 3, 8, 8\]"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused(
    loaded: LoadedModel, inputs: Arrays, array: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(array, inputs["offset"])


# --- elsewhere than tuned for ------------------------------------------------------------------


def test_other_cores_than_tuned_for_are_warned_of(tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "a", proof=dataclasses.replace(CORES, sm_count=999))
    with pytest.warns(tunerd.MismatchWarning, match="tuned for 999 cores"):
        tunerd.load(tmp_path / "a")


def test_another_processor_is_warned_of(tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "a", proof=dataclasses.replace(CORES, device="Abacus 1"))
    with pytest.warns(tunerd.MismatchWarning, match="tuned on a Abacus 1"):
        tunerd.load(tmp_path / "a")


def test_the_same_share_is_not_warned_of(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    tiny_artifact(tmp_path / "a", proof=dataclasses.replace(CORES, sm_count=cores))
    with warnings.catch_warnings():
        warnings.simplefilter("error", tunerd.MismatchWarning)
        tunerd.load(tmp_path / "a")


def test_inputs_that_a_script_still_has_at_its_end_are_left_to_the_system() -> None:
    ended = run_python(
        "from tests.lib.fake_gpu import HostMemory\n"
        "from tunerd.artifacts.staging import PinnedArrays\n"
        "from tunerd.vocabulary import TensorSpec\n"
        "import threading  # which has it for longer than the module of the arrays is there\n"
        "threading.kept = PinnedArrays(HostMemory(), [TensorSpec('x', (2, 3), 'float32')])\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
