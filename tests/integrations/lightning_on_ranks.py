"""What test_wire_in_lightning starts on two ranks: Lightning's DDP with a compressed
communication.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hasten.core.technique import Technique
from hasten.integrations.lightning import with_techniques
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half, TopK
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.sampler import LengthGrouped
from integrations.test_modules_of_lightning import trained
from integrations.test_techniques_in_lightning import (
    BATCH,
    SEED,
    loader,
    module_of,
    trainer_of,
)
from tiny import tiny_model

TOP = TopK(0.05, dense_share=0.0, minimum=1)
COMMUNICATIONS: dict[str, tuple[Technique, ...]] = {
    "none": (),
    "half": (Half(minimum=1),),
    "topk": (TOP, Checkpoints(interval=3)),
}


def fit(folder: Path, communication: tuple[Technique, ...], passes: int = 1, **more: Any) -> Any:
    """Losses of this rank's passes, bytes that have left it and steps that its communication has
    counted; ``ckpt`` is gone on from."""
    checkpoint = more.pop("ckpt", None)
    trainer = trainer_of(
        folder,
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        accumulate_grad_batches=passes,
        **more,
    )
    module = module_of(tiny_model())
    plan = [LengthGrouped(window=64), Packed(), LabelledTokenLoss(chunk=128), *communication]
    given = with_techniques(trainer, module, loader(BATCH // 2 // passes), plan, seed=SEED)
    seams: Any = trainer.callbacks[0]
    wrapped: list[bool] = []
    begun = seams.on_train_start

    def on_train_start(trainer: Any, pl_module: Any) -> None:
        wrapped.append(isinstance(trainer.strategy.model, DistributedDataParallel))
        begun(trainer, pl_module)

    seams.on_train_start = on_train_start
    trainer.fit(*given, ckpt_path=checkpoint)
    assert wrapped == [True]
    found: dict[str, Any] = {"losses": module.losses, "sent": 0, "steps": 0}
    if communication:
        compressor: Any = seams.setup.communication.compressor
        found |= {"sent": compressor.sent_bytes, "steps": compressor.steps}
    return found


def main(folder: Path) -> None:
    found: dict[str, Any] = {
        n: fit(folder / n, communication) for n, communication in COMMUNICATIONS.items()
    }
    found["passes"] = fit(folder / "passes", (), passes=2)
    saver: Any = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint
    saves = saver(dirpath=folder / "saved", every_n_train_steps=2, save_top_k=-1)
    more = {"enable_checkpointing": True, "callbacks": [saves]}
    fit(folder / "first", (TOP,), **more, max_steps=4)
    [half_way] = (folder / "saved").glob("*step=4.ckpt")
    found["resumed"] = fit(folder / "then", (TOP,), ckpt=str(half_way))
    # A metric of one rank alone differs for a packed batch: both ranks take packing out.
    os.environ["HASTEN_PROOF"] = "on"
    metric = trained(
        "row metric of rank 1", folder / "metric", speed_up=True, devices=2, strategy="ddp"
    )
    found["metric"] = {"losses": metric["losses"], "sent": sorted(metric["effective"]), "steps": 0}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Threads of gloo that are left to the interpreter's end may end it with SIGABRT (torch 2.13).
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # what is to be looked at lies on the disk
