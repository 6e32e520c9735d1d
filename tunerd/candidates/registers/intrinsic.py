"""AVX-512 VNNI's VPDPBUSD as a tensor intrinsic of TVM.

TVM has one, `dot_16x4_vnni`, which hands LLVM's intrinsic vectors of int32. Since LLVM 21 that
takes vectors of 64 bytes, and refuses the others.
"""
# The annotations of TVMScript are no types.
# mypy: disable-error-code="valid-type,untyped-decorator"

from __future__ import annotations

import threading

NAME = "tunerd_vpdpbusd_512"

_lock = threading.Lock()
_registered: list[str] = []


def register_intrinsic() -> str:
    """Register it once per process and return its name."""
    with _lock:
        if not _registered:
            _register()
            _registered.append(NAME)
    return NAME


def _register() -> None:
    from tvm.s_tir import TensorIntrin
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)
    def meaning(
        A: T.Buffer((4,), "uint8", offset_factor=1),
        B: T.Buffer((16, 4), "int8", offset_factor=1),
        C: T.Buffer((16,), "int32", offset_factor=1),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0:16], A[0:4], B[0:16, 0:4])
            T.writes(C[0:16])
            for i in T.serial(0, 16):
                for k in T.serial(0, 4):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        C[vi] = C[vi] + T.cast(A[vk], "int32") * T.cast(B[vi, vk], "int32")

    @T.prim_func(s_tir=True)
    def instruction(
        A: T.Buffer((4,), "uint8", offset_factor=1),
        B: T.Buffer((16, 4), "int8", offset_factor=1),
        C: T.Buffer((16,), "int32", offset_factor=1),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0:16], A[0:4], B[0:16, 0:4])
            T.writes(C[0:16])
            four = T.reinterpret(A.vload([0], "uint8x4"), dtype="int32")
            C[T.ramp(T.int32(0), 1, 16)] = T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id("llvm.x86.avx512.vpdpbusd.512"),
                C.vload([0], dtype="int32x16"),
                T.reinterpret(T.broadcast(four, 16), dtype="uint8x64"),
                B.vload([0, 0], dtype="int8x64"),
                dtype="int32x16",
            )

    TensorIntrin.register(NAME, meaning, instruction)
