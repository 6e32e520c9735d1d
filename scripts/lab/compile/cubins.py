"""The machine code in cubins and in libraries that hold them."""

from __future__ import annotations

import struct

_EM_CUDA = 190  # e_machine of the ELF files that are cubins


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """Return the .text sections of a cubin by name, to compare what compilations made (elf(5))."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    names = sections[names_index][4]
    found = {}
    for name_at, _type, _flags, _address, offset, length in sections:
        start = names + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text"):
            found[name] = cubin[offset : offset + length]
    return found


def code_bytes(library: bytes) -> int:
    """Return how many bytes of machine code the cubins in a library hold."""
    found, at = 0, 0
    while (at := library.find(b"\x7fELF", at + 1)) >= 0:
        (machine,) = struct.unpack_from("<H", library, at + 0x12)
        if machine == _EM_CUDA:
            found += sum(map(len, machine_code(library[at:]).values()))
    return found
