"""How long a tiled GPU kernel may take, from its tiling alone.

A roofline of one SM (Williams et al., CACM 2009) with a least time for each round of loads: each
block of threads repeats "load tiles into shared memory, wait, compute". Good for ranks only. On an
H200 cut to 52 SMs it ranks the kernels of a task, 17 of ResNet-50's, with a correlation of 0.80
(Spearman's, the median; scripts/lab/search/batches.py). Its constants were chosen there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Columns = npt.NDArray[np.float64]

_ROUND_SECS = 2e-6  # to load a tile that waits for nothing, and for the block's threads to meet
_BYTES_PER_SEC = 45e9  # that an SM loads, mostly from L2
_FLOPS_PER_SEC = 150e9  # of an SM that waits for nothing, with all that surrounds a multiply-add
_FULL_WARPS = 8  # that keep an SM's four schedulers busy

# CUDA C++ Programming Guide, technical specifications of compute capability 9.0.
_WARP = 32
_BLOCKS_PER_SM = 32
_THREADS_PER_SM = 2048
_SHARED_BYTES_PER_SM = 228 << 10
_SHARED_BYTES_RESERVED = 1 << 10  # of each block
_REGISTERS_PER_SM = 65536
_REGISTERS_PER_THREAD = 255
_OTHER_REGISTERS = 40  # than accumulators and their operands


@dataclass(frozen=True)
class Tiling:
    """What choices of a kernel's tiles amount to; each field has the shape [choice]."""

    blocks: Columns
    threads: Columns  # of a block
    accumulators: Columns  # of a thread
    rounds: Columns  # of loading and computing, one after the other
    multiply_adds: Columns  # of a block and round
    loaded_bytes: Columns  # of a block and round, into shared memory
    copies: int  # of the tiles in shared memory: more than 1 loads while it computes


def estimated_secs(tiling: Tiling, sms: float) -> Columns:
    """Return a rough time of each choice on `sms` SMs, shape [choice]."""
    warps = np.ceil(tiling.threads / _WARP)
    registers = np.minimum(_REGISTERS_PER_THREAD, 1.25 * tiling.accumulators + _OTHER_REGISTERS)
    shared_bytes = tiling.loaded_bytes * tiling.copies + _SHARED_BYTES_RESERVED
    fit = np.minimum.reduce(
        [
            np.full(len(warps), float(_BLOCKS_PER_SM)),
            _THREADS_PER_SM // (warps * _WARP),
            _SHARED_BYTES_PER_SM // shared_bytes,
            _REGISTERS_PER_SM // (warps * _WARP * registers),
        ]
    ).clip(1.0)
    resident = np.minimum(fit, np.ceil(tiling.blocks / sms))  # blocks of an SM at once
    waves = np.ceil(tiling.blocks / (resident * sms))
    used = np.minimum(1.0, resident * warps / _FULL_WARPS) * tiling.threads / (warps * _WARP)
    computing = resident * 2.0 * tiling.multiply_adds / (_FLOPS_PER_SEC * used)
    loading = np.maximum(resident * tiling.loaded_bytes / _BYTES_PER_SEC, _ROUND_SECS)
    both = np.maximum(loading, computing) if tiling.copies > 1 else loading + computing
    return np.asarray(waves * tiling.rounds * both)
