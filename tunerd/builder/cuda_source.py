"""Split what TVM's CUDA code generator writes into one source per kernel."""

from __future__ import annotations

import re

# All kernels are declared, each on a line of its own, and defined one after the other below.
_KERNEL = r'^extern "C" __global__ void (?:__launch_bounds__\([^\n]*?\) )?(?P<name>\w+)\([^\n]*'
_DECLARED = re.compile(_KERNEL + r";\n", re.MULTILINE)
_DEFINED = re.compile(_KERNEL + r"\{$", re.MULTILINE)
# Wrappers of instructions, such as cp.async, that some of the kernels call.
_HELPER = re.compile(
    r"^__forceinline__ __device__ [^\n]*?(?P<name>\w+)\([^\n]*\{\n.*?^\}\n",
    re.MULTILINE | re.DOTALL,
)


def kernel_sources(source: str) -> dict[str, str]:
    """Return a source for each kernel of `source`, by name; at least one.

    Each has what comes before the first kernel, without the other kernels' declarations and
    without wrappers that it does not call. So the source of one kernel is the same whatever other
    kernels a model has. Raises ValueError where no kernel is found.
    """
    starts = [(found["name"], found.start()) for found in _DEFINED.finditer(source)]
    if not starts:
        raise ValueError("the CUDA source defines no kernel in the form of TVM's code generator")
    head = _DECLARED.sub("", source[: starts[0][1]])
    ends = [start for _, start in starts[1:]] + [len(source)]
    sources = {}
    for (name, start), end in zip(starts, ends, strict=True):
        body = source[start:end]
        sources[name] = _without_idle_helpers(head, body) + body
    return sources


def _without_idle_helpers(head: str, body: str) -> str:
    called = set(re.findall(r"\w+", body))
    return _HELPER.sub(lambda helper: helper[0] if helper["name"] in called else "", head)
