"""`speed_up` leaves alone what isn't recognised, and changes training passes only."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import hasten
from hasten.errors import InputError
from hasten.integrations.batches import packed_batch
from hasten.integrations.loop import in_loop
from hasten.integrations.transformers import TrainerTechniques
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.layers import FusedLayers
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW, Muon
from integrations.test_first_step import MARK, joined, left_padded, rows, weights
from integrations.test_first_step import trainer_of as first_step_trainer
from tiny import COMMON, SILENT, tiny_model

PLAN = ["packed", "document_attention", "labelled_token_loss"]


def trainer_of(folder: Path, model: Any = None, **changes: Any) -> Any:
    """One of one pass a step, in the order of the library's own Trainer."""
    return first_step_trainer(
        folder, model, **{"kind": Trainer, "gradient_accumulation_steps": 1, **changes}
    )


def same_as_plain(folder: Path, plan: Any = PLAN, build: Any = tiny_model, **changes: Any) -> Any:
    """Losses and weights of a plain training and of one with techniques agree; the second one."""
    plain = trainer_of(folder, build(), **changes)
    plain.train()
    trainer = hasten.speed_up(trainer_of(folder, build(), **changes), plan)
    trainer.train()

    def losses(one: Any) -> list[float]:
        return [line["loss"] for line in one.state.log_history if "loss" in line]

    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-4)
    for name, weight in weights(trainer).items():
        torch.testing.assert_close(weight, weights(plain)[name], rtol=1e-3, atol=2e-4)
    return trainer


def test_a_step_without_a_trained_token_leaves_the_weights(tmp_path: Path) -> None:
    """As where long questions are cut before their answers begin."""

    def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = left_padded(examples)
        if (batch["input_ids"] == MARK).any():
            batch["labels"][:] = -100
        return batch

    for plan in (PLAN, ["labelled_token_loss"], ["packed", "fused_layers", "fused_adamw"]):
        same_as_plain(tmp_path, plan, data_collator=collate, max_steps=4)  # 4 steps are an epoch


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_packed_without_losing_a_label(side: str) -> None:
    torch.manual_seed(0)
    batch = left_padded(rows(6))
    if side == "right":
        batch = {k: v.flip(1) for k, v in batch.items()}
    packed = packed_batch(batch)
    assert isinstance(packed, dict)
    assert packed["input_ids"].shape == (1, int(batch["attention_mask"].sum()))
    found = []
    ends = packed["boundaries"].tolist()
    for start, end in itertools.pairwise(ends):
        found.append((packed["input_ids"][0, start:end].tolist(), packed["labels"][0, start:end]))
        assert packed["position_ids"][0, start:end].tolist() == list(range(end - start))
    for ids, labels, mask in zip(*batch.values(), strict=True):
        own = ids[mask.bool()].tolist()
        (theirs,) = [label for document, label in found if document == own]
        assert theirs[0] == -100
        assert theirs[1:].tolist() == labels[mask.bool()][1:].tolist()
    counted = (batch["labels"][:, 1:] != -100).sum()  # as the Trainer counts them
    assert (packed["labels"][..., 1:] != -100).sum() == counted - (side == "right") * 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_type_ids": torch.zeros(2, 4)}, "also returns token_type_ids"),
        ({"labels": None}, "no labels"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])}, "more than a mark"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "another shape"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]] * 2)}, "more than a mark on filler"),
        ({"labels": torch.full((2, 4), -100), "attention_mask": None}, "no token to train"),
        (
            {
                "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
                "labels": torch.tensor([[-100, 1, 2, 3], [4, 5, 6, 7]]),
            },
            "predicts the first token",
        ),
    ],
)
def test_a_batch_of_another_form_is_left_as_it_is(change: dict[str, Any], reason: str) -> None:
    ids = torch.arange(8).view(2, 4)
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones(2, 4)}
    assert reason in str(packed_batch({**batch, **change}))


class Copies(TrainerCallback):
    """What people do with a model between two steps."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.copies: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        prompt = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])
        kwargs = {"attention_mask": (prompt != 0).long(), "max_new_tokens": 4, "do_sample": False}
        self.texts.append(model.generate(prompt, **kwargs).tolist())
        self.copies.append(copy.deepcopy(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        self.copies.append(torch.load(file, weights_only=False))
        self.copies.append(pickle.loads(pickle.dumps(model)))


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "deepseek_v32"])
def test_generation_copies_and_files_are_those_of_the_model(
    architecture: str, tmp_path: Path
) -> None:
    seen = []
    for arguments in (None, [[*PLAN, "fused_layers"]], []):  # the last also reports its speed
        trainer = trainer_of(tmp_path, tiny_model(architecture))
        copies = Copies()
        trainer.add_callback(copies)
        if arguments is not None:
            hasten.speed_up(trainer, *arguments)
        trainer.train()
        ids = torch.arange(3, 11)[None]
        model = trainer.model
        model.eval()
        wanted = model(ids).logits
        last = [c.eval()(ids).logits for c in copies.copies[-3:]]
        for found in last:
            assert torch.equal(found, wanted)
        with torch.no_grad():  # a copy is a model of its own
            copies.copies[-3].lm_head.weight.zero_()
        assert not copies.copies[-3](ids).logits.any()
        seen.append((copies.texts, sorted(model.state_dict()), type(model.lm_head)))
        trainer.save_model(str(tmp_path / "saved"))
        again = type(model).from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(again.eval()(ids).logits, wanted)
    assert seen[0] == seen[1] == seen[2]


def test_techniques_join_the_model_that_model_init_builds(tmp_path: Path) -> None:
    built: list[Any] = []

    def build() -> Any:
        built.append(tiny_model())
        return built[-1]

    settings = TrainingArguments(str(tmp_path), max_steps=1, **SILENT)
    trainer: Any = Trainer(
        model_init=build,
        args=settings,
        train_dataset=rows(),  # type: ignore[arg-type]
        data_collator=left_padded,
    )
    hasten.speed_up(trainer, PLAN)
    trainer.train()
    assert len(built) > 1
    found = vars(trainer)["_hasten_techniques"]
    assert found.training.model is trainer.model is built[-1]
    assert joined(trainer) == PLAN


class TwoLosses(Trainer):
    """Each step computes its loss twice."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, dict(inputs)) + self.compute_loss(model, dict(inputs))
        loss.backward()
        return loss.detach()


def test_a_step_with_two_losses_is_followed(tmp_path: Path) -> None:
    trainer = same_as_plain(tmp_path, ["labelled_token_loss", "fused_layers"], kind=TwoLosses)
    assert set(joined(trainer)) == {"labelled_token_loss", "fused_layers"}


def test_a_look_at_the_loader_shows_the_hosts_own_batches(tmp_path: Path) -> None:
    plain = next(iter(trainer_of(tmp_path).get_train_dataloader()))
    trainer = hasten.speed_up(trainer_of(tmp_path), PLAN)
    looks = [next(iter(trainer.get_train_dataloader()))]
    trainer.train()
    assert joined(trainer) == PLAN
    looks.append(next(iter(trainer.get_train_dataloader())))
    for batch in looks:
        assert batch.keys() == plain.keys()
        assert trainer.compute_loss(trainer.model, dict(batch)).isfinite()


class Reads(Trainer):
    """Reads the padding of each batch."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert inputs["attention_mask"].shape == inputs["input_ids"].shape
        return super().training_step(model, inputs, *args, **kwargs)


def test_a_trainer_that_reads_its_batches_gets_padded_ones(tmp_path: Path) -> None:
    trainer = same_as_plain(tmp_path, kind=Reads)
    assert joined(trainer) == PLAN
    replaced_later = trainer_of(tmp_path)
    usual = replaced_later.training_step
    shapes: list[int] = []

    def training_step(model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
        shapes.append(inputs["input_ids"].shape[0])
        return usual(model, inputs, *args, **given)

    replaced_later.training_step = training_step
    hasten.speed_up(hasten.speed_up(replaced_later, PLAN), PLAN).train()
    assert joined(replaced_later) == PLAN
    assert shapes == [4, 4]


def test_a_second_call_replaces_the_first(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    hasten.speed_up(trainer, PLAN)
    hasten.speed_up(trainer, ["labelled_token_loss"])
    callbacks = trainer.callback_handler.callbacks
    assert len([c for c in callbacks if isinstance(c, TrainerTechniques)]) == 1
    trainer.train()
    assert joined(trainer) == ["labelled_token_loss"]
    vars(trainer)["_hasten_techniques"].leave()
    assert trainer.training_step.__func__ is Trainer.training_step
    assert trainer.get_train_dataloader.__func__ is Trainer.get_train_dataloader


def test_the_routers_loss_that_a_config_asks_for_is_kept(tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        config = Qwen3MoeConfig(**COMMON, **experts, num_key_value_heads=2, head_dim=8)
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
        return AutoModelForCausalLM.from_config(config)

    trainer = same_as_plain(tmp_path, ["labelled_token_loss"], build)
    assert joined(trainer) == ["labelled_token_loss"]


def test_an_adapters_addition_to_the_loss_is_kept(tmp_path: Path) -> None:
    from peft import AdaLoraConfig, get_peft_model

    def ada() -> Any:
        config = AdaLoraConfig(
            total_step=20, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        return get_peft_model(tiny_model(), config)  # type: ignore[arg-type]

    same_as_plain(tmp_path, None, ada)


def test_an_adapter_around_norms_is_trained_in_fused_layers(tmp_path: Path) -> None:
    from peft import LNTuningConfig, get_peft_model

    def build() -> Any:
        config = LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"])
        return get_peft_model(tiny_model(), config)  # type: ignore[arg-type]

    trainer = same_as_plain(tmp_path, ["fused_layers"], build)
    assert joined(trainer) == ["fused_layers"]


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "rmsprop", "adamw_torch"])
def test_other_optimizers_are_kept(
    optim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = same_as_plain(tmp_path, None, optim=optim, learning_rate=1e-4)
    kind = type(trainer.optimizer.optimizer).__name__
    assert (kind == "FusedAdamW") == (optim == "adamw_torch")
    assert (f"optim is {optim}" in caplog.text) == (optim != "adamw_torch")


def halves(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def hook_on_a_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm.register_forward_hook(halves)


def hook_on_the_head(model: Any) -> None:
    model.lm_head.register_forward_hook(halves)


def forward_of_a_part(model: Any) -> None:
    usual = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: usual(hidden) * 2


def another_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()


def mean_of_rows(logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    )
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()


def another_loss(model: Any) -> None:
    model.loss_function = mean_of_rows


def new_weights(model: Any) -> None:
    state = {name: weight * 0.5 for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def copied_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])


@pytest.mark.parametrize(
    ("change", "leaves"),
    [
        (hook_on_a_norm, {"packed", "document_attention"}),
        (hook_on_the_head, {"document_attention"}),
        (forward_of_a_part, {"packed", "document_attention"}),
        (another_activation, {*PLAN, "fused_layers"}),
        (another_loss, {"document_attention", "fused_layers"}),
        (new_weights, {*PLAN, "fused_layers"}),
        (copied_layer, {*PLAN, "fused_layers"}),
    ],
)
def test_a_model_that_other_code_changes_between_steps_is_followed(
    change: Any, leaves: set[str], tmp_path: Path
) -> None:
    class Changes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 1:
                change(more["model"])

    plan = [*PLAN, "fused_layers"]
    trainer = same_as_plain(tmp_path, plan, callbacks=[Changes()], max_steps=3)
    assert set(joined(trainer)) == leaves


def with_mean_of_rows(folder: Path, wraps: bool) -> Any:
    """A trainer whose own code takes the mean of the rows' means; rows of a batch are alike."""
    trainer = trainer_of(folder)
    usual = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        labels = inputs["labels"]
        return mean_of_rows(model(**{**inputs, "labels": None}).logits, labels)

    trainer.compute_loss = functools.wraps(usual)(compute_loss) if wraps else compute_loss
    return trainer


@pytest.mark.parametrize("wraps", [False, True])
def test_a_loss_of_the_instance_keeps_one_example_a_row(wraps: bool, tmp_path: Path) -> None:
    for name in ("packed", "labelled_token_loss"):
        with pytest.raises(hasten.errors.InputError, match=f"{name}: Trainer has a compute_loss"):
            hasten.speed_up(with_mean_of_rows(tmp_path, wraps), [name])


class Embeds(Trainer):
    """Gives its model the embeddings of the tokens."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared: Any = dict(super()._prepare_inputs(inputs))
        model: Any = self.model
        prepared["inputs_embeds"] = model.get_input_embeddings()(prepared.pop("input_ids"))
        return prepared


def test_inputs_that_are_computed_from_weights_train_them(tmp_path: Path) -> None:
    trainer = same_as_plain(tmp_path, ["labelled_token_loss", "fused_layers"], kind=Embeds)
    assert set(joined(trainer)) == {"labelled_token_loss", "fused_layers"}


def test_a_batch_without_labels_is_the_hosts_to_refuse(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, data_collator=default_data_collator)
    trainer.train_dataset = [{"input_ids": list(range(3, 12))}] * 8
    hasten.speed_up(trainer, ["packed"])
    with pytest.raises(ValueError, match="did not return a loss"):
        trainer.train()


def test_an_optimizer_with_hooks_or_a_schedule_is_not_replaced_in_a_loop() -> None:
    """A hook would not be called, and the schedule would change the rates of the former alone."""
    model = tiny_model()
    loop = in_loop(model, [FusedAdamW()], examples=rows(4), batch=2)
    hooked = torch.optim.AdamW(model.parameters())
    hooked.register_step_post_hook(lambda *_: None)
    assert loop.optimizer(hooked) is hooked
    scheduled = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 0.5**step)
    assert loop.optimizer(scheduled) is scheduled
    assert loop.optimizer(torch.optim.AdamW(model.parameters())).__class__ is not torch.optim.AdamW


@pytest.mark.parametrize("technique", [FusedAdamW(), CompactAdamW(), Muon()])
def test_rates_that_other_code_changes_in_the_former_optimizer_count(technique: Any) -> None:
    """As a module that keeps its optimizer does, or a schedule that leaves no mark in it."""
    model = tiny_model()
    former = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(former, patience=0)
    loop = in_loop(model, [technique], examples=rows(4), batch=2)
    optimizer = loop.optimizer(former)
    assert optimizer is not former
    model(**left_padded(rows(4))).loss.backward()
    loop.step(optimizer)
    assert former.state_dict()["state"]
    optimizer.load_state_dict(optimizer.state_dict())  # a training that was resumed
    for _ in range(2):
        schedule.step(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [1e-4] * len(optimizer.param_groups)
    )


@pytest.mark.parametrize("use_cache", [None, True, False])
def test_a_loop_s_positions_that_restart_mean_what_they_mean_without_techniques(
    use_cache: bool | None,
) -> None:
    """Transformers takes them for documents only where it fills no cache."""
    ids = torch.arange(3, 15)[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(12)[None] % 5}
    batch |= {} if use_cache is None else {"use_cache": use_cache}
    plain, edited = tiny_model("llama").train(), tiny_model("llama")
    in_loop(edited, [DocumentAttention(), LabelledTokenLoss()], examples=rows(4), batch=2)
    losses = [model(**batch).loss for model in (plain, edited)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for one, other in zip(plain.parameters(), edited.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-7)


def test_a_second_loop_may_train_the_same_model() -> None:
    """As where a cell of a notebook runs again."""
    model, batch = tiny_model("llama"), left_padded(rows(4))
    wanted = model.train()(**batch).loss.item()
    for _ in range(2):
        in_loop(model, [LabelledTokenLoss(), FusedLayers()], examples=rows(4), batch=2)
        output = model(**batch)
        assert output.logits is None
        assert output.loss.item() == pytest.approx(wanted, rel=1e-6)
    in_loop(model, [FusedLayers()], examples=rows(4), batch=2)
    assert model(**batch).logits is not None


@pytest.mark.parametrize("technique", [FusedLayers(), DocumentAttention(), LabelledTokenLoss()])
def test_a_second_derivative_is_refused(technique: Any) -> None:
    """As of a gradient penalty: autograd would take the first gradient for a constant."""
    model, batch = tiny_model("llama"), left_padded(rows(4))
    batch.pop("attention_mask")
    model.set_attn_implementation("eager")
    in_loop(model, [technique], examples=rows(4), batch=2)
    loss = model(**batch).loss
    with pytest.raises(InputError, match="no second derivative"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_a_function_for_the_loss_keeps_one_example_a_row(tmp_path: Path) -> None:
    """Its labels don't reach the model's call, so the check of the first step can't see packing."""
    trainer = trainer_of(tmp_path)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: mean_of_rows(
        outputs.logits, labels
    )
    with pytest.raises(InputError, match="packed: the code of its loss may need one example a row"):
        hasten.speed_up(trainer, ["packed"])


@pytest.mark.parametrize("streamed", [False, True])
def test_batches_that_accelerate_deals_out_are_packed_afterwards(
    streamed: bool, tmp_path: Path
) -> None:
    settings = {} if streamed else {"dispatch_batches": True, "split_batches": True}
    trainer = same_as_plain(
        tmp_path, accelerator_config=settings, kind=Streams if streamed else Trainer
    )
    assert joined(trainer) == PLAN


class Streams(Trainer):
    """Its examples have no length."""

    def __init__(self, *args: Any, train_dataset: Any, **more: Any) -> None:
        class Stream(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(train_dataset)

        super().__init__(*args, train_dataset=Stream(), **more)
