"""Techniques in Lightning: python examples/lightning_with_techniques.py

On two processes, with gradients in 8 bits between them:
torchrun --nproc-per-node 2 examples/lightning_with_techniques.py

A model of 4 layers, built here and random at first, learns to count; nothing is downloaded.
It needs Lightning: pip install lightning
"""

import os
import tempfile

import lightning
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hasten.integrations.lightning import with_techniques
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Quantised
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.sampler import LengthGrouped


class Counting(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=128,
            )
        )
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def counting(examples: int) -> list[dict[str, list[int]]]:
    """Rows of uneven lengths: 7, 8, 9, ..."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(examples):
        start, length = torch.randint(3, 60, (2,), generator=draw).tolist()
        rows.append({"input_ids": list(range(start, start + length))})
    return rows


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch of rows filled up to the longest; Packed lays them end to end instead."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(row: dict[str, list[int]], filler: int) -> list[int]:
        ids = row["input_ids"]
        return ids + [filler] * (longest - len(ids))

    ids = torch.tensor([filled(row, 0) for row in rows])
    labels = torch.tensor([filled(row, -100) for row in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def main(steps: int = 20) -> list[float]:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    module = Counting()
    plan = [LengthGrouped(), Packed(), DocumentAttention(), LabelledTokenLoss(), Quantised(8)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            use_distributed_sampler=False,  # LengthGrouped deals the examples out
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        loader = torch.utils.data.DataLoader(
            counting(256), batch_size=16 // ranks, collate_fn=padded
        )
        trainer.fit(*with_techniques(trainer, module, loader, plan))
    if trainer.is_global_zero:
        print(f"loss {module.losses[0]:.3f} at first, {module.losses[-1]:.3f} at last")
    return module.losses


if __name__ == "__main__":
    main()
