"""Evaluation against independent references, and intervals that cover as often as they promise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers.processors import TemplateProcessing

from finished_runs import trained
from hasten.errors import InputError
from hasten.parts.data.collate import tokenized_example
from hasten.recipe.prepared_data import prepare_data
from hasten.recipe.sample import prompt_of
from hasten.recipe.schema import load_recipe
from hasten.release import evaluation
from hasten.release.evaluation import (
    EXACT,
    LOSS,
    TaskMetric,
    compare,
    eval_examples,
    harness_metrics,
    read_task,
    score,
    score_tasks,
)
from hasten.release.trained_model import BASE, Sampling, generate, load_other, load_run


def test_the_loss_is_the_one_that_training_reported(full_run: Path) -> None:
    loaded = load_run(full_run)
    examples = eval_examples(full_run, lambda text: None)
    loss, exact = score(loaded, "eval data", examples)
    summary = json.loads((full_run / "summary.json").read_text())
    assert loss.mean == pytest.approx(summary["eval_loss"], rel=1e-5)
    assert (loss.name, exact.name, exact.mean) == (LOSS, EXACT, 0.0)
    before = score(load_other(BASE, full_run), "eval data", examples)
    row = compare(before, [loss])[0]
    assert row.verdict == "better"
    assert row.before is not None
    assert row.difference == pytest.approx(row.after - row.before)


def test_eval_examples_are_those_of_the_training_though_its_files_change(
    full_run: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    source = Path(load_recipe(full_run / "recipe.yaml").datasets[0].path).read_text()
    rows = source.splitlines(keepends=True)
    data.write_text("".join(rows[:40]))
    run = trained(tmp_path, dataset=str(data), max_examples=None, max_steps=1)

    def examples() -> list[bytes]:
        return [row.input_ids.tobytes() for row in eval_examples(run, lambda text: None)]

    before = examples()
    data.write_text("".join(rows[:60]))
    assert examples() == before
    prepare_data(load_recipe(run / "recipe.yaml"), run / "data")  # as another command does
    with pytest.raises(InputError, match="have changed since the training"):
        examples()
    data.write_text("".join(rows[:40]))
    assert examples() == before


def test_only_the_answer_that_the_model_gives_is_an_exact_match(full_run: Path) -> None:
    loaded = load_run(full_run)
    prompt = prompt_of(eval_examples(full_run, lambda text: None)[0])
    token = generate(loaded, prompt, Sampling(1))[0]
    settings: Any = loaded.model.generation_config
    settings.eos_token_id = token  # the model's answer is this token alone
    mask = [False] * len(prompt) + [True]
    ends = [token, next(t for t in range(100, 400) if t != token)]
    examples = [tokenized_example([*prompt, end], mask) for end in ends]
    loss, exact = score(loaded, "task", examples)
    assert exact.values == {0: 1.0, 1: 0.0}
    with torch.no_grad():
        logs = loaded.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert loss.values == pytest.approx({i: -logs[end].item() for i, end in enumerate(ends)})


def test_an_answer_is_followed_as_far_as_it_is_the_written_one(
    full_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation that stops early judges each answer as one to the end does."""
    loaded = load_run(full_run)
    prompt = prompt_of(eval_examples(full_run, lambda text: None)[0])
    written = generate(loaded, prompt, Sampling(24))
    other = next(t for t in range(100, 400) if t != written[12])
    settings: Any = loaded.model.generation_config
    lengths: list[int] = []

    def counted(*args: Any, **settings: Any) -> list[int]:
        ids = generate(*args, **settings)
        lengths.append(len(ids))
        return ids

    monkeypatch.setattr(evaluation, "generate", counted)
    settings.eos_token_id = None

    def judged(answer: list[int]) -> float:
        mask = [False] * len(prompt) + [True] * len(answer)
        _, exact = score(loaded, "task", [tokenized_example([*prompt, *answer], mask)])
        return exact.values[0]

    text = loaded.tokenizer.decode
    wrong = [written[0] + 1, *written[1:]]
    assert text(wrong).strip() != text(written).strip()
    for answer in (written, wrong, [*written[:12], other, *written[13:]]):
        free = generate(loaded, prompt, Sampling(len(answer) + 8))
        assert judged(answer) == (text(free).strip() == text(answer).strip())
    assert lengths[1] < lengths[2] < lengths[0]


@pytest.mark.parametrize("kind", ["loss", "right or wrong"])
def test_intervals_hold_the_truth_as_often_as_they_promise(kind: str) -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        weights = {i: float(draw.randint(1, 20)) for i in range(30)}
        hard = {i: draw.gauss(3, 1) for i in weights}
        if kind == "loss":
            after = {i: hard[i] - 0.2 + draw.gauss(0, 0.3) for i in weights}
            truth = -0.2
        else:
            weights = dict.fromkeys(weights, 1.0)
            hard = {i: float(draw.random() < 0.3) for i in weights}
            after = {i: max(value, float(draw.random() < 0.2)) for i, value in hard.items()}
            truth = 0.7 * 0.2
        row = compare(
            [TaskMetric("t", kind, hard, weights)], [TaskMetric("t", kind, after, weights)]
        )[0]
        assert row.low is not None
        assert row.high is not None
        held += row.low <= truth <= row.high
    assert 0.91 <= held / 400 <= 0.99


def test_one_example_has_a_difference_and_no_interval() -> None:
    before, after = (TaskMetric("task", LOSS, {3: value}, {3: 2.0}) for value in (5.0, 3.5))
    (row,) = compare([before], [after])
    assert (row.before, row.after, row.difference) == (5.0, 3.5, -1.5)
    assert (row.low, row.high, row.p_value, row.verdict) == (None, None, None, None)


def test_equal_models_are_never_called_better() -> None:
    metrics = [TaskMetric("t", EXACT, {0: 1.0, 1: 0.0, 2: 1.0}, dict.fromkeys(range(3), 1.0))]
    row = compare(metrics, metrics)[0]
    assert row.verdict == "undecided"
    assert row.low is not None
    assert row.low < 0 < (row.high or 0)


def task(folder: Path, **changes: Any) -> Path:
    rows = [{"text": f"{n} apples and one", "choices": ["more", "less"], "gold": 0} for n in "1234"]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "task": "apples",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(values | changes))
    return folder / "task.yaml"


def test_metrics_that_are_no_means_of_examples_are_named_not_dropped() -> None:
    """Perplexity of all texts isn't the mean of theirs; lm-eval gives pairs of numbers there."""
    rows: list[dict[str, Any]]
    rows = [{"doc_id": n, "metrics": ["acc"], "acc": n % 2} for n in range(4)]
    (metric,) = harness_metrics({"apples": rows})
    assert (metric.name, metric.values) == ("acc", {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0})
    for name, value in (("bits_per_byte", (-3.0, 4)), ("perplexity", -3.0)):
        rows.append({"doc_id": 4, "metrics": ["acc", name], "acc": 1, name: value})
        with pytest.raises(InputError, match=f"texts has {name}, and hasten eval compares means"):
            harness_metrics({"texts": rows})
        del rows[4]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_lm_eval_scores_a_local_task(full_run: Path, tmp_path: Path, adds_bos: bool) -> None:
    """With the tokens of the template alone, also if the tokenizer begins texts by itself."""
    pytest.importorskip("lm_eval", reason="the harness is optional (extra eval)")
    loaded = load_run(full_run)
    if adds_bos:
        first = (loaded.tokenizer.bos_token, loaded.tokenizer.bos_token_id)
        loaded.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first[0]} $A", special_tokens=[first]
        )
        loaded.tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:"
    metrics = score_tasks(loaded, [read_task(task(tmp_path))], None, tmp_path / "cache")
    assert [(m.task, m.name, len(m.values)) for m in metrics] == [("apples", "acc", 4)]
    chosen = []
    for n in "1234":
        text = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{n} apples and one"}],
            add_generation_prompt=True,
            tokenize=False,
        )
        sums = []
        for choice in ("more", "less"):
            prompt = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = loaded.tokenizer(text + choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logs = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(logs[i - 1, ids[i]].item() for i in range(len(prompt), len(ids))))
        chosen.append(float(sums[0] >= sums[1]))
    assert list(metrics[0].values.values()) == chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_path": "gsm8k"}, "would be downloaded"),
        ({"dataset_kwargs": {"data_files": {"test": "missing.jsonl"}}}, "there is no such file"),
        ({"dataset_kwargs": {}}, "takes data_files alone"),
        ({"doc_to_text": "{{ cycler.__init__.__globals__ }}"}, "isn't supported"),
        ({"doc_to_text": "{{ lipsum['_' ~ '_globals__'] }}"}, "isn't supported"),
        ({"doc_to_text": "{{ text.format(text) }}"}, "isn't supported"),
        ({"doc_to_text": "{{text}} {{text"}, "isn't supported"),
        ({"doc_to_text": "{% for x in y %}{% endfor %}"}, "isn't supported"),
        ({"metric_list": [{"metric": "./mine.py"}]}, "isn't supported"),
        ({"metric_list": [{"metric": "perplexity"}]}, "isn't supported: write one of acc, "),
        ({"class": "Task"}, "sets class"),
    ],
    ids=str,
)
def test_a_task_that_downloads_or_runs_code_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read_task(task(tmp_path, **changes))


@pytest.mark.parametrize("end", ["", "text}}"])
def test_each_character_of_a_template_is_looked_at_once(end: str) -> None:
    template = "{{" * 50 + end
    found = evaluation.expressions(template)
    assert len(found) == 50
    assert sum(map(len, found)) <= len(template)
    assert not any(map(evaluation._EXPRESSION.fullmatch, found[:-1]))
    assert evaluation.expressions("a {{b}} c {{ d }} e") == ["b", " d "]


def test_a_function_tag_is_refused(tmp_path: Path) -> None:
    path = task(tmp_path)
    path.write_text(path.read_text() + "process_docs: !function utils.process_docs\n")
    with pytest.raises(InputError):
        read_task(path)
