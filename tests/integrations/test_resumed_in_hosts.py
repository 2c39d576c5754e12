"""Other trainers' loops: resumed runs end like the whole, and the examples run."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest

from hasten.core.technique import Technique
from hasten.integrations import lightning, transformers
from hasten.integrations.batches import StepBatches, StepLoader
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, Muon
from integrations import test_techniques_in_lightning as in_lightning
from integrations import test_techniques_in_the_trainer as in_trainer
from tiny import tiny_model

STEPS = 6  # of which an epoch has 3
GROUPED = in_trainer.GROUPED
PLANS: dict[str, tuple[Technique, ...]] = {
    "muon": (GROUPED, Packed(), Muon()),
    "compact": (GROUPED, Packed(), LabelledTokenLoss(chunk=128), CompactAdamW("int8")),
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


class Counted:
    """An order of steps whose examples are their own numbers."""

    def steps(self, epoch: int) -> Any:
        return ([10 * epoch + step] for step in range(3))

    def local_steps(self, epoch: int, rank: int, world_size: int) -> Any:
        return ([step] for step in self.steps(epoch))


def step_loader(workers: int = 0) -> StepLoader:
    rows = list(range(40))
    return StepLoader(rows, StepBatches(Counted()), lambda b: b[0], num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_on_from_the_batch_that_follows_the_last(workers: int) -> None:
    loader = step_loader(workers)
    loader.set_epoch(1)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [10, 11]
    state = loader.state_dict()
    assert state == {"epoch": 1, "batch": 2}
    assert next(batches) == 12
    assert loader.state_dict() == {"epoch": 2, "batch": 0}
    other = step_loader(workers)
    other.load_state_dict(state)
    again = iter(other)
    other.set_epoch(1)  # trainers say so after iter, and of the epoch that it is in already
    assert list(again) == [12]
    assert list(other) == [10, 11, 12]
    other.set_epoch(3)
    assert other.state_dict() == {"epoch": 3, "batch": 0}
    assert list(other) == [30, 31, 32]


@plans
@pytest.mark.parametrize("after", [3, 4])
def test_the_trainer_goes_on_where_its_checkpoint_was_written(
    plan: tuple[Technique, ...], after: int, tmp_path: Path
) -> None:
    def trainer(steps: int) -> Any:
        made = in_trainer.trainer_of(
            tmp_path, max_steps=steps, save_strategy="steps", save_steps=after
        )
        return transformers.with_techniques(made, plan)

    whole = in_trainer.losses_of(trainer(STEPS))
    resumed = trainer(STEPS)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{after}"))
    found = {line["step"]: line["loss"] for line in resumed.state.log_history if "loss" in line}
    assert [found[step] for step in range(1, STEPS + 1)] == pytest.approx(whole, rel=1e-6)


@in_lightning.lightning_only
@plans
@pytest.mark.parametrize(("after", "workers"), [(3, 0), (4, 0), (4, 1)])
def test_lightning_goes_on_where_its_checkpoint_was_written(
    plan: tuple[Technique, ...], after: int, workers: int, tmp_path: Path
) -> None:
    saver: Any = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint

    def fit(checkpoint: str | None = None) -> list[float]:
        saves = saver(dirpath=tmp_path / "saved", every_n_train_steps=after, save_top_k=-1)
        trainer = in_lightning.trainer_of(tmp_path, callbacks=[saves], enable_checkpointing=True)
        module = in_lightning.module_of(tiny_model())
        given = lightning.with_techniques(
            trainer, module, in_lightning.loader(workers=workers), plan, seed=in_lightning.SEED
        )
        trainer.fit(*given, ckpt_path=checkpoint)
        losses: list[float] = module.losses
        return losses

    whole = fit()
    [saved] = (tmp_path / "saved").glob(f"*step={after}.ckpt")
    assert fit(str(saved)) == pytest.approx(whole[after:], rel=1e-6)


EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("trainer_with_techniques.py", "lightning_with_techniques.py", "loop_with_techniques.py")
NEEDS = {"lightning_with_techniques.py": "lightning"}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    losses = runpy.run_path(str(EXAMPLES / name))["main"]()
    assert losses[-1] < 0.8 * losses[0]
