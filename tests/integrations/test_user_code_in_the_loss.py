"""A loss that a user wrote runs once a step with `speed_up`, the first step included."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

import hasten
from hasten.integrations.loop import in_loop
from hasten.integrations.transformers import TrainerTechniques, runs_user_code
from hasten.measure.quality.replay import Call, Outputs, Recorder, ReplayPasses
from hasten.parts.nn.causal_lm import callable_modules
from hasten.techniques.layers import FusedLayers
from integrations import test_techniques_in_trl as trl_host
from integrations.test_first_step import InOrder, Planted, joined, left_padded, rows, trainer_of
from integrations.test_techniques_in_lightning import adamw, module_of
from integrations.test_techniques_in_lightning import trainer_of as lightning_of
from technique_counts import counted
from tiny import examples, tiny_model

STEPS = 5
lightning_only = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs lightning"
)
KINDS = ("stream", "teacher", "generators", "bank", "log")


class Extra:
    """What users do in a loss: each call of ``add`` changes ``state``."""

    def __init__(self, kind: str, model: Any, file: Path) -> None:
        self.kind, self.file = kind, file
        more = DataLoader(rows(40, seed=9), batch_size=2, collate_fn=left_padded)  # type: ignore[arg-type]
        self.stream, self.used = iter(more), list[int]()
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self.draw, self.draw_np = torch.Generator().manual_seed(5), np.random.default_rng(5)
        self.draw_py, self.numbers = random.Random(5), list[float]()
        self.bank, self.lines = torch.zeros(1000, 32), list[float]()
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, model: Any, inputs: Any, out: Any) -> Tensor:
        """The loss with what this kind adds to it."""
        loss: Tensor = out.loss
        if self.kind == "stream":
            batch = next(self.stream)
            self.used.append(int(batch["input_ids"].sum()))
            return loss + 0.5 * model(**batch).loss
        if self.kind == "teacher":
            with torch.no_grad():
                wanted = self.teacher(inputs["input_ids"], inputs["attention_mask"]).logits
                for old, new in zip(self.teacher.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
            return loss + F.mse_loss(out.logits, wanted)
        if self.kind == "generators":
            weights = torch.rand(out.logits.shape[:2], generator=self.draw)
            self.numbers += [self.draw_py.random(), float(self.draw_np.random())]
            return loss + 1e-2 * (out.logits.square().mean(-1) * weights).mean()
        if self.kind == "bank":
            last = out["logits"][:, -1, :32]
            self.bank = torch.cat((self.bank[len(last) :], last.detach()))
            return loss + 1e-3 * (last @ self.bank.T).square().mean()
        self.lines.append(float(loss.detach()))
        with self.file.open("a") as file:
            file.write(f"{self.lines[-1]}\n")
        return loss

    def exact(self) -> list[Any]:
        """State that no rounding of a weight changes."""
        lines = len(self.lines), len(self.file.read_text().splitlines() if self.lines else "")
        return [self.used, self.numbers, self.draw.get_state().tolist(), lines, len(self.bank)]

    def rounded(self) -> Tensor:
        parts = [*(p.flatten() for p in self.teacher.parameters()), self.bank.flatten()]
        return torch.cat([*parts, torch.tensor(self.lines)])


def in_trainer(kind: str, folder: Path, fast: bool) -> tuple[Extra, Any, set[str]]:
    class Own(InOrder):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
        ) -> Any:
            out = model(**inputs)
            loss = extra.add(model, inputs, out)
            return (loss, out) if return_outputs else loss

    trainer = trainer_of(folder, kind=Own, max_steps=STEPS, remove_unused_columns=False)
    extra = Extra(kind, trainer.model, folder / f"{kind}-{fast}.txt")
    if fast:
        hasten.speed_up(trainer)
    trainer.train()
    return extra, trainer.model, set(joined(trainer)) if fast else set()


def in_sft_trainer(kind: str, folder: Path, fast: bool) -> tuple[Extra, Any, set[str]]:
    """A subclass of TRL's trainer whose loss adds to TRL's own."""
    trl: Any = importlib.import_module("trl")
    sft = trl_host.trainer_of("SFT", folder)

    class Own(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
        ) -> Any:
            given = dict(inputs)
            loss, out = super().compute_loss(model, inputs, return_outputs=True, **more)
            out.loss = loss
            total = extra.add(model, given, out)
            return (total, out) if return_outputs else total

    sft.__class__ = Own
    extra = Extra(kind, sft.model, folder / f"{kind}-{fast}.txt")
    if fast:
        hasten.speed_up(sft)
    sft.train()
    return extra, sft.model, set(joined(sft)) if fast else set()


def in_lightning(kind: str, folder: Path, fast: bool) -> tuple[Extra, Any, set[str]]:
    module = module_of(tiny_model())
    extra = Extra(kind, module.model, folder / f"{kind}-{fast}.txt")

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        return extra.add(module.model, batch, module.model(**batch))

    module.training_step = training_step
    trainer = lightning_of(folder, max_steps=STEPS)
    if fast:
        hasten.speed_up(trainer)
    with counted() as counts:
        trainer.fit(module, DataLoader(rows(), batch_size=4, collate_fn=left_padded))  # type: ignore[arg-type]
    return extra, module.model, set(counts.effective())


def in_a_loop(kind: str, folder: Path, fast: bool) -> tuple[Extra, Any, set[str]]:
    model: Any = tiny_model()
    extra = Extra(kind, model, folder / f"{kind}-{fast}.txt")
    if fast:
        in_loop(model, [FusedLayers()], examples=examples(24), batch=4, steps=STEPS)
    optimizer = adamw(model)
    for batch in DataLoader(rows(4 * STEPS), batch_size=4, collate_fn=left_padded):  # type: ignore[arg-type]
        extra.add(model, batch, model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return extra, model, {"fused_layers"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "run",
    [
        in_trainer,
        pytest.param(in_sft_trainer, marks=trl_host.pytestmark),
        pytest.param(in_lightning, marks=lightning_only),
        in_a_loop,
    ],
    ids=["Trainer", "SFTTrainer", "Lightning", "loop"],
)
def test_what_the_user_s_loss_changes_changes_once_a_step(
    run: Callable[..., Any], kind: str, tmp_path: Path
) -> None:
    plain, plain_model, _ = run(kind, tmp_path / "plain", fast=False)
    extra, model, techniques = run(kind, tmp_path / "fast", fast=True)
    assert extra.exact() == plain.exact()
    torch.testing.assert_close(extra.rounded(), plain.rounded(), rtol=1e-3, atol=1e-4)
    for one, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    assert "fused_layers" in techniques


class Weighted(InOrder):
    """Reads loss and logits, changes these in place, and asks the model once without gradients."""

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:  # type: ignore[override]
        with torch.no_grad():
            model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        out = model(**inputs)
        logits = out.logits.mul_(2.0)
        return out.loss + 1e-2 * logits.square().mean()


@pytest.mark.parametrize(
    "fault", ["constant", "gradient", "second batch", "padding", "mask", "shift", "error"]
)
def test_a_planted_fault_is_seen_beside_a_loss_of_the_user_s(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, kind=Weighted, max_steps=1)
    hasten.speed_up(trainer, plan=[Planted(fault)])
    trainer.train()
    assert joined(trainer) == []
    (line,) = [r.message for r in caplog.records if "taken out" in r.message]
    assert line.startswith("speed_up: planted was taken out: ")


def test_padding_is_tried_even_if_no_batch_of_the_first_step_has_it(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, kind=Weighted, max_steps=1, per_device_train_batch_size=1)
    hasten.speed_up(trainer, plan=[Planted("padding")])
    trainer.train()
    assert joined(trainer) == []


class Foreign(InOrder):
    """A loss of the user's own that does what ``kind`` says."""

    kind = ""

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:  # type: ignore[override]
        if self.kind == "tuple":
            return model(**inputs, return_dict=False)[0]
        if self.kind == "parts":
            hidden = model.model(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
            return model.lm_head(hidden).square().mean()
        if self.kind == "embeddings":
            embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
            return model(inputs_embeds=embedded, **inputs).loss
        if self.kind == "without the model":
            return sum(p.square().sum() for p in model.parameters())
        return model(**inputs).loss


def test_embeddings_of_the_user_s_own_pass_are_compared(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, kind=Foreign, max_steps=2)
    trainer.kind = "embeddings"
    hasten.speed_up(trainer, plan=["fused_layers"])
    trainer.train()
    assert joined(trainer) == ["fused_layers"]


def assert_compared(build: Callable[[], Any]) -> None:
    """Of trainers alike, the right technique stays and the one with a fault goes."""
    for fault, expected in (("none", ["planted"]), ("gradient", [])):
        trainer = build()
        hasten.speed_up(trainer, plan=[Planted(fault)])
        trainer.train()
        assert joined(trainer) == expected


@pytest.mark.parametrize("kind", ["tuple", "parts"])
def test_other_ways_to_call_a_model_are_compared_too(kind: str, tmp_path: Path) -> None:
    class Calls(Foreign):
        pass

    Calls.kind = kind
    assert_compared(lambda: trainer_of(tmp_path, kind=Calls, max_steps=1))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("without the model", "can't be compared: the loss doesn't call the model"),
        ("a hook that counts", "can't be compared: a call of the model has another output"),
    ],
)
def test_calls_that_can_not_be_repeated_leave_no_technique(
    kind: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, kind=Foreign, max_steps=2)
    trainer.kind = kind
    calls: list[int] = []

    def adds(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append(1)
        return output + 0.1 * len(calls)

    if kind == "a hook that counts":
        trainer.model.model.norm.register_forward_hook(adds)
    hasten.speed_up(trainer, plan=["activation_checkpointing"])
    trainer.train()
    assert joined(trainer) == []
    assert words in caplog.text
    assert len(calls) in (0, 4)  # two steps of two batches


def dropping() -> Any:
    model: Any = tiny_model("qwen2")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return model


@pytest.mark.parametrize(
    ("model", "bf16"),
    [(dropping, False), (tiny_model, True), (lambda: tiny_model(dtype=torch.bfloat16), False)],
    ids=["dropout", "autocast", "weights in bf16"],
)
def test_noise_and_rounding_do_not_hide_or_make_a_difference(
    model: Callable[[], Any], bf16: bool, tmp_path: Path
) -> None:
    assert_compared(lambda: trainer_of(tmp_path, model(), Weighted, max_steps=1, bf16=bf16))


def test_the_code_of_a_loss_decides_whose_it_is(tmp_path: Path) -> None:
    class Logging(InOrder):
        def log(self, *args: Any, **more: Any) -> None:
            pass

    class Smoothing(InOrder):
        def compute_loss_context_manager(self) -> Any:
            return super().compute_loss_context_manager()

    class Counting(InOrder):
        def compute_loss(self, *args: Any, **more: Any) -> Any:
            return super().compute_loss(*args, **more)

    assert not runs_user_code(trainer_of(tmp_path, kind=Trainer))
    assert not runs_user_code(trainer_of(tmp_path, kind=Logging))
    assert not runs_user_code(trainer_of(tmp_path, kind=Smoothing))  # called around the loss
    own = trainer_of(tmp_path, kind=Counting)
    assert runs_user_code(own)
    hasten.speed_up(own, plan=[Planted("none")])
    assert isinstance(vars(own)["_hasten_techniques"], TrainerTechniques)
    assert runs_user_code(own)
    patched = trainer_of(tmp_path)
    patched.compute_loss = lambda *args, **more: None
    assert runs_user_code(patched)
    function = trainer_of(tmp_path)
    function.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.loss
    assert runs_user_code(function)


def recorded(backward: Callable[[Any], Tensor]) -> tuple[Any, list[Call]]:
    """A tiny model, and its calls in a pass."""
    model: Any = tiny_model()
    recorder = Recorder(callable_modules(model))
    with recorder.active():
        out = model(**left_padded(rows(4)))
        backward(out).backward()
    return model, recorder.calls


@pytest.mark.parametrize(
    ("read", "names"),
    [
        (lambda out: out.loss, {"loss"}),
        (lambda out: out["loss"], {"loss"}),
        (lambda out: out[0], {"loss"}),
        (lambda out: out.loss + 0 * out.logits.sum(), {"loss", "logits"}),
        (lambda out: out.get("logits").sum(), {"logits"}),
        (lambda out: out.to_tuple()[0], {"loss", "logits"}),
        (lambda out: next(iter(out.values())), {"loss", "logits"}),
        (lambda out: dict(out.items())["loss"], {"loss", "logits"}),
        (lambda out: sum(part.sum() for part in out[:2]), {"loss", "logits"}),
    ],
)
def test_outputs_that_are_read_are_recorded(read: Any, names: set[str]) -> None:
    _, (call,) = recorded(read)
    assert set(call.sums) == names


def test_the_gradients_of_a_replay_are_those_of_the_pass() -> None:
    """Against autograd's own, with a loss that reads loss and logits."""
    model, calls = recorded(lambda out: 3 * out.loss + out.logits.square().mean())

    class Hosted:
        def __init__(self) -> None:
            self.model = model

    passes = ReplayPasses(Hosted(), lambda inputs: "", lambda techniques: False)
    passes.require_recorded(calls)
    passes.require_repeatable(calls)
    outputs = passes.loss(calls)
    assert isinstance(outputs, Outputs)
    trained = list(model.parameters())
    again = torch.autograd.grad(outputs.tensors, trained, outputs.gradients)
    for one, parameter in zip(again, trained, strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-5, atol=1e-7)


@lightning_only
@pytest.mark.parametrize("reads", ["loss", "logits"])
def test_lightning_packs_the_model_s_call_if_nothing_reads_the_logits(
    reads: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = {}
    for fast in (False, True):
        module, seen = module_of(tiny_model()), list[Any]()

        def training_step(
            batch: Any, batch_idx: int, module: Any = module, seen: list[Any] = seen
        ) -> Tensor:
            out = module.model(**batch)
            seen.append((tuple(batch["input_ids"].shape), float(out.loss.detach())))
            if reads == "logits":
                seen.append(out.logits.argmax(-1).shape)
            loss: Tensor = out.loss
            return loss

        module.training_step = training_step
        trainer = lightning_of(tmp_path, max_steps=STEPS)
        if fast:
            hasten.speed_up(trainer)
        with counted() as counts:
            trainer.fit(module, DataLoader(rows(), batch_size=4, collate_fn=left_padded))  # type: ignore[arg-type]
        found[fast] = seen, set(counts.effective())
    (plain, _), (fast_seen, techniques) = found[False], found[True]
    assert [s if not isinstance(s[-1], float) else s[0] for s in fast_seen] == [
        s if not isinstance(s[-1], float) else s[0] for s in plain
    ]
    losses = [s[1] for s in fast_seen if isinstance(s[-1], float)]
    assert losses == pytest.approx([s[1] for s in plain if isinstance(s[-1], float)], rel=1e-4)
    assert ({"packed", "labelled_token_loss"} <= techniques) == (reads == "loss")
    assert ("packed was taken out" in caplog.text) == (reads == "logits")


@lightning_only
def test_a_first_step_without_a_loss_proves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = module_of(tiny_model())
    numbers: list[int] = []

    def training_step(batch: Any, batch_idx: int) -> Tensor | None:
        numbers.append(batch_idx)
        loss: Tensor = module.model(**batch).loss
        return None if batch_idx == 0 else loss

    module.training_step = training_step
    trainer = lightning_of(tmp_path, max_steps=STEPS)
    hasten.speed_up(trainer, plan=[Planted("gradient")])
    trainer.fit(module, DataLoader(rows(), batch_size=4, collate_fn=left_padded))  # type: ignore[arg-type]
    assert numbers[:3] == [0, 1, 2]
    assert "planted was taken out: the gradient of" in caplog.text


@lightning_only
def test_a_model_in_eval_mode_is_trained_as_it_is_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = {}
    for fast in (False, True):
        module = module_of(tiny_model())
        module.model.eval()
        trainer = lightning_of(tmp_path, max_steps=STEPS)
        if fast:
            hasten.speed_up(trainer)
        with counted() as counts, caplog.at_level(logging.WARNING):
            trainer.fit(module, DataLoader(rows(), batch_size=4, collate_fn=left_padded))  # type: ignore[arg-type]
        assert not module.model.training
        losses[fast] = module.losses
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert {"packed", "labelled_token_loss", "document_attention"} <= set(counts.effective())
    assert "the model is in eval mode, as from_pretrained leaves it" in caplog.text
