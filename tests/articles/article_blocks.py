"""The articles' blocks: what each takes for granted, and what it must have done at its end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hasten import OptimizedTrainer, TopoAwareCollective
from hasten.machine.environment import World

# Where the names come from that a reader takes from hasten in their place.
SOURCES = (
    r"deepseek[\w.]*|ciuic[\w.]*|peft|torch\.cuda\.amp|fairscale[\w.]*|torch\.utils\.checkpoint"
)
IMPORT = re.compile(rf"^from (?:{SOURCES}) import ", re.MULTILINE)


def folder() -> Path:
    return Path(os.environ["HASTEN_TEST_ARTICLES"]) / "snippets"


def block(name: str, **given: Any) -> dict[str, Any]:
    """Run a block; its import lines name hasten, and nothing else is changed."""
    (path,) = folder().glob(f"{name}.*")
    text = IMPORT.sub("from hasten import ", path.read_text())
    space = {"__name__": "block", **given}
    exec(compile(text, str(path), "exec"), space)
    return space


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def examples(count: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=draw)
    rule = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
    return x, (x @ rule).argmax(1)


def loss_of(model: nn.Module) -> float:
    x, y = examples()
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


def loader(size: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*examples()), batch_size=size)


def language_model(layers: int = 4) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


# One rank.


def amp() -> None:
    model, (x, y) = classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    space = block("000_01_amp", criterion=nn.CrossEntropyLoss())
    losses = [space["train_step"](model, optimizer, x, y) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


def amp_of_globals() -> None:
    model, (x, y) = classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = loss_of(model)
    space = block("003_04_amp", model=model, criterion=nn.CrossEntropyLoss(), optimizer=optimizer)
    for _ in range(20):
        space["train_step"](x, y)
    assert loss_of(model) < 0.7 * before


def compressed() -> nn.Module:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(128, 64)
    target = x @ torch.randn(64, 64) / 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    space, losses = block("000_02_gradient_compression"), []
    for _ in range(40):
        loss = F.mse_loss(model(x), target)
        space["backward_compressed"](model, loss)
        share = (model.weight.grad != 0).float().mean().item()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert share <= 0.11  # of each rank a twentieth
    assert losses[-1] < 0.7 * losses[0]
    return model


def dynamic_batch() -> None:
    seen: list[Tensor] = []
    given = {"train_step": lambda model, optimizer, batch: seen.append(batch[0]) or 0.5}
    space = block("000_03_dynamic_batch", model=None, optimizer=None, **given)
    x, y = examples()
    space["train_loop"](DataLoader(TensorDataset(x, y), batch_size=16))
    assert torch.equal(torch.cat(seen), x)


def pipeline() -> None:
    for model, data in (
        (nn.Sequential(*classifier(), nn.Tanh(), nn.Linear(4, 4)), loader(16)),
        (language_model(), [{"input_ids": torch.arange(48).view(8, 6)} for _ in range(2)]),
    ):
        for batch in data if isinstance(data, list) else ():
            batch["labels"] = batch["input_ids"].clone()
        before = digest(model)
        with pytest.warns(UserWarning, match="AdamW"):
            block("000_05_async_pipeline", model=model, dataloader=data)["pipeline_train"]()
        assert digest(model) != before


def prefetch() -> None:
    data = TensorDataset(*examples())
    wrap = block("000_06_prefetch", DataLoader=DataLoader)["enhanced_dataloader"]
    found = list(wrap(data))
    assert torch.equal(torch.stack([x for x, _ in found]), data.tensors[0])


def collective() -> None:
    given = torch.arange(5.0)
    space = block("000_07_topology_collective")
    assert torch.equal(space["all_reduce_optimized"](given.clone()), given)


def checkpointer() -> None:
    """Its loop says what to protect and when; without that the error names the call."""
    model, states = classifier(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = examples()

    def train_loop() -> None:
        for step in range(1, 4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            states.append(digest(model))
            space["checkpointer"].save(step)
        raise RuntimeError("a GPU fell off the bus")

    names = {"train_loop": train_loop, "adjust_hyperparameters": lambda: None}
    space = block("000_09_checkpointer", **names)
    with pytest.raises(ValueError, match="call protect"):
        space["protected_train"]()
    space = block("000_09_checkpointer", **names)
    space["checkpointer"].protect(model=model, optimizer=optimizer)
    states.clear()
    space["protected_train"]()
    space["checkpointer"].close()
    assert digest(model) == states[-1]


def trainer(data: Any = None) -> nn.Module:
    model = classifier()
    before = loss_of(model)
    block(
        "000_10_optimized_trainer",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss_fn=nn.CrossEntropyLoss(),
        train_loader=data or loader(),
    )
    assert loss_of(model) < 0.7 * before
    assert any(Path("checkpoints").iterdir())
    return model


def lora() -> None:
    base = language_model()
    model = block("002_03_lora", model=base)["model"]
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 4 * 4 * 2
    assert all("lora" in name for name in trained)


def checkpoint_sequential() -> None:
    model = block("003_03_checkpoint_sequential", nn=nn)["BigModel"]()
    model.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    model(torch.randn(2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def accumulation() -> None:
    model = classifier()
    before = loss_of(model)
    given = {"model": model, "loader": loader(8), "criterion": nn.CrossEntropyLoss()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    space = block("003_08_gradient_accumulation", optimizer=optimizer, **given)
    for _ in range(10):
        space["train_accum"]()
    assert loss_of(model) < before
    trainer = OptimizedTrainer(
        model, optimizer, nn.CrossEntropyLoss(), accum_steps=space["accum_steps"]
    )
    assert trainer.train(loader(8))["steps"] == 2


def pipedream() -> None:
    made: list[nn.Sequential] = []

    def big() -> nn.Sequential:
        made.append(nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))))
        return made[0]

    x = torch.randn(16, 6)
    model = block("003_09_pipedream", BigModel=big)["model"]
    torch.testing.assert_close(model(x), made[0](x))


BLOCKS = {
    "000_01_amp": amp,
    "000_02_gradient_compression": compressed,
    "000_03_dynamic_batch": dynamic_batch,
    "000_05_async_pipeline": pipeline,
    "000_06_prefetch": prefetch,
    "000_07_topology_collective": collective,
    "000_09_checkpointer": checkpointer,
    "000_10_optimized_trainer": trainer,
    "002_03_lora": lora,
    "003_03_checkpoint_sequential": checkpoint_sequential,
    "003_04_amp": amp_of_globals,
    "003_08_gradient_accumulation": accumulation,
    "003_09_pipedream": pipedream,
}
# Blocks that use nothing of hasten, or that no machine can run as they stand: docs/how-to/articles.md.
OTHERS = (
    "000_04_graph_fusion",  # compiles a C++ file that the article doesn't show
    "000_08_gradual_optimize",  # calls four functions that it doesn't show
    "001_01_comm_hooks",
    "001_02_powersgd",
    "001_03_quantisation",
    "001_04_bucket_cap",
    "001_05_nccl_debug",
    "001_06_backend_flag",
    "001_07_overlap_comm",
    "001_08_async_op",
    "001_09_cuda_stream",
    "002_01_deepspeed_launch",
    "002_02_ds_config",
    "003_01_check_hardware",
    "003_02_ddp_train",
    "003_05_data_loading",
    "003_06_benchmark",
    "003_07_dynamic_batch_sampler",
    "003_10_async_allreduce",
    "003_11_memory",
    "003_12_monitor",
    "004_01_data_parallel",
    "004_02_gradient_checkpoint",
)


# Two ranks.


class Seen(Dataset[Any]):
    """Notes which examples were read."""

    def __init__(self) -> None:
        self.x, self.y = examples()
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.read.append(int(index))
        return self.x[index], self.y[index]


def on_two_ranks(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"compressor": digest(compressed())}
    tensor = torch.full((1000,), world.rank + 1.0)
    found["collective"] = block("000_07_topology_collective")["all_reduce_optimized"](
        tensor
    ).tolist()
    assert set(found["collective"]) == {3.0}
    found["begun"] = begun(world)
    data = Seen()
    place = [tempfile.mkdtemp()]  # for checkpoints: one for all ranks
    dist.broadcast_object_list(place)
    with contextlib.chdir(place[0]):
        found["trainer"] = digest(trainer(DataLoader(data, batch_size=16)))
    return {**found, "examples": sorted(set(data.read))}


def begun(world: World) -> list[float]:
    """The collective in the place of the block's ``dist``: works that nobody waits for."""
    collective = TopoAwareCollective("gloo", "ethernet")

    class Dist:
        init_process_group = staticmethod(lambda **named: None)
        all_reduce = collective.all_reduce

    model, (x, y) = classifier(), examples(seed=world.rank)
    space = block("003_10_async_allreduce", dist=Dist, criterion=nn.CrossEntropyLoss())
    space["forward_backward"](model, x, y)
    return [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
