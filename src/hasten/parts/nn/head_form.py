"""The computation from hidden states to loss of a causal language model's ``forward``.

A loss that calls trunk and head by itself is right only if the model's own ``forward``
does nothing else. This isn't decided by a list of names. Instead the ``forward`` runs
once on six tokens, with placeholders for trunk and head. The form that explains its
result is returned:

    logits = cap tanh(scale head(state_scale states) / cap)

    loss   = cross-entropy of logits + router_weight x balance of the routers' choices

The placeholders record their arguments. So a prompt put before the tokens, a second
head or an added loss is detected. The computation is tiny. It reads no weights (a model
on the meta device is enough), and the random state stays unchanged.

Code that runs outside ``forward`` (hooks, a ``forward`` of the instance) would be
skipped too. If there is any, the model isn't recognised.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hasten.parts.nn import rebind
from hasten.parts.nn.causal_lm import causal_lm, routed_experts, trunk

ROWS, TOKENS = 2, 3  # shape of the probe's batch
# Probed values: powers of two, so that scales and caps computed from them are exact.
TINY, HUGE, ONE = 2.0**-30, 2.0**30, 1.0
CLOSE = 1e-5  # largest relative difference between equal results; the forward may use float32
UNNAMED_EXPERTS = 4  # number of the probe's experts if the config doesn't have a number
PEFT = ("PeftModel", "PeftModelForCausalLM")  # wrappers that only pass inputs on
ROUTER_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True)
class HeadForm:
    """The constants of the module's formulas; the defaults describe a plain linear head.

    ``router_top_k`` is the number of experts per token in the routers' loss.
    """

    state_scale: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    router_weight: float = 0.0
    router_top_k: int = 0


def plain_head_reason(model: nn.Module) -> str | None:
    """Returns why a loss may not call the model's trunk and head separately; None: it may.

    Args:
        model: a Hugging Face causal language model, with an adapter or without; its weights may be
            on the meta device.
    """
    try:
        head_form(model)
    except ValueError as error:
        return str(error)
    return None


def asks_router_loss(model: nn.Module) -> bool:
    """Returns True if the config enables the routers' loss (``output_router_logits``)."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return False
    places = config, config.get_text_config()
    return any(bool(getattr(candidate, "output_router_logits", False)) for candidate in places)


def head_form(model: nn.Module) -> HeadForm:
    """Returns the form of the model's computation from states to loss.

    Raises:
        ValueError: the model's own forward does more than the form can express. The message
            names it.
    """
    inner = causal_lm(model)
    with _disable_current_modes():  # a trace with fake tensors has no values to compare
        return _recognised(model, inner)


def _recognised(model: nn.Module, inner: Any) -> HeadForm:
    for module in (*_passed_over(model, inner), inner.lm_head):
        name = type(module).__name__
        if "forward" in vars(module):
            raise ValueError(f"the forward of this {name} instance was replaced")
        if rebind.has_hooks(module):
            raise ValueError(f"a hook is registered on {name}, which would no longer be called")
    _check_library(model, inner)
    with _probing(model, inner) as probe:
        state_scale, scale, softcap = _logit_form(probe)
        return _with_routers(probe, HeadForm(state_scale, scale, softcap))


def balance_of_choices(
    router_logits: tuple[Tensor, ...], top_k: int, real: Tensor | None = None
) -> Tensor:
    """Returns the routers' loss of a micro-batch (Switch Transformer, arXiv:2101.03961, eq. 4-6).

    ``E x sum_e f_e P_e`` over the E experts. f_e is the number of choices of expert e per
    token, P_e the mean of its probability. Both are over the tokens of all layers together.

    Args:
        router_logits: (tokens, E) of each layer.
        top_k: experts that each token chooses.
        real: (tokens,) or (B, T), true where a position holds a token; None: everywhere.
    """
    experts, device = router_logits[0].shape[-1], router_logits[0].device
    counted = None if real is None else real.reshape(-1, 1).to(device, torch.float32)
    choices = torch.zeros(experts, device=device)
    mass = torch.zeros(experts, device=device)
    tokens: Tensor | float = 0.0
    for logits in router_logits:
        # In their own format, as transformers does, so near ties are decided equally.
        shares = logits.to(device).softmax(dim=-1)
        chosen = torch.zeros_like(shares, dtype=torch.float32)
        chosen.scatter_(1, shares.topk(top_k, dim=-1).indices, 1.0)
        probability = shares.float()
        if counted is not None:
            chosen, probability = chosen * counted, probability * counted
        choices = choices + chosen.sum(0)
        mass = mass + probability.sum(0)
        tokens = tokens + (len(logits) if counted is None else counted.sum())
    if isinstance(tokens, Tensor):
        tokens = tokens.clamp_min(1)  # a rank without examples runs filler only
    balance: Tensor = (choices / tokens * (mass / tokens)).sum() * experts
    return balance


def _passed_over(model: nn.Module, inner: Any) -> list[nn.Module]:
    """Returns the modules from ``model`` down to ``inner``, which a separate loss doesn't call."""
    modules: list[nn.Module] = []
    module: Any = model
    while module is not inner:
        modules.append(module)
        below = [module._modules.get(name) for name in ("base_model", "model")]
        module = next((m for m in below if m is not None), None)
        if module is None:
            raise ValueError(f"the model is inside a {type(modules[-1]).__name__}, not known here")
    return [*modules, inner]


def _check_library(model: nn.Module, inner: Any) -> None:
    """Raises ValueError if a forward of wrapper or model isn't transformers' or peft's own."""
    if not _defined(type(inner)).startswith("transformers.models."):
        raise ValueError(f"the forward of {type(inner).__name__} isn't that of transformers")
    if model is inner:
        return
    wrapper, tuner = type(model), model._modules.get("base_model")
    if _defined(wrapper) not in {f"peft.peft_model.{name}.forward" for name in PEFT}:
        raise ValueError(f"the forward of {wrapper.__name__} isn't that of peft")
    if tuner is inner:
        raise ValueError("a prompt is learned, which the model's forward puts before the tokens")
    if _defined(type(tuner)) != "peft.tuners.tuners_utils.BaseTuner.forward":
        raise ValueError(f"{type(tuner).__name__} adds a part of its own to the model's forward")


def _defined(kind: type) -> str:
    code: Any = getattr(kind, "forward", None)
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', '')}"


class _TrunkOutput:
    """Output of the trunk's placeholder; any other field is None."""

    def __init__(self, states: Tensor, router_logits: tuple[Tensor, ...]) -> None:
        self.last_hidden_state, self.router_logits = states, router_logits

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Placeholder(nn.Module):
    """Placeholder for a module; other attributes are read from the replaced module."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.replaced_by_probe = replaced
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("replaced_by_probe"), name)


class _TrunkPlaceholder(_Placeholder):
    """Placeholder for the trunk: returns ``output`` and records its arguments."""

    def __init__(self, decoder: nn.Module, output: _TrunkOutput) -> None:
        super().__init__(decoder)
        self.output, self.hooks = output, 0

    def forward(self, *args: Any, **named: Any) -> Any:
        decoder = self.replaced_by_probe
        self.calls.append(inspect.signature(decoder.forward).bind(*args, **named).arguments)
        self.hooks = _hooks_in(decoder)
        return self.output


class _HeadPlaceholder(_Placeholder):
    """Placeholder for the head: returns ``logits`` and records the states."""

    def __init__(self, head: nn.Module, logits: Tensor) -> None:
        super().__init__(head)
        self.logits = logits
        self.weight = logits.new_zeros(0)  # some models cast their states to its format

    def forward(self, states: Tensor) -> Tensor:
        self.calls.append(states)
        return self.logits


@dataclass
class _Probe:
    """The model with placeholders, and the arguments for its forward."""

    model: nn.Module
    inner: Any
    trunk: _TrunkPlaceholder
    head: _HeadPlaceholder
    inputs: dict[str, Tensor]
    drawn: Callable[..., Tensor]  # draws random numbers of a shape

    def __post_init__(self) -> None:
        self.hooks = _hooks_in(self.trunk.replaced_by_probe)
        self.name = type(self.inner).__name__
        self.shape = (ROWS, TOKENS, _shape_of(self.head)[1])  # shape of the logits

    def run(self, logits: Tensor, labels: Tensor | None = None) -> Any:
        """Returns the output of the model's own forward if its head returns ``logits``."""
        self.trunk.calls.clear()
        self.head.calls.clear()
        self.head.logits = logits
        arguments = self.inputs if labels is None else {**self.inputs, "labels": labels}
        try:
            output = self.model(**arguments, use_cache=False, return_dict=True)
        except Exception as error:  # any error means that this forward needs something else
            raise ValueError(
                f"the forward of {self.name} is more than a call of its trunk and its head "
                f"({type(error).__name__}: {error})"
            ) from error
        self._check_calls()
        return output

    def _check_calls(self) -> None:
        name = self.name
        if len(self.trunk.calls) != 1 or len(self.head.calls) != 1:
            raise ValueError(
                f"{name} calls its trunk {len(self.trunk.calls)} times and its head "
                f"{len(self.head.calls)} times in a pass"
            )
        if self.trunk.hooks != self.hooks:
            raise ValueError(f"{name} is trained through hooks that are set for each pass")
        (call,) = self.trunk.calls
        arguments = {**call, **call.get("kwargs", {})}
        for key, value in arguments.items():
            same = value is self.inputs.get(key)
            if key != "kwargs" and not (same or value is None or isinstance(value, bool)):
                raise ValueError(f"{name} gives its trunk {key} of its own")
        missing = [key for key, value in self.inputs.items() if arguments.get(key) is not value]
        if missing:
            raise ValueError(f"{name} doesn't give its trunk the {missing[0]} that it is given")


@contextmanager
def _probing(model: nn.Module, inner: Any) -> Iterator[_Probe]:
    """Yields the model in training mode with placeholders; restores everything after."""
    prefix = inner.base_model_prefix
    decoder, head = trunk(model), inner.lm_head
    device = torch.device("cpu")  # any device will do, because the model's weights aren't read
    generator = torch.Generator(device).manual_seed(0)
    width, vocabulary = _shape_of(head)
    if vocabulary < ROWS * TOKENS:
        raise ValueError(f"a head of {vocabulary} tokens is too small to be recognised")

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device=device)

    states = drawn(ROWS, TOKENS, width)
    states[0, 0, 0] = ONE
    experts = routed_experts(inner.config.get_text_config()) or UNNAMED_EXPERTS
    output = _TrunkOutput(states, tuple(drawn(ROWS * TOKENS, experts) for _ in range(2)))
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long, device=device)
    mask[1, -1] = 0
    inputs = {
        "input_ids": torch.arange(ROWS * TOKENS, device=device).view(ROWS, TOKENS),
        "attention_mask": mask,
        "position_ids": torch.arange(TOKENS, device=device).expand(ROWS, TOKENS),
    }
    probe = _Probe(
        model,
        inner,
        _TrunkPlaceholder(decoder, output),
        _HeadPlaceholder(head, states),
        inputs,
        drawn,
    )
    outside = _passed_over(model, inner)
    modes = [m.training for m in outside]
    with torch.random.fork_rng(()), torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            for module in outside:
                module.training = True  # ``train()`` would change the trunk as well
            inner._modules[prefix], inner._modules["lm_head"] = probe.trunk, probe.head
            yield probe
        finally:
            inner._modules[prefix], inner._modules["lm_head"] = decoder, head
            for module, mode in zip(outside, modes, strict=True):
                module.training = mode


def _hooks_in(module: nn.Module) -> int:
    return sum(len(getattr(m, name, None) or ()) for m in module.modules() for name in rebind.HOOKS)


def _shape_of(head: Any) -> tuple[int, int]:
    """Returns (hidden, vocabulary) of a linear layer of any library."""
    if not hasattr(head, "in_features") or not hasattr(head, "out_features"):
        raise ValueError(f"the head is a {type(head).__name__}, not a linear layer")
    return head.in_features, head.out_features


def _logit_form(probe: _Probe) -> tuple[float, float, float | None]:
    """Returns (state_scale, scale, softcap), verified on random logits."""
    drawn, trunk_states = probe.drawn(*probe.shape), probe.trunk.output.last_hidden_state
    marked = drawn.clone()
    marked[0, 0, 0], marked[0, 0, 1], marked[0, 0, 2] = TINY, HUGE, -HUGE
    tiny, most, least = _logits(probe, marked)[0, 0, :3].tolist()
    (states,) = probe.head.calls
    if states.is_meta or states.shape != trunk_states.shape:
        raise ValueError(f"{probe.name} changes its states before its head in a way not known here")
    state_scale = _rounded(float(states[0, 0, 0]) / ONE)
    if not _same(states, trunk_states * state_scale):
        raise ValueError(f"{probe.name} changes its states before its head in a way not known here")
    scale, softcap = _rounded(tiny / TINY), None
    wanted = scale * drawn
    if math.isclose(most, -least, rel_tol=CLOSE) and 0 < most < scale * HUGE / 2:
        softcap = _rounded(most)
        wanted = softcap * torch.tanh(wanted / softcap)
    if not scale > 0 or not _same(_logits(probe, drawn), wanted):
        raise ValueError(f"{probe.name} changes its logits after its head in a way not known here")
    return state_scale, scale, softcap


def _rounded(value: float) -> float:
    """Returns the value with six digits, as in a config, if only float32's rounding differs."""
    short = float(f"{value:.6g}")
    return short if math.isclose(short, value, rel_tol=2e-7) else value


def _logits(probe: _Probe, logits: Tensor) -> Tensor:
    returned = getattr(probe.run(logits.clone()), "logits", None)
    if not isinstance(returned, Tensor) or returned.is_meta or returned.shape != logits.shape:
        raise ValueError(f"{probe.name} returns no logits of the usual shape")
    return returned.double()


def _with_routers(probe: _Probe, form: HeadForm) -> HeadForm:
    """Returns the form with the routers' loss, verified on random logits of heads and routers."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    labels = probe.inputs["input_ids"].clone()
    labels[0, 1] = -100
    output = probe.run(probe.drawn(*probe.shape), labels)
    loss, balance = getattr(output, "loss", None), getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor) or loss.is_meta:
        raise ValueError(f"{probe.name} returns no loss for its labels")
    plain = float(ForCausalLMLoss(output.logits, labels, probe.shape[-1]))
    added, tolerance = float(loss) - plain, 2e-6 * max(plain, 1.0)  # what float32 can resolve
    if balance is None and abs(added) <= tolerance:
        return form
    if not isinstance(balance, Tensor):
        raise ValueError(f"{probe.name} adds a loss of its own to cross-entropy")
    routers, real = probe.trunk.output.router_logits, probe.inputs["attention_mask"]
    values = (float(balance_of_choices(routers, k + 1, real)) for k in range(routers[0].shape[-1]))
    value = float(balance)
    top_k = [
        k for k, candidate in enumerate(values, 1) if math.isclose(candidate, value, rel_tol=CLOSE)
    ]
    places = probe.inner, probe.inner.config, probe.inner.config.get_text_config()
    weights = [getattr(owner, name, None) for owner in places for name in ROUTER_WEIGHTS]
    fits = [w for w in weights if w is not None and abs(w * value - added) <= tolerance]
    if not top_k or not fits:
        raise ValueError(f"{probe.name} adds a loss of its routers that isn't known here")
    return replace(form, router_weight=float(fits[0]), router_top_k=top_k[0])


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one.double(), other, rtol=CLOSE, atol=1e-7))
