"""The proof on the first step: planted faults are taken away, and nothing else is changed."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import hasten
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Technique, setting
from hasten.integrations.transformers import TrainerTechniques
from hasten.measure.quality.first_step import FirstStepProof, GradientRecord
from hasten.measure.quality.probe_batches import uneven_documents
from hasten.parts.nn.causal_lm import causal_lm, trunk
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from ranks import by_torchrun
from tiny import SILENT, VOCABULARY, tiny_model

MARK = VOCABULARY - 1  # a token that only some rows have
FAULTS = (
    *("constant", "gradient", "second batch", "padding", "documents", "mask", "shift", "error"),
    "rank 1",
)


@dataclass(frozen=True)
class Planted(Technique):
    """A technique that is wrong in one way."""

    slot = Slot.LAYERS
    fidelity = Fidelity.ROUNDING
    fault: str = setting("constant", "what is wrong")

    def apply(self, setup: Setup) -> None:
        setup.layers = self._plant

    def _plant(self, model: nn.Module) -> None:
        inner = causal_lm(model)
        usual, decoder = inner.forward, trunk(model)
        states = decoder.norm.forward  # type: ignore[union-attr, operator]
        fault = self.fault
        found = {"marked": False, "masked": False}

        def forward(*args: Any, **given: Any) -> Any:
            ids, mask = given["input_ids"], given.get("attention_mask")
            found["marked"] = bool((ids == MARK).any())
            found["masked"] = mask is not None and bool((mask == 0).any())
            if fault == "error":
                raise ValueError("a kernel that doesn't take this batch")
            if fault == "documents" and given.get("position_ids") is not None:
                given["position_ids"] = torch.arange(ids.shape[1])[None]
            if fault == "mask":
                given["attention_mask"] = None
            if fault == "shift" and given.get("labels") is not None:
                given["labels"] = given["labels"].roll(1, -1)
            output = usual(*args, **given)
            if fault == "constant":
                output.loss = output.loss + 1e-3
            return output

        def norm(hidden: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = states(hidden)
            wrong = {
                "gradient": True,
                "second batch": found["marked"],
                "padding": found["masked"],
                "rank 1": dist.is_initialized() and dist.get_rank() == 1,
            }.get(fault, False)
            return out + 0.01 * (out - out.detach()) if wrong else out  # same value, other gradient

        inner.forward, decoder.norm.forward = forward, norm  # type: ignore[union-attr]

    def check_effect(self, session: Any) -> EffectCheck:
        return EffectCheck(True, "")


class InOrder(Trainer):
    """Rows come in their order."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def rows(count: int = 16, seed: int = 0) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = int(torch.randint(8, 30, (1,), generator=draw))
        ids = torch.randint(3, MARK, (length,), generator=draw).tolist()
        if index == 4:  # of the second micro-batch
            ids[3] = MARK
        labels = [i if at > 2 else -100 for at, i in enumerate(ids)]
        found.append({"input_ids": ids, "labels": labels})
    return found


def left_padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(e["input_ids"]) for e in examples)

    def filled(key: str, filler: int) -> torch.Tensor:
        lines = [[filler] * (longest - len(e["input_ids"])) + e[key] for e in examples]
        return torch.tensor(lines)

    mask = [[0] * (longest - len(e["input_ids"])) + [1] * len(e["input_ids"]) for e in examples]
    return {
        "input_ids": filled("input_ids", 0),
        "labels": filled("labels", -100),
        "attention_mask": torch.tensor(mask),
    }


def trainer_of(folder: Path, model: Any = None, kind: Any = InOrder, **changes: Any) -> Any:
    collator = changes.pop("data_collator", left_padded)
    callbacks = changes.pop("callbacks", None)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        **SILENT,
        **changes,
    }
    torch.manual_seed(0)
    return kind(
        tiny_model() if model is None else model,
        TrainingArguments(**settings),
        train_dataset=rows(),
        data_collator=collator,
        callbacks=callbacks,
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def joined(trainer: Any) -> list[str]:
    """Names of the techniques that are left in a trainer."""
    found = vars(trainer)["_hasten_techniques"]
    assert isinstance(found, TrainerTechniques)
    return [t.name() for t in found.training.techniques]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a training without techniques."""
    trainer = trainer_of(tmp_path_factory.mktemp("plain"))
    trainer.train()
    return weights(trainer)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "rank 1"])
def test_a_planted_fault_is_taken_away_and_named(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, plain: dict[str, torch.Tensor]
) -> None:
    trainer = trainer_of(tmp_path)
    others = [Packed()] if fault == "documents" else []
    hasten.speed_up(trainer, plan=[*others, Planted(fault)])
    trainer.train()
    assert joined(trainer) == [t.name() for t in others]
    (line,) = [r.message for r in caplog.records if "taken out" in r.message]
    assert line.startswith("speed_up: planted was taken out: ")
    for name, weight in weights(trainer).items():
        torch.testing.assert_close(weight, plain[name], rtol=1e-3, atol=1e-4)


def test_documents_that_would_share_a_row_only_later_are_told_apart_too(tmp_path: Path) -> None:
    """One row a batch: no two documents meet in the first step, but two are added."""
    trainer = trainer_of(tmp_path, per_device_train_batch_size=1)
    hasten.speed_up(trainer, plan=[Packed(), Planted("documents")])
    trainer.train()
    assert joined(trainer) == ["packed"]


def test_the_proof_waits_for_a_batch_that_has_a_loss(tmp_path: Path) -> None:
    def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = left_padded(examples)
        if not (batch["input_ids"] == MARK).any():  # the first batch
            batch["labels"][:] = -100
        return batch

    trainer = trainer_of(tmp_path, gradient_accumulation_steps=1)
    trainer.data_collator = collate
    hasten.speed_up(trainer, plan=[Packed(), LabelledTokenLoss(), Planted("gradient")])
    trainer.train()
    assert joined(trainer) == ["packed", "labelled_token_loss"]
    assert all(weight.isfinite().all() for weight in weights(trainer).values())


def test_off_skips_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_PROOF", "off")
    trainer = trainer_of(tmp_path)
    hasten.speed_up(trainer, plan=[Planted("gradient")])
    trainer.train()
    assert joined(trainer) == ["planted"]


def test_memory_that_runs_out_ends_the_proof_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path)
    hasten.speed_up(trainer, plan=[Packed(), LabelledTokenLoss()])

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("hasten.measure.quality.first_step._gradients", full)
    trainer.train()
    assert trainer.state.global_step == 2
    assert joined(trainer) == ["packed", "labelled_token_loss"]
    (line,) = [r.message for r in caplog.records if "memory ran out" in r.message]
    assert "unproven" in line


class Draws(TrainerCallback):
    """Random numbers of each library as a step begins."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        import random

        import numpy as np

        self.found.append((torch.get_rng_state().tolist()[:64], random.random(), np.random.rand()))


def test_afterwards_everything_is_as_it_was_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training whose proof ran and one whose proof was skipped have the same bits."""
    found = []
    for proof in ("off", "on"):
        monkeypatch.setenv("HASTEN_PROOF", proof)
        model: Any = tiny_model("qwen2")
        model.config.attention_dropout = 0.1
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        model.register_buffer("steps", torch.zeros(3))

        class Meter:
            calls = 0

        class Counting(InOrder):
            """Keeps counters of its own, as TRL's trainers do, in objects and modules, too."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.metrics: dict[str, list[float]] = {"loss": []}
                self.calls, self.meter, self.module = 0, Meter(), torch.nn.BatchNorm1d(2)

            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                self.meter.calls += 1
                self.module(torch.randn(3, 2))
                self.late = [*getattr(self, "late", []), self.calls]
                loss = super().compute_loss(model, inputs, *args, **kwargs)
                self.metrics["loss"].append(1.0)
                self.model.steps += 1  # type: ignore[union-attr, operator]
                return loss

        trainer = trainer_of(tmp_path, model, Counting)
        draws = Draws()
        trainer.add_callback(draws)
        hasten.speed_up(trainer, plan=[Planted("none")])
        torch.manual_seed(1)
        trainer.train()
        found.append(
            [
                *(draws.found, trainer.calls, trainer.metrics, model.steps.tolist()),
                *(trainer.meter.calls, trainer.module.running_mean.tolist(), trainer.late),
                *(trainer.state.global_step, [w.tolist() for w in weights(trainer).values()]),
            ]
        )
    assert found[0] == found[1]
    assert found[0][1] == 4


class Noisy(nn.Module):
    """Adds noise of its own to another module's output."""

    def __init__(self, usual: nn.Module) -> None:
        super().__init__()
        self.usual = usual

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.usual(hidden)
        return out * (1 + 0.05 * torch.randn(()))


def test_a_host_that_differs_from_itself_sets_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @dataclass(frozen=True)
    class Drawing(Planted):
        """Draws a random number more, so that the host's noise is another."""

        def _plant(self, model: nn.Module) -> None:
            inner = causal_lm(model)
            usual = inner.forward

            def forward(*args: Any, **given: Any) -> Any:
                torch.randn(3)
                return usual(*args, **given)

            inner.forward = forward

    model: Any = tiny_model()
    model.model.norm = Noisy(model.model.norm)
    trainer = trainer_of(tmp_path, model)
    hasten.speed_up(trainer, plan=[Drawing("none")])
    trainer.train()
    assert joined(trainer) == ["drawing"]
    assert any("differs from itself by" in r.message for r in caplog.records)


def test_half_precision_is_compared_too(tmp_path: Path) -> None:
    for changes, dtype in (({"bf16": True}, torch.float32), ({}, torch.bfloat16)):
        right = trainer_of(tmp_path, tiny_model(dtype=dtype), **changes)
        hasten.speed_up(right, plan=[Packed(), DocumentAttention(), LabelledTokenLoss()])
        wrong = trainer_of(tmp_path, tiny_model(dtype=dtype), **changes)
        hasten.speed_up(wrong, plan=[Packed(), Planted("gradient")])
        for trainer in (right, wrong):
            before = {p.dtype for p in trainer.model.parameters()}
            trainer.train()
            assert {p.dtype for p in trainer.model.parameters()} == before == {dtype}
        assert joined(right) == ["packed", "document_attention", "labelled_token_loss"]
        assert joined(wrong) == ["packed"]


def test_sketches_estimate_the_norm_of_a_difference() -> None:
    torch.manual_seed(0)
    one, other = {"w": torch.randn(5000)}, {"w": torch.randn(5000)}
    whole, sketch = GradientRecord(one, sketched=False), GradientRecord(one, sketched=True)
    kept = GradientRecord(one, sketched=False, on_device=True)
    true = float((one["w"] - other["w"]).norm())
    assert whole.distance("w", other["w"]) == kept.distance("w", other["w"]) == pytest.approx(true)
    assert sketch.distance("w", other["w"]) == pytest.approx(true, rel=0.5)
    assert sketch.distance("w", one["w"]) == 0
    assert whole.norm == sketch.norm == pytest.approx(float(one["w"].norm()))


def test_two_documents_of_different_length_have_the_form_of_the_host_s_batch() -> None:
    ids = torch.arange(3, 33)[None]
    found = uneven_documents({"input_ids": ids, "labels": ids, "attention_mask": ids * 0 + 1})
    assert found is not None
    assert found["input_ids"].tolist()[0] == [*range(3, 13), *[0] * 10]
    assert found["attention_mask"].sum(1).tolist() == [10, 20]
    assert (found["labels"][found["attention_mask"] == 0] == -100).all()
    flat = uneven_documents({"input_ids": ids, "labels": ids, "position_ids": ids - 3})
    assert flat is not None
    assert flat["position_ids"].tolist() == [[*range(10), *range(20)]]
    assert set(flat) == {"input_ids", "labels", "position_ids"}
    padded = torch.tensor([[1, 1, 1], [1, 1, 0]])
    several = {"input_ids": padded, "labels": padded, "attention_mask": padded}
    assert uneven_documents(several) is None  # these show it already
    alike = {
        "input_ids": torch.cat((ids, ids)),
        "labels": torch.cat((ids, ids)).where(torch.arange(30) < 20, -100),
        "attention_mask": (torch.arange(30) < torch.tensor([[20], [25]])).long(),
    }
    assert uneven_documents(alike) is not None  # a mean of the rows' means isn't seen in these
    left = uneven_documents({key: value.flip(1) for key, value in alike.items()})
    assert left is not None
    assert (left["labels"][left["attention_mask"].cumsum(1) == 1][:1] == -100).all()
    assert uneven_documents({"input_ids": ids, "labels": ids, "images": ids}) is None


def ranked(folder: Path) -> None:
    """On each of two ranks: a fault on rank 1 alone is taken away on both."""
    trainer = trainer_of(folder, max_steps=1, ddp_backend="gloo", per_device_train_batch_size=2)
    hasten.speed_up(trainer, plan=[Packed(), LabelledTokenLoss(), Planted("rank 1")])
    trainer.train()
    (folder / f"rank-{dist.get_rank()}").write_text(" ".join(joined(trainer)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fault_on_one_rank_is_taken_away_on_all(tmp_path: Path) -> None:
    failed = by_torchrun(__file__, tmp_path)
    assert not failed, failed[-3000:]
    found = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert found == ["packed labelled_token_loss"] * 2


if __name__ == "__main__":
    logging.disable()
    ranked(Path(sys.argv[1]))
    dist.barrier()
    os._exit(0)  # gloo's threads may end an interpreter with SIGABRT (torch 2.13)


class Routed(nn.Module):
    """Two layers that send each token to one of two experts; one token is undecided."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(6, 4)
        self.embedding.weight.data = torch.randn(6, 4, generator=draw)
        self.embedding.weight.data[5] = torch.tensor([8.0, 8.0, 8.0, -8.0])
        self.gates = nn.ParameterList(torch.tensor([1.0, 1, 1, 3]) for _ in range(2))
        self.head = nn.Parameter(torch.randn(4, generator=draw))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


class RoutedPasses:
    """In the run's own format a technique rounds otherwise, or is wrong."""

    is_mixed = True

    def __init__(self, fault: bool) -> None:
        self.model, self.fault = Routed(), fault
        self.models = [self.model]
        self.in_use, self.is_wide = False, False

    def loss(self, batch: Any) -> torch.Tensor:
        states, total = self.model.embedding(batch["input_ids"]), torch.zeros(())
        other = self.in_use and not self.is_wide
        for number, gate in enumerate(self.model.gates):
            score = states @ gate
            first = score + (1e-3 if other and number == 0 else -1e-3) > 0
            total = total + torch.where(first, score, -2 * score).sum()
        head = self.model.head.roll(1) if other and self.fault else self.model.head
        return total + (states @ head).sum()

    def batch(self, host_batch: Any, techniques: Any) -> Any:
        return host_batch

    @contextlib.contextmanager
    def active(self, techniques: Any) -> Iterator[None]:
        self.in_use = bool(techniques)
        yield

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        self.is_wide = True
        yield
        self.is_wide = False


@pytest.mark.parametrize("fault", [False, True])
def test_a_router_that_rounding_decides_is_no_fault_and_hides_none(fault: bool) -> None:
    passes = RoutedPasses(fault)
    before = [p.detach().clone() for p in passes.model.parameters()]
    proof = FirstStepProof(passes, [DocumentAttention()], "the host")
    removed = proof.check({"input_ids": torch.arange(6)})
    assert ["head" in str(each.difference) for each in removed] == [True] * fault
    assert all(map(torch.equal, before, passes.model.parameters()))


def test_no_memory_for_another_rounding_ends_the_proof_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (6, 4):
            raise torch.OutOfMemoryError("no room")
        return usual(tensor)

    usual = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", fails)
    proof = FirstStepProof(RoutedPasses(fault=False), [DocumentAttention()], "the host")
    assert proof.check({"input_ids": torch.arange(6)}) == []
    assert "ended because memory ran out" in caplog.text
