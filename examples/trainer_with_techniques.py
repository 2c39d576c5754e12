"""Techniques in Hugging Face's Trainer: python examples/trainer_with_techniques.py

A model of 4 layers, built here and random at first, learns to count; nothing is downloaded.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hasten.integrations.batches import padded_rows
from hasten.integrations.transformers import with_techniques
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.sampler import LengthGrouped


def counting(examples: int) -> list[dict[str, list[int]]]:
    """Rows of uneven lengths: 7, 8, 9, ..."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(examples):
        start, length = torch.randint(3, 60, (2,), generator=draw).tolist()
        rows.append({"input_ids": list(range(start, start + length))})
    return rows


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
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = with_techniques(
            Trainer(model, arguments, data_collator=padded_rows, train_dataset=counting(256)),
            [LengthGrouped(), Packed(), DocumentAttention(), LabelledTokenLoss()],
        )
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main()
