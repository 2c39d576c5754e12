"""``optimize_for_inference``: torch's own in eval mode, fused layers in training mode.

torch's optimisation freezes a model: without any message it has no parameters
afterwards. A model that still trains gets fused linear layers and ReLUs instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hasten.parts.nn.fused_functions import fused_linear_relu
from hasten.parts.nn.rebind import has_hooks


class LinearReLU(nn.Linear):
    """A linear layer and the following ReLU in one call, with the layer's parameters."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return fused_linear_relu(input, self.weight, self.bias)


def optimize_for_inference(model: nn.Module, sample: Any = None) -> Any:
    """Returns a faster model with equal outputs.

    In eval mode: ``torch.jit.optimize_for_inference`` of the scripted model, without parameters.
    In training mode: the model itself, each linear layer and the ReLU behind it in an
    ``nn.Sequential`` fused in place. Its parameters stay the same objects, as optimizers need.

    Args:
        sample: an input (or a tuple of inputs) to trace a model with that torch can't script.

    Raises:
        ValueError: torch can't script the model, and no ``sample`` was given.
    """
    if model.training:
        return _fused(model)
    if isinstance(model, torch.jit.ScriptModule):
        return torch.jit.optimize_for_inference(model)
    if sample is not None:
        inputs = sample if isinstance(sample, tuple) else (sample,)
        return torch.jit.optimize_for_inference(torch.jit.trace(model, inputs))
    try:
        scripted = torch.jit.script(model)
    except Exception as error:  # torch's compiler raises many types
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"torch can't script this {type(model).__name__} ({first}); give sample=, an input to "
            "trace it with"
        ) from error
    return torch.jit.optimize_for_inference(scripted)


def _fused(model: nn.Module) -> nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        print(
            "optimize_for_inference: a scripted model in training mode stays as it is; give the "
            "model itself to have its layers fused, or call eval() first"
        )
        return model
    count = 0
    for inner in list(model.modules()):
        if not isinstance(inner, nn.Sequential):
            continue
        for index in range(len(inner) - 1):
            layer = inner[index]
            if type(layer) is not nn.Linear or type(inner[index + 1]) is not nn.ReLU:
                continue
            if not has_hooks(layer) and "weight" in layer._parameters:  # the layer's own weight
                inner[index], inner[index + 1] = LinearReLU(layer), nn.Identity()
                count += 1
    print(
        f"optimize_for_inference: the model is in training mode and keeps its parameters: {count} "
        "linear layers fused with the ReLU behind them; torch's optimisation is for eval()"
    )
    return model
