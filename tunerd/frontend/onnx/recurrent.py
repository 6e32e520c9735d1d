"""Write LSTM, GRU and RNN as their steps.

The product with the inputs is one matrix product over all steps; each step multiplies its state.
All steps have the same kernels, because their inputs come out of one Split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.frontend.onnx.builder import Builder, attributes_of, inputs_of

if TYPE_CHECKING:
    import onnx

MAX_STEPS = 512  # a step is about ten operators, which TVM takes a millisecond each for
_CHUNK = 64  # outputs of one Split: a kernel has an argument for each
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
# Of activations with parameters: their defaults, as of the operators of these names.
_PARAMETERS: dict[str, dict[str, float]] = {
    "affine": {"alpha": 1.0, "beta": 0.0},
    "elu": {"alpha": 1.0},
    "hardsigmoid": {"alpha": 0.2, "beta": 0.5},
    "leakyrelu": {"alpha": 0.01},
    "scaledtanh": {"alpha": 1.0, "beta": 1.0},
    "thresholdedrelu": {"alpha": 1.0},
}
_OPERATORS = {
    "elu": "Elu",
    "hardsigmoid": "HardSigmoid",
    "leakyrelu": "LeakyRelu",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "softplus": "Softplus",
    "softsign": "Softsign",
    "tanh": "Tanh",
    "thresholdedrelu": "ThresholdedRelu",
}


@dataclass
class _Cell:
    """One direction of a node: its weights, and what a step does. B is the batch, H the state."""

    kind: str
    build: Builder
    size: int  # H
    recurrence: list[str]  # (H, n H) by product that a step takes; GRU has two
    bias: list[str]  # that is added to a product of the state, "" for none
    peepholes: list[str]  # of the gates i, o and f, (H,) each
    activations: list[Callable[[str], str]]
    clip: float
    is_coupled: bool  # LSTM: the forget gate is 1 - i
    resets_last: bool  # GRU: the reset gate multiplies the product, not the state

    def step(self, x: str, h: str, c: str) -> tuple[str, str]:
        """Return the state after `x`, the product with the inputs, (B, gates H)."""
        return {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self.kind](x, h, c)

    def _product(self, h: str, index: int) -> str:
        product = self.build.op("MatMul", h, self.recurrence[index])
        return self.build.op("Add", product, self.bias[index]) if self.bias[index] else product

    def _activate(self, index: int, x: str) -> str:
        if self.clip:
            bounds = [self.build.constant(b, np.float32) for b in (-self.clip, self.clip)]
            x = self.build.op("Max", x, bounds[0])
            x = self.build.op("Min", x, bounds[1])
        return self.activations[index](x)

    def _rnn(self, x: str, h: str, c: str) -> tuple[str, str]:
        return self._activate(0, self.build.op("Add", x, self._product(h, 0))), c

    def _lstm(self, x: str, h: str, c: str) -> tuple[str, str]:
        op = self.build.op
        gates = op("Add", x, self._product(h, 0))
        i, o, f, new = self.build.split(gates, [self.size] * 4, axis=1)
        if self.peepholes:
            i = op("Add", i, op("Mul", self.peepholes[0], c))
            f = op("Add", f, op("Mul", self.peepholes[2], c))
        i, new = self._activate(0, i), self._activate(1, new)
        if self.is_coupled:
            f = op("Sub", self.build.constant(1, np.float32), i)
        else:
            f = self._activate(0, f)
        c = op("Add", op("Mul", f, c), op("Mul", i, new))
        if self.peepholes:
            o = op("Add", o, op("Mul", self.peepholes[1], c))
        return op("Mul", self._activate(0, o), self.activations[2](c)), c

    def _gru(self, x: str, h: str, c: str) -> tuple[str, str]:
        op, size = self.build.op, self.size
        x_gates, x_new = self.build.split(x, [2 * size, size], axis=1)
        if self.resets_last:
            h_gates, h_new = self.build.split(self._product(h, 0), [2 * size, size], axis=1)
        else:
            h_gates = self._product(h, 0)
        z, r = self.build.split(
            self._activate(0, op("Add", x_gates, h_gates)), [size, size], axis=1
        )
        h_new = op("Mul", r, h_new) if self.resets_last else self._product(op("Mul", r, h), 1)
        new = self._activate(1, op("Add", x_new, h_new))
        kept = op("Sub", self.build.constant(1, np.float32), z)
        return op("Add", op("Mul", kept, new), op("Mul", z, h)), c


def unrolled(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    """Return Y (steps, directions, B, H), Y_h and, of LSTM, Y_c (directions, B, H).

    Raises ValueError for what this does not do.
    """
    given = attributes_of(node)
    x, w, r, b, lengths, h0, c0, p = inputs_of(node, 8)
    if given.get("layout", 0):
        raise ValueError("layout=1, with the batch first, is not known; export it with layout=0")
    if build.dtype(x) != np.float32:
        raise ValueError(f"its type is {build.dtype(x)}, and float32 is known; export it so")
    steps, batch, _ = build.shape(x)
    if steps > MAX_STEPS:
        raise ValueError(
            f"it has {steps} steps, and up to {MAX_STEPS} are unrolled; run the model in windows"
        )
    directions, size = build.shape(r)[0], build.shape(r)[2]
    is_backward = given.get("direction", "forward") == "reverse"
    masks = _masks(build, lengths, steps, batch) if lengths else None
    per_direction = []
    for d in range(directions):
        cell = _cell(node, given, build, d, size, (r, b, p))
        states = [
            build.reshape(_one(build, s, d), batch, size)
            if s
            else build.constant(np.zeros((batch, size)), np.float32)
            for s in (h0, c0)
        ]
        inputs = _input_products(build, x, _one(build, w, d), cell, _input_bias(build, b, d, node))
        reverse = is_backward or d == 1
        per_direction.append(_run(build, cell, inputs, states, masks, reverse=reverse))
    outputs = []
    for at in range(3):  # Y, the last H, the last C
        parts = [ends[at] for ends in per_direction]
        outputs.append(
            parts[0] if len(parts) == 1 else build.op("Concat", *parts, axis=int(at == 0))
        )
    return outputs[: 3 if node.op_type == "LSTM" else 2]


def _run(
    build: Builder,
    cell: _Cell,
    inputs: list[str],
    states: list[str],
    masks: list[str] | None,
    *,
    reverse: bool,
) -> tuple[str, str, str]:
    """Return all H as (steps, 1, B, H), the last H and the last C as (1, B, H).

    Where a sequence has ended, its state stays and Y is 0; backwards it begins where it ends. Of
    none at all, the last state is 0, as in ONNX Runtime.
    """
    h, c = states
    zero = build.constant(0, np.float32)
    made = [""] * len(inputs)
    for t in reversed(range(len(inputs))) if reverse else range(len(inputs)):
        new_h, new_c = cell.step(inputs[t], h, c)
        made[t] = new_h
        if masks is not None:
            made[t] = build.op("Where", masks[t], new_h, zero)
            new_h = build.op("Where", masks[t], new_h, h)
            new_c = build.op("Where", masks[t], new_c, c) if cell.kind == "LSTM" else c
        h, c = new_h, new_c
    if masks is not None:
        h, c = (build.op("Where", masks[0], each, zero) for each in (h, c))
    rows = [build.reshape(each, 1, 1, -1, cell.size) for each in made]
    y = rows[0] if len(rows) == 1 else build.op("Concat", *rows, axis=0)
    return y, build.reshape(h, 1, -1, cell.size), build.reshape(c, 1, -1, cell.size)


def _input_products(build: Builder, x: str, w: str, cell: _Cell, bias: str) -> list[str]:
    """Return X W + bias of every step, (B, gates H) each, of w (1, gates H, inputs)."""
    steps, batch, width = build.shape(x)
    rows = _GATES[cell.kind] * cell.size
    matrix = _transposed(build, w, rows, width)
    product = build.op("MatMul", build.reshape(x, steps * batch, width), matrix)
    if bias:
        product = build.op("Add", product, bias)
    if steps == 1:
        return [product]
    found = []
    chunks = [min(_CHUNK, steps - start) for start in range(0, steps, _CHUNK)]
    for chunk, length in zip(
        build.split(product, [c * batch for c in chunks], axis=0), chunks, strict=True
    ):
        found += build.split(chunk, [batch] * length, axis=0)
    return found


def _masks(build: Builder, lengths: str, steps: int, batch: int) -> list[str] | None:
    """Return whether a step is before the end of each sequence, (B, 1) each; None: all are."""
    known = build.value(lengths)
    if known is not None and (known >= steps).all():
        return None
    at = build.constant(np.arange(steps).reshape(-1, 1), np.int32)
    ends = build.reshape(build.cast(lengths, np.int32), 1, batch)
    before = build.reshape(build.op("Less", at, ends), steps * batch, 1)
    return build.split(before, [batch] * steps, axis=0)


def _one(build: Builder, stacked: str, direction: int) -> str:
    """Return one direction of a tensor that has them first."""
    if not stacked:
        return ""
    count = build.shape(stacked)[0]
    return build.split(stacked, [1] * count, axis=0)[direction]


def _transposed(build: Builder, w: str, rows: int, columns: int) -> str:
    return build.transpose(build.reshape(w, rows, columns), 1, 0)


def _halves(build: Builder, b: str, direction: int) -> list[str]:
    """Return what is added to the inputs' product and to the state's, (gates H,) each."""
    size = build.shape(b)[1] // 2
    one = build.reshape(_one(build, b, direction), 2 * size)
    return build.split(one, [size, size], axis=0)


def _resets_last(node: onnx.NodeProto) -> bool:
    return bool(attributes_of(node).get("linear_before_reset", 0))


def _input_bias(build: Builder, b: str, direction: int, node: onnx.NodeProto) -> str:
    """Return the bias of the inputs' product: all of it, where the state's has none of its own."""
    if not b:
        return ""
    of_inputs, of_state = _halves(build, b, direction)
    if node.op_type == "GRU" and _resets_last(node):
        return of_inputs
    return build.op("Add", of_inputs, of_state)


def _cell(
    node: onnx.NodeProto,
    given: dict[str, Any],
    build: Builder,
    direction: int,
    size: int,
    weights: tuple[str, str, str],
) -> _Cell:
    r, b, p = weights
    kind = str(node.op_type)
    matrix = _transposed(build, _one(build, r, direction), _GATES[kind] * size, size)
    resets_last = kind == "GRU" and _resets_last(node)
    recurrence, bias = [matrix], [""]
    if resets_last and b:
        bias = [_halves(build, b, direction)[1]]
    if kind == "GRU" and not resets_last:
        recurrence = build.split(matrix, [2 * size, size], axis=1)
        bias = ["", ""]
    peepholes = []
    if p:
        one = build.reshape(_one(build, p, direction), 3 * size)
        peepholes = build.split(one, [size] * 3, axis=0)
    return _Cell(
        kind,
        build,
        size,
        recurrence,
        bias,
        peepholes,
        _activations(given, build, kind, direction),
        float(given.get("clip", 0.0)),
        bool(given.get("input_forget", 0)),
        resets_last,
    )


def _activations(
    given: dict[str, Any], build: Builder, kind: str, direction: int
) -> list[Callable[[str], str]]:
    """Return the activations of one direction; alpha and beta are listed for those that take it."""
    count = len(_ACTIVATIONS[kind])
    names = [n.lower() for n in given.get("activations", ())] or [
        n.lower() for n in _ACTIVATIONS[kind] * 2
    ]
    left = {key: list(given.get(f"activation_{key}", ())) for key in ("alpha", "beta")}
    found = []
    for name in names:
        if name not in _OPERATORS and name not in _PARAMETERS:
            raise ValueError(f"the activation {name} is not known; export it with another one")
        values = {
            key: left[key].pop(0) if left[key] else default
            for key, default in _PARAMETERS.get(name, {}).items()
        }
        found.append(_activation(build, name, values))
    return found[direction * count : (direction + 1) * count]


def _activation(build: Builder, name: str, values: dict[str, float]) -> Callable[[str], str]:
    def scaled(factor: float, x: str) -> str:
        return build.op("Mul", build.constant(factor, np.float32), x)

    def apply(x: str) -> str:
        if name == "affine":
            shift = build.constant(values["beta"], np.float32)
            return build.op("Add", scaled(values["alpha"], x), shift)
        if name == "scaledtanh":
            return scaled(values["alpha"], build.op("Tanh", scaled(values["beta"], x)))
        return build.op(_OPERATORS[name], x, **values)

    return apply
