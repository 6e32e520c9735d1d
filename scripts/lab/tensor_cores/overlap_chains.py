"""The chains of launch_overlap.py: the convolutions of ResNet-50 and the products of BERT-base."""

from __future__ import annotations

from collections.abc import Callable

from lab.tensor_cores.overlap_kernel import Op

Steps = list[tuple[Op, str, str | None, str]]  # operation, its input, its residual, its output


def resnet50() -> Steps:
    """Return the steps of ResNet-50: operation, name of its input, of its residual, of its output.

    The input of the first block is "pooled".
    """
    steps: Steps = [(Op(224, 224, 3, 64, 7, 2, 3, act="relu"), "images", None, "stem")]
    here, size, channels = "pooled", 56, 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            name = f"{stage}.{block}"
            res = here
            first = Op(size, size, channels, width, act="relu")
            steps.append((first, here, None, f"{name}.a"))
            middle = Op(size, size, width, width, 3, stride, 1, act="relu")
            steps.append((middle, f"{name}.a", None, f"{name}.b"))
            if not block:
                down = Op(size, size, channels, 4 * width, 1, stride)
                steps.append((down, here, None, f"{name}.down"))
                res = f"{name}.down"
            size //= stride
            expand = Op(size, size, width, 4 * width, has_res=True, act="relu")
            steps.append((expand, f"{name}.b", res, name))
            here, channels = name, 4 * width
    return steps


def bert_base(tokens: int = 128) -> Steps:
    """Return the GEMMs of BERT-base; what follows qkv reads the first of its values."""
    steps: Steps = []
    here = "images"
    for layer in range(12):
        steps += [
            (Op(tokens, 1, 768, 2304), here, None, f"{layer}.qkv"),
            (Op(tokens, 1, 768, 768, has_res=True), f"{layer}.qkv", here, f"{layer}.out"),
            (Op(tokens, 1, 768, 3072, act="gelu"), f"{layer}.out", None, f"{layer}.up"),
            (Op(tokens, 1, 3072, 768, has_res=True), f"{layer}.up", f"{layer}.out", f"{layer}"),
        ]
        here = f"{layer}"
    return steps


CHAINS: dict[str, Callable[[], Steps]] = {
    "ResNet-50": resnet50,
    "BERT-base": bert_base,
}
