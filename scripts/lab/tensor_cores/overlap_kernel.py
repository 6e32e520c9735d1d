"""The kernel of chains whose launches overlap: a convolution, or a product, and its operations."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MODES = ("serial", "early", "late", "prefetch")
WORKSPACE = 32 << 20  # fp32 values for split-K


@triton.jit  # type: ignore[untyped-decorator]
def conv(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    bias_ptr,
    res_ptr,
    out_ptr,
    ws_ptr,
    locks_ptr,
    M,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    HAS_RES: tl.constexpr,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    MODE: tl.constexpr,
):
    """Convolve NHWC by HWIO as an implicit GEMM, with bias, residual and activation.

    A GEMM is a convolution of 1x1. A step of K lies within one tap; the channels of a stem, fewer
    than a step, are taken with a row of taps at once. MODE is an index of MODES.
    """
    pid, split = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    width = 4 * tiles_n
    first = pid // width * 4
    height = min(tiles_m - first, 4)
    tile_m, tile_n = first + pid % width % height, pid % width // height
    offs_m = tile_m * BM + tl.arange(0, BM)
    offs_n = tile_n * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    rows = tl.minimum(offs_m, M - 1)
    cols = tl.max_contiguous(tl.multiple_of(offs_n, BN), BN)
    BY_ROW: tl.constexpr = C % BK != 0
    STEPS: tl.constexpr = (KERNEL * C + BK - 1) // BK if BY_ROW else C // BK
    TAPS: tl.constexpr = KERNEL if BY_ROW else KERNEL * KERNEL
    KT: tl.constexpr = STEPS * TAPS
    PER: tl.constexpr = (KT + SPLIT_K - 1) // SPLIT_K
    begin = split * PER
    end = min(begin + PER, KT)
    if MODE > 0:
        if MODE != 2:
            gdc_launch_dependents()
        if MODE == 3 and not BY_ROW:
            LINES: tl.constexpr = (BN + 63) // 64  # 128 bytes each
            lines = tile_n * BN + tl.arange(0, LINES) * 64
            for kt in range(begin, end):
                at = w_ptr + (kt * BK + offs_k)[:, None] * N + lines[None, :]
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                    "=r,l",
                    [at.to(tl.int64)],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
        gdc_wait()
    image = rows // (OH * OW)
    ih0 = rows // OW % OH * STRIDE - PAD
    iw0 = rows % OW * STRIDE - PAD
    base = ((image * H + ih0) * W + iw0) * C
    acc = tl.zeros((BM, BN), tl.float32)
    for kt in range(begin, end):
        tap, step = kt // STEPS, kt % STEPS
        if BY_ROW:
            r = step * BK + offs_k
            iw = iw0[:, None] + (r // C)[None, :]
            ih = (ih0 + tap)[:, None]
            inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (r < KERNEL * C)[None, :]
            x = tl.load(x_ptr + base[:, None] + tap * (W * C) + r[None, :], mask=inside, other=0.0)
            k = tap * (KERNEL * C) + r
            there = (r < KERNEL * C)[:, None]
            w = tl.load(w_ptr + k[:, None] * N + cols[None, :], mask=there, other=0.0)
        else:
            kh, kw = tap // KERNEL, tap % KERNEL
            c = step * BK + offs_k
            at = x_ptr + (base + (kh * W + kw) * C)[:, None] + c[None, :]
            if KERNEL == 1 and PAD == 0:
                x = tl.load(at)
            else:
                ih, iw = ih0 + kh, iw0 + kw
                inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
                x = tl.load(at, mask=inside[:, None], other=0.0)
            k = kt * BK + offs_k
            w = tl.load(w_ptr + k[:, None] * N + cols[None, :])
        acc = tl.dot(x, w, acc)
    if MODE == 2:
        gdc_launch_dependents()
    last = True
    if SPLIT_K > 1:  # the splits are added in their order, by whoever comes last
        tiles = tiles_m * tiles_n
        at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(ws_ptr + (split * tiles + pid) * (BM * BN) + at, acc)
        tl.debug_barrier()
        last = tl.atomic_add(locks_ptr + pid, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            acc = tl.zeros((BM, BN), tl.float32)
            for s in range(SPLIT_K):
                acc += tl.load(ws_ptr + (s * tiles + pid) * (BM * BN) + at, cache_modifier=".cg")
            tl.store(locks_ptr + pid, 0)
    if last:
        mask = (offs_m < M)[:, None]
        out = offs_m[:, None] * N + cols[None, :]
        acc += tl.load(bias_ptr + cols)[None, :].to(tl.float32)
        if HAS_RES:
            acc += tl.load(res_ptr + out, mask=mask, other=0.0).to(tl.float32)
        if ACT == "relu":
            acc = tl.maximum(acc, 0.0)
        elif ACT == "gelu":
            acc = 0.5 * acc * (1.0 + tl.math.erf(acc * 0.7071067811865476))
        tl.store(out_ptr + out, acc.to(tl.float16), mask=mask)


@dataclass(frozen=True)
class Config:
    bm: int
    bn: int
    bk: int
    split_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Op:
    """One kernel: a convolution of square images, or a GEMM as one of 1x1 over `height` rows."""

    height: int
    width: int
    channels: int
    filters: int
    kernel: int = 1
    stride: int = 1
    pad: int = 0
    has_res: bool = False
    act: str = ""

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def rows(self) -> int:
        return self.out_height * self.out_width

    @property
    def depth(self) -> int:
        return self.kernel * self.kernel * self.channels

    def steps(self, bk: int) -> int:
        if self.channels % bk:
            return self.kernel * math.ceil(self.kernel * self.channels / bk)
        return self.depth // bk

    def constants(self, config: Config, mode: str) -> dict[str, Any]:
        return {
            "H": self.height,
            "W": self.width,
            "C": self.channels,
            "N": self.filters,
            "OH": self.out_height,
            "OW": self.out_width,
            "KERNEL": self.kernel,
            "STRIDE": self.stride,
            "PAD": self.pad,
            "HAS_RES": self.has_res,
            "ACT": self.act,
            "BM": config.bm,
            "BN": config.bn,
            "BK": config.bk,
            "SPLIT_K": config.split_k,
            "MODE": MODES.index(mode),
        }

    def space(self) -> Iterator[Config]:
        """Yield the configurations that fit shared memory and registers."""
        is_stem = self.channels < 16
        for bm in (16, 32, 64, 128):
            for bn in (32, 64, 128, 256):
                if self.filters % bn or not 1024 <= bm * bn <= 128 * 128:
                    continue
                for bk in (32,) if is_stem else (32, 64, 128):
                    if not is_stem and self.channels % bk:
                        continue
                    steps = self.steps(bk)
                    for split_k in (1, 2, 3, 4, 6, 8, 12):
                        if split_k > 1 and steps // split_k < 2:
                            continue
                        for warps in (4, 8) if bm >= 64 else (2, 4):
                            if not 8 <= bm * bn / (32 * warps) <= 128:
                                continue
                            for stages in (2, 3, 4, 5, 6):
                                fits = (stages - 1) * (bm + bn) * bk * 2 <= 200 << 10
                                if fits and stages <= steps // split_k + 2:
                                    yield Config(bm, bn, bk, split_k, warps, stages)

    def guess_secs(self, config: Config, sms: int, batch: int) -> float:
        """Estimate a call: waves over the SMs, and in each a step's arithmetic or its bytes."""
        tiles = math.ceil(batch * self.rows / config.bm) * math.ceil(self.filters / config.bn)
        blocks, steps = tiles * config.split_k, self.steps(config.bk) / config.split_k
        buffers = max(1, config.stages - 1)
        shared = buffers * (config.bm + config.bn) * config.bk * 2
        live = max(1, min(220 * 1024 // shared, 2048 // (32 * config.warps)))
        busy = min(live, math.ceil(blocks / sms))
        full = min(1, config.bm / 64) * min(1, config.bn / 64)
        flop = 2 * config.bm * config.bn * config.bk / (4.0e12 * full)
        mem = (config.bm + config.bn) * config.bk * 2 / 70e9
        step = max(busy * flop, busy * mem, 0.7e-6 / buffers)
        secs = math.ceil(blocks / (sms * busy)) * (1.0e-6 + steps * step) + 2e-6
        if config.split_k > 1:
            secs += 1.2e-6 + 2 * config.split_k * tiles * config.bm * config.bn * 4 / 2e12
        return secs

    def candidates(self, sms: int, batch: int, count: int) -> list[Config]:
        """Return the best by the estimate, two of each tile, and some of the rest by chance."""
        ranked = sorted(self.space(), key=lambda c: self.guess_secs(c, sms, batch))
        chosen: list[Config] = []
        for config in ranked:
            alike = [c for c in chosen if (c.bm, c.bn, c.bk) == (config.bm, config.bn, config.bk)]
            if len(alike) < 3 and len(chosen) < count * 3 // 4:
                chosen.append(config)
        rest = [c for c in ranked[: max(60, len(ranked) // 4)] if c not in chosen]
        random.Random(0).shuffle(rest)
        return (chosen + rest)[:count]
