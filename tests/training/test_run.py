"""Whole training runs: real examples in, a model that Transformers loads out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hasten.core import context as facts
from hasten.core.setup import Session
from hasten.core.timing import StepMetrics
from hasten.errors import InputError
from hasten.models.load import load_model, load_tokenizer
from hasten.parts.data.collate import padded
from hasten.parts.nn.causal_lm import causal_lm
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.recipe import sample
from hasten.recipe.schema import Recipe, load_recipe
from hasten.techniques.precision import BF16MasterWeights
from hasten.training.run import train
from sample_data import dataset, real_dataset, small
from told import json_lines

PRESETS = ("deepseek-llm-tiny", "r1-distill-qwen-tiny", "v2-lite-tiny", "v3-tiny")
PLAN = ["packed", "document_attention", "labelled_token_loss"]
if not BF16MasterWeights().unsupported_reasons(facts.seen_at_start()):
    PLAN.append("bf16_master_weights")  # minutes of a loop on a processor without such products


def run(values: dict[str, Any]) -> tuple[dict[str, Any], Session]:
    sessions: list[Session] = []
    recipe = Recipe(**values)
    summary = train(recipe, tell=lambda text: None, on_start=sessions.append)
    return summary, sessions[0]


ALL = [(preset, finetuning) for preset in PRESETS for finetuning in ("full", "lora")]
SAMPLE = ALL[::3]  # each way; v2 trains in tests/release


@pytest.mark.parametrize(
    ("preset", "finetuning"),
    [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.long) for case in ALL],
)
def test_training_lowers_the_loss_and_the_saved_model_loads_with_equal_logits(
    tmp_path: Path, preset: str, finetuning: str
) -> None:
    check_training(tmp_path, dataset("alpaca_en_demo.json", tmp_path), preset, finetuning)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "preset", "finetuning"),
    [
        ("gsm8k_train.jsonl", "deepseek-llm-tiny", "full"),
        ("gsm8k_train.jsonl", "v3-tiny", "lora"),
        ("alpaca_en_demo.json", "v2-lite-tiny", "full"),
        ("alpaca_en_demo.json", "r1-distill-qwen-tiny", "lora"),
    ],
)
def test_training_on_real_records_does_so_too(
    tmp_path: Path, name: str, preset: str, finetuning: str
) -> None:
    longer = {"cutoff_len": 96, "max_examples": 120}  # real questions alone fill 64 tokens
    check_training(tmp_path, real_dataset(name), preset, finetuning, **longer)


def check_training(folder: Path, data: str, preset: str, finetuning: str, **changes: Any) -> None:
    """Train ten steps, and load what was saved as a user would."""
    lora = finetuning == "lora"
    values = small(
        folder,
        model=preset,
        dataset=data,
        max_steps=10,
        finetuning_type=finetuning,
        learning_rate=4e-3 if lora else 3e-3,
        plan=PLAN[:3] if lora else PLAN,
        **changes,
    )
    summary, session = run(values)
    losses = [line["loss"] for line in json_lines(folder / "run" / "metrics.jsonl")]
    assert len(losses) == 10
    assert sum(losses[-3:]) < sum(losses[:3])
    idle = {name for name, proof in summary["effective"].items() if not proof["effective"]}
    # Examples that are all cut to one length leave no padding to take out.
    same_length = len(set(session.setup.job.lengths)) == 1
    assert idle == ({"packed"} if same_length else set())
    loaded = _load(Path(summary["saved"]), preset, summary, lora)
    ids = torch.randint(
        3, loaded.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0)
    )
    causal_lm(session.model).set_attn_implementation("sdpa")
    with torch.no_grad():
        ours, theirs = (m.eval()(input_ids=ids).logits for m in (session.model, loaded))
    assert torch.equal(ours, theirs)
    assert loaded.generate(input_ids=ids[:1], max_new_tokens=3, do_sample=False).shape[1] <= 20
    assert summary["samples"][0]["prompt"]


def _load(folder: Path, preset: str, summary: dict[str, Any], lora: bool) -> Any:
    """As a user would, with Transformers and PEFT alone."""
    import transformers

    if not lora:
        assert folder.name == "model"
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftModel

    assert folder.name == "adapter"
    tokenizer = load_tokenizer(str(folder))
    base = load_model(
        preset,
        seed=summary["seed"],
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return PeftModel.from_pretrained(base, folder)


def test_a_saved_model_is_trained_further_unless_it_is_to_begin_from_scratch(
    tmp_path: Path,
) -> None:
    def first_loss(**changes: Any) -> float:
        summary, _ = run(small(tmp_path, output=str(tmp_path / "again"), **changes))
        assert summary["steps"] == 3
        loss: float = json_lines(tmp_path / "again" / "metrics.jsonl")[0]["loss"]
        return loss

    first, _ = run(small(tmp_path, max_steps=8))
    untrained = json_lines(tmp_path / "run" / "metrics.jsonl")[0]["loss"]
    assert first_loss(model=first["saved"]) < untrained - 0.3
    assert first_loss(model=first["saved"], from_scratch=True) == pytest.approx(untrained, abs=0.3)


def test_a_run_leaves_what_the_docs_promise(tmp_path: Path) -> None:
    price = {"currency": "CNY", "per_device_hour": 0.6}
    values = small(tmp_path, eval_every=2, max_steps=4, price=price)
    summary, _ = run(values)
    output = tmp_path / "run"
    written = {p.name for p in output.iterdir()}
    assert written - {"rejected.jsonl", "machine.jsonl"} == {  # the machine: after ten seconds
        *("recipe.yaml", "run.json", "metrics.jsonl", "evaluations.jsonl", "summary.json"),
        *("model", "best", "data"),
    }
    keys = {
        *("step", "loss", "learning_rate", "grad_norm", "tokens", "trained_tokens"),
        *("tokens_per_second", "step_seconds", "padding_share", "peak_memory_bytes"),
    }
    assert keys <= set(json_lines(output / "metrics.jsonl")[0])
    assert [e["step"] for e in json_lines(output / "evaluations.jsonl")] == [2, 4]
    assert json.loads((output / "summary.json").read_text()) == json.loads(json.dumps(summary))
    promised = {
        *("steps", "tokens", "trained_tokens", "seconds", "startup_seconds", "tokens_per_second"),
        *("examples_per_second", "epoch_seconds", "step_seconds_median", "peak_memory_bytes"),
        *("peak_host_memory_bytes", "eval_loss", "perplexity", "metrics", "world_size"),
        *("plan", "hardware", "versions", "seed", "cost"),
    }
    assert promised <= set(summary)
    startup = summary["startup_seconds"]
    assert set(startup) == {"imports", "data", "meeting", "model", "assembly", "until_first_step"}
    assert startup["until_first_step"] > sum(startup[k] for k in ("data", "model", "assembly"))
    assert summary["cost"]["total"] == pytest.approx(0.6 * summary["seconds"] / 3600)
    resolved = load_recipe(output / "recipe.yaml")
    assert resolved == Recipe(**values)
    assert yaml.safe_load((output / "recipe.yaml").read_text())["lr_schedule"] == "cosine"


@pytest.mark.usefixtures("published_presets")  # a narrow model is undecided between two tokens
@pytest.mark.parametrize("finetuning", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_each_evaluation_writes_the_model_s_greedy_answers_and_changes_no_step(
    tmp_path: Path, finetuning: str
) -> None:
    values = small(tmp_path, max_steps=4, eval_every=2, plan=PLAN[:3], finetuning_type=finetuning)
    run(values)
    plain = json_lines(tmp_path / "run" / "metrics.jsonl")
    _, session = run(values | {"samples": 2})
    output = tmp_path / "run"
    assert [m["loss"] for m in json_lines(output / "metrics.jsonl")] == [m["loss"] for m in plain]
    samples = json_lines(output / "samples.jsonl")
    assert [line["step"] for line in samples] == [2, 2, 4, 4]
    # The same texts by the library's own generation, on the model after its last step.
    tokenizer = load_tokenizer(str(output / ("model" if finetuning == "full" else "adapter")))
    causal_lm(session.model).set_attn_implementation("sdpa")
    session.model.eval()
    for line in samples[2:]:
        ids = tokenizer(line["prompt"], return_tensors="pt", add_special_tokens=False)
        written = session.model.generate(
            **ids, max_new_tokens=sample.ANSWER_TOKENS, do_sample=False
        )
        answer = tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert line["answer"] == answer


def test_a_file_in_the_run_s_folder_saves_and_stops_it_and_the_next_run_starts(
    tmp_path: Path,
) -> None:
    values = small(tmp_path, max_steps=100_000, eval_data=0)
    stop = tmp_path / "run" / "stop"

    def request(metrics: StepMetrics) -> None:
        if metrics.step == 2:
            stop.touch()

    summary = train(Recipe(**values), tell=lambda text: None, on_step=request)
    assert summary["stopped"] == "interrupted"
    assert 2 <= summary["steps"] < 100_000
    assert Path(summary["saved"], "model.safetensors").is_file()
    again, _ = run(values | {"max_steps": 3})
    assert (again["stopped"], again["steps"]) == ("done", 3)
    assert not stop.exists()


def test_the_same_recipe_gives_the_same_bits_and_nothing_is_overwritten(tmp_path: Path) -> None:
    values = small(tmp_path, plan=PLAN, max_steps=2)
    run(values)
    once = json_lines(tmp_path / "run" / "metrics.jsonl")
    run(values)
    twice = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [m["loss"] for m in once] == [m["loss"] for m in twice]
    assert [m["grad_norm"] for m in once] == [m["grad_norm"] for m in twice]
    before = tmp_path / "run" / "previous" / "1"
    assert json_lines(before / "metrics.jsonl") == once
    assert (before / "model" / "config.json").is_file()


@pytest.mark.parametrize("saves", [None, 1])
def test_a_second_run_in_a_live_run_s_folder_is_refused_and_touches_nothing(
    tmp_path: Path, saves: int | None
) -> None:
    values = small(tmp_path, max_steps=2, checkpoint_every=saves, eval_data=0)
    output, refused = tmp_path / "run", list[str]()

    def begin_another(metrics: StepMetrics) -> None:
        before = {path: path.read_bytes() for path in output.rglob("*.[jy]*") if path.is_file()}
        with pytest.raises(InputError, match="in use by process") as error:
            train(Recipe(**{**values, "seed": 9, "max_examples": 40}), tell=lambda text: None)
        refused.append(str(error.value))
        watched = ("machine.jsonl", "run.json", "manifest.json")  # written by other threads
        for path, content in before.items():
            assert path.name in watched or path.read_bytes() == content

    train(Recipe(**values), tell=lambda text: None, on_step=begin_another)
    assert len(refused) == 2
    assert len(json_lines(output / "metrics.jsonl")) == 2
    assert not (output / "previous").exists()
    assert not (output / "run.lock").exists()


def test_the_asked_measures_stand_beside_the_eval_loss(tmp_path: Path) -> None:
    """Taken while the plan's own attention and head are in place, and on the saved model."""
    values = small(tmp_path, metrics=["token_accuracy"], plan=PLAN[:3], max_steps=4, eval_every=2)
    summary, session = run(values)
    found = [e["token_accuracy"] for e in json_lines(tmp_path / "run" / "evaluations.jsonl")]
    assert len(found) == 2
    assert all(0 <= share <= 1 for share in found)
    model: Any = load_model(Path(summary["saved"]))
    eval_data = session.setup.job.eval_data
    batch = padded([eval_data[i] for i in range(len(eval_data))])
    predicted, labels = WholeLogitsLoss(model).eval()(predict=True, **batch)
    assert float((predicted == labels).double().mean()) == pytest.approx(found[-1], abs=0.02)


def test_best_holds_the_weights_of_the_lowest_eval_loss(tmp_path: Path) -> None:
    values = small(tmp_path, eval_every=1, max_steps=6, learning_rate=0.5, lr_schedule="constant")
    run(values)
    evaluations = json_lines(tmp_path / "run" / "evaluations.jsonl")
    best = min(e["eval_loss"] for e in evaluations)
    assert best != evaluations[-1]["eval_loss"]
    again = small(
        tmp_path,
        model=str(tmp_path / "run" / "best"),
        output=str(tmp_path / "again"),
        max_steps=1,
        learning_rate=1e-12,
    )
    summary, _ = run(again)
    assert summary["eval_loss"] == pytest.approx(best, rel=1e-4)


def test_a_later_attempt_does_not_take_a_worse_model_for_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"learning_rate": 0.5, "lr_schedule": "constant"}  # the loss can only rise
    values = small(tmp_path, eval_every=2, plan=[{"checkpoints": {"interval": 2}}], **rates)
    run({**values, "max_steps": 4})
    best = tmp_path / "run" / "best"
    before = {p.name: p.read_bytes() for p in best.glob("*.safetensors")}
    assert before
    losses = [e["eval_loss"] for e in json_lines(tmp_path / "run" / "evaluations.jsonl")]
    with (tmp_path / "run" / "evaluations.jsonl").open("a") as file:  # as if it had been lower
        file.write(json.dumps({"step": 4, "tokens": 9, "eval_loss": min(losses) / 100}) + "\n")
    monkeypatch.setenv("HASTEN_ATTEMPT", "2")
    run({**values, "max_steps": 6, "resume": "auto"})
    assert {p.name: p.read_bytes() for p in best.glob("*.safetensors")} == before
    assert [e["step"] for e in json_lines(tmp_path / "run" / "evaluations.jsonl")][-1] == 6


@pytest.mark.parametrize("later_best", [False, True], ids=["", "best of a later step"])
def test_a_resumed_run_has_the_best_model_and_the_patience_of_an_uninterrupted_one(
    tmp_path: Path, later_best: bool
) -> None:
    rates = {"learning_rate": 0.3, "lr_schedule": "constant"}  # the loss rises
    values = small(tmp_path, eval_every=2, patience=2, checkpoint_every=1, max_steps=12, **rates)
    output, sessions = tmp_path / "run", list[Session]()

    def interrupt(metrics: StepMetrics) -> None:
        sessions[0].stop_requested = metrics.step == 5

    quiet: Any = {"tell": lambda text: None}
    train(Recipe(**values), on_start=sessions.append, on_step=interrupt, **quiet)
    best = (output / "best" / "model.safetensors").read_bytes()
    if later_best:
        with (output / "evaluations.jsonl").open("a") as file:
            file.write(json.dumps({"step": 8, "tokens": 9, "eval_loss": 0.1}) + "\n")
    summary = train(Recipe(**values, resume="auto"), **quiet)
    assert (summary["stopped"], summary["steps"]) == ("early stop", 6)
    assert [e["step"] for e in json_lines(output / "evaluations.jsonl")] == [2, 4, 5, 6]
    place = output / "previous" / "1" if later_best else output
    assert (place / "best" / "model.safetensors").read_bytes() == best
    assert json_lines(output / "metrics.jsonl")[0]["step"] == 6


@pytest.mark.parametrize("patience", [0, 1])
def test_a_run_killed_in_an_evaluation_makes_it_when_it_resumes(
    tmp_path: Path, patience: int
) -> None:
    rates = {"learning_rate": 0.3, "lr_schedule": "constant"}  # the loss rises
    values = small(tmp_path, eval_every=2, checkpoint_every=2, max_steps=6, **rates)
    output = tmp_path / "run"
    run(values)
    uninterrupted = json_lines(output / "evaluations.jsonl")
    (last,) = (output / "checkpoints").glob("*00000006*")
    shutil.rmtree(last)
    (output / "evaluations.jsonl").write_text(json.dumps(uninterrupted[0]) + "\n")
    summary, _ = run({**values, "resume": "auto", "patience": patience})
    steps = 4 if patience else 6
    assert (summary["steps"], summary["stopped"]) == (steps, "early stop" if patience else "done")
    resumed = json_lines(output / "evaluations.jsonl")
    assert [e["step"] for e in resumed] == [e["step"] for e in uninterrupted if e["step"] <= steps]
    for one, other in zip(resumed, uninterrupted, strict=False):
        assert one["eval_loss"] == other["eval_loss"]


def test_the_schedule_ends_with_the_data_whatever_the_order_makes_of_it(tmp_path: Path) -> None:
    order = [{"packed_epoch": {"row_tokens": 96}}, "packed"]
    values = small(tmp_path, max_steps=None, epochs=2, lr_schedule="linear", plan=order)
    values |= {"global_batch_size": None, "global_batch_tokens": 400, "max_examples": 40}
    summary, session = run(values)
    rates = [line["learning_rate"] for line in json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert session.setup.job.schedule.total_steps == summary["steps"]
    assert rates[-1] == pytest.approx(rates[0] / summary["steps"])  # the next would be 0


def test_pretraining_on_plain_text_trains_every_token(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    rows = [json.dumps({"text": f"example {i} " + "some plain text " * 9}) for i in range(60)]
    texts.write_text("\n".join(rows))
    summary, _ = run(small(tmp_path, dataset=str(texts), max_steps=2))
    assert summary["trained_tokens"] == summary["tokens"] - summary["examples"]


def test_a_finished_run_continues_to_more_epochs(tmp_path: Path) -> None:
    keys = {**small(tmp_path, max_steps=None, epochs=1, max_examples=32, eval_data=4)}
    keys |= {"checkpoint_every": 2, "warmup_steps": 0.25}
    first = train(Recipe(**keys), tell=lambda text: None)
    lines: list[str] = []

    def longer(**changes: Any) -> dict[str, Any]:
        return train(Recipe(**keys | {"resume": "auto", "epochs": 2} | changes), tell=lines.append)

    with pytest.raises(InputError, match=r"learning_rate was 0\.003"):
        longer(learning_rate=1e-3)
    second = longer()
    assert second["steps"] == 2 * first["steps"]
    (resumed,) = [line for line in lines if line.startswith("resuming from")]
    assert "epochs was 1 and is 2 now" in resumed
    assert "of the peak learning rate" in resumed
    third = longer(epochs=3, min_lr_ratio=0.0)
    assert third["steps"] == 3 * first["steps"]
