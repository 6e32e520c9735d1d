"""PyTorch's ways to run several models of one architecture, as slots of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lab.colocation.queues import Slot
from lab.colocation.tenants import build
from tunerd.runner import pytorch
from tunerd.runner.pytorch import Graph, as_graph


def slot(graph: Graph, stream: Any = None, inferences: int = 1) -> Slot:
    """Return a graph as a slot on a stream, that of its capture if none is given."""
    import torch

    stream = stream or graph.stream

    def launch() -> None:
        with torch.cuda.stream(stream):
            graph()

    return Slot(launch, int(stream.cuda_stream), inferences)


def placed(
    name: str, seed: int, *, batch: int = 1, precision: str, folded: bool = False
) -> tuple[Any, Any]:
    """Return a model and its input on the GPU. folded: batch norms are part of convolutions."""
    model, x = build(name, seed, batch)
    model = fold(model) if folded else model
    model, (x,) = pytorch.placed(model, (x,), precision, device="cuda", channels_last=x.ndim == 4)
    return model, x


def fold(model: Any) -> Any:
    """Return a model in evaluation mode with its batch norms folded into its convolutions."""
    from torch.fx.experimental.optimization import fuse

    return fuse(model)


def compiled(models: Sequence[Any], inputs: Sequence[Any]) -> list[Graph]:
    """Compile one model's code with Inductor, and capture it with the weights of each."""
    quick = compiled_call(models[0])
    pairs = zip(map(state_of, models), inputs, strict=True)
    return [as_graph(quick, each) for each in pairs]


def compiled_call(model: Any) -> Callable[[dict[str, Any], Any], Any]:
    """Return a model's code, compiled by Inductor, as a function of its weights and its input."""
    import copy

    from torch.func import functional_call

    # No weights of its own: those of the first would be compiled as the same, and others again.
    shell = copy.deepcopy(model)

    def call(state: dict[str, Any], x: Any) -> Any:
        return functional_call(shell, state, (x,))

    quick: Callable[[dict[str, Any], Any], Any] = pytorch.compiled(call)
    return quick


def state_of(model: Any) -> dict[str, Any]:
    """Return a model's weights and buffers by their names."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


# --- several models as one ---------------------------------------------------------------------


def vmapped(models: Sequence[Any], inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return one call of all models by torch.func, and its arguments: stacked weights and inputs.

    It returns all outputs, stacked.
    """
    import copy

    import torch
    from torch.func import functional_call, stack_module_state

    torch.backends.mha.set_fastpath_enabled(False)  # which vmap does not know
    parameters, buffers = stack_module_state(list(models))
    shell = copy.deepcopy(models[0]).to("meta")

    def one(p: Any, b: Any, x: Any) -> Any:
        return functional_call(shell, (p, b), (x,))

    return torch.vmap(one), [parameters, buffers, torch.stack(list(inputs))]


def grouped(models: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    """Return one convolutional network that is several, side by side, and its input.

    Batch norms are folded first. A convolution is one with as many groups, a linear layer a batched
    product; the output has the shape (models, batch, classes).
    """
    import torch

    folded = [fold(model) for model in models]
    count = len(folded)
    parts = [dict(model.named_modules()) for model in folded]
    whole = folded[0]
    for name, module in list(whole.named_modules()):
        same = [part[name] for part in parts]
        if isinstance(module, torch.nn.Conv2d):
            _replace(whole, name, _grouped_convolution(same))
        elif isinstance(module, torch.nn.Linear):
            _replace(whole, name, _batched_linear(same))
    x = torch.cat(list(inputs), dim=1)
    assert x.shape[1] % count == 0
    return whole.eval(), x


def _grouped_convolution(same: Sequence[Any]) -> Any:
    import torch

    first, count = same[0], len(same)
    made = torch.nn.Conv2d(
        first.in_channels * count, first.out_channels * count, first.kernel_size, first.stride,
        first.padding, first.dilation, first.groups * count,
    )  # fmt: skip
    zero = torch.zeros(first.out_channels)
    with torch.no_grad():
        made.weight.copy_(torch.cat([c.weight for c in same]))
        made.bias.copy_(torch.cat([zero if c.bias is None else c.bias for c in same]))
    return made


def _batched_linear(same: Sequence[Any]) -> Any:
    import torch

    class Batched(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.stack([x.weight.t() for x in same]))
            self.bias = torch.nn.Parameter(torch.stack([x.bias for x in same]))

        def forward(self, x: Any) -> Any:
            apart = x.reshape(x.shape[0], len(same), -1).transpose(0, 1)
            return torch.baddbmm(self.bias[:, None], apart, self.weight)

    return Batched()


def _replace(model: Any, name: str, module: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
