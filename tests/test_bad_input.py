"""What cannot be used is refused in one sentence, with its own exit code, and nothing is written.

The tables say which input, with which code, and what the sentence must name: what was found, what
is allowed or what to do.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from artifact_fixtures import tiny_artifact
from models import conv_net, floats, ints, model
from onnx import TensorProto, helper, numpy_helper
from test_records import FACTS, TASK, candidate, measurement

from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode
from tunerd.loading import LIBRARY, MANIFEST, WEIGHTS
from tunerd.model import read_model
from tunerd.records import RunFacts, schema
from tunerd.records.schema import STORE_NAME, VERSION
from tunerd.run_archive import pack
from tunerd.run_folder import RunFolder
from tunerd.vocabulary import TargetSpec

DATA = Path(__file__).parent / "data"
FLOAT = TensorProto.FLOAT


@dataclass
class Place:
    """Where one bad input is made, and what it is made of."""

    folder: Path
    artifact_of: Callable[[], Path]
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def saved(self, content: onnx.ModelProto | bytes, name: str = "net.onnx") -> str:
        path = self.folder / "models" / name
        path.parent.mkdir(exist_ok=True)
        data = content if isinstance(content, bytes) else content.SerializeToString()
        path.write_bytes(data)
        return str(path)

    def artifact(self) -> Path:
        """Return a copy of a good artifact."""
        return Path(shutil.copytree(self.artifact_of(), self.folder / "artifact"))

    def run(self, name: str = "run", facts: RunFacts = FACTS) -> Path:
        """Return a run with a measured trial."""
        folder = self.folder / name
        with RunFolder.open(folder, facts=facts) as made:
            made.store.register_tasks([TASK])
            (trial,) = made.store.propose([candidate(1)])
            made.store.start([trial], "cpu-0-0")
            made.store.finish(trial, measurement(1e-3))
        return folder


Make = Callable[[Place], Sequence[object]]


@dataclass(frozen=True)
class Bad:
    what: str
    make: Make  # returns the command line
    code: ExitCode
    said: str  # a regular expression


@pytest.fixture(scope="module")
def artifact_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return what compiles a good artifact, once and only where it is needed."""

    @functools.cache
    def make() -> Path:
        folder = tmp_path_factory.mktemp("good") / "artifact"
        tiny_artifact(folder)
        return folder

    return make


@pytest.fixture
def place(tmp_path: Path, artifact_of: Callable[[], Path]) -> Iterator[Place]:
    made = Place(tmp_path, artifact_of)
    with made.stack:
        yield made


def entries(place: Place) -> set[Path]:
    """Return what is in a place, less the files that SQLite makes beside a store to read it."""
    return {p for p in place.folder.rglob("*") if not p.name.endswith(("-wal", "-shm"))}


def check(bad: Bad, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(argument) for argument in bad.make(place)]
    before = entries(place)
    capsys.readouterr()
    assert run(app, argv) == bad.code, capsys.readouterr().err
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("tunerd: ")
    assert "Traceback" not in err
    assert out == ""
    assert re.search(bad.said, line), line
    assert entries(place) == before, "something was written"


# --- models ------------------------------------------------------------------------------------


def tensor(name: str, dims: Sequence[int | str | None] = (1, 4), kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, dims)


def net(
    *nodes: onnx.NodeProto,
    inputs: Sequence[Any] = (tensor("x"),),
    outputs: Sequence[Any] = (tensor("y"),),
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(constants))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)


def relu(source: str = "x", target: str = "y") -> onnx.NodeProto:
    return helper.make_node("Relu", [source], [target])


def whole() -> bytes:
    return conv_net().SerializeToString()


def cyclic() -> onnx.ModelProto:
    return net(helper.make_node("Add", ["x", "b"], ["a"]), relu("a", "b"), relu("b", "y"))


def of_dims(*dims: int | str | None) -> onnx.ModelProto:
    return net(relu(), inputs=[tensor("x", dims)], outputs=[tensor("y", dims)])


def of_kind(kind: int) -> onnx.ModelProto:
    same = helper.make_node("Identity", ["x"], ["y"])
    return net(same, inputs=[tensor("x", kind=kind)], outputs=[tensor("y", kind=kind)])


def huge_inside() -> onnx.ModelProto:
    """A kilobyte that asks for eight terabytes on its way from one number to another."""
    return net(
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Add", ["x", "zeros"], ["sum"]),
        helper.make_node("ReduceSum", ["sum"], ["y"], keepdims=0),
        inputs=[tensor("x", (1,))],
        outputs=[tensor("y", ())],
        constants=[numpy_helper.from_array(ints(1 << 20, 1 << 20), "shape")],
    )


def endless_loop() -> onnx.ModelProto:
    scalars = [tensor("i", (), TensorProto.INT64), tensor("go", (), TensorProto.BOOL)]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), relu("v", "w")],
        "body",
        [*scalars, tensor("v")],
        [tensor("on", (), TensorProto.BOOL), tensor("w")],
    )
    times = numpy_helper.from_array(np.array(1 << 60), "times")
    return net(helper.make_node("Loop", ["times", "", "x"], ["y"], body=body), constants=[times])


def branches_on_values() -> onnx.ModelProto:
    def branch(op: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node(op, ["x"], ["b"])], op, [], [tensor("b")])

    return net(
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["yes"], to=TensorProto.BOOL),
        helper.make_node(
            "If", ["yes"], ["y"], then_branch=branch("Relu"), else_branch=branch("Abs")
        ),
    )


def own_function(name: str, *called: str) -> onnx.FunctionProto:
    """A function of one input that calls others, one after the other."""
    names = ["a", *(f"t{i}" for i in range(1, len(called))), "b"]
    nodes = [
        helper.make_node(op, [names[i]], [names[i + 1]], domain="own" if op[0] == "F" else "")
        for i, op in enumerate(called)
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["b"], nodes, opsets)


def calling_itself() -> onnx.ModelProto:
    call = helper.make_node("F0", ["x"], ["y"], domain="own")
    return net(call, functions=[own_function("F0", "F0")])


def doubling_functions() -> onnx.ModelProto:
    """Forty functions that each call the next one twice: a trillion nodes once inlined."""
    call = helper.make_node("F0", ["x"], ["y"], domain="own")
    bodies = [own_function(f"F{i}", f"F{i + 1}", f"F{i + 1}") for i in range(40)]
    return net(call, functions=[*bodies, own_function("F40", "Relu")])


def custom_operators() -> onnx.ModelProto:
    magic = [helper.make_node("Magic", ["x"], [n], domain="my.company") for n in ("a", "y")]
    return net(*magic, helper.make_node("Bad\x1b[31m", ["x"], ["z"]))


def lstm() -> onnx.ModelProto:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=3)
    weights = {"w": floats(1, 12, 4), "r": floats(1, 12, 3)}
    return model([node], inputs={"x": (5, 1, 4)}, outputs={"y": (5, 1, 1, 3)}, weights=weights)


def odd_constant(**fields: Any) -> onnx.ModelProto:
    odd = TensorProto(name="w", data_type=FLOAT, dims=[1, 4], raw_data=bytes(16))
    for name, value in fields.items():
        if name == "dims":
            del odd.dims[:]
            odd.dims.extend(value)
        else:
            setattr(odd, name, value)
    return net(helper.make_node("Add", ["x", "w"], ["y"]), constants=[odd])


def not_utf8() -> bytes:
    return (
        net(relu("some_name", "y"), inputs=[tensor("some_name")])
        .SerializeToString()
        .replace(b"some_name", b"some\xffname")
    )


def other_input(value: onnx.TypeProto) -> onnx.ModelProto:
    odd = helper.make_value_info("x", value)
    return net(helper.make_node("Identity", ["x"], ["y"]), inputs=[odd])


_PLAIN = helper.make_tensor_type_proto(FLOAT, (1, 4))

MODELS: dict[str, tuple[Callable[[], onnx.ModelProto | bytes], str]] = {
    "an empty file": (lambda: b"", r"net\.onnx holds no ONNX graph; export or download it again"),
    "a web page": (lambda: b"<html>404", r"net\.onnx is not ONNX.*download it again"),
    "a zip": (lambda: b"PK\x03\x04 an archive", r"net\.onnx is not ONNX, or was cut short"),
    "a text": (lambda: b"{}" * 999, r"net\.onnx (is not|holds no) ONNX"),
    "zeros": (lambda: bytes(64), r"net\.onnx is not ONNX"),
    "a tenth of a model": (lambda: whole()[: len(whole()) // 10], "is not ONNX, or was cut short"),
    "half a model": (lambda: whole()[: len(whole()) // 2], "is not ONNX, or was cut short"),
    "a model less a byte": (lambda: whole()[:-1], "is not ONNX, or was cut short"),
    "no nodes": (lambda: net(), "holds no ONNX graph"),
    "a name that is not UTF-8": (not_utf8, r"the name b'some\\xffname', which is not UTF-8"),
    "a cycle": (cyclic, "must be topologically sorted, however input 'b'.*export it again"),
    "an input that nothing makes": (lambda: net(relu("q")), "input 'q'.*not output of any prev"),
    "two outputs of one name": (lambda: net(relu(), relu()), "'y' has been used.*multiple times"),
    "two inputs of one name": (
        lambda: net(relu(), inputs=[tensor("x"), tensor("x")]),
        "'x' has been used as graph input names multiple times",
    ),
    "no outputs": (lambda: net(relu(), outputs=[]), "has no outputs, and one of each is needed"),
    "no inputs": (
        lambda: net(relu("w"), inputs=[], constants=[numpy_helper.from_array(floats(1, 4), "w")]),
        "has no inputs, and one of each is needed",
    ),
    "an output that nothing makes": (
        lambda: net(relu(), outputs=[tensor("q")]),
        "Graph output 'q' is not an output of any node",
    ),
    "terabytes of input": (
        lambda: of_dims(1 << 20, 1 << 20, 4),
        r"inputs take 49,152\.0 GiB to run, and this machine has .* GiB.*give smaller shapes",
    ),
    "more than 64 bits of input": (lambda: of_dims(1 << 62, 1 << 62), "GiB to run, and this mach"),
    "terabytes inside": (huge_inside, r"value 'zeros' the model takes 8,192\.0 GiB to run"),
    "a dimension of zero": (lambda: of_dims(0, 4), r"open \(x:\?,4\); fix them.*--shape x:N,4"),
    "a negative dimension": (lambda: of_dims(-2, 4), r"open \(x:\?,4\); fix them.*--shape x:N,4"),
    "an open dimension": (lambda: of_dims("n", 4), r"open \(x:n,4\); fix them.*--dim n=1"),
    "300 dimensions": (lambda: of_dims(*[1] * 300), "'x' has 300 dimensions; at most 32"),
    "a name of 100,000 characters": (lambda: of_dims("a" * 100_000), r"open \(x:a+ \.\.\. a+=1"),
    "a constant of negative size": (lambda: odd_constant(dims=[-1, 4]), "Negative dimension value"),
    "a constant of too few bytes": (lambda: odd_constant(raw_data=b"1"), "is too small for the d"),
    "a constant of no known type": (
        lambda: odd_constant(data_type=99),
        "constant 'w' has type number 99.*export the model again",
    ),
    "an opset of the future": (lambda: net(relu(), opset=999), "opset 999; up to .* older opset"),
    "an opset below one": (lambda: net(relu(), opset=-3), "domain_version of -3"),
    "operators of their own": (
        custom_operators,
        r"standard ONNX does not have: Bad.*\(1\), my\.company\.Magic \(2\); export it without",
    ),
    "operators that TVM lacks": (
        lstm,
        r"TVM cannot import.*: LSTM \(1\); export the model without",
    ),
    "a loop of 2^60 rounds": (
        endless_loop,
        r"cannot import these.*: Loop \(1\); export it without",
    ),
    "branches that depend on values": (branches_on_values, "1 of the model's If operators depend"),
    "a function that calls itself": (
        calling_itself,
        "call themselves, or make more than 1,000,000",
    ),
    "functions that explode": (doubling_functions, "call themselves, or make more than 1,000,000"),
    "text as input": (lambda: of_kind(TensorProto.STRING), "'x' has type object; allowed are bool"),
    "complex numbers": (lambda: of_kind(TensorProto.COMPLEX64), "type complex64; allowed are bool"),
    "an input without a type": (lambda: of_kind(0), "'x' has type unknown; allowed are bool"),
    "a sequence as input": (
        lambda: other_input(helper.make_sequence_type_proto(_PLAIN)),
        "input 'x' is not a tensor; only tensors can be inputs",
    ),
    "a map as input": (
        lambda: other_input(helper.make_map_type_proto(TensorProto.INT64, _PLAIN)),
        "input 'x' is not a tensor; only tensors can be inputs",
    ),
    "an attribute of another type": (
        lambda: net(helper.make_node("Softmax", ["x"], ["y"], axis="last")),
        "Mismatched attribute type.*export it again",
    ),
    "a node with too few inputs": (
        lambda: net(helper.make_node("Add", ["x"], ["y"])),
        r"has input size 1 not in range \[min=2, max=2\]",
    ),
    "a shape that does not fit": (
        lambda: net(
            helper.make_node("Reshape", ["x", "to"], ["y"]),
            constants=[numpy_helper.from_array(ints(3, 5), "to")],
        ),
        "ONNX Runtime cannot run the model with inputs x:1x4.*check the shapes, or export",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = MODELS[what]
    argv: Make = lambda p: ["tune", p.saved(make()), "--cpu-pct", 100, "--dry-run"]  # noqa: E731
    check(Bad(what, argv, ExitCode.BAD_MODEL, said), place, capsys)


# --- files that are no model, and weights elsewhere --------------------------------------------


def tune(model_path: object, *flags: object) -> list[object]:
    return ["tune", model_path, "--cpu-pct", 100, "--dry-run", *flags]


def external(
    place: Place, location: str, *, size: int | None = None, twice: bool = False, **entries: object
) -> list[object]:
    """Save a model whose weight lies in a file of `size` bytes beside it, or elsewhere."""
    proto = conv_net()
    for weight in list(proto.graph.initializer)[: 2 if twice else 1]:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **entries}.items():
            weight.external_data.add(key=key, value=str(value))
    path = place.saved(proto)
    if size is not None:
        with (Path(path).parent / location).open("wb") as file:
            file.truncate(size)  # of holes: it takes no room
    (place.folder / "secret.bin").write_bytes(bytes(4096))
    return tune(path)


def linked_out(place: Place) -> list[object]:
    argv = external(place, "link.bin")
    (place.folder / "models" / "link.bin").symlink_to(place.folder / "secret.bin")
    return argv


def of_holes(place: Place) -> list[object]:
    path = place.saved(b"")
    os.truncate(path, 3 << 30)
    return tune(path)


_OUTSIDE = "outside the model's folder; put the model and its data into one folder"

FILES = [
    Bad("nothing", lambda p: tune("no.onnx"), ExitCode.BAD_MODEL, r"no\.onnx does not exist; give"),
    Bad("a folder", lambda p: tune(p.folder), ExitCode.BAD_MODEL, "is a folder; give the path of"),
    Bad("a device", lambda p: tune("/dev/zero"), ExitCode.BAD_MODEL, "/dev/zero is no file; give"),
    Bad("a long path", lambda p: tune("a" * 5000), ExitCode.BAD_MODEL, "cannot be read: File name"),
    Bad("no text", lambda p: tune("\udcff"), ExitCode.BAD_INPUT, "no text in UTF-8; rename the"),
    Bad("3 GiB", of_holes, ExitCode.BAD_MODEL, r"3\.0 GiB with its weights; at most 2 GiB"),
    Bad("an absolute path", lambda p: external(p, "/etc/passwd"), ExitCode.BAD_MODEL, _OUTSIDE),
    Bad("a parent", lambda p: external(p, "../secret.bin"), ExitCode.BAD_MODEL, _OUTSIDE),
    Bad("a way out", lambda p: external(p, "a/../../secret.bin"), ExitCode.BAD_MODEL, _OUTSIDE),
    Bad("no place", lambda p: external(p, ""), ExitCode.BAD_MODEL, _OUTSIDE),
    Bad("a link out", linked_out, ExitCode.BAD_MODEL, _OUTSIDE),
    Bad(
        "weights that are missing",
        lambda p: external(p, "w.bin"),
        ExitCode.BAD_MODEL,
        r"'w\.bin', which is not in .*; put the file beside the model",
    ),
    Bad(
        "weights that are short",
        lambda p: external(p, "w.bin", size=16, offset=8, length=864),
        ExitCode.BAD_MODEL,
        r"bytes 8 to 872 of w\.bin, which has 16; download the model's files again",
    ),
    Bad(
        "weights at no number",
        lambda p: external(p, "w.bin", size=16, offset="all"),
        ExitCode.BAD_MODEL,
        "external data of tensor 'w1' cannot be read: invalid literal.*'all'; export or download",
    ),
    Bad(
        "the same 1.5 GiB twice",
        lambda p: external(p, "w.bin", size=3 << 29, twice=True),
        ExitCode.BAD_MODEL,
        r"with its weights; at most 2 GiB can be loaded",
    ),
]

# --- flags -------------------------------------------------------------------------------------


def flags(*given: object) -> Make:
    return lambda place: tune(place.saved(net(relu())), *given)


def open_flags(*given: object) -> Make:
    return lambda place: tune(place.saved(of_dims("n", 4)), *given)


NINES = "9" * 5000

FLAGS: dict[str, tuple[Make, str]] = {
    "a budget without a unit": (flags("--budget", "soon"), "'soon' is not a duration; write for"),
    "a negative budget": (flags("--budget", "-5m"), "-5m.* is not a duration; write for example"),
    "a budget in parsecs": (flags("--budget", "10 pc"), "'10 pc' is not a duration; write for ex"),
    "a budget of nothing": (flags("--budget", "0s"), "0s leaves no time; give more than 0s"),
    "no budget": (flags("--budget", ""), "'' is not a duration; write for example 90s"),
    "an endless budget": (flags("--budget", NINES), "longer than a year; write for example 90s"),
    "a budget in other digits": (flags("--budget", "\u0661m"), "is not a duration; write for ex"),
    "a shape without sizes": (flags("--shape", "x"), "'x' is not NAME:SIZES.*--shape images:1,3"),
    "a shape with a gap": (flags("--shape", "x:1,,4"), "'x:1,,4' is not NAME:SIZES"),
    "a shape with crosses": (flags("--shape", "x:1x4"), "'x:1x4' is not NAME:SIZES"),
    "a shape with a zero": (flags("--shape", "x:0,4"), "'x:0,4' is not NAME:SIZES.*1 or more"),
    "a shape of nothing": (flags("--shape", ":1,4"), "':1,4' is not NAME:SIZES"),
    "a shape over 32 bits": (flags("--shape", "x:9999999999,4"), "1 or more, up to 2147483647"),
    "a shape with an underscore": (flags("--shape", "x:1_0,4"), "'x:1_0,4' is not NAME:SIZES"),
    "a shape of another input": (
        open_flags("--shape", "q:1,4"),
        "no input 'q'; its inputs are 'x'",
    ),
    "a shape of another rank": (
        open_flags("--shape", "x:1,4,1"),
        "has 3 dimensions; the model's i",
    ),
    "a shape that contradicts": (open_flags("--shape", "x:1,5"), "differs from the model's own"),
    "two shapes of one input": (
        open_flags("--shape", "x:1,4", "--shape", "x:2,4"),
        "--shape is given twice for 'x', with other sizes; give it once",
    ),
    "a dimension without a size": (flags("--dim", "n"), "'n' is not NAME=SIZE.*--dim batch=1"),
    "a dimension of words": (flags("--dim", "n=many"), "'n=many' is not NAME=SIZE"),
    "a dimension of zero": (flags("--dim", "n=0"), "'n=0' is not NAME=SIZE with a size of 1"),
    "a dimension of nothing": (flags("--dim", "=1"), "'=1' is not NAME=SIZE"),
    "a dimension of 5,000 digits": (flags("--dim", f"n={NINES}"), "up to 2147483647; write for"),
    "a dimension that is closed": (flags("--dim", "n=1"), "no open dimension 'n'; it has none"),
    "a dimension of another name": (open_flags("--dim", "m=1"), "dimension 'm'; they are 'n'"),
    "two sizes of a dimension": (
        open_flags("--dim", "n=1", "--dim", "n=2"),
        "--dim is given twice for 'n', with other sizes; give it once",
    ),
    "a shape and a dimension": (
        open_flags("--shape", "x:1,4", "--dim", "n=2"),
        "dimension 'n' is given as 2 and.*as 1; give one of them",
    ),
    "a batch and a dimension": (
        open_flags("--batch", 2, "--dim", "n=2"),
        "give either --batch or --dim n=..., not both",
    ),
    "a batch of zero": (flags("--batch", 0), "'--batch': .*--help"),
    "a batch over 32 bits": (flags("--batch", 10**12), "--batch 1000000000000: .* 2147483647"),
    "no trials": (flags("--trials", 0), "'--trials': .*--help"),
    "half a trial": (flags("--trials", 1.5), "'--trials': .*--help"),
    "trials over 32 bits": (flags("--trials", 10**12), "--trials 1000000000000: .* 2147483647"),
    "no slices": (flags("--slices", 0), "'--slices': .*--help"),
    "no tuners": (flags("--tuners", 0), "'--tuners': .*--help"),
    "a negative seed": (flags("--seed", -1), "'--seed': .*--help"),
    "a seed over 32 bits": (flags("--seed", 10**12), "--seed 1000000000000: .* 2147483647"),
    "a slice of another kind": (flags("--slice", "cloud"), "'cloud' is not one of 'mps', 'whole'"),
    "a GPU's slice of cores": (flags("--slice", "mps"), "--slice mps takes its share from --gpu-"),
    "MPS on cores": (flags("--mps", "external"), "--mps external is for slices of kind mps.*leave"),
    "MPS of another kind": (flags("--mps", "none"), "'none' is not one of 'own', 'external'"),
    "an unknown flag": (flags("--color"), "No such option: --color; .*--help"),
    "two models": (flags("another.onnx"), r"unexpected extra argument.*another\.onnx"),
    "a dry run elsewhere": (flags("--address", "a:1"), "--dry-run plans this machine; it cannot"),
    "no share": (lambda p: ["tune", "a.onnx"], "give one share: --gpu-pct for GPUs or --cpu-pct"),
    "two shares": (flags("--gpu-pct", 40), "give one share: --gpu-pct for GPUs or --cpu-pct"),
    **{
        f"{share!r} as {flag}": (
            lambda p, flag=flag, share=share: ["tune", "a.onnx", flag, share],  # type: ignore[misc]
            f"'{flag}': .* --help",
        )
        for flag in ("--gpu-pct", "--cpu-pct")
        for share in ("0", "101", "-1", "33.3", "40%", "", "half")
    },
}


@pytest.mark.parametrize("what", FLAGS)
def test_a_flag_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = FLAGS[what]
    check(Bad(what, make, ExitCode.BAD_INPUT, said), place, capsys)


# --- run folders -------------------------------------------------------------------------------


def tune_in(folder: object, model_path: str) -> list[object]:
    return ["tune", model_path, "--cpu-pct", 100, "--trials", 1, "--out", folder]


def other_run(**changes: Any) -> Make:
    """Tune a model in the folder of a run that differs in what `changes` say."""

    def make(place: Place) -> list[object]:
        path = place.saved(net(relu()))
        facts = {
            "model_name": "net",
            "model_digest": read_model(Path(path)).digest,
            "target": TargetSpec("llvm", "{}"),
            "device": "CPU",
            "slice_kind": "cpu",
            "pct": 100,
            "tvm_version": "0.27",
        }
        return tune_in(place.run(facts=RunFacts(**(facts | changes))), path)

    return make


def in_a_file(place: Place) -> list[object]:
    return tune_in(place.saved(b"mine", "file"), place.saved(net(relu())))


def with_a_thesis(place: Place) -> list[object]:
    (place.folder / "mine").mkdir()
    (place.folder / "mine" / "thesis.tex").write_text("mine")
    return tune_in(place.folder / "mine", place.saved(net(relu())))


def in_use(place: Place) -> list[object]:
    place.stack.enter_context(RunFolder.open(place.folder / "run", facts=FACTS))
    return tune_in(place.folder / "run", place.saved(net(relu())))


FOLDERS = [
    Bad("a file", in_a_file, ExitCode.BAD_FOLDER, "file cannot be written: File exists; choose a"),
    Bad(
        "below a file",
        lambda p: tune_in(p.saved(b"", "file") + "/run", p.saved(net(relu()))),
        ExitCode.BAD_FOLDER,
        "file/run cannot be written: Not a directory; choose a folder of yours with --out",
    ),
    Bad(
        "a folder of the kernel's",
        lambda p: tune_in("/proc/run", p.saved(net(relu()))),
        ExitCode.BAD_FOLDER,
        "/proc/run cannot be written: .*; choose a folder of yours with --out",
    ),
    Bad(
        "other files", with_a_thesis, ExitCode.BAD_FOLDER, "'thesis.tex' and no run .* choose anot"
    ),
    Bad(
        "in use", in_use, ExitCode.BAD_FOLDER, rf"in use by the tunerd with pid {os.getpid()}; wai"
    ),
    Bad(
        "of another model",
        other_run(model_name="other", model_digest="d" * 64),
        ExitCode.BAD_FOLDER,
        "run of model 'other'.*not of 'net'.*choose another folder",
    ),
    Bad(
        "another share", other_run(pct=50), ExitCode.BAD_FOLDER, "share 50%.*share 100%.*choose an"
    ),
    Bad("another TVM", other_run(tvm_version="0.1"), ExitCode.BAD_FOLDER, r"TVM 0\.1,? .*TVM 0\.2"),
    Bad(
        "slices of another kind",
        other_run(slice_kind="whole"),
        ExitCode.BAD_FOLDER,
        "slice kind whole.*slice kind cpu.*choose another folder",
    ),
]

# --- stores ------------------------------------------------------------------------------------

SHOW = ("show",)
EXPORT = ("export", "--format", "json", "--to", "/dev/null")


def store(change: Callable[[Path], object], *command: object) -> Make:
    """Change a run's store, and read it."""

    def make(place: Place) -> list[object]:
        folder = place.run()
        change(folder / STORE_NAME)
        name, *rest = command or SHOW
        return ["records", name, folder, *rest]

    return make


def sql(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as raw, raw:
            for statement in statements:
                raw.execute(statement)

    return change


def old_and_torn(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.executescript((DATA / "store-v1.sql").read_text())
        raw.execute("DROP TABLE spans")


def locked(place: Place) -> list[object]:
    """Another program holds the write lock, longer than anybody waits."""
    argv = other_run()(place)
    patch = place.stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(schema, "BUSY_TIMEOUT_SECS", 0.05)
    raw = sqlite3.connect(place.folder / "run" / STORE_NAME, isolation_level=None)
    place.stack.callback(raw.close)
    raw.execute("BEGIN IMMEDIATE")
    return list(argv)


def two_runs(place: Place) -> list[object]:
    """The second run has a trial of a task that it does not have."""
    first, second = place.run("first"), place.run("second")
    sql("PRAGMA foreign_keys = OFF", "UPDATE trials SET task_id = 'none', candidate_id = 'other'")(
        second / STORE_NAME
    )
    return ["records", "merge", first, second, "--to", place.folder / "both"]


_NO_RECORD = "holds what is no record of a run .*copy the run folder again, or name another one"
_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"

STORES: dict[str, tuple[Make, str]] = {
    "not there": (lambda p: ["records", "show", p.folder], "is not a run folder: it has no store"),
    "a long path": (lambda p: ["records", "show", "a" * 5000], "File name too long"),
    "a text": (store(lambda path: path.write_text("text " * 999)), "file is not a database; check"),
    "empty": (store(lambda path: path.write_bytes(b"")), "no store of tunerd: it has no table"),
    "cut short": (store(lambda path: os.truncate(path, 8192)), "malformed; (check|copy)"),
    "somebody else's": (
        store(lambda path: (path.unlink(), sql("CREATE TABLE cats (name TEXT)")(path))),
        "no store of tunerd: it has no table schema_version; choose another folder",
    ),
    "of a newer version": (
        store(sql("UPDATE schema_version SET version = 99")),
        f"schema version 99, and this tunerd reads those up to version {VERSION}; use the tunerd",
    ),
    "of a version in words": (
        store(sql("UPDATE schema_version SET version = 'new'")),
        "schema version new, and this tunerd reads those up to version",
    ),
    "without trials": (store(sql("DROP TABLE trials")), "no table trials; it is damaged: copy the"),
    "without a column": (
        store(sql("ALTER TABLE trials DROP COLUMN power_w")),
        "no column power_w in its table trials; it is damaged",
    ),
    "of an older version without spans": (
        store(old_and_torn),
        "cannot be opened as a store: .*spans",
    ),
    "with an endless view": (
        store(sql("DROP TABLE phases", f"CREATE VIEW phases AS {_ENDLESS}")),
        "holds the view 'phases', which tunerd makes none of; choose another folder",
    ),
    "with a trigger": (
        store(sql("CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END")),
        "holds the trigger 't', which tunerd makes none of",
    ),
    "without a session": (store(sql("DELETE FROM sessions")), "it has no session.*copy the run"),
    "facts that are no JSON": (store(sql("UPDATE sessions SET facts = '{'")), _NO_RECORD),
    "facts of another kind": (store(sql("UPDATE sessions SET facts = '{\"a\": 1}'")), _NO_RECORD),
    "a share in words": (
        store(sql("UPDATE sessions SET facts = json_set(facts, '$.pct', 'half')")),
        r"pct: Input should be a valid integer.*copy the run folder again",
    ),
    "samples that are no JSON": (store(sql("UPDATE trials SET run_secs = 'fast'")), _NO_RECORD),
    "samples that are words": (
        store(sql("UPDATE trials SET run_secs = '[\"fast\"]'")),
        "0: Input should be a valid number.*copy the run folder again",
    ),
    "no samples": (
        store(sql("UPDATE trials SET run_secs = '[]'"), *EXPORT),
        "finite samples, at l",
    ),
    "a time in words": (
        store(sql("UPDATE trials SET proposed_at = 'today'"), *EXPORT),
        r"trials\.proposed_at is 'today', no float",
    ),
    "a state that is none": (
        store(sql("UPDATE trials SET state = 'resting'"), *EXPORT),
        "'resting' is not a valid TrialState",
    ),
    "a measured trial without samples": (
        store(sql("UPDATE trials SET run_secs = NULL"), *EXPORT),
        "a trial that is measured has no run_secs",
    ),
    "a trial of no task": (
        store(sql("PRAGMA foreign_keys = OFF", "DELETE FROM tasks"), *EXPORT),
        "trial 1 is of a task that it has not",
    ),
    "a task that TVM cannot read": (
        store(sql("UPDATE tasks SET mod_json = '[]'"), "export", "--format", "tvm", "--to", "db"),
        "task 'conv'.* cannot be exported",
    ),
    "tasks of other shapes": (store(sql("UPDATE tasks SET args = '[[1]]'")), _NO_RECORD),
    "held by another program": (locked, "in use by another program .*wait until it ends"),
    "merged with trials of no task": (two_runs, "cannot be merged.*FOREIGN KEY"),
}


@pytest.mark.parametrize("what", STORES)
def test_a_store_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = STORES[what]
    check(Bad(what, make, ExitCode.BAD_FOLDER, said), place, capsys)


# --- packed runs -------------------------------------------------------------------------------


def packed(change: Callable[[bytes], bytes]) -> Make:
    def make(place: Place) -> list[object]:
        file = pack(place.run(), place.folder / "file")
        file.write_bytes(change(file.read_bytes()))
        return ["records", "unpack", file, place.folder / "there"]

    return make


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


PACKED = [
    Bad(
        "no archive", packed(lambda _: b"text" * 99), ExitCode.BAD_FOLDER, "Not a gzipped file.*giv"
    ),
    Bad("cut short", packed(lambda c: c[: len(c) // 2]), ExitCode.BAD_FOLDER, "cannot be unpacked"),
    Bad("a changed byte", packed(flipped), ExitCode.BAD_FOLDER, "cannot be (unpacked|opened)"),
    Bad("empty", packed(lambda _: gzip.compress(b"")), ExitCode.BAD_FOLDER, "cannot be unpacked"),
    Bad(
        "a long path",
        lambda p: ["records", "unpack", "a" * 5000, p.folder / "there"],
        ExitCode.BAD_FOLDER,
        "File name too long.*(choose|give)",
    ),
]

# --- artifacts ---------------------------------------------------------------------------------


def artifact(change: Callable[[Path], object], *flags: object) -> Make:
    def make(place: Place) -> list[object]:
        folder = place.artifact()
        change(folder)
        return ["bench", folder, *flags]

    return make


def byte_of(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(flipped((folder / name).read_bytes()))

    return change


def told(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(manifest | changes))

    return change


def also_named(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"][name] = "0" * 64
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return change


def pipe_for(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


_CHANGED = r"was changed: its sha256 is \w+\.\.\., the manifest says .*nothing of it was loaded"

ARTIFACTS: dict[str, tuple[Make, str]] = {
    "nowhere": (
        lambda p: ["bench", "nowhere"],
        "nowhere holds no manifest.json; give the artifact",
    ),
    "a file": (lambda p: ["bench", p.saved(b"{}", "file")], "file holds no manifest.json; give"),
    "no text": (lambda p: ["bench", "\udcff"], "holds no manifest.json; give the artifact folder"),
    "a long path": (lambda p: ["bench", "a" * 5000], "File name too long"),
    "a byte of the library": (artifact(byte_of(LIBRARY)), f"{LIBRARY} {_CHANGED}"),
    "a byte of the weights": (artifact(byte_of(WEIGHTS)), f"{WEIGHTS} {_CHANGED}"),
    "a byte of the manifest": (artifact(byte_of(MANIFEST)), "manifest.json cannot be read|changed"),
    "no library": (artifact(lambda f: (f / LIBRARY).unlink()), "cannot be read .*copy the whole"),
    "no weights": (artifact(lambda f: (f / WEIGHTS).unlink()), "cannot be read .*copy the whole"),
    "a pipe for weights": (artifact(pipe_for(WEIGHTS)), "no plain file.*copy the whole folder"),
    "half a manifest": (
        artifact(lambda f: os.truncate(f / MANIFEST, 100)),
        "manifest.json cannot be read .*; it is damaged, so tune again or copy the folder again",
    ),
    "an empty manifest": (artifact(lambda f: (f / MANIFEST).write_text("")), "it is damaged"),
    "a manifest of lists": (
        artifact(lambda f: (f / MANIFEST).write_text("[" * 100_000)),
        "manifest.json cannot be read .*it is damaged",
    ),
    "another format": (artifact(told(format_version=99)), "has format 99; this tunerd reads 1, so"),
    "no share": (artifact(told(share={})), "what it says of share cannot be.*it is damaged"),
    "a share of 0": (
        artifact(told(share={"pct": 0, "sm_counts": [1], "device": None})),
        "what it says of share cannot be",
    ),
    "inputs of no shape": (artifact(told(inputs=[{"name": "x"}])), "what it says of inputs cannot"),
    "another target": (artifact(told(target={"kind": "abacus"})), "what it says of target cannot"),
    "a file outside": (
        artifact(also_named("../../etc/passwd")),
        "names the file '../../etc/passwd'",
    ),
    "a file elsewhere": (
        artifact(also_named("/etc/passwd")),
        "names the file '/etc/passwd', which",
    ),
    "no sha256 of the library": (
        artifact(told(files={WEIGHTS: "0" * 64})),
        f"the manifest of .* has no sha256 of {LIBRARY}; it was changed",
    ),
    "a share of a GPU": (
        artifact(lambda f: None, "--gpu-pct", 40),
        "is compiled for llvm; give its share by --cpu-pct",
    ),
}


@pytest.mark.parametrize("what", ARTIFACTS)
def test_an_artifact_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = ARTIFACTS[what]
    check(Bad(what, make, ExitCode.BAD_INPUT, said), place, capsys)


@pytest.mark.parametrize("bad", [*FILES, *FOLDERS, *PACKED], ids=lambda bad: bad.what)
def test_a_file_or_folder_that_cannot_be_used(
    bad: Bad, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    check(bad, place, capsys)
