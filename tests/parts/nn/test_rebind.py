"""A forward that is bound to one instance, and what copies, pickles and other libraries see."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.parts.nn import rebind


def scaled(module: Any, usual: Any, *args: Any, **kwargs: Any) -> Any:
    """The usual result times the module's own factor, which lies in its state."""
    return usual(*args, **kwargs) * rebind.state_of(module, scaled).get("factor", 1.0)


def moved(module: Any, usual: Any, *args: Any, **kwargs: Any) -> Any:
    return usual(*args, **kwargs) + 1


def counted(module: Any, usual: Any, *args: Any, **kwargs: Any) -> Any:
    module.calls = getattr(module, "calls", 0) + 1
    return usual(*args, **kwargs)


def linear(factor: float) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    rebind.bind(layer, scaled, {"factor": factor})
    return layer


X = torch.tensor([[1.0, -2.0, 0.5]])


def plain(layer: nn.Linear) -> Tensor:
    return X @ layer.weight.T + layer.bias


def test_the_last_one_bound_is_called_first_and_each_can_be_taken_off() -> None:
    layer = linear(3.0)
    rebind.bind(layer, moved)
    assert rebind.bound(layer) == (moved, scaled)
    torch.testing.assert_close(layer(X), 3 * plain(layer) + 1)
    rebind.unbind(layer, scaled)
    torch.testing.assert_close(layer(X), plain(layer) + 1)
    rebind.unbind(layer, moved)
    assert type(layer) is nn.Linear
    torch.testing.assert_close(layer(X), plain(layer))


def test_a_wrapper_that_lay_in_the_instance_stays_below() -> None:
    layer = nn.Linear(3, 2)
    before = layer.forward
    layer.forward = lambda x: before(x) * 10  # type: ignore[method-assign]
    rebind.bind(layer, moved)
    torch.testing.assert_close(layer(X), 10 * plain(layer) + 1)
    rebind.unbind(layer, moved)
    torch.testing.assert_close(layer(X), 10 * plain(layer))


def test_other_instances_and_the_state_dict_are_as_before() -> None:
    layer, other = linear(3.0), nn.Linear(3, 2)
    torch.testing.assert_close(other(X), plain(other))
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert linear(1.0).__class__ is layer.__class__  # one class for all
    assert isinstance(other, type(layer))


def test_a_function_that_no_pickle_would_find_is_refused() -> None:
    with pytest.raises(ValueError, match="isn't a function of a module"):
        rebind.bind(nn.Linear(2, 2), lambda module, usual, x: usual(x))


def test_a_transformers_model_keeps_its_names_signature_and_generation(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=32,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(6)[None]
    names = list(inspect.signature(model.forward).parameters)
    want, text = model(ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)
    modules = [model, model.model, *model.model.layers]
    for module in modules:
        rebind.bind(module, counted)
    assert list(inspect.signature(model.forward).parameters) == names
    assert torch.equal(model(ids).logits, want)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), text)
    assert all(module.calls == 4 for module in modules)
    assert type(model.model.layers[0]).__name__ in model._no_split_modules
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == 3  # transformers finds the layers by their class


def test_fsdp_wraps_a_bound_module(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        layer = linear(3.0)
        want = layer(X)
        fully_shard(layer)
        torch.testing.assert_close(layer(X), want)
        assert rebind.is_bound(layer, scaled)
        assert rebind.plain_class(layer) is nn.Linear
    finally:
        dist.destroy_process_group()
