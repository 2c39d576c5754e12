"""Techniques in a training loop of one's own: python examples/loop_with_techniques.py

A model of 4 layers, built here and random at first, learns to count; nothing is downloaded.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hasten.integrations.loop import in_loop
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import Muon
from hasten.techniques.sampler import PackedEpoch


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    )
    examples = [{"input_ids": list(range(3 + i % 50, 60 + i % 60))} for i in range(256)]
    run = in_loop(
        model,
        [PackedEpoch(256), Packed(), DocumentAttention(), LabelledTokenLoss(), Muon()],
        examples=examples,
        batch=16,
        steps=steps,
    )
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses: list[float] = []
    for epoch in range(steps):
        for batch in run.loader(epoch):
            loss = model(**batch).loss
            loss.backward()
            run.step(optimizer)
            losses.append(loss.item())
            print(f"step {len(losses)}: loss {losses[-1]:.3f}")
            if len(losses) == steps:
                return losses
    return losses


if __name__ == "__main__":
    main()
