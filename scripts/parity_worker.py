"""Runs commands and probes of one checkout for parity.py, each in a fork of one loaded process.

    PYTHONPATH=CHECKOUT/src python scripts/parity_worker.py

The process imports the libraries once, and nothing of hasten. It then reads requests, a line of
JSON each. A request is run in a forked child, which imports hasten as a fresh interpreter would,
so that no request sees what another one left behind. The answer is a line of JSON too.

A request has ``folder`` (where it runs), ``words`` (of the command) or ``probe`` (a function of
PROBES), ``prefix`` (of the files for its output), ``seconds`` and ``steady`` (see STEADY).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

# Loaded before the forks. What is missing here costs each child its import, and nothing else.
LIBRARIES = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("torch.distributed.checkpoint", "transformers.models.auto.modeling_auto"),
    "transformers.models.deepseek_v2.modeling_deepseek_v2",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    *("peft", "pyarrow", "tokenizers", "typer", "rich.table", "pydantic", "jinja2", "yaml"),
)
# Every internal name that is needed, with the places it may have, the newest first.
PLACES: dict[str, tuple[str, ...]] = {
    "GlobalBatch": ("hasten.core.job:GlobalBatch", "hasten.core.order:GlobalBatch"),
    "Stop": ("hasten.core.job:Stop",),
    "JobContext": ("hasten.core.context:JobContext",),
    "ExampleStats": ("hasten.core.context:ExampleStats",),
    "ModelFacts": ("hasten.core.context:ModelFacts",),
    "hardware": ("hasten.machine.host:hardware", "hasten.core.context:hardware"),
    "prepare": ("hasten.core.setup:prepare",),
    "with_language_counts": (
        "hasten.core.job:with_language_counts",
        "hasten.core.batch:with_language_counts",
    ),
    "padded": ("hasten.parts.data.collate:padded", "hasten.parts.collate:padded"),
    "tokenized_example": (
        "hasten.parts.data.collate:tokenized_example",
        "hasten.parts.examples:tokenized_example",
    ),
    "pack_lengths": ("hasten.parts.data.packing:pack_lengths", "hasten.parts.packing:pack_lengths"),
    "FORMATS": ("hasten.recipe.importers:FORMATS", "hasten.recipe.importing:FORMATS"),
    "with_techniques": (
        "hasten.integrations.transformers:with_techniques",
        "hasten.hosts.transformers:with_techniques",
    ),
    "in_loop": ("hasten.integrations.loop:in_loop", "hasten.hosts.plain:in_loop"),
    "source_digest": (
        "hasten.machine.cache:source_digest",
        "hasten.measure.record:source_digest",
        "hasten.evidence.example:source_digest",
    ),
    "bf16_gain": (
        "hasten.parts.nn.kernel_variants:bf16_gain",
        "hasten.techniques.kernel_figures:bf16_gain",
        "hasten.parts.nn.bf16_gain:bf16_gain",
        "hasten.machine.benchmark:bf16_gain",
        "hasten.parts.bf16_gain:bf16_gain",
    ),
}
# What differs between two checkouts, or two moments, without a change of behaviour: a child that
# is asked for it answers so in place of the function. The children's children don't.
STEADY: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "source_digest": lambda module: lambda *folder: "sources",
    "bf16_gain": lambda module: lambda *processor: module.Gain(1.7, 1.6, 1.8, 6),
}
POLL_SECONDS = 0.01
TIMED_OUT = "timed out"


def find(name: str) -> Any:
    """What PLACES lists under a name.

    Raises:
        LookupError: it is in none of its places.
    """
    module, attribute = place_of(name)
    return getattr(module, attribute)


def place_of(name: str) -> tuple[Any, str]:
    """The module that has a name of PLACES, and the name's own part there."""
    for place in PLACES[name]:
        module_name, _, attribute = place.partition(":")
        if _exists(module_name):
            module = importlib.import_module(module_name)
            if hasattr(module, attribute):
                return module, attribute
    raise LookupError(f"{name} is in none of its places: {', '.join(PLACES[name])}")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of `finally`
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a child that looks for garbage would copy all pages of the libraries
    package = importlib.util.find_spec("hasten")
    print(json.dumps({"package": package and package.origin}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answered(json.loads(line))), file=answers, flush=True)


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request in a child and wait for it; the exit code, or that it timed out."""
    began = time.monotonic()
    number = os.fork()
    if number == 0:
        _live(request)
    code: int | str = TIMED_OUT
    try:
        while time.monotonic() - began < request["seconds"]:
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(POLL_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(number, signal.SIGKILL)  # whatever it has left behind, too
        if code == TIMED_OUT:
            os.waitpid(number, 0)
    return {"code": code, "seconds": time.monotonic() - began}


def _live(request: dict[str, Any]) -> NoReturn:
    """Be the process that was asked for, and end as an interpreter ends."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        os.chdir(request["folder"])
        for target, path in ((0, os.devnull), (1, ".out"), (2, ".err")):
            path = path if target == 0 else request["prefix"] + path
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), target)
        random.seed(0)  # a fork has another seed each time, which checkpoints would keep
        for name in request["steady"]:
            _hold_steady(name)
        if request["probe"]:
            value = PROBES[request["probe"]]()
            with open(request["prefix"] + ".json", "w", encoding="utf-8") as file:
                json.dump(value, file)
        else:
            sys.argv = ["hasten", *request["words"]]
            runpy.run_module("hasten", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = _code(leaving)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _hold_steady(name: str) -> None:
    """Replace a function where it is defined, and where an import has already taken it."""
    module, attribute = place_of(name)
    before, after = getattr(module, attribute), STEADY[name](module)
    for loaded in [m for n, m in sys.modules.items() if n.partition(".")[0] == "hasten"]:
        if vars(loaded).get(attribute) is before:
            setattr(loaded, attribute, after)


def _code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


# Probes: functions of what no command shows; each returns JSON values.


def techniques() -> list[str]:
    """The names of the catalogue."""
    from hasten.techniques import CATALOGUE

    return [kind.name() for kind in CATALOGUE]


def importers() -> dict[str, list[str]]:
    """The keys that the importer of each other trainer knows."""
    return {module.NAME: list(module.KEYS) for module in find("FORMATS")}


def public_names() -> dict[str, Any]:
    """The package's names with their signatures, and the techniques with their settings."""
    import hasten
    from hasten.techniques import CATALOGUE

    return {
        "names": {name: _signature(getattr(hasten, name)) for name in hasten.__all__},
        "techniques": {kind.name(): _signature(kind) for kind in CATALOGUE},
        "positions": {kind.name(): kind.slot.name for kind in CATALOGUE},
        "fidelities": {kind.name(): kind().fidelity.name for kind in CATALOGUE},
    }


def _signature(what: Any) -> str:
    try:
        return str(inspect.signature(what))
    except (TypeError, ValueError):
        return type(what).__name__


LENGTHS = [3 + (i * i * 7 + i * 13) % 61 for i in range(300)]  # 3 to 63 tokens
EPOCHS, RANKS = 3, (1, 2, 3)


def orders() -> dict[str, Any]:
    """Which examples share a step, for some samplers, epochs and numbers of ranks."""
    batches: dict[str, dict[str, Any]] = {
        "examples": {"examples": 16},
        "tokens": {"examples": None, "tokens": 600},
    }
    plans: dict[str, list[Any]] = {
        "shuffled": [],
        "grouped": [{"length_grouped": {"window": 64}}],
        "packed epoch": [{"packed_epoch": {"row_tokens": 100}}],
    }
    found: dict[str, Any] = {}
    for unit, batch in batches.items():
        for name, plan in plans.items():
            sampler = _setup(plan, batch).sampler
            for epoch in range(EPOCHS):
                key = f"{name} by {unit}, epoch {epoch}"
                found[key] = list(sampler.steps(epoch))
                for size in RANKS:
                    dealt = [list(sampler.local_steps(epoch, r, size)) for r in range(size)]
                    found[f"{key}, {size} ranks"] = dealt
    return found | dict(_batch_sampler())


def _batch_sampler() -> Iterator[tuple[str, Any]]:
    from hasten import DynamicBatchSampler

    for shuffle in (True, False):
        for rank in range(2):
            sampler = DynamicBatchSampler(
                *(None, 500), lengths=LENGTHS, shuffle=shuffle, seed=5, rank=rank, world_size=2
            )
            for epoch in range(EPOCHS):
                sampler.set_epoch(epoch)
                key = f"DynamicBatchSampler {shuffle=} {rank=}, epoch {epoch}"
                yield key, [[int(index) for index in batch] for batch in sampler]


def packing() -> dict[str, Any]:
    """Rows of packed examples, and the tensors of some micro-batches."""
    rows = {f"rows of {n}": find("pack_lengths")(LENGTHS, n) for n in (64, 97, 128, 500)}
    digests: dict[str, Any] = {}
    for name, plan in {"padded": [], "packed": ["packed"]}.items():
        setup = _setup(plan, {"examples": 16})
        for number, step in enumerate(setup.sampler.steps(0)):
            made = setup.collate([setup.job.examples[index] for index in step])
            digests[f"{name}, step {number}"] = {k: _digest(v) for k, v in made.inputs.items()}
    return {**rows, **digests}


def _setup(plan: list[Any], batch: dict[str, Any]) -> Any:
    """A job on examples of LENGTHS, prepared; its model is never built."""
    import numpy as np
    import torch

    from hasten import Job, Plan
    from hasten.techniques import CATALOGUE

    draw, make = np.random.default_rng(7), find("tokenized_example")
    data = [make(draw.integers(3, 97, n), draw.random(n) < 0.6) for n in LENGTHS]
    job = Job(
        model=torch.nn.Module,
        loss=lambda model: model,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        stop=find("Stop")(epochs=EPOCHS),
        collate=find("with_language_counts")(find("padded")),
        examples=data,
        lengths=LENGTHS,
        batch=find("GlobalBatch")(**batch),
        seed=11,
    )
    count, total, longest = len(LENGTHS), sum(LENGTHS), max(LENGTHS)
    facts = find("JobContext")(
        hardware=find("hardware")(),
        model=find("ModelFacts")("llama", 50_000, 32, 2, 97),
        examples=find("ExampleStats")(count, total, longest, 0.6),
    )
    return find("prepare")(job, Plan.from_list(plan, CATALOGUE), facts)


def articles_trainer() -> dict[str, Any]:
    """Two epochs with the trainer of the articles, on a plain model and loader."""
    import torch

    from hasten import OptimizedTrainer

    torch.manual_seed(0)
    inputs, labels = torch.randn(60, 8), torch.randint(0, 4, (60,))
    data = torch.utils.data.TensorDataset(inputs, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = OptimizedTrainer(model, optimizer, torch.nn.CrossEntropyLoss(), max_grad_norm=1.0)
    summary = made.train(loader, epochs=2, checkpoint_dir="checkpoints")
    return {"summary": summary, "weights": _weights(model)}


def host_trainer() -> dict[str, Any]:
    """Five steps of Transformers' Trainer with techniques in it."""
    from transformers import Trainer, TrainingArguments

    model, rows = _small_model(), [{"input_ids": list(range(3, 20 + i))} for i in range(40)]
    settings: dict[str, Any] = {"max_steps": 5, "report_to": [], "use_cpu": True, "seed": 4}
    settings |= {"per_device_train_batch_size": 8, "logging_steps": 1, "disable_tqdm": True}
    made = Trainer(model, TrainingArguments("out", **settings), train_dataset=rows)
    trainer = find("with_techniques")(made, _techniques())
    trainer.train()
    logged = [{k: entry[k] for k in entry if k in HOST_KEYS} for entry in trainer.state.log_history]
    return {"logged": logged, "weights": _weights(model)}


def host_loop() -> dict[str, Any]:
    """An epoch of a loop of one's own with techniques in it."""
    import torch

    model, rows = _small_model(), [{"input_ids": list(range(3, 20 + i))} for i in range(40)]
    run = find("in_loop")(model, _techniques(), examples=rows, batch=8)
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for batch in run.loader(epoch=0):
        loss = model(**batch).loss
        loss.backward()
        run.step(optimizer)
        losses.append(loss.item())
    return {"losses": losses, "weights": _weights(model)}


HOST_KEYS = ("step", "loss", "grad_norm", "learning_rate")
HOST_PLAN = ("length_grouped", "packed", "document_attention", "labelled_token_loss")


def _techniques() -> list[Any]:
    from hasten import Plan
    from hasten.techniques import CATALOGUE

    return list(Plan.from_list(HOST_PLAN, CATALOGUE))


def _small_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))


def _weights(model: Any) -> dict[str, str]:
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}


def _digest(value: Any) -> Any:
    """A tensor as its type, shape and a hash of its bytes."""
    if not hasattr(value, "numpy"):
        return value
    content = hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    return f"{value.dtype} {list(value.shape)} {content[:32]}"


PROBES: dict[str, Callable[[], Any]] = {
    "techniques": techniques,
    "importers": importers,
    "public names": public_names,
    "orders": orders,
    "packing": packing,
    "articles' trainer": articles_trainer,
    "Transformers' trainer": host_trainer,
    "loop": host_loop,
}

if __name__ == "__main__":
    main()
