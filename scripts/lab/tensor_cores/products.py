#!/usr/bin/env python3
"""Compare ways to write matrix products in fp16, at one share of a GPU.

    scripts/lab/tensor_cores/products.py --out FOLDER [--gpu-pct 40] [--only vit]

Times the products of BERT-base (128 tokens) and ViT-B/16 (197 tokens) at batch 1 and 8, and some
1x1 convolutions of ResNet-50 as products: tunerd's template and the variants of it that
product_variants.py names, and torch.matmul, which is cuBLAS or cuBLASLt, with weights of either
layout, the faster one. No bias and no activation.

Everything is compiled first, on all cores and without the GPU; what FOLDER/built has is not
compiled again, and --compile-only ends there. Then one process under an MPS cap verifies each
kernel against fp32 and times it: one CUDA graph of 32 calls, each with weights of its own, which
come from memory, as in a model of more weights than the L2 cache holds (a buffer larger than the
cache is read before each sample); two activations by turns, in the cache. The two fastest cuts of
each kind are finalists, timed again in turns. Writes products.json, with every sample of the
finalists, and products.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, ratio, table, write
from lab.tensor_cores.compare_with_pytorch import mps
from lab.tensor_cores.product_bench import LIBRARY, TURN, Bench, Driver, measured
from lab.tensor_cores.product_variants import KINDS, Kernel, Shape, build_all, facts, tried


def shapes() -> dict[str, list[Shape]]:
    """Return the products by where they are from."""
    found = {}
    for batch in (1, 8):
        for name, tokens in (("BERT-base", 128), ("ViT-B/16", 197)):
            sizes = ((768, 768), (2304, 768), (3072, 768), (768, 3072))
            found[f"{name}, batch {batch}"] = [Shape(batch * tokens, n, k) for n, k in sizes]
    found["ResNet-50, batch 1"] = [
        Shape(3136, 64, 256),
        Shape(3136, 256, 64),
        Shape(196, 1024, 256),
        Shape(49, 2048, 512),
    ]
    return found


def inside(options: argparse.Namespace) -> None:
    """Be the process under the cap; go on where the one before it ended."""
    import torch

    started = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    place = options.out / "found.json"
    found = json.loads(place.read_text()) if place.exists() else {"products": {}, "without": []}
    driver = Driver()
    found["device"], found["torch"] = torch.cuda.get_device_name(), torch.__version__
    found["sms"] = torch.cuda.get_device_properties(0).multi_processor_count
    for name, each in chosen(options.only).items():
        for shape in each:
            label = f"{name}: {shape}"
            if label in found["products"]:
                continue
            bench = Bench(torch, driver, shape)
            variants = list(tried(shape.product(), options.sms, options.count))
            without = frozenset(found["without"])
            found["products"][label] = measured(bench, variants, options.built, without)
            del bench
            torch.cuda.empty_cache()
            found["secs"] = time.monotonic() - started
            write(place, found, indent=None)


def chosen(only: str) -> dict[str, list[Shape]]:
    return {n: s for n, s in shapes().items() if only.lower() in n.lower()}


def shown(products: dict[str, Any]) -> str:
    """Return the best of each kind in us, and how it is beside the template."""
    kinds = (*KINDS, LIBRARY)
    times, cuts = [], []
    for label, found in products.items():
        best = best_of(found["finalists"])
        secs = {kind: each["secs"] for kind, each in best.items()}
        cells = [f"{1e6 * statistics.median(secs[k]):.2f}" if k in secs else "-" for k in kinds]
        ours = [k for k in secs if k != LIBRARY]  # the fastest first
        variants = [k for k in ours if k != "template"]
        gain = rival = "-"
        if variants and "template" in secs:
            gain = f"{ratio(secs['template'], secs[variants[0]])}, {variants[0]}"
        if ours and LIBRARY in secs:
            rival = ratio(secs[LIBRARY], secs[ours[0]])
        times.append([label, *cells, gain, rival])
        cuts.append([label, *(best[k]["cut"] if k in best else "-" for k in kinds), alike(found)])
    heads = ("us, median", *kinds, "template over the best variant", f"{LIBRARY} over ours")
    first = table(heads, times, numbers=range(1, len(heads)))
    second = table(("cut", *kinds, "template over tma, the same cuts"), cuts)
    return f"{first}\n\n{second}\n"


def best_of(finalists: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the fastest of each kind, the fastest kind first."""
    best: dict[str, dict[str, Any]] = {}
    for each in sorted(finalists, key=lambda e: statistics.median(e["secs"])):
        best.setdefault(each["kind"], each)
    return best


def alike(found: dict[str, Any]) -> str:
    """Return how much TMA brings to the same cuts: the median, the least and the most."""
    secs = {(t["kind"], t["cut"]): t["secs"] for t in found["tried"]}
    ratios = [
        each / secs["tma", cut]
        for (kind, cut), each in secs.items()
        if kind == "template" and ("tma", cut) in secs
    ]
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def run_capped(options: argparse.Namespace) -> None:
    """Run the process under the cap; one that a kernel ends goes on without kernels of its kind."""
    place = options.out / "found.json"
    place.unlink(missing_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--inside"]
    for _ in range(6):
        with mps(options.gpu_pct) as env, (options.out / "inside.log").open("a") as log:
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        if not done.returncode:
            return
        turns = [x.removeprefix(TURN) for x in done.stdout.splitlines() if x.startswith(TURN)]
        print(f"the process ended ({done.returncode}) at {turns[-1:]}", file=sys.stderr, flush=True)
        if not turns:
            return
        found = json.loads(place.read_text()) if place.exists() else {"products": {}, "without": []}
        found["without"].append(turns[-1])
        write(place, found, indent=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--built", type=Path, help="compiled kernels; FOLDER/built")
    parser.add_argument("--gpu-pct", type=int, default=40)
    parser.add_argument("--sms", type=int, default=52, help="that the share has, to choose cuts")
    parser.add_argument("--count", type=int, default=12, help="cuts of a product, and those named")
    parser.add_argument("--only", default="", help="of what: a part of a name, such as vit")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.built = options.built or options.out / "built"
    if options.inside:
        inside(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    kernels = [
        (variant, Kernel.of(product, variant))
        for each in chosen(options.only).values()
        for shape in each
        for product in (shape.product(),)
        for variant in tried(product, options.sms, options.count)
    ]
    secs = build_all((k for _, k in kernels), options.built, options.jobs)
    document: dict[str, Any] = {**made_by(), "gpu_pct": options.gpu_pct}
    document |= {"compiled": facts(kernels, options.built), "compile_secs": secs}
    print(json.dumps(document["compiled"], indent=1), f"{secs:.0f} s", file=sys.stderr, flush=True)
    write(options.out / "products.json", document, indent=None)
    if options.compile_only:
        return
    try:
        run_capped(options)
    finally:
        place = options.out / "found.json"
        if place.exists():
            document |= json.loads(place.read_text())
            write(options.out / "products.json", document, indent=None)
            (options.out / "products.txt").write_text(shown(document["products"]))
            print(shown(document["products"]))


if __name__ == "__main__":
    main()
