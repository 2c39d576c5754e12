"""The forecast of memory against what is really taken: live tensors, and a process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.step import assemble, training
from hasten.core.technique import Technique
from hasten.models.flops import model_flops
from hasten.models.memory import ModelSize
from hasten.recipe import memory_check
from hasten.recipe.memory_check import largest_micro_batch, needs_of, one_pass
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from hasten.techniques.loss import LabelledTokenLoss
from tiny import COMMON, examples, job_context, language_job

WIDTH, INNER, LAYERS, VOCABULARY = 128, 344, 4, 2000
WITHIN = 0.2


class LiveTensors(TorchDispatchMode):
    """The most bytes of tensors that were made inside and live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._seen:
                storage = tensor.untyped_storage()
                self._seen.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size: int) -> None:
        self.live -= size


def model() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY}
    config = hf.LlamaConfig(
        **{**COMMON, **sizes, "num_hidden_layers": LAYERS, "max_position_embeddings": 1024},
        num_key_value_heads=4,
    )
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def shaped(context: JobContext, built: Any) -> JobContext:
    count = sum(p.numel() for p in built.parameters())
    shape = replace(
        context.model,
        parameters=count,
        hidden_size=WIDTH,
        layers=LAYERS,
        heads=4,
        key_value_heads=4,
        vocabulary=VOCABULARY,
    )
    return replace(context, model=shape)


PLANS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "several passes": (GradientAccumulation(micro_batch_size=3),),
    "labels": (LabelledTokenLoss(),),
    "packed": (Packed(), DocumentAttention(), LabelledTokenLoss()),
    "fused": (Packed(), DocumentAttention(), FusedLayers(), LabelledTokenLoss()),
    "recomputed": (ActivationCheckpointing(),),
}


@pytest.mark.parametrize("name", PLANS)
def test_live_tensors_of_a_step_are_what_was_forecast(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor's bytes say nothing of the heap that it lies in."""
    monkeypatch.setattr(memory_check, "HEAP_SPARE", 1.0)
    techniques, built = PLANS[name], model()
    job = language_job(lambda: built, data=examples(8, longest=200), steps=2)
    context = shaped(job_context(job), built)
    if any(t.unsupported_reasons(context) for t in techniques):
        pytest.skip("a technique of this plan can't run here")
    active = model_flops(built).per_token / 6
    size = ModelSize(context.model.parameters, active, WIDTH, LAYERS, VOCABULARY)
    plan = Plan(techniques)
    setup = prepare(job, plan, context)
    needs = needs_of(size, context, plan, largest_micro_batch(setup), one_pass(setup))
    steps = training(assemble(setup))
    next(steps)
    tracker = LiveTensors()
    with tracker:
        next(steps)
    # Weights and moments were there before; where a step has several passes gradients are inside.
    found = tracker.peak + 12 * context.model.parameters
    assert needs.total - needs.overhead == pytest.approx(found, rel=WITHIN)


CHILD = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
print(done.stdout, done.stderr, "PEAK", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.long  # the tensors of each plan are compared above, one by one
@pytest.mark.cold
@pytest.mark.parametrize(
    "keys",
    [
        {"global_batch_size": 2, "cutoff_len": 64, "plan": []},
        {"global_batch_size": 16, "plan": []},
        {"global_batch_size": 16, "plan": ["packed", "document_attention", "labelled_token_loss"]},
    ],
    ids=["nearly nothing", "whole logits", "labels alone"],
)
def test_a_process_takes_what_hasten_train_prints(tmp_path: Path, keys: dict[str, Any]) -> None:
    """The largest resident size of the process, as the system has it."""
    texts = [Path(module.__file__ or "").read_text() for module in (json, re, subprocess, weakref)]
    pieces = ["".join(texts)[at : at + 3000] for at in range(0, sum(map(len, texts)), 3000)]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    assert len(pieces) > 36
    recipe = {
        "model": "deepseek-llm-tiny",
        "dataset": str(data),
        "eval_data": 4,
        "vocabulary": 2000,
        "cutoff_len": 512,
        "max_steps": 2,
        "device": "cpu",
        "output": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe | keys))
    words = [sys.executable, "-c", CHILD, sys.executable, "-m", "hasten", "train", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    said = re.search(r"memory of a rank: about ([\d.]+) GB", done.stdout)
    taken = re.search(r"PEAK (\d+)", done.stdout)
    assert said is not None, done.stdout[-2000:]
    assert taken is not None
    unit = 1 if sys.platform == "darwin" else 1024
    # What is printed has one decimal.
    assert float(said[1]) == pytest.approx(int(taken[1]) * unit / 1e9, rel=WITHIN, abs=0.05)
