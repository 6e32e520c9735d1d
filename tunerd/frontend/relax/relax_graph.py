"""What a Relax module computes: TVM runs it without schedules and without passes of tunerd's."""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from tunerd.errors import ModelError
from tunerd.frontend.onnx.file import counted
from tunerd.frontend.onnx.memory import (
    RELAX_BYTES_PER_BYTE,
    require_memory_of,
    require_memory_to_lower,
)
from tunerd.frontend.onnx.reference import last_line
from tunerd.frontend.onnx.uncertainty import NUDGES, nudged_by_a_bit
from tunerd.frontend.relax.lowering import make_target
from tunerd.frontend.tensors import require_usable
from tunerd.system.targets import cpu_target_json
from tunerd.vocabulary import Arrays, Behind, Packed, TensorSpec, Ways

if TYPE_CHECKING:
    from tvm import relax
    from tvm.ir import IRModule

SUFFIX = ".relax"


@dataclass(frozen=True)
class RelaxGraph:
    """A Relax module whose function `main` is the model, with its weights as constants."""

    content: str = field(repr=False)  # as tvm.ir.save_json writes it, constants included

    kind: ClassVar[str] = "relax"
    reference: ClassVar[str] = "unscheduled TVM"

    @classmethod
    def of(cls, mod: IRModule) -> Self:
        """Take a module as it is now; ModelError where it cannot be tuned."""
        import tvm

        try:
            graph = cls(str(tvm.ir.save_json(mod)))
        except Exception as error:  # of what it may hold, as a library that was compiled
            raise ModelError(
                f"the Relax module cannot be written: {last_line(error)}; give one that TVM has "
                "not compiled"
            ) from error
        graph._check()
        return graph

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        return cls(content.decode())

    @classmethod
    def from_packed(cls, packed: Packed) -> Self:
        return cls.from_bytes(packed.content)

    def packed(self) -> Packed:
        return Packed(self.to_bytes())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `to_bytes` returned; ModelError where a file holds something else."""
        from tvm.ir import IRModule

        try:
            size = path.stat().st_size
            require_memory_to_lower(f"the model {path}", size, per_byte=RELAX_BYTES_PER_BYTE)
            graph = cls.from_bytes(path.read_bytes())
            if not isinstance(graph.mod, IRModule):
                raise TypeError(f"it holds a {type(graph.mod).__name__}")
        except ModelError:
            raise
        except OSError as error:
            raise ModelError(
                f"the model {path} cannot be read: {error.strerror}; give another path"
            ) from error
        except Exception as error:  # no JSON, or none of a module
            raise ModelError(
                f"the model {path} is no Relax module, or was cut short: {last_line(error)}; give "
                "the module to tunerd.tune, which writes such files"
            ) from error
        graph._check()
        return graph

    @functools.cached_property
    def mod(self) -> IRModule:
        import tvm

        return tvm.ir.load_json(self.content)

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 of the graph and the weights, in hex; names of inputs count, others do not."""
        import tvm_ffi
        from tvm import relax
        from tvm.ir import GenericConst

        digest = hashlib.sha256(repr((tvm_ffi.structural_hash(self.mod), self.inputs())).encode())

        def visit(expr: relax.Expr) -> None:
            if isinstance(expr, GenericConst):
                digest.update(expr.value.numpy().tobytes())

        relax.analysis.post_order_visit(self.mod["main"], visit)
        return digest.hexdigest()

    @property
    def file_name(self) -> str:
        return f"relax-{self.digest[:8]}{SUFFIX}"

    def to_bytes(self) -> bytes:
        return self.content.encode()

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the inputs in order; ModelError for those that no artifact can have."""
        return tuple(_spec(p.name, p.ty, "input") for p in self.mod["main"].params)

    def weight_bytes(self) -> int:
        return len(self.content) * 3 // 4  # constants are in base64, and most of it

    def outputs(self) -> tuple[TensorSpec, ...]:
        from tvm import relax

        returned = self.mod["main"].ret_ty
        if not isinstance(returned, relax.TupleType):
            return (_spec("output", returned, "output"),)
        return tuple(_spec(f"output_{i}", of, "output") for i, of in enumerate(returned.fields))

    def _check(self) -> None:
        from tvm import relax

        functions = {var.name_hint: func for var, func in self.mod.functions_items()}
        main = functions.get("main")
        if not isinstance(main, relax.Function):
            others = sorted(n for n, f in functions.items() if isinstance(f, relax.Function))
            raise ModelError(
                f"the Relax module has no function main, only {', '.join(others) or 'kernels'}; "
                "name the one to tune main"
            )
        bound = int((main.attrs or {}).get("num_input", len(main.params)))
        if unbound := [p.name for p in main.params[bound:]]:
            raise ModelError(
                f"weights of the Relax module have no values: {', '.join(unbound)}; bind them with "
                'relax.transform.BindParams("main", {name: array})(mod)'
            )
        names = Counter(spec.name for spec in self.inputs())
        if len(names) < len(main.params) or not main.params or not self.outputs():
            raise ModelError(
                "a Relax module needs inputs of different names and an output, and main has the "
                f"inputs {counted(names) or 'none'} and {len(self.outputs())} outputs"
            )
        self._require_memory()

    def _require_memory(self) -> None:
        """Raise ModelError where this machine's memory holds not what it takes to run."""
        blocks = self.mod["main"].body.blocks if hasattr(self.mod["main"].body, "blocks") else ()
        require_memory_of(
            ((math.prod(i.shape), np.dtype(i.dtype).itemsize) for i in self.inputs()),
            (
                (binding.var.name, size)
                for block in blocks
                for binding in block.bindings
                if (size := _bytes_of(binding.var.ty))
            ),
        )

    def simplified(self, inputs: tuple[TensorSpec, ...]) -> tuple[Self, tuple[str, ...]]:
        return self, ()  # lowering does all of it

    def to_relax(self, model: str) -> IRModule:
        from tvm import relax
        from tvm.ir import Op
        from tvm.relax import transform as rt

        from tunerd.frontend.relax.constants import name_inputs

        mod = self.mod.clone()
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function) and var.name_hint != "main":
                mod.update_func(var, func.without_attr("global_symbol"))  # to have it inlined
        for each in (
            rt.InlinePrivateFunctions(),
            rt.DeadCodeElimination(["main"]),
            rt.ConvertToDataflow(1),
        ):
            mod = each(mod)
        called: Counter[str] = Counter()

        def visit(expr: relax.Expr) -> None:
            if isinstance(expr, relax.Call) and not isinstance(expr.op, Op):
                called[getattr(expr.op, "name_hint", type(expr.op).__name__)] += 1

        relax.analysis.post_order_visit(mod["main"], visit)
        if called:
            raise ModelError(
                f"main of {model} calls functions that tunerd cannot tune: {counted(called)}; "
                "give a module whose main holds all operators itself"
            )
        if narrow := [v.name_hint for v, func in mod.functions_items() if _is_narrow(func)]:
            raise ModelError(
                f"kernels of {model} have sizes that are no int64, which Relax's are: "
                f"{', '.join(sorted(narrow))}; write T.int64(64) in place of 64"
            )
        return name_inputs(mod)

    def with_rounded_weights(self, precision: str) -> Self:
        import tvm

        from tunerd.frontend.relax.constants import round_constants

        return type(self)(str(tvm.ir.save_json(round_constants(self.mod, precision))))

    def behind(self, outputs: Sequence[TensorSpec]) -> Mapping[str, Behind]:
        from tvm import relax

        main = self.mod["main"]
        known = {p: Behind(frozenset({str(p.ty.dtype)}), True) for p in main.params}
        values = {}
        for block in main.body.blocks:
            for binding in block.bindings:
                values[binding.var] = binding.value
                known[binding.var] = _behind(binding.value, known)
        returned = values.get(main.body.body, main.body.body)
        fields = returned.fields if isinstance(returned, relax.Tuple) else [returned] * len(outputs)
        return {o.name: _behind(each, known) for o, each in zip(outputs, fields, strict=True)}

    def ways(self, inputs: Sequence[Arrays]) -> Ways | None:
        """Compute it again with weights and inputs moved by their last bits.

        TVM writes each operator in one way, so that what rounding does is seen in no other.
        """
        import tvm

        from tunerd.frontend.relax.constants import nudge_constants

        others = []
        for seed in range(NUDGES):
            rng = np.random.default_rng(seed)
            moved = type(self)(str(tvm.ir.save_json(nudge_constants(self.mod, rng))))
            given = [{n: nudged_by_a_bit(a, rng) for n, a in each.items()} for each in inputs]
            others.append(tuple(moved.run(given)))
        return Ways(tuple(self.run(inputs)), tuple(others), {})

    def run(self, inputs: Sequence[Arrays]) -> list[Arrays]:
        import tvm
        from tvm import relax

        target = make_target(cpu_target_json(1))
        with target, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Each operator a kernel of its own, as TVM writes it.
            built = relax.build(self.mod, target, relax_pipeline="default_build")
        main = relax.VirtualMachine(built, tvm.cpu())["main"]
        found = []
        for given in inputs:
            result = main(*(tvm.runtime.tensor(given[spec.name]) for spec in self.inputs()))
            tensors = [result] if isinstance(result, tvm.runtime.Tensor) else result
            names = (spec.name for spec in self.outputs())
            found.append({n: each.numpy() for n, each in zip(names, tensors, strict=True)})
        return found


def _spec(name: str, of: relax.Type, role: str) -> TensorSpec:
    from tvm import relax
    from tvm.tirx import IntImm

    what = f"{role} '{name}' of the Relax module"
    if not isinstance(of, relax.TensorType):
        raise ModelError(f"{what} is no tensor; only tensors can be inputs and outputs")
    dims = list(of.shape.values) if isinstance(of.shape, relax.ShapeExpr) else None
    if dims is None or not all(isinstance(d, IntImm) and int(d) > 0 for d in dims):
        said = None if dims is None else [str(getattr(d, "value", d)) for d in dims]
        sizes = "of unknown shape" if said is None else f"of shape [{', '.join(said)}]"
        raise ModelError(
            f"{what} is {sizes}, and every size must be a number above 0; fix those that are "
            "names with relax.transform.BindSymbolicVars({name: size})(mod)"
        )
    require_usable(what, dtype=str(of.dtype), rank=len(dims))
    return TensorSpec(name, tuple(map(int, dims)), str(of.dtype))


def _bytes_of(of: relax.Type) -> int:
    """Return how many bytes a tensor of fixed shape takes, or all of several; else 0."""
    from tvm import relax
    from tvm.tirx import IntImm

    if isinstance(of, relax.TupleType):
        return sum(map(_bytes_of, of.fields))
    dims = of.shape.values if isinstance(getattr(of, "shape", None), relax.ShapeExpr) else []
    if not all(isinstance(d, IntImm) for d in dims):
        return 0
    try:
        return math.prod(map(int, dims)) * np.dtype(str(of.dtype)).itemsize
    except (AttributeError, TypeError):  # no tensor, or of a type that NumPy lacks
        return 0


def _is_narrow(func: Any) -> bool:
    from tvm.tirx import PrimFunc

    return isinstance(func, PrimFunc) and any(
        str(size.ty) != "int64" for param in func.params for size in getattr(param.ty, "shape", ())
    )


def _behind(expr: relax.Expr, known: Mapping[Any, Behind]) -> Behind:
    from tvm import relax
    from tvm.ir import GenericConst

    parts: list[Behind] = []

    def visit(each: relax.Expr) -> None:
        if each in known:
            parts.append(known[each])
        elif isinstance(each, relax.Var | relax.Call | GenericConst):
            dtype = getattr(each.ty, "dtype", None)
            parts.append(Behind(frozenset([] if dtype is None else [str(dtype)]), False))

    relax.analysis.post_order_visit(expr, visit)
    return Behind(
        frozenset().union(*(part.dtypes for part in parts)), any(part.is_input for part in parts)
    )
