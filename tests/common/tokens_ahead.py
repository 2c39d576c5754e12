"""Multi-token prediction as a plain loop over examples and positions: the paper's equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hasten.core.job import Job, permutation
from hasten.parts.data.collate import TokenizedExample
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.parts.nn.multi_token import MultiToken


def plain(model: nn.Module, ahead: MultiToken, data: Sequence[TokenizedExample]) -> Tensor:
    """Example by example, position by position: arXiv:2412.19437, eq. 21 to 25, as they stand."""
    inner, total = causal_lm(model), torch.zeros((), dtype=torch.float64)
    depth = len(ahead.modules_ahead)
    modules: list[Any] = list(ahead.modules_ahead.values())
    for example in data:
        tokens = torch.from_numpy(example.input_ids.astype(np.int64))
        length = len(tokens)
        hidden = trunk(model)(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        for i in range(length - 1):
            if example.trained[i + 1]:
                total = total - inner.lm_head(hidden[i]).log_softmax(-1)[tokens[i + 1]]
        for k, module in enumerate(modules, start=1):
            if length <= k:
                break
            rows = []
            for i in range(length - k):
                embedded = inner.get_input_embeddings()(tokens[i + k])
                parts = [module.embedding_norm(embedded), module.state_norm(hidden[i])]
                rows.append(module.project.weight @ torch.cat(parts))
            block = module.block(inputs_embeds=torch.stack(rows)[None], use_cache=False)
            hidden = block.last_hidden_state[0]
            for i in range(length - k - 1):
                if example.trained[i + k + 1]:
                    scores = inner.lm_head(hidden[i]).log_softmax(-1)
                    total = total - ahead.weight / depth * scores[tokens[i + k + 1]]
    return total


def plain_training(
    build: Callable[[], nn.Module], job: Job, depth: int, weight: float, decay: float, steps: int
) -> dict[str, Any]:
    """Steps of AdamW in float64: losses, norms, the last weights and their exponential mean."""
    torch.manual_seed(job.seed)
    model = build()
    ahead = MultiToken(model, depth, weight)
    named = {f"model.{name}": p for name, p in model.named_parameters()}
    named |= {f"ahead.{name}": p for name, p in ahead.named_parameters()}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, weight_decay=0.0)
    found: dict[str, Any] = {"losses": [], "norms": []}
    count, size = len(job.examples), job.batch.examples or 1
    orders = (permutation(count, job.seed, epoch) for epoch in range(steps))
    batches = [order[i : i + size] for order in orders for i in range(0, count, size)]
    for number, batch in enumerate(batches[:steps], start=1):
        step = [job.examples[i] for i in batch]
        loss = plain(model, ahead, step) / sum(int(e.trained[1:].sum()) for e in step)
        optimizer.zero_grad()
        loss.backward()
        squares = sum(float(p.grad.square().sum()) for p in named.values() if p.grad is not None)
        norm, limit = squares**0.5, job.max_grad_norm or float("inf")
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad *= min(1.0, limit / (norm + 1e-6))
        optimizer.step()
        found["losses"].append(float(loss.detach()))
        found["norms"].append(norm)
        now = {name: p.detach().clone() for name, p in named.items()}
        d = min(decay, (1 + number) / (10 + number))
        mean = (
            {n: d * m + (1 - d) * now[n] for n, m in found["mean"].items()} if number > 1 else now
        )
        found |= {"weights": now, "mean": mean}
    return found
