"""The items of parity.py: what runs in both checkouts, and the files that it reads.

An item is one folder. Files are written into it, folders that the old checkout has made are copied
into it, and commands or a probe run there. What is run stands as data in parity_items.yaml, in the
order of the functions below, one for each part. Nothing here imports hasten.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PARTS = ("training", "data", "resume", "planner", "files", "report", "commands")
ASKED = {"training": "techniques", "files": "importers"}  # what a part's items are made from
TESTS = Path(__file__).resolve().parents[1] / "tests"
REPORT = TESTS / "report/data" / "report_full.json"  # every key of the format
LISTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
ARCHITECTURES = tuple(LISTS["architectures"])
MEASURED = ("bf16_gain",)
KEYED = ("bf16_gain", "source_digest")  # for items whose key counts the sources in
Words = tuple[str, ...]
Event = dict[str, Any]  # a line of an experiment's example


@dataclass(frozen=True)
class Item:
    """One folder of work, the same in both checkouts.

    Args:
        commands: of hasten, one after another.
        probe: of parity_worker.py, in place of commands.
        files: to be written first, by their path in the folder.
        copies: to be copied first: path in the folder -> path among what was made.
        edit: changes what was copied.
        compared: globs of the written files that are compared.
        view: what is compared of the folder beside them.
        codes: with which the last command may end; with another one the item proves nothing.
        steady: functions that answer the same in both checkouts, see the worker's STEADY.
        listed: its output lists commands, whose help is asked for next.
        slow: not for a quick run.
    """

    part: str
    name: str
    commands: Sequence[Words] = ()
    probe: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    edit: Callable[[Path], None] | None = None
    compared: tuple[str, ...] = ("**/*",)
    view: Callable[[Path], Any] | None = None
    codes: tuple[int, ...] = (0,)
    steady: tuple[str, ...] = MEASURED
    listed: bool = False
    slow: bool = False


def words_of(command: str, inputs: Path) -> Words:
    """A command of the lists as words."""
    return tuple(shlex.split(command.replace("INPUTS", str(inputs))))


# Files that all items read, written once


def write_inputs(folder: Path) -> None:
    """Models without weights, each with a tokenizer, and examples in the shapes hasten reads."""
    draw, words = random.Random(0), text().split()
    pairs = [
        [" ".join(draw.choices(words, k=draw.randint(2, most))) for most in (14, 10)]
        for _ in range(48)
    ]
    write_records(folder, pairs)
    for name, special in LISTS["architectures"].items():
        model = folder / name
        model.mkdir()
        experts = LISTS["experts"] if "deepseek" in name else {}
        config = {**LISTS["model"], "model_type": name, **experts, **special}
        (model / "config.json").write_text(json.dumps(config))
        write_tokenizer(model)


def text() -> str:
    """Words of examples."""
    return "how many apples does she have left if she gives two to her friend and eats one of them"


def write_records(folder: Path, pairs: Sequence[Sequence[str]]) -> None:
    """One file for each shape, and damaged ones."""

    def turns(pair: Sequence[str], roles: Sequence[str], role: str, said: str) -> list[Any]:
        return [{role: name, said: one} for name, one in zip(roles, pair, strict=True)]

    people = ("human", "gpt")
    shapes: dict[str, Callable[[Sequence[str]], dict[str, Any]]] = {
        "questions": lambda pair: dict(zip(("question", "answer"), pair, strict=True)),
        "alpaca": lambda pair: {"instruction": pair[0], "input": "", "output": pair[1]},
        "prompts": lambda pair: dict(zip(("prompt", "completion"), pair, strict=True)),
        "texts": lambda pair: {"text": f"{pair[0]}. {pair[1]}."},
        "messages": lambda pair: {
            "messages": turns(pair, ("user", "assistant"), "role", "content")
        },
        "sharegpt": lambda pair: {"conversations": turns(pair, people, "from", "value")},
        "named": lambda pair: dict(zip(("ask", "say"), pair, strict=True)),
    }
    for name, shape in shapes.items():
        lines = [json.dumps(shape(pair)) for pair in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "alpaca.json").write_text(json.dumps([shapes["alpaca"](pair) for pair in pairs]))
    bad = ['{"question": "no answer"}', '{"question": ', "[]"]
    good = (folder / "questions.jsonl").read_text().splitlines()
    (folder / "damaged.jsonl").write_text("\n".join([*good[:9], *bad, *good[9:]]))
    (folder / "empty.jsonl").write_text("")
    table = io.StringIO()
    csv.writer(table).writerows([["question", "answer"], *pairs])
    (folder / "questions.csv").write_text(table.getvalue())


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of as many tokens as the models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    trainer = trainers.BpeTrainer(
        vocab_size=LISTS["model"]["vocab_size"],
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text()] * 4, trainer)
    made.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def recipe(inputs: Path, changes: Mapping[str, Any]) -> dict[str, str]:
    """The file of a recipe that trains in a second; names of shared files become paths."""
    values = {**LISTS["recipe"], **changes}
    several = [values["dataset"]] if isinstance(values["dataset"], str) else values["dataset"]
    paths = [str(inputs / name) for name in several]
    values["dataset"] = paths[0] if isinstance(values["dataset"], str) else paths
    if values["model"] in ARCHITECTURES:
        values["model"] = str(inputs / values["model"])
    return {"recipe.yaml": yaml.safe_dump(values, sort_keys=False)}


# Training: each technique on each architecture, plans of several, other trainers

TRAIN: tuple[Words, ...] = (("train", "recipe.yaml"),)
# Without run/data, which is the same in all of them and compared in the part "data".
TRAINED = ("*", "run/*", "run/[!d]*/**/*")


def training(inputs: Path, names: Sequence[str]) -> Iterator[Item]:
    """Losses, norms and weights; ``names`` are those of the catalogue."""
    plans = [*(LISTS["instead"].get(name, [name]) for name in names)]
    for plan in [*plans, *([more] for more in LISTS["more"])]:
        for architecture in ARCHITECTURES:
            yield _trained(inputs, architecture, 1, plan, (0, 2))  # 2: it can't work there
    for architecture, ranks, plan in LISTS["plans"]:
        yield _trained(inputs, architecture, ranks, plan, (0,))
    for probe in ("articles' trainer", "Transformers' trainer", "loop"):
        yield Item("training", probe, probe=probe, compared=())


def _trained(
    inputs: Path, architecture: str, ranks: int, plan: list[Any], codes: tuple[int, ...]
) -> Item:
    named = [architecture, *(json.dumps(entry).replace('"', "") for entry in plan)]
    name = ", ".join([*named, *([f"{ranks} ranks"] if ranks > 1 else [])])
    files = recipe(inputs, {"model": architecture, "plan": plan, "nproc": ranks})
    return Item("training", name, TRAIN, files=files, compared=TRAINED, codes=codes)


# Data: the order of examples, packing, and what is prepared


def data(inputs: Path) -> Iterator[Item]:
    """Orders, packing, and prepared data: its key and its bytes."""
    for probe in ("orders", "packing"):
        yield Item("data", probe, probe=probe, compared=())
    for name, changes in LISTS["prepared"].items():
        yield Item("data", name, TRAIN, files=recipe(inputs, {"max_steps": 1, **changes}))
    for command in LISTS["data commands"]:
        words = words_of(f"data {command}", inputs)
        yield Item("data", " ".join(words[:2]), (words,), files=recipe(inputs, {}))


# Resuming: what the old checkout has begun, the new one goes on with

STEPS, CUT = 6, 2  # steps of the whole run, and after how many it is continued


def makers(inputs: Path) -> Iterator[Item]:
    """What the old checkout makes for the parts "resume" and "report"."""
    for name, changes in LISTS["saved"].items():
        yield Item("made", name, TRAIN, files=_saved(inputs, changes))
    files, words = recipe(inputs, LISTS["experiment"]), words_of(LISTS["speedup"], inputs)
    yield Item("made", "experiment", (words,), files=files, steady=KEYED)


def _saved(inputs: Path, changes: Mapping[str, Any]) -> dict[str, str]:
    plan = [LISTS["keep"], *changes.get("plan", ())]
    return recipe(inputs, {"max_steps": STEPS, **changes, "plan": plan})


def resume(inputs: Path) -> Iterator[Item]:
    """Unfinished runs and an unfinished experiment are continued; finished runs are looked at."""
    for name, changes in LISTS["saved"].items():
        yield Item(
            *("resume", f"training, {name}", (("train", "recipe.yaml", "resume=auto"),)),
            files=_saved(inputs, changes),
            copies={"run": f"{name}/run"},
            edit=cut_run,
            compared=TRAINED,
        )
    yield Item(
        *("resume", "experiment", (words_of(LISTS["speedup"], inputs),)),
        files=recipe(inputs, LISTS["experiment"]),
        copies={"run": "experiment/run"},
        edit=cut_experiment,
        compared=(),
        view=experiment_view,
        steady=KEYED,
        slow=True,
    )
    for given in LISTS["looked at"]:
        commands = [words_of(command, inputs) for command in given]
        yield Item("resume", " ".join(commands[0][:2]), commands, copies={"run": "plain/run"})
    yield Item("resume", "export", (("export", "run", "-o", "out"),), copies={"run": "lora/run"})


def cut_run(folder: Path) -> None:
    """Make a finished run one that was killed in step CUT + 1, within a line of its metrics."""
    run = folder / "run"
    for name in ("summary.json", "run.json", "evaluations.jsonl"):
        (run / name).unlink(missing_ok=True)
    for place in (run / "checkpoints").glob("step-*"):
        if int(place.name.rpartition("-")[2]) > CUT:
            shutil.rmtree(place)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:CUT]) + lines[CUT][:40])


def cut_experiment(folder: Path) -> None:
    """Make a finished experiment one that was killed in its second round, within a line."""
    path = _record(folder)
    lines = path.read_text().splitlines(keepends=True)
    turns = [number for number, line in enumerate(lines) if '"event": "turn"' in line]
    path.write_text("".join(lines[: turns[5]]) + lines[turns[5]][:50])
    _forget_report(folder)


def _record(folder: Path) -> Path:
    (path,) = folder.glob("run/experiments/*/record.jsonl")
    return path


def _events(folder: Path) -> tuple[Event, list[Event]]:
    """The example's first line, and its events."""
    head, *events = [json.loads(line) for line in _record(folder).read_text().splitlines()]
    return head, events


def _forget_report(folder: Path) -> None:
    for name in ("report.json", "report.html", "bundle.json"):
        (folder / "run" / name).unlink()


def experiment_view(folder: Path) -> dict[str, Any]:
    """What doesn't depend on seconds: events, and losses by the step of a variant's process.

    A warm-up takes more steps where their times differ more, so only the steps that every process
    takes are compared.
    """
    head, events = _events(folder)
    least = 1 + 4 * 2  # warm-up, and rounds of steps, of the command
    steps: dict[str, dict[int, list[float]]] = {}
    counts: dict[str, int] = {}
    for event in events:
        for step in event.get("steps", ()):
            if step["step"] <= least:
                variant = steps.setdefault(f"{event['variant']}, sitting {event['sitting']}", {})
                variant[step["step"]] = [step["loss"], step["grad_norm"]]
        if event["event"] != "warmup":
            name = f"{event['event']} {event.get('variant', '')}"
            counts[name] = counts.get(name, 0) + 1
    report = json.loads((folder / "run" / "report.json").read_text())
    return {
        "key": [_record(folder).parent.name, head],
        "events": counts,
        "steps": steps,
        "variants": [
            [variant["name"], variant["kind"], variant["techniques"]]
            for variant in report["variants"]
        ],
        "report's keys": keys_of(report),
        "page": (folder / "run" / "report.html").is_file(),
    }


def keys_of(value: Any) -> Any:
    """The keys of a JSON value without the values; of a list, those of its first element."""
    if isinstance(value, dict):
        return {key: keys_of(inner) for key, inner in value.items()}
    return [keys_of(inner) for inner in value[:1]] if isinstance(value, list) else None


# The planner, on clusters of several sorts

DEVICE = {"name": "mine", "peak16": 4e14, "memory_bytes": 96e9, "memory_rate": 3e12, "link": 2e11}


def planner(inputs: Path) -> Iterator[Item]:
    """Plans as text, JSON and page."""
    files = {
        "mine.json": json.dumps(DEVICE),
        "price.yaml": "currency: CNY\nper_device_hour: 0.6\n",
        **recipe(inputs, LISTS["planned recipe"]),
    }
    for given in LISTS["planned"]:
        words = words_of(f"estimate {given} --json -o plan.html", inputs)
        yield Item("planner", given, (words,), files=files, steady=())


# Files of other trainers, launch files, first recipes

SEVERAL = {"report_to": ["mlflow"], "lora_target_modules": ["q_proj"]}  # keys with lists
MODELS = ("model_name_or_path", "base_model")
ZERO = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}


def files(inputs: Path, keys: Mapping[str, Sequence[str]]) -> Iterator[Item]:
    """What ``import``, ``launch`` and ``init`` write; ``keys`` are those of each importer."""
    for name, content in foreign_files(keys):
        ranks = ("nproc=2",) if "2" in name else ()
        words = ("import", name, "--output", "recipe.yaml", *ranks)
        beside = {name: content, "ds_z3.json": json.dumps(ZERO)}
        yield Item("files", f"import {name}", (words,), files=beside, codes=(0, 2))
    made = recipe(inputs, LISTS["launched recipe"])
    for options in LISTS["launched"]:
        words = words_of(f"launch recipe.yaml --output out {options}", inputs)
        yield Item("files", f"launch {options}", (words,), files=made)
    for command in LISTS["begun"]:
        words = words_of(command, inputs)
        yield Item("files", f"{words[0]} {words[1]}", (words,))


def foreign_files(keys: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Name and text of other trainers' files: usual ones, changed ones, and all keys at once."""
    if str(TESTS / "common") not in sys.path:
        sys.path.append(str(TESTS / "common"))
    import foreign_configs as usual
    import zero_configs as zero

    fill = {"model": "org/base", "folder": "data", "data": "data/examples.json"}
    bases: dict[str, dict[str, Any]] = {
        "LLaMA-Factory": yaml.safe_load(usual.LLAMA_FACTORY.format(**fill)),
        "axolotl": yaml.safe_load(usual.AXOLOTL.format(**fill)),
        "accelerate": yaml.safe_load(usual.ACCELERATE),
        "TrainingArguments": json.loads(usual.TRAINING_ARGUMENTS),
        "DeepSpeed, articles": zero.ARTICLE,
        "DeepSpeed, DeepSeek-Coder": zero.CODER,
        "none": {},
    }
    for tool, changes in LISTS["foreign"].items():
        for number, change in enumerate(changes):
            values = {k: v for k, v in {**bases[tool], **change}.items() if v != "absent"}
            if number % 2:
                yield f"{tool}-{number}.json", json.dumps(values)
            else:
                yield f"{tool}-{number}.yaml", yaml.safe_dump(values)
        # Without a model the recipe isn't whole, so that no key can make it one that is refused.
        for word, value in {"on": True, "one": "1", "off": False}.items():
            every = {key: SEVERAL.get(key, value) for key in keys.get(tool, ())} | bases[tool]
            text = json.dumps({k: v for k, v in every.items() if k not in MODELS})
            if tool in keys:
                yield f"{tool}-{word}.json", text


# Reports from stored examples


def report(inputs: Path) -> Iterator[Item]:
    """JSON, Markdown and page of finished experiments."""
    shown = ("report", "run")
    for change in (unchanged, faster, unsteady, with_failure):
        yield Item(
            *("report", change.__name__.replace("_", " ")),
            commands=(words_of(LISTS["speedup"], inputs), shown, (*shown, "--json")),
            files=recipe(inputs, LISTS["experiment"]),
            copies={"run": "experiment/run"},
            edit=_edited(change),
            steady=KEYED,
            slow=True,
        )
    commands = (("report", "report.json"), ("report", "report.json", "--json"))
    yield Item("report", "every key", commands, files={"report.json": REPORT.read_text()})


def _edited(change: Callable[[list[Event]], list[Event]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        head, events = _events(folder)
        lines = [json.dumps(line) for line in (head, *change(events))]
        _record(folder).write_text("\n".join(lines) + "\n")
        _forget_report(folder)

    return edit


def unchanged(events: list[Event]) -> list[Event]:
    """As it was measured."""
    return events


def faster(events: list[Event]) -> list[Event]:
    """The last variant takes half the time, and ends with a lower loss."""
    for event in events:
        if event.get("variant") == "all":
            _slow_down(event, 0.5)
            if event["event"] == "evaluate":
                event["eval_loss"] *= 0.99
    return events


def unsteady(events: list[Event]) -> list[Event]:
    """Every turn takes another time."""
    for number, event in enumerate(events):
        _slow_down(event, 1 + 0.4 * math.sin(number))
    return events


def with_failure(events: list[Event]) -> list[Event]:
    """One variant fails in its second turn."""
    mine = [event for event in events if event.get("variant") == "only packed"]
    turns = [event for event in mine if event["event"] == "turn"]
    gone = mine[mine.index(turns[1]) :]
    why = {
        "event": "failed",
        "at": 14.0,
        "sitting": 1,
        "variant": "only packed",
        "why": "no memory",
    }
    kept = [event for event in events if event not in gone]
    return [*kept[:-1], why, kept[-1]]


def _slow_down(event: Event, factor: float) -> None:
    for step in event.get("steps", ()):
        step["step_seconds"] *= factor
        step["tokens_per_second"] /= factor


# Commands: help texts, bad input, and what no other part runs


def commands(inputs: Path) -> Iterator[Item]:
    """Help texts, exit codes, the words of errors, and the package's names."""
    yield help_of("")
    yield Item("commands", "public names", probe="public names", compared=())
    given = {"text.yaml": "just text\n", "twice.yaml": "seed: 1\nseed: 2\n", **recipe(inputs, {})}
    for name, command in LISTS["bad"].items():
        words = words_of(command, inputs)
        yield Item("commands", name, (words,), files=given, codes=(1, 2))
    for command in LISTS["good"]:
        words = words_of(command, inputs)
        yield Item("commands", words[0], (words,), files=given, steady=KEYED)
    words = ("profile", "recipe.yaml", "--steps", "2")
    yield Item("commands", "profile", (words,), files=given, compared=(), view=profile_view)


def profile_view(folder: Path) -> Any:
    """The keys of a profile; its values are seconds."""
    return keys_of(json.loads((folder / "run" / "profile.json").read_text()))


def help_of(command: str) -> Item:
    """The item that asks for a command's help."""
    words = (*command.split(), "--help")
    return Item("commands", " ".join(words), (words,), steady=(), listed=True)


def listed_commands(help_text: str) -> list[str]:
    """The names in a help text's list of commands."""
    _, _, rest = help_text.partition("\nCommands:\n")
    lines = [line for line in rest.splitlines() if line.startswith("  ") and line[2:3] > " "]
    return [line.split()[0] for line in lines]


def sample(items: Iterable[Item], most: int = 8) -> list[Item]:
    """Some items of a part, spread over it, for a quick run."""
    fast = [item for item in items if not item.slow]
    return fast[:: max(1, math.ceil(len(fast) / most))]
