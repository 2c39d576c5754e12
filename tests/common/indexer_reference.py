"""Training of DeepSeek-V3.2 with its indexers' loss, as a plain loop over examples in transformers.

One example at a time, alone in its row, through transformers' model with a plain attention in
float64. The index scores are computed again, in one product of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.job import Job


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    indices: Tensor,
    **other: Any,
) -> tuple[Tensor, Tensor]:
    """Over the chosen keys that aren't later than the query; transformers' own is in float32."""
    scores = query @ key.mT * scaling
    chosen = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    chosen = chosen.scatter(1, indices[0].long(), True).tril()
    weights = scores.masked_fill(~chosen, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def with_plain_attention(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("plain_reference", plain_attention)
    AttentionMaskInterface.register("plain_reference", eager_mask)
    model.set_attn_implementation("plain_reference")


def index_scores(indexer: Any, hidden: Tensor, latent: Tensor, tables: Any) -> Tensor:
    """Scores (T, T) of one row, from the published formula; later keys are included."""
    length, rope = hidden.shape[1], indexer.qk_rope_head_dim

    def rotated(x: Tensor) -> Tensor:  # (T, heads, width): halves, on the first columns
        cos, sin = (t[0, :, None] for t in tables)
        first, second = x[..., : rope // 2], x[..., rope // 2 : rope]
        turned = torch.cat([-second, first], dim=-1)
        return torch.cat([x[..., :rope] * cos + turned * sin, x[..., rope:]], dim=-1)

    queries = rotated(indexer.wq_b(latent)[0].view(length, indexer.n_heads, -1))
    keys = rotated(indexer.k_norm(indexer.wk(hidden))[0][:, None])[:, 0]
    weights = indexer.weights_proj(hidden)[0] * indexer.n_heads**-0.5 * indexer.head_dim**-0.5
    products = torch.einsum("thd,sd->ths", queries, keys).relu()
    return (products * weights[..., None]).sum(1)


def divergence(scores: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """KL summed over queries, and the mass (T, T) of the heads' mean, from (heads, T, T)."""
    mass = probabilities.detach().sum(0) / probabilities.shape[0]
    log = scores.masked_fill(mass == 0, -torch.inf).log_softmax(-1)
    return (torch.xlogy(mass, mass) - mass * log.masked_fill(mass == 0, 0)).sum(), mass


@contextmanager
def watched(model: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside, a forward pass adds (KL, mass) of each layer to the list, with gradients."""
    seen: list[tuple[Tensor, Tensor]] = []
    read: list[Any] = []
    hooks = []

    def note(module: Any, args: Any, output: Any) -> None:
        hidden, latent, tables = read.pop()
        scores = index_scores(module.indexer, hidden.detach(), latent.detach(), tables)
        seen.append(divergence(scores, output[1][0]))

    for layer in model.model.layers:
        attention = layer.self_attn
        hooks.append(attention.indexer.register_forward_pre_hook(lambda m, a: read.append(a[:3])))
        hooks.append(attention.register_forward_hook(note))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def plain_training(
    build: Callable[[], nn.Module],
    job: Job,
    steps: int,
    stage: str = "sparse",
    weight: float = 1.0,
    rate: float | None = None,
    clip: float = 1.0,
    lr: float = 1e-2,
    learns: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The job's steps with AdamW at ``lr``; ``learns``: parts of the names that do, else all.

    Returns losses, KLs (mean of a query and layer), and the weights at the end.
    """
    model: Any = build()
    with_plain_attention(model)
    if stage == "warmup":  # attention over all keys
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = 1 << 20
    own = [p for n, p in model.named_parameters() if ".indexer." in n]
    model.requires_grad_(stage == "sparse" and learns is None)
    for name, weight_of in model.named_parameters():
        named = learns is not None and any(part in name for part in learns)
        weight_of.requires_grad_(weight_of.requires_grad or named)
    for parameter in own:
        parameter.requires_grad_(True)
    ids = {id(p) for p in own}
    trunk = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    groups = [{"params": trunk}] if trunk else []
    optimizer = torch.optim.AdamW(
        [*groups, {"params": own, "lr": lr if rate is None else rate}], lr=lr, weight_decay=0.0
    )
    found: dict[str, Any] = {"losses": [], "kl": [], "norms": []}
    sampler = _steps(job)
    for _ in range(steps):
        examples = [job.examples[i] for i in next(sampler)]
        loss, kl, trained, tokens = _sums(model, examples)
        layers = len(model.model.layers)
        found["losses"].append(float(loss.detach()) / trained)
        found["kl"].append(float(kl.detach()) / tokens / layers)
        optimizer.zero_grad()
        (loss / trained + weight * kl / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(trunk, job.max_grad_norm or torch.inf)
        torch.nn.utils.clip_grad_norm_(own, clip or torch.inf)
        found["norms"].append(float(norm))
        optimizer.step()
    found["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def _sums(model: Any, examples: Sequence[Any]) -> tuple[Tensor, Tensor, int, int]:
    loss = kl = torch.zeros((), dtype=torch.float64)
    trained = tokens = 0
    for example in examples:
        ids = torch.from_numpy(example.input_ids).long()[None]
        with watched(model) as seen:
            logits = model(input_ids=ids, use_cache=False).logits[0]
        kl = kl + torch.stack([one for one, _ in seen]).sum()
        wanted = torch.from_numpy(example.trained)[1:]
        each = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        loss = loss + each[wanted].sum()
        trained, tokens = trained + int(wanted.sum()), tokens + ids.shape[1]
    return loss, kl, trained, tokens


def _steps(job: Job) -> Iterator[list[int]]:
    from hasten.core.job import ShuffledOrder

    order = ShuffledOrder(job.lengths, job.batch, job.seed)
    for epoch in range(1000):
        yield from order.steps(epoch)


def wide_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny V3.2 whose weights are eight times as large, so that attention isn't even."""
    from tiny import tiny_model

    model = tiny_model("deepseek_v32", dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    embedding: Any = model.get_parameter("model.embed_tokens.weight")
    embedding.data[0] = embedding.data[1]  # of filler; zeros would have no divergence
    return model


def plain_gradients(model: Any, examples: Sequence[Any]) -> dict[str, Tensor]:
    """The gradients of a step over these examples in the sparse stage, with weight 1."""
    with_plain_attention(model)
    loss, kl, trained, tokens = _sums(model.requires_grad_(True), examples)
    (loss / trained + kl / tokens).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
