"""Evaluates a run's model before and after training, on eval examples, prompts and tasks.

(1) Each example gives its summed loss over trained tokens. With a prompt, it also gives whether the
greedy answer equals the written one. (2) The base model is scored on the same examples. (3) The
difference is estimated from the pairs, so that hard examples, which are hard for both, don't widen
its interval. (4) P-values of all metrics pass Holm's correction before a verdict is given.

Tasks of EleutherAI's lm-eval harness are YAML files with data on this machine's disks. They are
read as plain YAML: a ``!function`` tag, which would run code, is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hasten.data.chat_template import encode_all
from hasten.data.readers import read_examples
from hasten.errors import InputError, require_packages
from hasten.formatting import one_line
from hasten.machine.environment import with_variables
from hasten.measure.significance import holm
from hasten.measure.statistics import DOUBT, mean_and_error, student_quantile, student_tail
from hasten.models.load import quiet
from hasten.parts.data.collate import IGNORED, TokenizedExample, aligned_labels
from hasten.recipe.prepared_data import prepare_data, stored_data
from hasten.recipe.sample import prompt_of
from hasten.recipe.yaml_reader import read_yaml_file
from hasten.release.trained_model import (
    LoadedModel,
    Sampling,
    generate,
    is_data_of,
    recipe_of,
)

LOSS, EXACT = "eval loss", "exact match"
UNSETTLED = 8  # characters at the end of an incomplete answer
MORE = 8  # tokens that an answer may have in addition, as spaces at its beginning or end


@dataclass(frozen=True)
class TaskMetric:
    """One metric of one task: a value and a weight for each example, by its number.

    The metric is the weighted mean of the values: loss per token for examples of many tokens.
    """

    task: str
    name: str
    values: Mapping[int, float]
    weights: Mapping[int, float]

    @property
    def mean(self) -> float:
        total = math.fsum(self.weights[i] * score for i, score in self.values.items())
        return total / math.fsum(self.weights[i] for i in self.values)


@dataclass(frozen=True)
class MetricChange:
    """A metric before and after training, with the 95 % interval of the difference.

    ``verdict`` is better, worse, or undecided; None where nothing was compared, or one example.
    """

    task: str
    metric: str
    examples: int
    after: float
    before: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    verdict: str | None = None


# Loss and exact match.


def eval_examples(run: Path, tell: Callable[[str], None]) -> Sequence[TokenizedExample]:
    """Returns the eval examples of the run's recipe.

    Raises:
        InputError: the recipe sets none apart, or the data isn't that of the training any more.
    """
    recipe = recipe_of(run)
    prepared = stored_data(recipe, run / "data")
    if prepared is None or not is_data_of(run, prepared):
        prepared = prepare_data(recipe, run / "data", tell)
    if not is_data_of(run, prepared):
        raise InputError(
            f"dataset: the files in the recipe of {run} have changed since the training, so its "
            "eval examples are unknown: restore the files, or give examples with --tasks FILE"
        )
    examples = [prepared.eval_data[i] for i in range(len(prepared.eval_data))]
    if not examples:
        raise InputError(
            f"eval_data: {recipe.eval_data} in the recipe of {run} sets no examples apart: give "
            "prompts and answers with --tasks FILE"
        )
    return examples


def file_examples(loaded: LoadedModel, file: Path) -> Sequence[TokenizedExample]:
    """Returns the examples of a data file, rendered by the model's chat template.

    Raises:
        InputError: the file is missing, unusable, or has an example that the model can't take.
    """
    longest = getattr(loaded.model.config, "max_position_embeddings", None) or 2**31
    examples: list[TokenizedExample] = []
    conversations = read_examples([file]).conversations
    for source, encoded in zip(
        conversations,
        encode_all(loaded.tokenizer, list(conversations), longest, "drop"),
        strict=True,
    ):
        if not encoded.examples:
            raise InputError(f"--tasks: {source.location} can't be evaluated: {encoded.reason}")
        examples += encoded.examples
    return examples


def score(
    loaded: LoadedModel,
    task: str,
    examples: Sequence[TokenizedExample],
    cutoff: float = math.inf,
) -> list[TaskMetric]:
    """Returns the loss per trained token, and the share of prompts with a correct greedy answer.

    Exact match ignores white space at both ends. Examples without a prompt have none. The same is
    true of an answer that ends at the ``cutoff``: a model that gives it whole would be wrong.
    """
    losses: dict[int, float] = {}
    tokens: dict[int, float] = {}
    exact: dict[int, float] = {}
    for number, example in enumerate(examples):
        example = example.rows[0]  # a preference pair counts with its chosen answer
        if not example.trained_tokens:
            continue
        losses[number] = _loss(loaded, example) / example.trained_tokens
        tokens[number] = example.trained_tokens
        prompt = prompt_of(example)
        answer = _answer_tokens(example, len(prompt))
        is_whole = len(prompt) + len(answer) < cutoff
        if answer and is_whole and not example.trained[: len(prompt)].any():
            exact[number] = float(_is_answered(loaded, prompt, answer))
    metrics = [TaskMetric(task, LOSS, losses, tokens)]
    return metrics + ([TaskMetric(task, EXACT, exact, dict.fromkeys(exact, 1.0))] if exact else [])


def _is_answered(loaded: LoadedModel, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Returns True if the greedy answer to a prompt has the text of ``answer``."""

    def text(ids: Sequence[int]) -> str:
        return str(loaded.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    expected = text(answer)

    def differs(ids: Sequence[int]) -> bool:
        begun = text(ids)
        # Later tokens can still change the last characters: a character of several tokens, spaces.
        return not expected.startswith(begun[:-UNSETTLED]) or (not begun and len(ids) > MORE)

    # A right answer ends within its own length; a few tokens more show that it goes on.
    written = generate(loaded, prompt, Sampling(len(answer) + MORE), until=differs)
    return text(written) == expected


def _loss(loaded: LoadedModel, example: TokenizedExample) -> float:
    """Returns the sum of the loss over trained tokens."""
    model: Any = loaded.model
    ids = torch.from_numpy(example.input_ids.astype("int64"))[None].to(model.device)
    labels = torch.from_numpy(aligned_labels(example)).to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0].float()  # (tokens, vocabulary)
        return float(cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))


def _answer_tokens(example: TokenizedExample, begin: int) -> list[int]:
    """Returns the first consecutive trained tokens from ``begin``."""
    untrained = (~example.trained[begin:]).nonzero()[0]
    end = begin + int(untrained[0]) if len(untrained) else example.length
    tokens: list[int] = example.input_ids[begin:end].tolist()
    return tokens


# Before and after.


def compare(before: Iterable[TaskMetric], after: Iterable[TaskMetric]) -> list[MetricChange]:
    """Returns each metric after training, with the difference over common examples."""
    earlier = {(metric.task, metric.name): metric for metric in before}
    rows = [_compared(earlier.get((m.task, m.name)), m) for m in after]
    judged = [row for row in rows if row.p_value is not None]
    corrected = dict(zip(map(id, judged), holm([r.p_value or 0.0 for r in judged]), strict=True))
    return [_with_verdict(row, corrected.get(id(row))) for row in rows]


def _compared(before: TaskMetric | None, after: TaskMetric) -> MetricChange:
    plain = MetricChange(after.task, after.name, len(after.values), after.mean)
    common = sorted(before.values.keys() & after.values.keys()) if before else []
    if before is None or not common:
        return plain
    weights = [after.weights[i] for i in common]
    changes = [after.values[i] - before.values[i] for i in common]
    total, freedom = math.fsum(weights), len(common) - 1
    middle = math.fsum(w * d for w, d in zip(weights, changes, strict=True)) / total
    difference = middle
    plain = replace(plain, before=before.mean, difference=difference)
    if len(common) < 2:  # no interval
        return plain
    if set(changes) <= {-1.0, 0.0, 1.0}:
        # Right or wrong: half an example more of each kind keeps the interval of few changes from
        # being empty (Agresti and Min 2005, "Simple improved confidence intervals for comparing
        # matched proportions").
        gained, lost, count = changes.count(1.0) + 0.5, changes.count(-1.0) + 0.5, len(common) + 2
        middle = (gained - lost) / count
        error = math.sqrt(gained + lost - (gained - lost) ** 2 / count) / count
    else:
        # A ratio of sums: its error is that of the weighted residuals (Cochran 1977, section 6.3).
        scale = len(common) / total
        error = mean_and_error(
            [w * (d - middle) * scale for w, d in zip(weights, changes, strict=True)]
        )[1]
    half = student_quantile(0.975, freedom) * error
    return replace(
        plain,
        low=middle - half,
        high=middle + half,
        p_value=2 * student_tail(abs(middle) / error, freedom) if error else float(not middle),
    )


def _with_verdict(row: MetricChange, p_value: float | None) -> MetricChange:
    if p_value is None or row.low is None or row.high is None:
        return row
    word = "undecided"
    if p_value <= DOUBT and (row.low > 0 or row.high < 0):
        fell = row.high < 0
        word = "better" if fell == (row.metric == LOSS) else "worse"
    return replace(row, p_value=p_value, verdict=word)


# The lm-eval harness.

_LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow")
_TASK_KEYS = frozenset(
    (
        *("task", "task_alias", "tag", "description", "metadata", "output_type", "repeats"),
        *("num_fewshot", "metric_list", "dataset_path", "dataset_name", "dataset_kwargs"),
        *("training_split", "validation_split", "test_split", "fewshot_split", "doc_to_text"),
        *("doc_to_target", "doc_to_choice", "gen_prefix", "target_delimiter"),
        *("fewshot_delimiter", "generation_kwargs", "filter_list"),
    )
)
# Means of single examples, which are compared before and after training. lm-eval would look for
# an unknown name as a script, and run it.
_METRICS = ("acc", "acc_mutual_info", "acc_norm", "exact_match")
# lm-eval renders templates without a sandbox, so only columns, their items, and these methods and
# filters may stand in them: nothing that such an expression reaches is called.
_COLUMN = r"[A-Za-z]\w*"
_EXPRESSION = re.compile(
    rf"\s*{_COLUMN}(\.{_COLUMN}(?!\()|\[({_COLUMN}|\d+|'{_COLUMN}'|\"{_COLUMN}\")\]"
    rf"|\.(strip|lower|upper|title|capitalize)\(\)|\.index\({_COLUMN}\))*"
    r"(\s*\|\s*(trim|lower|upper|title|capitalize|length|first|last|int|string))*\s*"
)


def read_task(file: Path) -> dict[str, Any]:
    """Returns the configuration of an lm-eval task with local data and absolute paths.

    Raises:
        InputError: the file is no task, could run code, or its data would be downloaded.
    """
    task = read_yaml_file(file, "--tasks")
    if not isinstance(task, dict) or not isinstance(task.get("task"), str):
        raise InputError(f"--tasks: {file} has no key task with a name: give an lm-eval task")
    if strange := sorted(map(str, task.keys() - _TASK_KEYS)):
        raise InputError(f"--tasks: {file} sets {strange[0]}, which isn't supported: remove it")
    metrics = task.get("metric_list") or []
    for metric in metrics if isinstance(metrics, list) else [metrics]:
        name = metric.get("metric") if isinstance(metric, dict) else metric
        if name not in _METRICS or (isinstance(metric, dict) and metric.get("hf_evaluate")):
            raise InputError(
                f"--tasks: the metric {name!r} in {file} isn't supported: write one of "
                + ", ".join(_METRICS)
            )
    for text in _texts(task):
        inside = expressions(text)
        if "{%" in text or "{#" in text or not all(map(_EXPRESSION.fullmatch, inside)):
            raise InputError(
                f"--tasks: the template {text[:80]!r} in {file} isn't supported: write columns as "
                "{{name}}, with items, strip() and simple filters alone"
            )
    return {**task, "dataset_kwargs": {"data_files": _local_files(task, file)}}


def expressions(template: str) -> list[str]:
    """Returns the texts between double braces; an unclosed text keeps its opening braces.

    Each character is read once, for any number of braces.
    """
    parts = (part.partition("}}") for part in template.split("{{")[1:])
    return [inside if end else f"{inside}{{{{" for inside, end, _ in parts]


def _local_files(task: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Returns the data file of each split, relative to the task's."""
    if task.get("dataset_path") not in _LOCAL_FORMATS:
        raise InputError(
            f"--tasks: dataset_path {task.get('dataset_path')!r} in {file} would be downloaded: "
            f"set one of {', '.join(_LOCAL_FORMATS)}, with data_files in dataset_kwargs"
        )
    options = task.get("dataset_kwargs") or {}
    files = options.get("data_files") if isinstance(options, dict) else None
    if not isinstance(files, str | dict) or options.keys() != {"data_files"}:
        raise InputError(f"--tasks: dataset_kwargs in {file} takes data_files alone: local files")
    named = {"train": files} if isinstance(files, str) else files
    absolute = {str(split): str(file.parent / str(name)) for split, name in named.items()}
    for path in absolute.values():
        if not Path(path).is_file():
            raise InputError(f"--tasks: {file} names {path}, and there is no such file")
    return absolute


def _texts(content: Any) -> Iterator[str]:
    """Yields every text in nested values."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _texts(part)


def check_harness() -> None:
    """Raises InputError if lm-eval isn't installed."""
    require_packages("--tasks with a YAML file", "eval", "lm_eval")


def score_tasks(
    loaded: LoadedModel, tasks: Sequence[Mapping[str, Any]], limit: int | None, cache: Path
) -> list[TaskMetric]:
    """Returns every metric of the tasks that lm-eval has for single examples, without download.

    ``cache`` takes the tables that its data library writes.

    Raises:
        InputError: lm-eval refuses a task.
    """
    check_harness()
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    configs = []
    for task in tasks:
        options = {**task["dataset_kwargs"], "cache_dir": str(cache)}
        configs.append({**task, "dataset_kwargs": options})
    with with_variables(offline), quiet("lm_eval", "lm-eval", "datasets"):
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        try:
            # A rendered prompt has its first token already, or the template wants none.
            model = HFLM(
                pretrained=loaded.model,
                tokenizer=loaded.tokenizer,
                batch_size=1,
                add_bos_token=not loaded.tokenizer.chat_template,
            )
            results = lm_eval.simple_evaluate(
                model,
                tasks=configs,
                limit=limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=bool(loaded.tokenizer.chat_template),
                task_manager=TaskManager(include_defaults=False),
            )
        except Exception as error:  # the library raises any kind of error for a task's file
            raise InputError(f"--tasks: lm-eval refuses a task: {one_line(error, 300)}") from error
    return harness_metrics(results["samples"])


def harness_metrics(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[TaskMetric]:
    """Returns the metrics that are means over examples, from lm-eval's rows of each task.

    Raises:
        InputError: another one, such as perplexity or bleu, which belongs to all its texts.
    """
    metrics = []
    for task, rows in samples.items():
        names = sorted({name for row in rows for name in row.get("metrics", ())})
        others = [name for name in names if name.partition(",")[0] not in _METRICS]
        if others or not names:
            raise InputError(
                f"--tasks: {task} has {', '.join(others) or 'no metric'}, and hasten eval compares "
                f"means of examples: write a metric_list of {', '.join(_METRICS)}"
            )
        for name in names:
            values = {int(row["doc_id"]): float(row[name]) for row in rows if name in row}
            metrics.append(TaskMetric(task, name, values, dict.fromkeys(values, 1.0)))
    return metrics
