"""Instructions that multiply bytes: AVX-512 VNNI's, and AMX's with what its tiles need."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.ir import IRModule

_X86 = "llvm.x86."


def dot_products(sums: Any, values: Any, weights: Any) -> Any:
    """Return sums, int32x16, with products added: VPDPBUSD adds four to each.

    values: uint8x4, the same for all sums.
    weights: int8x64, four for each sum.
    """
    from tvm import tirx

    everywhere = tirx.Broadcast(tirx.reinterpret("int32", values), 16)
    # Since LLVM 21 it takes bytes, and refuses the same as int32.
    return tirx.call_llvm_pure_intrin(
        "int32x16", f"{_X86}avx512.vpdpbusd.512",
        sums, tirx.reinterpret("uint8x64", everywhere), weights,
    )  # fmt: skip


def begin_tiles(config: Any) -> Any:
    """Return what gives this thread tiles. config: the address of what `tile_config` returns."""
    return _amx("ldtilecfg", config)


def end_tiles() -> Any:
    return _amx("tilerelease")


def zero_tile(tile: int) -> Any:
    return _amx("tilezero", _tile(tile))


def load_tile(tile: int, address: Any, row_bytes: int) -> Any:
    """Return what loads a tile. row_bytes: from one of its rows to the next one in memory."""
    return _amx("tileloadd64", _tile(tile), address, _bytes(row_bytes))


def store_tile(tile: int, address: Any, row_bytes: int) -> Any:
    return _amx("tilestored64", _tile(tile), address, _bytes(row_bytes))


def add_products(sums: int, values: int, weights: int) -> Any:
    """Return what adds the product of two tiles to a third one.

    sums: int32 [rows, 16].
    values: uint8 [rows, depth].
    weights: int8 [depth / 4, 16, 4].
    """
    return _amx("tdpbusd", *map(_tile, (sums, values, weights)))


def tile_config(shapes: Mapping[int, tuple[int, int]]) -> list[int]:
    """Return the 16 numbers, int32, that say how many rows a tile has, and bytes of a row."""
    config = bytearray([1, *[0] * 63])  # palette 1
    for tile, (rows, row_bytes) in shapes.items():
        config[16 + 2 * tile], config[48 + tile] = row_bytes, rows
    return list(struct.unpack("<16i", config))


def uses_tiles(mod: IRModule) -> bool:
    """Say whether a module's functions use AMX."""
    from tvm import ir, tirx
    from tvm.target import codegen
    from tvm_ffi import structural_walk

    begin = int(codegen.llvm_lookup_intrinsic_id(f"{_X86}ldtilecfg"))
    called = ir.Op.get("tirx.call_llvm_intrin")
    found: list[bool] = []

    def visit(call: Any) -> None:
        if call.op.same_as(called):
            found.append(int(call.args[0].value) == begin)

    for _, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc):
            structural_walk(function.body, (ir.Call, visit))
    return any(found)


def _amx(name: str, *operands: Any) -> Any:
    from tvm import tirx

    return tirx.Evaluate(tirx.call_llvm_intrin("void", _X86 + name, *operands))


def _tile(number: int) -> Any:
    from tvm import tirx

    return tirx.IntImm("int8", number)


def _bytes(count: int) -> Any:
    from tvm import tirx

    return tirx.IntImm("int64", count)
