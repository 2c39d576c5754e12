"""Multi-token prediction as a training objective, as in DeepSeek-V3.

At each position a model predicts the token that follows. Additional module k of D
predicts the token k positions further on. Its inputs are the state of the module before
it at that position, and the token that was to be predicted.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, eq. 21 to 25:

    (1) h' = M [RMSNorm(Emb(t_{i+k})); RMSNorm(h^{k-1})]    at position i; h^0: model's state

    (2) h^k = Norm(Block(h'))                               a layer like the model's last one

    (3) L^k = sum over i of -log softmax(Head(h^k))[t_{i+k+1}]

The objective is L + weight / D x sum over k of L^k. It is divided by the number of
tokens that carry loss for the model itself (1 / T in eq. 24). Embedding and head are
the model's own: the gradients of both are added.

The order in (1) is that of the released weights as Transformers runs them (its
``modeling_layers``). There h^0 and h^k are also taken after their norms. V4 has several
streams through its layers; h^0 and h^k are the results of its last mixing.

    ahead = MultiToken(model, depth=1, weight=0.3)
    add_to_loss(loss_of, ahead)          # a WholeLogitsLoss or LabelOnlyLoss of this model
    optimizer = AdamW(loss_of.parameters())

Nothing crosses from one document of a packed row to the next. If a token ahead belongs
to another document, its embedding is zero and it has no loss. In ``eval`` mode the loss
is the model's alone. The modules belong to the loss and not to the model, which is
saved without them.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hasten.parts.data.collate import IGNORED
from hasten.parts.nn import attention, rebind
from hasten.parts.nn.causal_lm import causal_lm, freeze_indexers, trunk
from hasten.parts.nn.late_weights import MARK, LateWeight, read_now
from hasten.parts.nn.losses import (
    PLAIN,
    LabelOnlyLoss,
    LossTerms,
    WholeLogitsLoss,
    chunk_rows,
    head_cross_entropy,
    labelled_rows,
)
from hasten.parts.nn.new_weights import expect_weights, seeded_by_name

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
)


class MultiToken(nn.Module):
    """The modules of all depths, and the loss of the tokens that they predict.

    Args:
        model: a Hugging Face causal language model. Its embedding and head are used, not
            owned.
        depth: how many tokens ahead of the next one are predicted, D.
        weight: weight of their mean loss; 0: the modules exist, don't learn and aren't run.

    Raises:
        ValueError: the model's architecture isn't supported, or a number makes no sense.
    """

    def __init__(self, model: nn.Module, depth: int = 1, weight: float = 0.3) -> None:
        super().__init__()
        check(depth, weight)
        inner = causal_lm(model)
        if inner.config.model_type not in ARCHITECTURES:
            raise ValueError(
                f"the layers of {inner.config.model_type} aren't known here; multi-token "
                f"prediction is for {', '.join(ARCHITECTURES)}"
            )
        self.weight, self.chunk = weight, chunk_rows("auto", inner.config.vocab_size)
        # In a dict, because a list of several would look like the blocks of a model.
        with torch.device("meta"):
            self.modules_ahead = nn.ModuleDict(
                {str(number): PredictionModule(trunk(model)) for number in range(depth)}
            )
        for name, module in self.modules_ahead.items():
            module.expect_weights(f"ahead.{name}.")
        home: Any = trunk(model).norm.weight.device
        if home.type != "meta":  # else these weights, too, are read later
            read_now(self)
            self.to(home)
        self.size = sum(p.numel() for p in self.parameters())
        self.passes = 0
        self.last: list[tuple[Tensor, Tensor]] = []  # loss sum and count by depth
        if not weight:
            self.requires_grad_(False)

    def forward(
        self,
        model: nn.Module,
        hidden: Tensor,
        labels: Tensor,
        input_ids: Tensor,
        terms: LossTerms = PLAIN,
        **inputs: Any,
    ) -> Tensor:
        """Returns the weighted loss sum.

        - ``hidden`` (B, T, hidden): the model's states after its norm
        - ``labels`` (B, T): aligned with the position that predicts them, as for the model
        """
        inner = causal_lm(model)
        embed, head = inner.get_input_embeddings(), inner.lm_head
        self.passes, self.last = self.passes + 1, []
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for distance, ahead in enumerate(self.modules_ahead.values(), start=1):
            in_document = same_document(input_ids, inputs.get("position_ids"), distance)
            tokens = input_ids.roll(-distance, dims=1)
            wanted = labels.roll(-distance, dims=1).masked_fill(~in_document, IGNORED)
            embedded = embed(tokens) * in_document.unsqueeze(-1).to(hidden.dtype)
            hidden = ahead(embedded, hidden, **inputs)
            loss = head_cross_entropy(head, *labelled_rows(hidden, wanted), self.chunk, terms)
            self.last.append((loss.detach(), (wanted != IGNORED).sum()))
            total = total + loss
        return total * (self.weight / len(self.modules_ahead))


class PredictionModule(nn.Module):
    """Computes the next state of a position from its state and the next token."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        norm, config = decoder.norm, decoder.config
        width, kind = config.hidden_size, rebind.plain_class(norm)
        self.embedding_norm = kind(width, eps=config.rms_norm_eps)
        self.state_norm = kind(width, eps=config.rms_norm_eps)
        self.project = nn.Linear(2 * width, width, bias=False)
        self._std = config.initializer_range
        self.block = one_layer(decoder)  # includes its own final norm
        for weight in self.parameters():  # not buffers: angles and biases are float32 everywhere
            weight.data = weight.data.to(norm.weight.dtype)

    def expect_weights(self, prefix: str) -> None:
        """Gives new weights, which are read later, from torch's seed and their names.

        Raises:
            UnknownSourceError: the layer draws a tensor in a way that isn't known.
        """
        seed = torch.initial_seed()

        def projection() -> Tensor:
            with seeded_by_name(seed, f"{prefix}project.weight"):
                return torch.empty(self.project.weight.shape).normal_(std=self._std)

        for name, parameter in self.named_parameters():
            shape = tuple(parameter.shape)
            full = projection if name == "project.weight" else partial(torch.ones, shape)
            setattr(parameter, MARK, LateWeight(name, shape, parameter.dtype, full=full))
        block: Any = self.block
        expect_weights(block, seed, {}, f"{prefix}block.")

    def forward(self, embedded: Tensor, hidden: Tensor, **inputs: Any) -> Tensor:
        """Both (B, T, hidden); ``inputs`` are those of the model's decoder but its tokens."""
        both = torch.cat([self.embedding_norm(embedded), self.state_norm(hidden)], dim=-1)
        output = self.block(inputs_embeds=self.project(both), use_cache=False, **inputs)
        states: Tensor = output.last_hidden_state
        return states


def one_layer(decoder: Any) -> nn.Module:
    """Returns a new decoder of the same class with one layer like the last, without embedding.

    A whole decoder, because it makes the masks and angles that its layers need.
    """
    config = copy.deepcopy(decoder.config)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds is not None:
            setattr(config, name, list(kinds)[-1:])
    dense = getattr(config, "first_k_dense_replace", None)  # the first layers have no experts
    if dense is not None:
        config.first_k_dense_replace = int(dense >= config.num_hidden_layers)
    config.num_hidden_layers = 1
    config.vocab_size, config.pad_token_id = 1, None
    made: Any = rebind.plain_class(decoder)(config)
    if attention.by_documents(config):
        attention.use_document_attention(made)
    made.embed_tokens = None  # the decoder is called with embeddings
    freeze_indexers(made)
    layer: nn.Module = made.train()
    return layer


def same_document(input_ids: Tensor, position_ids: Tensor | None, distance: int) -> Tensor:
    """Returns True where the token ``distance`` ahead is in the same document, (B, T).

    Documents of a packed row begin where positions do. Without positions each row is one.
    """
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    inside = (places + distance < input_ids.shape[1]).expand_as(input_ids)
    if position_ids is None:
        return inside
    number = (position_ids == 0).cumsum(dim=1).expand_as(input_ids)
    return inside & (number == number.roll(-distance, dims=1))


def add_to_loss(loss_of: nn.Module, ahead: MultiToken) -> None:
    """Adds the loss of the tokens ahead to the loss sum of a loss module's training passes.

    The modules become the loss module's ``ahead``, so that whatever moves, replicates, splits or
    saves its parameters has theirs.

    Raises:
        ValueError: it isn't a language model's loss.
    """
    loss: Any = loss_of
    model_of(loss)
    if isinstance(loss, LabelOnlyLoss):
        ahead.chunk = loss.chunk
    loss.ahead = ahead


def prediction_modules(module: nn.Module) -> list[PredictionModule]:
    """Returns the modules that predict further tokens, of all depths; none without any."""
    return [m for m in module.modules() if isinstance(m, PredictionModule)]


def decoders(loss_of: Any) -> list[nn.Module]:
    """Returns all parts of a language model's loss with decoder layers: trunk, modules ahead."""
    ahead: list[Any] = prediction_modules(loss_of)
    return [trunk(loss_of.model), *(module.block for module in ahead)]


def model_of(loss_of: nn.Module) -> nn.Module:
    """Returns the language model of a loss.

    Raises:
        ValueError: it is another loss.
    """
    if not isinstance(loss_of, WholeLogitsLoss | LabelOnlyLoss):
        raise ValueError(
            "multi-token prediction needs the states of a language model, and this job's loss is "
            f"{type(loss_of).__name__}"
        )
    model: nn.Module = loss_of.model
    return model


def check(depth: int, weight: float) -> None:
    """Raises ValueError for invalid numbers.

    Raises:
        ValueError: one does.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"depth is {depth!r}; give how many tokens ahead, 1 or more")
    if not 0 <= weight < float("inf"):
        raise ValueError(f"weight is {weight}; give 0 or a small number such as 0.3")
