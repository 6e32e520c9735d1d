"""Models that cannot be used are refused in one sentence, and before they cost anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.lib.bad_input import Bad, Make, Place, check, net, of_dims, relu, tensor, tune
from tests.lib.models import conv_net, floats, ints, model
from tunerd.errors import ExitCode

FLOAT = TensorProto.FLOAT


# --- models ------------------------------------------------------------------------------------


def whole() -> bytes:
    return conv_net().SerializeToString()


def cyclic() -> onnx.ModelProto:
    return net(helper.make_node("Add", ["x", "b"], ["a"]), relu("a", "b"), relu("b", "y"))


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
    def branch(name: str, *inputs: str) -> onnx.GraphProto:
        node = helper.make_node("Concat", inputs, ["b"], axis=0)
        out = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
        return helper.make_graph([node], name, [], [out])

    return net(
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["yes"], to=TensorProto.BOOL),
        helper.make_node(
            "If", ["yes"], ["rows"], then_branch=branch("t", "x"), else_branch=branch("e", "x", "x")
        ),
        helper.make_node("ReduceMax", ["rows"], ["most"], keepdims=0),
        helper.make_node("Add", ["x", "most"], ["y"]),
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


def determinant() -> onnx.ModelProto:
    node = helper.make_node("Det", ["x"], ["y"])
    return model([node], inputs={"x": (5, 4, 4)}, outputs={"y": (5,)})


def largest_of_regions() -> onnx.ModelProto:
    node = helper.make_node("RoiAlign", ["x", "regions", "images"], ["y"], mode="max")
    weights = {"regions": np.array([[0, 0, 4, 4]], np.float32), "images": ints(0)}
    outputs = {"y": (1, 3, 1, 1)}
    return model([node], inputs={"x": (1, 3, 8, 8)}, outputs=outputs, weights=weights, opset=16)


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
    "a constant of too few bytes": (
        lambda: odd_constant(raw_data=b"1"),
        "constant .w. does not hold what its",
    ),
    "a constant of too many bytes": (
        lambda: odd_constant(raw_data=bytes(20)),
        "constant 'w' does not hold what its shape and type say.*export the model again",
    ),
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
        determinant,
        r"TVM cannot import.*: Det \(1\); export the model without",
    ),
    "an attribute that TVM takes for another": (
        largest_of_regions,
        "operator RoiAlign of opset 16: mode=max; export the model without",
    ),
    "a loop of 2^60 rounds": (
        endless_loop,
        r"the number of rounds of these.* is not known, or above 512: Loop \(1\); export",
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
    Bad(
        "3 GiB",
        of_holes,
        ExitCode.BAD_MODEL,
        r"3\.0 GiB with its weights; at most 2 GiB can be in one file",
    ),
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
        r"with its weights; at most 2 GiB can be in one file",
    ),
]


@pytest.mark.parametrize("bad", FILES, ids=lambda bad: bad.what)
def test_a_file_that_cannot_be_used(
    bad: Bad, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    check(bad, place, capsys)
