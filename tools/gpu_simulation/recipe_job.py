"""A recipe's session on the simulated device: its real plan, model and job, with examples made up.

Nothing is read but the model's config: weights have no values by simulation, and every example is
as long as the recipe allows. So a step is traced at full width, with as few layers and examples as
wanted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gpu_simulation.step import treats_alike
from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.setup import Session, Setup, prepare
from hasten.core.step import assemble
from hasten.data.prepared import PreparedData, PreparedDataIndex
from hasten.models.load import load_tokenizer, read_config
from hasten.models.presets import PRESETS
from hasten.parts.data.collate import TokenizedExample, tokenized_example
from hasten.recipe.build import batch_of, context_of, job_of, plan_of
from hasten.recipe.candidates import candidates, first_plan
from hasten.recipe.peak_flops import meter_of
from hasten.recipe.schema import Recipe

STEPS = 4  # of examples; a trace takes two of them
NOT_WANTED: Mapping[str, Any] = {
    "resume": "never",
    "log_to": [],
    "auto_plan": None,
    "ceiling": "auto",
}
CUT_BY_LAYERS = frozenset({"pipeline", "hybrid"})  # layouts that deal out whole layers


class SimulatedTokenizer:
    """The part of a tokenizer that fitting a model requires."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 1

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self._size)}


class SimulatedExamples(Sequence[TokenizedExample]):
    """Examples of one length; every token carries loss."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        ids = np.random.default_rng(0).integers(2, vocabulary, length, dtype=np.int32)
        self._record = tokenized_example(ids)
        self.lengths: NDArray[np.int64] = np.full(count, length)
        self.trained_counts: NDArray[np.int64] = np.full(count, length - 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return self._record


@dataclass(frozen=True)
class SimulatedRecipe:
    """A recipe of which sessions of any size can be built, all with the plan of the whole job.

    Raises:
        InputError: when the plan is asked for: a technique can't work on this device.
    """

    recipe: Recipe

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's, as its config.json has it."""
        read = read_config(self.recipe.model, vocab_size=self._vocabulary)
        config: dict[str, Any] = read.to_dict()
        return config

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def fewest_layers(self) -> int:
        """Fewest layers of a trace; with one more layer, all others can be calculated.

        If layers differ from each other, it is the number of all layers.
        """
        kinds = set(self.config.get("layer_types") or [])
        cut = CUT_BY_LAYERS & {t.name() for t in self.plan}
        if len(kinds) > 1 or cut or not treats_alike(self.plan):
            return self.layers
        return 2 + int(self.config.get("first_k_dense_replace") or 0)

    @cached_property
    def examples(self) -> int:
        """Examples of a step, over all ranks."""
        batch = batch_of(self.recipe)
        return batch.examples or max(1, (batch.tokens or 0) // self.recipe.cutoff_len)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the full job; with ``plan: auto``, the initial plan."""
        with self._sized(self.layers, self.examples, {}) as sized_recipe:
            plan = plan_of(sized_recipe.recipe, sized_recipe.context)
            if self.recipe.auto_plan is None:
                return plan
            fidelity = self.recipe.auto_plan.fidelity
            return first_plan(
                candidates(sized_recipe.recipe, sized_recipe.context, fidelity),
                plan,
                sized_recipe.context,
            )

    @cached_property
    def passes(self) -> int:
        """Passes of this rank in a step."""
        with self.sized(self.layers, self.examples) as sized_recipe:
            return sized_recipe.passes()

    @contextmanager
    def few_layers(self) -> Iterator[Recipe]:
        """The recipe with a model of few layers, for a look."""
        with self._sized(2, 1, {}) as few:
            yield few.recipe

    def sized(self, layers: int, examples: int) -> AbstractContextManager[SizedRecipe]:
        """The recipe with so many layers, and examples of a step."""
        return self._sized(layers, examples, {"plan": self.plan.to_list()})

    @contextmanager
    def _sized(self, layers: int, examples: int, more: Mapping[str, Any]) -> Iterator[SizedRecipe]:
        with tempfile.TemporaryDirectory(prefix="hasten-paper-") as folder:
            config = {**self.config, "num_hidden_layers": layers}
            if config.get("layer_types"):
                config["layer_types"] = config["layer_types"][:layers]
            model = Path(folder) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(config, default=str))
            changes = {
                **NOT_WANTED,
                "model": str(model),
                "from_scratch": True,
                "device": "cuda",
                "global_batch_size": examples,
                "global_batch_tokens": None,
                "output": folder,
                "max_steps": 10**6,
                "epochs": None,
                "max_tokens": None,
                **more,
            }
            yield SizedRecipe(self.recipe.model_copy(update=changes))

    @cached_property
    def _vocabulary(self) -> int | None:
        """Rows of a preset's embedding; None for other models, which have it in their config."""
        recipe = self.recipe
        if recipe.model not in PRESETS:
            return None
        return len(load_tokenizer(recipe.tokenizer)) if recipe.tokenizer else recipe.vocabulary


@dataclass(frozen=True)
class SizedRecipe:
    """A recipe of one size, to be built in this process."""

    recipe: Recipe

    @cached_property
    def data(self) -> PreparedData:
        recipe = self.recipe
        rows = int(read_config(recipe.model).vocab_size)
        examples = SimulatedExamples(
            STEPS * (recipe.global_batch_size or 1), recipe.cutoff_len, rows
        )
        note = PreparedDataIndex("paper", "paper", "", "paper", None, None)
        return PreparedData(cast(Any, SimulatedTokenizer(rows)), cast(Any, examples), (), note)

    @cached_property
    def context(self) -> JobContext:
        return context_of(self.recipe, self.data)

    def setup(self) -> Setup:
        plan = plan_of(self.recipe, self.context)
        job = job_of(self.recipe, self.data, self.context, plan)
        build = job.model

        # On the device a model takes no memory. A function has no skeleton, so ranks that would
        # otherwise receive weights build them, too.
        def on_device() -> nn.Module:
            with torch.device(self.context.device):
                return build()

        job = replace(job, model=on_device)
        return prepare(job, plan, self.context, Path(self.recipe.output) / "checkpoints")

    def passes(self) -> int:
        """Passes of this rank in the first step."""
        setup = self.setup()
        assert setup.sampler is not None  # the job has examples
        layout = setup.layout
        pieces = next(setup.sampler.local_steps(0, layout.data_rank, layout.data_size))
        return sum(
            len(setup.split_micro_batches([setup.job.examples[i] for i in indices]))
            for indices in pieces
        )

    def session(self) -> Session:
        session = assemble(self.setup())
        session.meter = meter_of(self.recipe, self.context, session.model)
        return session
