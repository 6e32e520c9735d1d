"""A product by cuBLASLt: the call as a value, and what carries it out.

cuBLASLt counts by columns: a matrix of `rows` x `columns` has its columns `stride` elements apart.
Row-major C = A B is column-major C' = B' A', so what is `a` here is a task's right operand.

    D = epilogue(alpha op(A) op(B) + beta C + bias), the bias one value for each row of D

Names and numbers are those of cublasLt.h, library_types.h and cublas_api.h of CUDA 13.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunerd.libraries import packages
from tunerd.libraries.packages import LibraryCallError
from tunerd.vocabulary import BF16, CUBLASLT, FP16, FP32, TF32

RANKS = 24  # algorithms that the heuristic is asked for
WORKSPACE_BYTES = 32 << 20  # what cuBLAS itself takes on Hopper (cuBLAS manual, 2.1.7)
ALIGNMENT = 64  # bytes; of every tensor that TVM takes

_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_COMPUTE = {  # cublasComputeType_t, by the types of operands and the precision of the product
    ("float32", FP32): 68,  # 32F
    ("float32", TF32): 77,  # 32F_FAST_TF32
    ("float32", FP16): 74,  # 32F_FAST_16F
    ("float32", BF16): 75,  # 32F_FAST_16BF
    ("float16", FP16): 68,
    ("bfloat16", BF16): 68,
}
_RELU, _BIAS, _GELU = 2, 4, 32  # cublasLtEpilogue_t, which adds up; 1 is none
_ACTIVATIONS = {"": 0, "relu": _RELU, "gelu_tanh": _GELU}
ACTIVATIONS = tuple(_ACTIVATIONS)
# cublasLtMatmulDescAttributes_t
_TRANS_A, _TRANS_B, _EPILOGUE, _BIAS_POINTER, _SM_COUNT_TARGET, _BIAS_TYPE = 3, 4, 7, 8, 15, 26
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # cublasLtMatrixLayoutAttribute_t
# cublasLtMatmulPreferenceAttributes_t; the four alignments follow each other
_MAX_WORKSPACE, _MIN_ALIGNMENT_A = 1, 5
_SOME_POINTER = 1 << 20  # the heuristic of an epilogue with a bias wants one, and does not read it


@dataclass(frozen=True)
class Matrix:
    """How a matrix lies, by columns. Sizes and strides are in elements."""

    dtype: str
    rows: int
    columns: int
    stride: int  # between columns
    apart: int = 0  # between the matrices of a batch


@dataclass(frozen=True)
class MatmulCall:
    """A product, and which algorithm computes it.

    Its pointers are a, b, then c where it has one, then the bias where it has one, d, and the
    workspace.
    """

    a: Matrix
    b: Matrix
    d: Matrix
    c: Matrix | None = None
    transposed: tuple[bool, bool] = (False, False)  # a, b
    batch: int = 1
    precision: str = FP32
    activation: str = ""
    has_bias: bool = False
    alpha: float = 1.0
    sms: int = 0  # that the heuristic is to count on; 0: those of the device
    rank: int = 0  # among the heuristic's algorithms

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @staticmethod
    def parse(text: str) -> MatmulCall:
        """Read the text of a call; raises ValueError, KeyError or TypeError for what is none."""
        said = json.loads(text)
        a, b, d = (Matrix(**said.pop(name)) for name in "abd")
        c = said.pop("c")
        of_a, of_b = said.pop("transposed")
        return MatmulCall(
            a=a, b=b, d=d, c=Matrix(**c) if c else None, transposed=(of_a, of_b), **said
        )

    @property
    def problem(self) -> str | None:
        """Say why cuBLASLt has no such product, None where it may have."""
        types = {m.dtype for m in (self.a, self.b)}
        if len(types) > 1 or (self.a.dtype, self.precision) not in _COMPUTE:
            return f"it multiplies {' and '.join(sorted(types))} in {self.precision}"
        if self.d.dtype not in (self.a.dtype, "float32"):
            return f"its result is {self.d.dtype}, of {self.a.dtype}"
        return None


class Plan:
    """A call that is ready: its descriptors, and the algorithm. Lives as long as the process."""

    def __init__(self, call: MatmulCall, handle: Handle) -> None:
        """Ask the heuristic; raises LibraryCallError where it has no algorithm of that rank."""
        self._call, self._library = call, handle.library
        self._handle = handle.value
        self._description = self._described()
        c = call.c or call.d
        self._layouts = [self._layout(m) for m in (call.a, call.b, c, call.d)]
        found = self._algorithms()
        if call.rank >= len(found):
            raise LibraryCallError(
                f"cuBLASLt names {len(found)} algorithms for this product and GPU, and number "
                f"{call.rank + 1} is asked for"
            )
        self._algorithm = found[call.rank]
        self._alpha = ctypes.c_float(call.alpha)
        self._beta = ctypes.c_float(0.0 if call.c is None else 1.0)
        self._turn = threading.Lock()  # the bias is said in the description

    def __call__(self, pointers: Sequence[int | None], stream: int) -> None:
        """Queue the product on a stream."""
        with self._turn:
            self._multiply(pointers, stream)

    def _multiply(self, pointers: Sequence[int | None], stream: int) -> None:
        rest = list(pointers)
        a, b = rest.pop(0), rest.pop(0)
        c = rest.pop(0) if self._call.c else None
        if self._call.has_bias:
            self._describe(_BIAS_POINTER, ctypes.c_void_p(rest.pop(0)))
        d, workspace = rest
        pointer = ctypes.c_void_p
        layouts = self._layouts
        self._checked(
            self._library.cublasLtMatmul(
                self._handle,
                self._description,
                ctypes.byref(self._alpha),
                pointer(a),
                layouts[0],
                pointer(b),
                layouts[1],
                ctypes.byref(self._beta),
                pointer(d if c is None else c),
                layouts[2],
                pointer(d),
                layouts[3],
                ctypes.byref(self._algorithm.algo),
                pointer(workspace),
                ctypes.c_size_t(WORKSPACE_BYTES),
                pointer(stream),
            )
        )

    def _described(self) -> ctypes.c_void_p:
        call = self._call
        made = ctypes.c_void_p()
        self._description = made
        compute = _COMPUTE[call.a.dtype, call.precision]
        scale = _TYPES["float32"]
        self._checked(self._library.cublasLtMatmulDescCreate(ctypes.byref(made), compute, scale))
        for attribute, is_transposed in zip((_TRANS_A, _TRANS_B), call.transposed, strict=True):
            self._describe(attribute, ctypes.c_int32(int(is_transposed)))
        epilogue = _ACTIVATIONS[call.activation] | (_BIAS if call.has_bias else 0)
        self._describe(_EPILOGUE, ctypes.c_uint32(epilogue or 1))
        if call.has_bias:
            self._describe(_BIAS_TYPE, ctypes.c_int32(_TYPES[call.d.dtype]))
            self._describe(_BIAS_POINTER, ctypes.c_void_p(_SOME_POINTER))
        if call.sms:
            self._describe(_SM_COUNT_TARGET, ctypes.c_int32(call.sms))
        return made

    def _describe(self, attribute: int, value: Any) -> None:
        self._checked(
            self._library.cublasLtMatmulDescSetAttribute(
                self._description,
                attribute,
                ctypes.byref(value),
                ctypes.c_size_t(ctypes.sizeof(value)),
            )
        )

    def _layout(self, matrix: Matrix) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._checked(
            self._library.cublasLtMatrixLayoutCreate(
                ctypes.byref(made),
                _TYPES[matrix.dtype],
                ctypes.c_uint64(matrix.rows),
                ctypes.c_uint64(matrix.columns),
                ctypes.c_int64(matrix.stride),
            )
        )
        for attribute, value in (
            (_BATCH_COUNT, ctypes.c_int32(self._call.batch)),
            (_BATCH_STRIDE, ctypes.c_int64(matrix.apart)),
        ):
            self._checked(
                self._library.cublasLtMatrixLayoutSetAttribute(
                    made, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                )
            )
        return made

    def _algorithms(self) -> list[HeuristicResult]:
        preference = ctypes.c_void_p()
        library = self._library
        self._checked(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        limits: list[tuple[int, Any]] = [(_MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))]
        limits += [(_MIN_ALIGNMENT_A + i, ctypes.c_uint32(ALIGNMENT)) for i in range(4)]
        for attribute, value in limits:
            self._checked(
                library.cublasLtMatmulPreferenceSetAttribute(
                    preference,
                    attribute,
                    ctypes.byref(value),
                    ctypes.c_size_t(ctypes.sizeof(value)),
                )
            )
        results = (HeuristicResult * RANKS)()
        count = ctypes.c_int()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            self._description,
            *self._layouts,
            preference,
            RANKS,
            results,
            ctypes.byref(count),
        )
        self._checked(library.cublasLtMatmulPreferenceDestroy(preference))
        self._checked(status)
        return [results[i] for i in range(count.value) if results[i].state == 0]

    def _checked(self, status: int) -> None:
        checked(self._library, status)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Handle:
    """cuBLASLt on the current device."""

    def __init__(self) -> None:
        self.library = packages.load(CUBLASLT)
        self.value = ctypes.c_void_p()
        checked(self.library, self.library.cublasLtCreate(ctypes.byref(self.value)))

    def plan(self, text: str) -> Plan:
        return Plan(MatmulCall.parse(text), self)


def checked(library: Any, status: int) -> None:
    """Raise LibraryCallError for a cublasStatus_t that is no success."""
    if status:
        name = library.cublasLtGetStatusString
        name.restype = ctypes.c_char_p
        raise LibraryCallError(f"cuBLASLt: {name(status).decode()} (status {status})")
