"""Options of the Trainer and of SFTTrainer: with `speed_up` they train what they train without.

Each case trains twice from the same weights, plainly and with techniques, and compares the loss of
each step, the weights at the end and what evaluation returns. `acts` names the techniques whose
code must run in training, `rests` those whose code must not; both are counted, not read from a
message.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.utils.data import IterableDataset

import hasten
from technique_counts import TechniqueCounts, counted
from tiny import SILENT, VOCABULARY, examples, tiny_config, tiny_model

STEPS, BATCH = 2, 4
PACKING = frozenset({"packed", "document_attention", "labelled_token_loss"})
LOSS = frozenset({"labelled_token_loss"})
EXAMPLES = [
    {
        "input_ids": example.input_ids.tolist(),
        "attention_mask": [1] * example.length,
        "labels": np.where(example.trained, example.input_ids, -100).tolist(),
    }
    for example in examples(24, longest=24)
]
WHOLE = [{"input_ids": example["input_ids"]} for example in EXAMPLES]
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-6,  # a gradient near zero would have the sign of its rounding otherwise
    "per_device_eval_batch_size": 3,
    **SILENT,
}
Change = Callable[[Any], Any]


@functools.cache
def tokenizer() -> Any:
    """Token 0 fills up; text is words t3, t4, ..."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCABULARY)}
    built = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def by_seq2seq(**settings: Any) -> Any:
    return hf.DataCollatorForSeq2Seq(tokenizer(), **settings)


def by_language_modeling() -> Any:
    return hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)


def left_padding() -> Any:
    other = copy.deepcopy(tokenizer())
    other.padding_side = "left"
    return hf.DataCollatorForSeq2Seq(other)


def without_first_labels(examples: Sequence[Mapping[str, Any]]) -> Any:
    """A collator of one's own: the first three tokens of an answer aren't trained."""
    batch = by_seq2seq()([dict(example) for example in examples])
    batch["labels"][:, :3] = -100
    return batch


@functools.cache
def weights(architecture: str) -> Mapping[str, torch.Tensor]:
    return MappingProxyType(tiny_model(architecture).state_dict())


def model_of(architecture: str) -> Any:
    model: Any = hf.AutoModelForCausalLM.from_config(tiny_config(architecture))
    model.load_state_dict(weights(architecture))
    return model


def unchanged(model: Any) -> Any:
    return model


def to(dtype: torch.dtype) -> Change:
    return lambda model: model.to(dtype)


def tied(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def frozen(model: Any) -> Any:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def with_lora(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def with_prompt(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(model, settings)


class AddsToLoss(hf.LlamaForCausalLM):
    """Adds the size of the head to the loss."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids=input_ids, labels=labels, **named)
        if output.loss is not None:
            output.loss = output.loss + 0.1 * self.lm_head.weight.square().mean()
        return output


def adding(model: Any) -> Any:
    other = AddsToLoss(model.config)
    other.load_state_dict(model.state_dict())
    return other


def hooked(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 0.5)
    return model


class OwnLoss(hf.Trainer):
    """Adds a penalty to the loss that the model returns."""

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        found = super().compute_loss(*args, **named)
        model: Any = self.model
        penalty = 0.1 * model.lm_head.weight.square().mean()
        return (found[0] + penalty, found[1]) if isinstance(found, tuple) else found + penalty


def smoothed_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, wanted, label_smoothing=0.2)


class Generates(hf.TrainerCallback):
    """Generates from the model that trains, after each step, in its training mode's place."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        model, mode = named["model"], named["model"].training
        model.eval()
        prompt = torch.tensor([EXAMPLES[0]["input_ids"][:3]])
        model.generate(prompt, max_new_tokens=3, do_sample=False)
        model.train(mode)


class Copies(hf.TrainerCallback):
    """Copies the model, changes the copy, and leaves the model as it is."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        other = copy.deepcopy(named["model"]).eval()
        prompt = torch.tensor([EXAMPLES[0]["input_ids"]])
        with torch.no_grad():
            before = other(input_ids=prompt).logits
            for parameter in other.parameters():
                parameter.zero_()
            after = other(input_ids=prompt).logits
        assert not torch.equal(before, after)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(EXAMPLES)


def share_right(prediction: hf.EvalPrediction) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    hits = np.asarray(logits)[:, :-1].argmax(-1) == np.asarray(labels)[:, 1:]
    return {"right": float(hits[np.asarray(labels)[:, 1:] != -100].mean())}


EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1}
EVALUATED: dict[str, Any] = {
    "eval_dataset": EXAMPLES[:6],
    "compute_metrics": share_right,
}


@dataclass(frozen=True)
class Case:
    """One set-up of the Trainer.

    Args:
        arguments: of TrainingArguments.
        trainer: of the Trainer itself.
        change: what is done to the model first.
        acts, rests: techniques that must act, and must not.
        tolerance: relative, of losses and of the weights' movement.
        twice: speed_up is called twice.
        resumed: a second trainer continues from the first one's checkpoint.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = "llama"
    kind: type[hf.Trainer] = hf.Trainer
    change: Change = unchanged
    examples: Any = None
    collator: Callable[..., Any] = by_seq2seq
    acts: frozenset[str] = PACKING
    rests: frozenset[str] = frozenset()
    tolerance: float = 1e-4
    twice: bool = False
    resumed: bool = False
    built_by_the_trainer: bool = False


def options(**arguments: Any) -> Case:
    return Case(arguments)


CASES: dict[str, Case] = {
    "qwen2": Case(architecture="qwen2"),
    "deepseek_v2": Case(architecture="deepseek_v2"),
    "deepseek_v3": Case(architecture="deepseek_v3"),
    "language modeling": Case(examples=WHOLE, collator=by_language_modeling),
    "padding to a multiple": Case(collator=functools.partial(by_seq2seq, pad_to_multiple_of=8)),
    "two passes": options(gradient_accumulation_steps=2),
    "three passes, cut at the end": Case(
        {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1}
    ),
    "grouped by length": options(train_sampling_strategy="group_by_length"),
    "sequential": options(train_sampling_strategy="sequential"),
    "bf16": Case({"bf16": True}, tolerance=2e-2),
    "clipped": options(max_grad_norm=0.05),
    "not clipped": options(max_grad_norm=0.0),
    "sgd": options(optim="sgd", learning_rate=0.1),
    "adafactor": options(optim="adafactor"),
    "adagrad": options(optim="adagrad"),
    "rmsprop": options(optim="rmsprop"),
    "adamw_torch_fused": options(optim="adamw_torch_fused"),
    "cosine": options(lr_scheduler_type="cosine", warmup_steps=1),
    "cosine to a least rate": options(
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-4}
    ),
    "constant": options(lr_scheduler_type="constant"),
    "weight decay": options(weight_decay=0.1),
    "dropped last": Case(
        {"dataloader_drop_last": True, "per_device_train_batch_size": 7, "max_steps": 4}
    ),
    "a worker loads": options(dataloader_num_workers=1),
    "an epoch": options(num_train_epochs=1, max_steps=-1, per_device_train_batch_size=8),
    "another seed of the data": options(data_seed=7),
    "checkpointed activations": options(gradient_checkpointing=True),
    "batch size to be found": options(auto_find_batch_size=True),
    "tokens counted": options(include_num_input_tokens_seen="non_padding"),
    "tokens and padding counted": options(include_num_input_tokens_seen="all"),
    "evaluated": Case({**EACH_STEP, "eval_on_start": True}, EVALUATED),
    "plateau": Case(
        {**EACH_STEP, "lr_scheduler_type": "reduce_lr_on_plateau"},
        EVALUATED,
    ),
    "best model": Case(
        {
            **EACH_STEP,
            "eval_on_start": True,
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
        },
        EVALUATED,
    ),
    "resumed": Case({"save_strategy": "steps", "save_steps": 2, "max_steps": 3}, resumed=True),
    "tied head": Case(change=tied),
    "frozen layers": Case(change=frozen),
    "lora": Case(change=with_lora),
    "float64": Case(change=to(torch.float64)),
    "weights in bf16": Case(change=to(torch.bfloat16), tolerance=5e-2),
    "generates": Case(trainer={"callbacks": [Generates]}),
    "copies": Case(trainer={"callbacks": [Copies]}),
    "twice": Case(twice=True),
    "built by the trainer": Case(acts=frozenset(), built_by_the_trainer=True),
    "one example a row": Case({"per_device_train_batch_size": 1}, acts=LOSS, rests=PACKING - LOSS),
    "left padding": Case(collator=left_padding, acts=frozenset()),
    "label smoothing": Case({"label_smoothing_factor": 0.1}, acts=PACKING - LOSS, rests=LOSS),
    "noise on embeddings": Case(
        {"neftune_noise_alpha": 5.0}, acts=frozenset(), rests=frozenset({"packed"})
    ),
    "a stream": Case({"max_steps": STEPS}, examples=Stream()),
    "own collator": Case(collator=lambda: without_first_labels),
    "packed by its collator": Case(
        collator=hf.DataCollatorWithFlattening, acts=frozenset(), rests=frozenset({"packed"})
    ),
    "own loss": Case(kind=OwnLoss, acts=frozenset()),
    "loss function": Case(
        trainer={"compute_loss_func": smoothed_loss}, acts=frozenset(), rests=PACKING
    ),
    "model that adds to its loss": Case(change=adding, acts=frozenset(), rests=LOSS),
    "hooked head": Case(change=hooked, acts=frozenset(), rests=LOSS),
    "prompt tuning": Case(change=with_prompt, acts=frozenset(), rests=PACKING),
}


# Each has the same code of ours as another: an optimizer, a schedule or an order of the host's own.
LONG = {
    *("qwen2", "deepseek_v2", "language modeling", "two passes", "sequential", "not clipped"),
    *("sgd", "adagrad", "rmsprop", "adamw_torch_fused", "cosine", "cosine to a least rate"),
    *("constant", "weight decay", "dropped last", "an epoch", "another seed of the data"),
    *("tokens and padding counted", "plateau", "float64", "copies", "adafactor"),
    *("padding to a multiple", "built by the trainer", "clipped", "evaluated"),
}


@dataclass
class Outcome:
    """What a training left behind."""

    logs: list[dict[str, Any]]
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    predictions: Any
    effective: frozenset[str] = frozenset()

    def series(self, key: str) -> list[float]:
        return [line[key] for line in self.logs if key in line]


def trained(case: Case, folder: Path, speed_up: bool) -> Outcome:
    """Trains once; the model has the same weights and the same random state in both runs."""
    counts = TechniqueCounts()
    with counted(counts):
        trainer = _trainer(case, folder, speed_up, counts)
        start = _weights(trainer)
        torch.manual_seed(5)
        trainer.train()
        if case.resumed:
            trainer = _trainer(case, folder, speed_up, counts)
            torch.manual_seed(5)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        effective = frozenset(counts.effective())
        predictions = trainer.predict(WHOLE[:6] if case.examples is WHOLE else EXAMPLES[:6])  # type: ignore[arg-type]
    return Outcome(trainer.state.log_history, start, _weights(trainer), predictions, effective)


def _trainer(case: Case, folder: Path, speed_up: bool, counts: TechniqueCounts) -> hf.Trainer:
    arguments = hf.TrainingArguments(str(folder), **{**ARGUMENTS, **case.arguments})
    build = functools.partial(_model, case)
    given: dict[str, Any] = (
        {"model_init": build} if case.built_by_the_trainer else {"model": build()}
    )
    examples: Any = EXAMPLES if case.examples is None else case.examples
    trainer = case.kind(
        **given,
        args=arguments,
        train_dataset=examples,
        data_collator=case.collator(),
        processing_class=tokenizer(),
        **dict(case.trainer),
    )
    with counts.paused():
        for _ in range(speed_up * (1 + case.twice)):
            hasten.speed_up(trainer)
    return trainer


def _model(case: Case) -> Any:
    return case.change(model_of(case.architecture))


def _weights(trainer: hf.Trainer) -> dict[str, torch.Tensor]:
    model: Any = trainer.model
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_training(plain: Outcome, found: Outcome, tolerance: float) -> None:
    """Losses of all steps, norms of gradients, evaluation, and how the weights moved."""
    assert len(plain.series("loss")) == len(found.series("loss")) > 0
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "train_loss"):
        assert found.series(key) == pytest.approx(plain.series(key), rel=10 * tolerance), key
    seen = "num_input_tokens_seen"
    assert found.series(seen) == plain.series(seen)
    assert found.weights.keys() == plain.weights.keys()
    for name, wanted in plain.weights.items():
        moved = (wanted - plain.start[name]).double().norm().item()
        apart = (wanted - found.weights[name]).double().norm().item()
        assert apart <= 50 * tolerance * moved + 1e-7, name
    if plain.predictions is None:
        return
    labels = plain.predictions.label_ids
    assert np.array_equal(found.predictions.label_ids, labels)
    logits, wanted_logits = (np.asarray(o.predictions.predictions) for o in (found, plain))
    assert logits.shape == wanted_logits.shape
    assert np.allclose(logits, wanted_logits, rtol=100 * tolerance, atol=100 * tolerance)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] * (name in LONG))
        for name, case in CASES.items()
    ],
)
def test_a_trainer_trains_the_same_with_techniques(case: Case, tmp_path: Path) -> None:
    plain = trained(case, tmp_path / "plain", speed_up=False)
    found = trained(case, tmp_path / "found", speed_up=True)
    assert not plain.effective
    assert case.acts <= found.effective
    assert not case.rests & found.effective
    assert_same_training(plain, found, case.tolerance)


def test_the_page_has_the_number_of_set_ups() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md").read_text()
    assert CASES.keys() > LONG
    together = sum(case.acts == PACKING for case in CASES.values())
    assert together >= 30
    assert f"{len(CASES)} set-ups of the Trainer" in page
    assert f"In {together} set-ups of the Trainer, packed" in page
