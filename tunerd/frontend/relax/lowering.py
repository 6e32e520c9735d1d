"""Model -> Lowered: the graph as calls of kernels, with the weights outside."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.errors import ModelError, TunerdError
from tunerd.frontend.onnx.file import counted
from tunerd.frontend.onnx.reference import last_line
from tunerd.frontend.relax.importing import WITHOUT_CHOICE
from tunerd.system.arrays import Array, rounded
from tunerd.vocabulary import BF16, FP16, TF32, Arrays, Model, TargetSpec, architecture
from tunerd.vocabulary.model import INTEGER_PRODUCTS

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

log = logging.getLogger(__name__)

# Channels last makes the innermost loop of a convolution contiguous in data, weights and output.
_CONV_LAYOUTS = {"relax.nn.conv2d": ["NHWC", "HWIO"]}


_TENSOR_CORES = frozenset((TF32, FP16, BF16))  # precisions of their products


@dataclass(frozen=True)
class Lowered:
    """A Relax module whose `main` calls one TIR function per kernel.

    `main` takes the model's inputs, then one tensor per entry of `weights`, in that order; the
    parameters have the names of the entries. Weights stay outside of compiled code because a
    library that embeds them takes their size, twice, in every build.
    """

    mod_json: str = field(repr=False)  # as TVM writes it, which another process can read
    weights: Arrays = field(repr=False)
    num_inputs: int
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def mod(self) -> IRModule:
        import tvm

        return tvm.ir.load_json(self.mod_json)


def lower(model: Model, target: TargetSpec) -> Lowered:
    """Import `model` into TVM, optimize the graph for `target` and fuse it into kernels.

    Raises ModelError that names the operators which TVM cannot take, or fails on.
    """
    from tunerd.frontend.relax.blame import guilty_node

    make_target(target)  # a target that is none is no model's fault
    try:
        return _lower(model, target)
    except (TunerdError, MemoryError):
        raise
    except Exception as error:  # any kind: passes and kernels of any operator
        log.info("lowering failed", exc_info=True)
        node = guilty_node(model, lambda alone: _lower(alone, target))
        raise ModelError(
            f"TVM cannot lower {node or 'the graph'} of {model.name}: {last_line(error)}; export "
            f"the model without {'this operator' if node else 'what it does not know'}"
        ) from error


def _lower(model: Model, target: TargetSpec) -> Lowered:
    import tvm

    from tunerd.frontend.relax.constants import hoist_constants
    from tunerd.frontend.relax.permutes import sink_permutes
    from tunerd.frontend.relax.precision import DTYPES, store_in
    from tunerd.frontend.relax.slices import gather_slices
    from tunerd.frontend.relax.widening import widen

    tvm_target = make_target(target)
    exported = model.graph.to_relax(model.name)
    wide = widen(exported) if model.precision else exported
    with tvm_target, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clean = _run(wide, _clean_up(has_integers=_has_integer_cores(target, model.precision)))
        preferred, notes = _channels_last(clean)
        preferred = gather_slices(sink_permutes(preferred))
        fuse = _fuse(target, model.precision)
        mod = _run(preferred, fuse)
        left = _not_lowered(mod)
        if left and preferred is not clean:
            notes = (f"convolutions stay in NCHW: TVM has no NHWC kernel for {counted(left)}",)
            mod = _run(clean, fuse)
            left = _not_lowered(mod)
        if branches := _branches(mod):
            raise ModelError(
                f"{branches} of the model's If operators depend on the values of the inputs; only "
                f"models that always run the same kernels can be tuned, so {WITHOUT_CHOICE}"
            )
        if left:
            raise ModelError(
                f"TVM has no kernel of fixed shape for these operators of {model.name}: "
                f"{counted(left)}; export the model without them"
            )
        _require_output_types(mod, model)
        if wide is not exported:
            notes = (*notes, "operators and weights of 16 bits are widened to fp32")
        if attentions := _calls(mod, "attention"):
            notes = (*notes, f"{attentions} attentions are one kernel each, from Q, K and V on")
        if norms := _calls(mod, "norm_matmul"):
            notes = (*notes, f"{norms} products compute the layer norms of what they read")
        if products := _calls(mod, INTEGER_PRODUCTS):
            notes = (*notes, f"{products} products are computed in integers of 8 bits")
        mod, weights = hoist_constants(mod, num_inputs=len(model.inputs))
        if model.precision in DTYPES:
            mod, weights, stored = store_in(
                mod, weights, model.precision, inputs=[t.name for t in model.inputs]
            )
            notes = (*notes, *stored)
        if model.precision == TF32:
            weights = {name: _tf32(array) for name, array in weights.items()}
            notes = (*notes, "weights of several dimensions are rounded to TF32")
    return Lowered(tvm.ir.save_json(mod), weights, len(model.inputs), notes)


def _tf32(weight: Array) -> Array:
    """Return a weight as tensor cores take it: they cut bits off, which is no rounding.

    One of one dimension is none of a product's.
    """
    is_operand = weight.ndim > 1 and weight.dtype == np.float32
    return rounded(weight, TF32) if is_operand else weight


def import_all() -> None:
    """Import what simplifying and lowering a model takes."""
    for name in ("onnx", "onnxruntime", "onnxslim", "tvm.relax.frontend.onnx", "tvm.tirx"):
        importlib.import_module(name)


def make_target(target: TargetSpec) -> Target:
    """Return TVM's object for a target; it needs no such device on this machine."""
    import json

    import tvm

    return tvm.target.Target(json.loads(target.json))


def _require_output_types(mod: IRModule, model: Model) -> None:
    """Raise ModelError where `main` gives other types or shapes than the model."""
    from tvm import relax
    from tvm.tirx import IntImm

    returned = mod["main"].ret_ty
    types = returned.fields if isinstance(returned, relax.TupleType) else [returned]
    for spec, got in zip(model.outputs, types, strict=True):
        expected = f"{spec.dtype}{list(spec.shape)}"
        if not isinstance(got, relax.TensorType) or not isinstance(got.shape, relax.ShapeExpr):
            raise ModelError(
                f"TVM imports output '{spec.name}' of {model.name} as {got}, and in "
                f"{model.graph.reference} it is {expected}; only models of fixed shapes can be "
                "tuned, so export the model differently"
            )
        found = f"{got.dtype}{[int(d) if isinstance(d, IntImm) else str(d) for d in got.shape]}"
        if found != expected:
            raise ModelError(
                f"TVM imports {model.name} wrongly: its output '{spec.name}' would be {found}, "
                f"and in {model.graph.reference} it is {expected}; export the model differently"
            )


# --- passes ------------------------------------------------------------------------------------


def _run(mod: IRModule, passes: Sequence[Callable[[IRModule], IRModule]]) -> IRModule:
    for each in passes:
        mod = each(mod)
    return mod


def _clean_up(*, has_integers: bool) -> list[Callable[[IRModule], IRModule]]:
    from tvm.relax import transform as rt

    from tunerd.frontend.relax.constants import fold_constants, remove_redundant_reshapes
    from tunerd.frontend.relax.merging import merge_products
    from tunerd.frontend.relax.powers import expand_powers
    from tunerd.frontend.relax.quantizers import expand_quantizers
    from tunerd.frontend.relax.quantizing import gather_quantizers, quantize_parts, store_int8

    quantizers = [gather_quantizers, rt.EliminateCommonSubexpr(), merge_products, store_int8]
    return [
        rt.DecomposeOpsForInference(),
        rt.CanonicalizeBindings(),
        *(quantizers if has_integers else []),
        quantize_parts,
        expand_powers,
        functools.partial(expand_quantizers, keeps_zeros=has_integers),
        fold_constants,
        rt.EliminateCommonSubexpr(),
        remove_redundant_reshapes,
        rt.DeadCodeElimination(),
    ]


def _channels_last(mod: IRModule) -> tuple[IRModule, tuple[str, ...]]:
    """Convert convolutions and what is between them to NHWC, unless that costs more than it gains.

    An operator that knows one layout only gets a transpose on either side.
    """
    import tvm
    from tvm.relax import transform as rt

    from tunerd.frontend.relax.constants import (
        fold_constants,
        idle_permutes_to_reshapes,
        positive_axes,
        remove_redundant_reshapes,
        second_operands,
    )

    tidy = [
        rt.CanonicalizeBindings(),
        fold_constants,
        idle_permutes_to_reshapes,
        remove_redundant_reshapes,
        rt.EliminateCommonSubexpr(),
        rt.DeadCodeElimination(),
    ]
    convolutions = _count(mod, "relax.nn.conv2d")
    if not convolutions:
        return mod, ()
    try:
        converted = _run(
            mod, [positive_axes, second_operands, rt.ConvertLayout(_CONV_LAYOUTS), *tidy]
        )
    except tvm.error.InternalError as error:  # of an operator whose layout rule is wrong
        log.info("NHWC failed", exc_info=True)
        return mod, (f"convolutions stay in NCHW: TVM cannot convert them: {last_line(error)}",)
    added = _count(converted, "relax.permute_dims") - _count(mod, "relax.permute_dims")
    if added > 2 + convolutions:
        return mod, (f"convolutions stay in NCHW: NHWC would add {added} transposes",)
    return converted, ()


def _fuse(target: TargetSpec, precision: str) -> list[Callable[[IRModule], IRModule]]:
    from tvm.relax import transform as rt

    from tunerd.frontend.relax.constants import fold_shapes
    from tunerd.frontend.relax.cuts import cut_out_parts

    return [
        fold_shapes,
        *(_for_gpus(target, precision) if target.is_cuda else _for_cpus(target)),
        cut_out_parts,
        rt.LegalizeOps(),
        rt.AnnotateTIROpPattern(),
        rt.FoldConstant(),
        rt.FuseOps(),
        rt.FuseTIR(),
        rt.DeadCodeElimination(),
        # After fusion, so that a reshape joins its neighbours where it can; what is left of them
        # becomes a view.
        rt.RewriteDataflowReshape(),
        rt.DeadCodeElimination(),
    ]


def _for_cpus(target: TargetSpec) -> list[Callable[[IRModule], IRModule]]:
    from tunerd.frontend.relax.channels import fill_vectors
    from tunerd.frontend.relax.fast_math import use_fast_math
    from tunerd.frontend.relax.integers import VNNI, has_instructions, use_integers

    has_integers = has_instructions(make_target(target))
    integers = [functools.partial(use_integers, form=VNNI)] if has_integers else []
    return [fill_vectors, *integers, use_fast_math]


def _for_gpus(target: TargetSpec, precision: str) -> list[Callable[[IRModule], IRModule]]:
    from tunerd.frontend.relax.attention import fuse_attention
    from tunerd.frontend.relax.constants import (
        idle_permutes_to_reshapes,
        remove_redundant_reshapes,
    )
    from tunerd.frontend.relax.hoisting import hoist_moves_of_rows, sink_moves_of_rows
    from tunerd.frontend.relax.integers import TENSOR_CORES, use_integers
    from tunerd.frontend.relax.norms import fold_norms
    from tunerd.frontend.relax.operands import read_transposed
    from tunerd.frontend.relax.precision import DTYPES

    # Without Triton there is no template of an attention, and its parts are faster; so with norms.
    has_template = _has_template(precision)
    attention = [fuse_attention] if has_template else []
    norms: list[Callable[[IRModule], IRModule]] = []
    integers: list[Callable[[IRModule], IRModule]] = []
    if _has_integer_cores(target, precision):
        integers = [functools.partial(use_integers, form=TENSOR_CORES)]
    if has_template and precision in DTYPES and _has_async_copies(target):
        norms = [functools.partial(fold_norms, precision=precision)]

    def moved(mod: IRModule, *, transposes: bool) -> IRModule:
        if transposes:
            mod = remove_redundant_reshapes(hoist_moves_of_rows(mod, transposes=True))
        mod = remove_redundant_reshapes(sink_moves_of_rows(mod, transposes=transposes))
        return _run(hoist_moves_of_rows(mod), attention)

    def with_fewest_transposes(mod: IRModule) -> IRModule:
        plain = moved(mod, transposes=False)
        left = _count(plain, "relax.permute_dims")
        if not left or not _calls(plain, "attention"):
            return plain
        other = moved(mod, transposes=True)
        return other if _count(other, "relax.permute_dims") < left else plain

    return [
        idle_permutes_to_reshapes,
        remove_redundant_reshapes,
        with_fewest_transposes,
        remove_redundant_reshapes,
        *norms,
        *integers,
        *([remove_redundant_reshapes] if integers else []),
        read_transposed,
    ]


def _has_template(precision: str) -> bool:
    return precision in _TENSOR_CORES and importlib.util.find_spec("triton") is not None


def _has_integer_cores(target: TargetSpec, precision: str) -> bool:
    """Whether products of 8 bits are computed by tensor cores."""
    return target.is_cuda and _has_template(precision) and _has_async_copies(target)


def _has_async_copies(target: TargetSpec) -> bool:
    """Whether a GPU is of capability 8.0 or more, as templates of products want it."""
    version = architecture(target.json).removeprefix("sm_").rstrip("af")
    return version.isdecimal() and int(version) >= 80


def _count(mod: IRModule, op: str) -> int:
    from tvm import relax

    found = 0

    def visit(expr: relax.Expr) -> None:
        nonlocal found
        found += isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == op

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


def _calls(mod: IRModule, name: str) -> int:
    """Count the calls of kernels with `name` in theirs."""
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    kernels = [v for v in values if getattr(getattr(v, "op", None), "name", "") == "relax.call_tir"]
    return sum(name in str(kernel.args[0].name_hint) for kernel in kernels)


def _branches(mod: IRModule) -> int:
    from tvm import relax

    found = 0

    def visit(expr: relax.Expr) -> None:
        nonlocal found
        found += isinstance(expr, relax.If)

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


def _not_lowered(mod: IRModule) -> Counter[str]:
    """Count the operators that have no kernel in this layout, or for a shape known only later."""
    from tvm import relax

    left: Counter[str] = Counter()
    allowed = {"relax.call_tir", "relax.reshape"}

    def visit(expr: relax.Expr) -> None:
        name = getattr(expr.op, "name", "") if isinstance(expr, relax.Call) else ""
        if name.startswith("relax.") and name not in allowed:
            left[name.removeprefix("relax.")] += 1

    relax.analysis.post_order_visit(mod["main"], visit)
    return left


# --- what an inference touches ----------------------------------------------------------------


def touched_bytes(lowered: Lowered) -> int:
    """Return how many bytes an inference reads and writes: all weights, and its activations.

    Memory of activations is used again, so that the most count that are needed at any time.
    """
    from tvm import relax

    made: dict[Any, int] = {}  # bytes, by the variable
    owner: dict[Any, Any] = {}  # of what another variable holds
    last_read: dict[Any, int] = {}
    bindings = [b for block in lowered.mod["main"].body.blocks for b in block.bindings]
    for step, binding in enumerate(bindings):
        var, value = binding.var, binding.value
        source = value.tuple_value if isinstance(value, relax.TupleGetItem) else value
        if source in owner:
            owner[var] = owner[source]
        else:
            owner[var], made[var] = var, _type_bytes(var.ty)

        def read(expr: Any, step: int = step) -> None:
            if isinstance(expr, relax.Var) and expr in owner:
                last_read[owner[expr]] = step

        relax.analysis.post_order_visit(value, read)
    freed = [0] * (len(bindings) + 1)
    for var, size in made.items():
        freed[last_read.get(var, len(bindings))] += size
    held = most = 0
    for step, binding in enumerate(bindings):
        held += made.get(binding.var, 0)
        most = max(most, held)
        held -= freed[step]
    return most + sum(weight.nbytes for weight in lowered.weights.values())


def _type_bytes(of: Any) -> int:
    """Return the bytes of a value of fixed shape, or of several."""
    from tvm import relax

    if isinstance(of, relax.TupleType):
        return sum(map(_type_bytes, of.fields))
    if not isinstance(of, relax.TensorType):
        return 0
    return math.prod(int(d) for d in of.shape) * np.dtype(str(of.dtype)).itemsize
