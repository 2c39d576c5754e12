"""Records what hasten computes, and compares a later state of the code with it.

    python scripts/parity.py record FILE.json       # with the interpreter of the state before
    python scripts/parity.py compare FILE.json      # with that of the state after
    python scripts/parity.py compare FILE.json --part training --part imports
    python scripts/parity.py record --list-only

The hasten that the interpreter imports is used, through its commands and public functions.
The record also holds the inputs, so both states get the same ones. Values that depend on
the machine's speed, and texts of messages, are left out. ``compare`` prints each difference
and ends with 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import os
import pkgutil
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
STEP_KEYS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "positions")
MEASURED = re.compile(
    r"second|_parts|memory|mfu|energy|stall|stability|flops|cost|host|machine|created"
)
TEXT = "the model reads tokens and learns from data with small steps of work on layers"
WORDS = TEXT.split()

Values = dict[str, Any]  # by name, what is compared


# Inputs: taken from the tests' own files, and kept in the record.


def import_cases() -> list[dict[str, Any]]:
    """Configurations of other tools, each as the text of its file."""
    cases = []
    for path in sorted((ROOT / "tests/recipe/foreign").glob("*.yaml")):
        form = yaml.safe_load(path.read_text())
        for case in form["cases"]:
            values = {**form["base"], **case.get("config", {})}
            values = {key: value for key, value in values.items() if value is not None}
            is_json = "text" in case or case.get("json", form.get("json", False))
            text = json.dumps(values) if is_json else yaml.safe_dump(values, sort_keys=False)
            cases.append(
                {
                    "name": f"{path.stem}: {case['name']}",
                    "file": "config.json" if is_json else "config.yaml",
                    "text": case.get("text", text),
                    "ranks": case.get("ranks", 1),
                }
            )
    return cases


def inputs() -> dict[str, Any]:
    """Returns all inputs that come from files of this checkout."""
    report = ROOT / "tests/report/data/report_full.json"
    return {"imports": import_cases(), "report": json.loads(report.read_text())}


def sentence(draw: random.Random, longest: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, longest)))


def data_files(folder: Path) -> dict[str, Path]:
    """Writes the same examples in the usual shapes and file formats."""
    draw = random.Random(0)
    pairs = [(sentence(draw, 20), sentence(draw, 30)) for _ in range(64)]
    shapes: dict[str, list[dict[str, Any]]] = {
        "alpaca": [{"instruction": q, "input": "", "output": a} for q, a in pairs],
        "question": [{"question": q, "answer": a} for q, a in pairs],
        "messages": [
            {
                "messages": [
                    {"role": "system", "content": "be short"},
                    {"role": "user", "content": q},
                    {"role": "assistant", "content": a},
                    {"role": "user", "content": a},
                    {"role": "assistant", "content": q},
                ]
            }
            for q, a in pairs
        ],
        "sharegpt": [
            {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
            for q, a in pairs
        ],
        "text": [{"text": f"{q}. {a}."} for q, a in pairs],
    }
    files = {}
    for name, rows in shapes.items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    files["json"] = folder / "list.json"
    files["json"].write_text(json.dumps(shapes["alpaca"], indent=1))
    files["csv"] = folder / "pairs.csv"
    files["csv"].write_text("prompt,completion\n" + "".join(f'"{q}","{a}"\n' for q, a in pairs))
    files["txt"] = folder / "plain.txt"
    files["txt"].write_text("\n\n".join(f"{q}. {a}." for q, a in pairs))
    import pyarrow as pa
    import pyarrow.parquet as pq

    files["parquet"] = folder / "pairs.parquet"
    columns = {"prompt": [q for q, _ in pairs], "response": [a for _, a in pairs]}
    pq.write_table(pa.table(columns), files["parquet"])
    return files


# How commands are run: in a child of this process, which has imported the libraries.


def import_once() -> None:
    """Imports what most children need, so that they don't each take seconds for it."""
    import peft  # noqa: F401
    import torch
    import torch._dynamo
    import transformers

    import hasten

    torch.set_num_threads(1)
    for kind in ("Llama", "Qwen2", "DeepseekV2", "DeepseekV3"):
        getattr(transformers, f"{kind}ForCausalLM")
    importlib.import_module(hasten.train.__module__)


def command(folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs a command of hasten in that folder; its exit code and standard output."""
    output = folder / "stdout.txt"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(folder)
            for number, path in ((1, output), (2, folder / "stderr.txt")):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.argv = ["hasten", *arguments]
            importlib.import_module("hasten.__main__").main()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, output.read_text()


def succeeded(folder: Path, *arguments: str) -> str:
    """Runs a command that must succeed.

    Raises:
        SystemExit: it failed; with the end of what it wrote.
    """
    code, text = command(folder, *arguments)
    if code != 0:
        errors = (folder / "stderr.txt").read_text()[-2000:]
        sys.exit(f"hasten {' '.join(arguments)} ended with {code}:\n{errors}")
    return text


# Training.

BASE = {
    "dataset": "alpaca.jsonl",
    "vocabulary": 400,
    "max_steps": 4,
    "global_batch_size": 8,
    "cutoff_len": 64,
    "eval_data": 8,
    "learning_rate": 1e-3,
    "device": "cpu",
}
FAST: dict[str, Any] = {
    "plan": ["packed", "document_attention", "fused_layers", "labelled_token_loss", "fused_adamw"]
}
LLAMA, QWEN, V2, V3 = "deepseek-llm-tiny", "r1-distill-qwen-tiny", "v2-lite-tiny", "v3-tiny"
TRAININGS: dict[str, dict[str, Any]] = {
    "llama, plain": {"model": LLAMA, "eval_every": 2, "metrics": ["token_accuracy"]},
    "qwen, fast plan, messages": {"model": QWEN, "dataset": "messages.jsonl", **FAST},
    "v2, experts, accumulation": {
        "model": V2,
        "plan": ["packed_epoch", {"gradient_accumulation": {"micro_batch_size": 4}}],
    },
    "v3, routing, further tokens": {
        "model": V3,
        "dataset": "text.jsonl",
        "too_long": "split",
        "plan": ["balanced_routing", "multi_token_prediction"],
    },
    "llama, LoRA": {"model": LLAMA, "finetuning_type": "lora", "lora_dropout": 0.1, **FAST},
    "qwen, LoRA on nf4": {"model": QWEN, "finetuning_type": "lora", "lora_base": "nf4"},
    "llama, bf16": {"model": LLAMA, "plan": [{"autocast": {"dtype": "bf16"}}, "muon"]},
    "llama, two ranks, fsdp2": {
        "model": LLAMA,
        "nproc": 2,
        "layout": "fsdp2",
        "checkpoint_every": 2,
    },
    "v2, checkpoint and resume": {
        "model": V2,
        "max_steps": 3,
        "checkpoint_every": 2,
        "plan": [{"weight_average": {}}],
    },
}
RESUMED = {"llama, two ranks, fsdp2", "v2, checkpoint and resume"}


def weights_hash(folder: Path) -> str:
    """The hash of all tensors in the folder's safetensors files."""
    from safetensors import safe_open

    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name).contiguous()
                total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                total.update(tensor.view(-1).view(_bytes_type()).numpy().tobytes())
    return total.hexdigest()


def _bytes_type() -> Any:
    import torch

    return torch.uint8


def training(folder: Path, _: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Losses of each step, evaluations, answers and the final weights of small trainings."""
    for name, recipe in TRAININGS.items():
        slug = re.sub(r"\W+", "_", name)
        path = folder / f"{slug}.yaml"
        path.write_text(yaml.safe_dump({**BASE, **recipe, "output": slug}))
        succeeded(folder, "train", path.name)
        yield from trained(f"training/{name}", folder / slug)
        if name in RESUMED:
            succeeded(folder, "train", path.name, "max_steps=6", "resume=auto")
            yield from trained(f"training/{name}, resumed", folder / slug)


def trained(name: str, run: Path) -> Iterator[tuple[str, Any]]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    yield f"{name}/steps", [{key: step[key] for key in STEP_KEYS} for step in steps]
    summary = json.loads((run / "summary.json").read_text())
    for key in ("stopped", "steps", "tokens", "trained_tokens", "examples", "eval_loss"):
        yield f"{name}/{key}", summary[key]
    yield f"{name}/metrics", summary["metrics"]
    yield f"{name}/samples", summary["samples"]
    yield f"{name}/weights", weights_hash(run / "model")


# Plans and predictions.

ESTIMATES: dict[str, tuple[str, int, int, str, int, int]] = {
    # model, nodes, GPUs of a node, task, sequence, global batch
    "llm-1b, one H100": ("deepseek-llm-1b", 1, 1, "full", 2048, 64),
    "llm-7b, 8 H100": ("deepseek-llm-7b", 1, 8, "pretrain", 4096, 256),
    "llm-7b, LoRA": ("deepseek-llm-7b", 1, 2, "lora", 2048, 64),
    "qwen-1.5b": ("deepseek-r1-distill-qwen-1.5b", 1, 4, "full", 4096, 128),
    "qwen-7b, two nodes": ("deepseek-r1-distill-qwen-7b", 2, 8, "full", 4096, 256),
    "v2-lite": ("deepseek-v2-lite", 1, 8, "full", 4096, 256),
    "v2-lite, two nodes": ("deepseek-v2-lite", 2, 8, "pretrain", 4096, 512),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved")
PRECISIONS = ("bf16", "fp16", "fp8", "fp32")


def is_runnable(layout: Mapping[str, Any]) -> bool:
    """Returns True if hasten's own trainer has the layout."""
    tp, pp, ep = (layout[key] > 1 for key in ("tp", "pp", "ep"))
    own = layout["cp"] == 1 and layout["recompute"] != "light" and layout["precision"] in PRECISIONS
    own = own and not (layout["precision"] == "fp8" and tp)
    own = own and (layout["compression"] == "none" or not (tp or pp or ep))
    if pp:
        own = own and not (tp or ep or layout["recompute"] == "selective")
        own = own and layout["schedule"] in SCHEDULES
        own = own and layout["virtual"] == (2 if layout["schedule"] == "interleaved" else 1)
        own = own and (layout["zero"] < 2 or layout["dp"] == 1)
    elif ep:
        own = own and not (tp or layout["zero"] > 1 or layout["recompute"] == "selective")
    return own


def planner_part(name: str) -> Any:
    """A public name of the planner, in whichever of its files it is."""
    import hasten.planner

    for module in pkgutil.iter_modules(hasten.planner.__path__):
        found = getattr(importlib.import_module(f"hasten.planner.{module.name}"), name, None)
        if found is not None:
            return found
    raise LookupError(f"hasten.planner has no {name}")


def runnable_layouts(devices: int) -> list[dict[str, Any]]:
    """A sample of the layouts of that many devices that the trainer has."""
    sizes = [n for n in (1, 2, 4, 8) if devices % n == 0]
    layouts = []
    for tp, pp, ep, zero, micro, recompute, precision, schedule in itertools.product(
        *(sizes, sizes, sizes, (0, 1, 3), (1, 4), ("none", "selective", "full")),
        *(("bf16", "fp8", "fp32"), SCHEDULES),
    ):
        layout: dict[str, Any] = {"dp": devices // (tp * pp), "tp": tp, "pp": pp, "ep": ep, "cp": 1}
        layout |= {"zero": zero, "micro_batch": micro, "recompute": recompute}
        layout |= {"precision": precision, "schedule": schedule, "compression": "none"}
        layout |= {"virtual": 2 if schedule == "interleaved" else 1}
        is_usual = pp > 1 or schedule == "1f1b"
        if tp * pp <= devices and is_usual and is_runnable(layout):
            layouts.append(layout)
    compressed = [
        {**layouts[0], "tp": 1, "pp": 1, "ep": 1, "dp": devices, "compression": compression}
        for compression in ("int8", "int4", "topk1")
    ]
    return [*layouts[:: max(len(layouts) // 60, 1)], *compressed]


def layout_name(layout: Mapping[str, Any]) -> str:
    keys = ("dp", "tp", "pp", "ep", "zero", "micro_batch", "schedule", "virtual", "recompute")
    words = [f"{key}={layout[key]}" for key in keys]
    return " ".join([*words, layout["precision"], layout["compression"]])


def predictions(_: Path, __: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Seconds and memory of runnable layouts, to the digit."""
    from hasten.models.architecture import Architecture

    cluster_of, layouts_of = planner_part("Cluster").preset, planner_part("Layouts").of
    planned, job_of, predict = map(planner_part, ("PlannedLayout", "PlannedJob", "predict"))
    for name, (model, nodes, per_node, task, sequence, batch) in ESTIMATES.items():
        architecture = Architecture.from_config(model)
        layouts = runnable_layouts(nodes * per_node)
        if not architecture.moe:
            layouts = [layout for layout in layouts if layout["ep"] == 1]
        found = predict(
            architecture,
            cluster_of("fat_tree", nodes, per_node, "h100"),
            job_of(sequence, batch, task),
            layouts_of([planned(**layout) for layout in layouts]),
        )
        columns = ("step_seconds", "step_p10", "step_p90", "mfu", "memory_bytes", "memory_p90")
        for row, layout in enumerate(layouts):
            values = [float(getattr(found, column)[row]) for column in columns]
            yield f"predictions/{name}/{layout_name(layout)}", values


def plans(folder: Path, _: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The order of runnable layouts in ``estimate``, and the first plans of ``plan: auto``."""
    for name, (model, nodes, per_node, task, sequence, batch) in ESTIMATES.items():
        options: dict[str, Any] = {
            "--cluster": "fat_tree",
            "--gpu": "h100",
            "--nodes": nodes,
            "--task": task,
        }
        options |= {"--gpus-per-node": per_node, "--sequence": sequence, "--global-batch": batch}
        words = [str(word) for pair in options.items() for word in pair]
        text = succeeded(folder, "estimate", model, *words, "--top", "50", "--json")
        best = [one for one in json.loads(text)["best"] if is_runnable(one["layout"])]
        yield f"plans/{name}/order", [layout_name(one["layout"]) for one in best]
        for one in best:
            parts = {key: one[key] for key in ("step_seconds", "step_parts", "memory_bytes")}
            yield f"plans/{name}/{layout_name(one['layout'])}", parts
    for model in (LLAMA, QWEN, V2, V3):
        path = folder / "auto.yaml"
        path.write_text(yaml.safe_dump({**BASE, "model": model, "plan": "auto"}))
        text = succeeded(folder, "check", path.name, f"output=auto-{model}")
        plan = re.search(r"begins with (\w+(?: \+ \w+)*)", text)
        yield f"plans/auto {model}", sorted(plan.group(1).split(" + ")) if plan else None


# Data, imports, reports, studies.


def data(folder: Path, _: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Counts and the first rendered example of each shape and format of data."""
    for name, path in sorted(data_files(folder).items()):
        values = {**BASE, "model": LLAMA, "dataset": path.name, "output": f"data-{name}"}
        columns = {"prompt": "prompt", "response": "completion"}
        values |= {"columns": columns} if name == "csv" else {}
        recipe = folder / f"data-{name}.yaml"
        recipe.write_text(yaml.safe_dump(values))
        text = succeeded(folder, "check", recipe.name)
        yield f"data/{name}/counts", re.findall(r"^ok\s+(?:data|files)\s+(.*)$", text, re.M)
        yield f"data/{name}/first", text.partition("[[ ]]:")[2].strip()


def imports(folder: Path, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The recipes that ``import`` writes, without comments; None for a refusal."""
    from hasten.cli.import_ import import_
    from hasten.errors import InputError

    for number, case in enumerate(given["imports"]):
        own = folder / f"import-{number}"
        own.mkdir()
        path, output = own / case["file"], own / "recipe.yaml"
        path.write_text(case["text"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(own):
            try:
                import_(path, [f"nproc={case['ranks']}"] if case["ranks"] > 1 else [], output)
            except InputError:
                yield f"imports/{case['name']}", None
                continue
        lines = [re.sub(r"\s+#.*", "", line) for line in output.read_text().splitlines()]
        text = "\n".join(line for line in lines if line and not line.startswith("#"))
        yield f"imports/{case['name']}", text.replace(str(own), "FOLDER")


def report(folder: Path, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A stored comparison as JSON and text, and the keys and exact values of a run's summary."""
    (folder / "report.json").write_text(json.dumps(given["report"]))
    yield "report/json", json.loads(succeeded(folder, "report", "report.json", "--json"))
    text = succeeded(folder, "report", "report.json")
    for number, line in enumerate(text.splitlines()):
        if line.startswith("|"):
            yield f"report/table {number}", re.sub(r"\s+", " ", line)
    values = {**BASE, "model": LLAMA, "max_steps": 1, "output": "reported"}
    (folder / "reported.yaml").write_text(yaml.safe_dump(values))
    succeeded(folder, "train", "reported.yaml")
    summary = json.loads(succeeded(folder, "report", "reported", "--json"))
    yield "report/summary keys", sorted(summary)
    for key, value in summary.items():
        if not MEASURED.search(key) and "per_" not in key:
            yield f"report/summary/{key}", value


def study(_: Path, __: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Trials that each proposer of ``tune`` needs on the recorded grid, with fixed seeds."""
    import hasten

    script = Path(hasten.__file__).parents[2] / "benchmarks/bench_tuner.py"
    command = [sys.executable, str(script), "--seeds", "3", "--problem", "grid"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in text.splitlines():
        name, *figures = re.split(r"\s{2,}", line.strip())
        if len(figures) > 3:
            yield f"study/{name}", figures[:3]


PARTS: dict[str, Callable[[Path, Mapping[str, Any]], Iterator[tuple[str, Any]]]] = {
    "training": training,
    "plans": plans,
    "predictions": predictions,
    "data": data,
    "imports": imports,
    "report": report,
    "study": study,
}


def computed(names: list[str], given: Mapping[str, Any]) -> Values:
    """What the imported hasten computes in those parts."""
    values: Values = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="hasten-parity-") as folder:
            data_files(Path(folder))
            values.update(PARTS[name](Path(folder), given))
        print(f"{name}: {sum(key.startswith(f'{name}/') for key in values)} values", flush=True)
    result: Values = json.loads(json.dumps(values))  # as they are read again
    return result


def differences(before: Values, after: Values) -> list[str]:
    """One line for each name whose value differs.

    Of an order, the part that both have must be the same, and nothing may be missing. A name
    that is new in ``after`` counts for a prediction of the estimate alone as no difference.
    """
    lines = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, "absent"), after.get(name, "absent")
        if name.endswith("/order") and isinstance(new, list):
            new = [layout for layout in new if layout in old]
        if name not in before and name.startswith("plans/"):
            continue
        if old != new:
            lines.append(f"{name}\n  before {_short(old)}\n  after  {_short(new)}")
    return lines


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 600 else f"{text[:600]} ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; repeatable")
    parser.add_argument("--list-only", action="store_true", help="print the names of the parts")
    options = parser.parse_args()
    names = options.part or list(PARTS)
    if options.list_only:
        print("\n".join(names))
        return
    if options.file is None:
        parser.error("name the file of the record")
    os.environ.update(OMP_NUM_THREADS="1", HASTEN_PROOF="off")
    import_once()
    if options.verb == "record":
        given = inputs()
        record = {"inputs": given, "values": computed(names, given)}
        options.file.write_text(json.dumps(record, indent=1))
        return
    record = json.loads(options.file.read_text())
    before = {k: v for k, v in record["values"].items() if k.partition("/")[0] in names}
    lines = differences(before, computed(names, record["inputs"]))
    print("\n".join([*lines, f"{len(lines)} differences in {len(before)} values"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
