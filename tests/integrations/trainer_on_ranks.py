"""What test_wire_in_the_trainer starts on two ranks: the Trainer with a compressed
communication.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hasten.core.technique import Technique
from hasten.integrations.transformers import with_techniques
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half, TopK
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.sampler import LengthGrouped
from integrations.test_techniques_in_the_trainer import BATCH, trainer_of

COMMUNICATIONS: dict[str, Technique | None] = {
    "none": None,
    "half": Half(minimum=1),
    "topk": TopK(0.05, dense_share=0.0, minimum=1),
}


def trained(
    folder: Path, communication: Technique | None, checkpoint: str | None = None
) -> list[Any]:
    """Losses that are logged, bytes that left this rank, and steps that its communication has
    counted.
    """
    plan = [LengthGrouped(window=64), Packed(), LabelledTokenLoss(chunk=128)]
    trainer = trainer_of(
        folder,
        per_device_train_batch_size=BATCH // 2,
        ddp_backend="gloo",
        max_steps=6,
        save_strategy="steps",
        save_steps=4,
    )
    with_techniques(trainer, [*plan, communication] if communication else plan)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    seams: Any = trainer.callback_handler.callbacks[-1]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    compressor: Any = seams.setup.communication.compressor if communication else None
    return [losses, compressor and compressor.sent_bytes, compressor and compressor.steps]


def main(folder: Path) -> None:
    """What each communication found, and that of one resumed."""
    found = {
        name: trained(folder / name, communication)
        for name, communication in COMMUNICATIONS.items()
    }
    half_way = str(folder / "topk" / "checkpoint-4")
    found["resumed"] = trained(folder / "then", COMMUNICATIONS["topk"], half_way)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Threads of gloo that are left to the interpreter's end may end it with SIGABRT (torch 2.13).
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # what is to be looked at lies on the disk
