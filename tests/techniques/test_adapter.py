"""Adapters begin as the job's seed draws them."""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.techniques.adapter import LoRA
from tiny import language_job, session_of


def first_matrices(seed: int) -> Tensor:
    model = session_of(language_job(seed=seed), LoRA(rank=4)).model
    found = [p.detach().flatten() for n, p in model.named_parameters() if "lora_A" in n]
    return torch.cat(found)


def test_another_seed_draws_other_adapters_and_the_same_one_the_same() -> None:
    assert torch.equal(first_matrices(3), first_matrices(3))
    assert not torch.equal(first_matrices(3), first_matrices(4))
