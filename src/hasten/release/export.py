"""Exports a finished run as files for other programs, and compares them with the model.

(1) Run folder, output folder and tokenizer are checked, before any weight is read. (2) The
trained model is built: the base with the adapter on top, or the trained weights. (3) Its logits
on 20 eval examples are computed, with one block in memory at a time. (4) The adapter is merged
in float32 into the base's original weights, one after the other. Folder or file is written in
the format of the base. (5) The written files are read back, and their logits are compared with
those of step 3. The table of step 5 is stored with the files, in `export.json` and in the card.

An adapter that was trained on a base in few bits is merged into the original weights too. How far
that model is from the one with the rounded base is a row of the table; it decides nothing.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hasten.data.chat_template import answer_end, encode
from hasten.data.conversation import Conversation
from hasten.data.prepared import PreparedData, stop_token
from hasten.data.turns import Message
from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.formatting import one_line
from hasten.machine.files import write_atomic
from hasten.models.adapters import merge, merged_values, round_base, with_adapter
from hasten.models.gguf_format import GGUFType, check_convertible, read_gguf, write_gguf
from hasten.models.load import (
    load_model,
    load_tokenizer,
    read_config,
    stored_formats,
    take_own_attention,
)
from hasten.models.presets import PRESETS
from hasten.models.save import appearing_at_once, save_adapter, save_model
from hasten.models.weight_files import UNSPLIT, UnsplitModel
from hasten.models.weights import ADAPTER, NumberFormats
from hasten.parts.checkpoint import MANIFEST, checkpoints, load
from hasten.parts.checkpoint.state import FrozenWeights, hash_of
from hasten.parts.nn.late_weights import is_late, read_in_turn, read_now
from hasten.parts.nn.new_weights import UnknownSourceError
from hasten.parts.nn.quantised import Kind
from hasten.parts.nn.recompute import decoder_blocks
from hasten.recipe.build import lora_of, model_for, requested_plan, weights_dtype
from hasten.recipe.prepare import is_random, saved_formats
from hasten.recipe.prepared_data import stored_data
from hasten.recipe.schema import Recipe
from hasten.release.trained_model import (
    check_adapter_base,
    check_is_language_model,
    is_data_of,
    recipe_of,
)
from hasten.report.card import write_card
from hasten.techniques.adapter import LoRA
from hasten.techniques.checkpoint import Checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WeightsOf = Literal["final", "average", "best", "checkpoint"]
Form = Literal["folder", "gguf", "adapter"]
Tell = Callable[[str], None]
RESULT_FILE: Final = "export.json"
EXAMPLES: Final = 20
TOKENS: Final = 128  # tokens of an example: logits of 20 x 128 tokens fit into memory
# Tolerances by the format of the weights. Rounding a weight to n bits changes logits by about
# 2**-n of their size times the square root of the number of layers.
TOLERANCES: Final = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2, "f16": 1e-2, "q8_0": 5e-2}
ORDERS: Final = 8  # permitted difference in float32 / effect of the model's rounding
# A checkpoint's weights are those of the module that computes the loss, which holds the model.
_IN_CHECKPOINT: Final = "model/model."
ROOM: Final = 64 * 2**20  # bytes for tokenizer, card and configs
WEIGHTS: Final[tuple[WeightsOf, ...]] = get_args(WeightsOf)


@dataclass(frozen=True)
class Export:
    """The weights to export, and their form.

    Args:
        run: the folder of a run.
        output: the folder to write; absent or empty.
        weights: which of the run's weights.
        form: a full model's folder, one GGUF file, or the adapter alone.
        gguf_type: the number format of matrices in a GGUF file.
        report: what the ``report.json`` of an experiment holds, for the card.
    """

    run: Path
    output: Path
    weights: WeightsOf = "final"
    form: Form = "folder"
    gguf_type: GGUFType = "f16"
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class LogitComparison:
    """Logits of two models on the same tokens.

    ``largest`` is the largest difference over the largest logit. ``mean`` is the root mean
    square of the differences over that of the logits. Both are of the worst example. The
    tolerance is of ``largest`` in float32, and not below the model's own rounding. In other formats
    it is of ``mean``, since rounding can send a single token to another expert.
    """

    name: str
    format: str
    examples: int
    positions: int
    largest: float
    mean: float
    same_token: float  # share of positions with the same most probable token
    tolerance: float | None = None  # None: for information

    @property
    def is_equal(self) -> bool:
        if self.tolerance is None:
            return True
        # A comparison with a NaN is false.
        return (self.largest if self.format == "float32" else self.mean) <= self.tolerance


@dataclass(frozen=True)
class Exported:
    """The written model, compared with the trained one.

    ``problems`` are differences in other things than logits; ``unsaved`` parts couldn't be written.
    """

    comparisons: tuple[LogitComparison, ...]
    problems: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.problems and all(c.is_equal for c in self.comparisons)

    def rows(self) -> list[tuple[str, ...]]:
        """Returns a table with a head."""
        head = ("logits of", "examples", "largest difference", "rms", "same token", "tolerance", "")
        rows: list[tuple[str, ...]] = [head]
        for c in self.comparisons:
            numbers = (f"{c.largest:.2g}", f"{c.mean:.2g}", f"{c.same_token:.2%}")
            limit, verdict = "none", "for information"
            if c.tolerance is not None:
                limit = f"{c.tolerance:g} ({c.format})"
                verdict = "equal" if c.is_equal else "DIFFERENT"
            rows.append((c.name, str(c.examples), *numbers, limit, verdict))
        return rows


@dataclass(frozen=True)
class _Trained:
    """A run's trained weights, with recipe and tokenizer."""

    recipe: Recipe
    source: Path  # a model's or adapter's folder, or a checkpoint
    lora: LoRA | None
    data: PreparedData | None
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    stop: int | None  # the token that ends a trained answer

    @property
    def is_checkpoint(self) -> bool:
        return (self.source / MANIFEST).is_file()

    def base(self, late: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        """Returns the run's initial model; ``late``: its weights are read later, if possible."""
        build = partial(model_for, self.recipe, self.tokenizer, self.stop, dtype=dtype)
        return _late_if_possible(build) if late and not is_random(self.recipe) else build()

    def attach(self, late: bool) -> Any:
        """Returns the trained model; ``late``: weights are read later, if possible."""
        if self.is_checkpoint:
            model = self.base(late and self.lora is not None)
            if self.lora is not None:
                model = replace(self.lora, base=None).adapt(model)
            _load_checkpoint(model, self.source, self._frozen_hash)
            return model
        if self.lora is not None:
            return with_adapter(self.base(late), self.source)
        load = partial(load_model, str(self.source), stop_token_id=self.stop)
        loaded = _late_if_possible(load) if late else load()
        take_own_attention(loaded)
        return loaded

    def _frozen_hash(self) -> str:
        """Returns the hash of the frozen weights as training has them."""
        model = self.base(dtype=weights_dtype(self.recipe))
        if self.lora is not None:
            model = self.lora.adapt(model)
        frozen, state = FrozenWeights(model), model.state_dict(keep_vars=True)
        return frozen.hash or hash_of({n: t for n, t in state.items() if n in frozen.names})

    def on_rounded_base(self, kind: Kind) -> Any:
        """Returns the trained model on the quantised base, as in training."""
        base = self.base(late=False)
        if self.is_checkpoint and self.lora is not None:
            model = self.lora.adapt(base)
            _load_checkpoint(model, self.source)
            return model
        round_base(base, kind)
        return with_adapter(base, self.source)

    def formats(self) -> NumberFormats:
        """Returns the number formats of full weights."""
        if self.lora is not None or self.is_checkpoint:
            return saved_formats(self.recipe)
        config = read_config(str(self.source), needs_weights=True)
        return stored_formats(str(self.source), config)


def _late_if_possible(build: Callable[..., Any]) -> Any:
    with suppress(UnknownSourceError):
        return build(late=True)
    return build()


def export(request: Export, tell: Tell = print) -> Exported:
    """Writes a run's model into the output folder, and compares it with the trained one.

    The folder appears under its name when all of it is written, also if the comparison fails: the
    result and `export.json` report that.

    Raises:
        InputError: something of the request can't be exported, or the disk is full; nothing is
            left of the output folder.
    """
    output = request.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"-o {output} is not an empty folder: choose a new one")
    check_is_language_model(request.run)
    trained = _trained_of(request)
    skeleton = model_for(trained.recipe, trained.tokenizer, trained.stop, skeleton=True)
    if request.form == "gguf":
        for difference in check_convertible(skeleton, trained.tokenizer):
            tell(f"warning: {difference}")
    _check_room(request, skeleton, trained)
    formats = trained.formats()
    model = trained.attach(late=request.form != "gguf")
    generation_of = model.get_base_model() if trained.lora is not None else model
    if sentence := _repair_generation(generation_of):
        tell(sentence)
    tokens, source_of_tokens = _tokens(trained.data, skeleton.config.vocab_size)
    tell(f"comparing logits on {source_of_tokens}")
    if request.form == "adapter" and trained.lora is not None and trained.lora.rslora:
        tell(
            "warning: llama.cpp's converter of adapters ignores use_rslora, which makes this one "
            f"{trained.lora.rank**0.5:.3g} times too weak there; use --to gguf, which merges it"
        )
    before = logits(model, tokens)
    comparisons = []
    if trained.lora is not None and trained.lora.base is not None:
        on_rounded = logits(trained.on_rounded_base(trained.lora.base), tokens)
        name = f"on the original base, compared with the base in {trained.lora.base}"
        comparisons.append(compare(name, "float32", before, on_rounded, None))
        del on_rounded
    try:
        with appearing_at_once(request.output) as folder:
            kind, after, problems, unsaved = _write(
                request, trained, model, formats, folder, tokens
            )
            name = "written files, compared with the trained model"
            written = logits(after, tokens)
            last = compare(name, kind, written, before, TOLERANCES[kind])
            if kind == "float32" and not last.is_equal:
                last = replace(last, tolerance=_own_rounding(after, tokens, written))
            result = Exported((*comparisons, last), tuple(problems), tuple(unsaved))
            _describe(request, trained.recipe, folder, result, tell)
    except OSError as error:
        raise InputError(
            f"{request.output} can't be written ({error.strerror or error}): make room or choose "
            "another folder; nothing of it is left"
        ) from error
    return result


def _write(
    request: Export,
    trained: _Trained,
    model: Any,
    formats: NumberFormats,
    folder: Path,
    tokens: Sequence[Tensor],
) -> tuple[str, Any, list[str], list[str]]:
    """Writes the files and reads them back: format, model, problems, what couldn't be written."""
    tokenizer, stop = trained.tokenizer, trained.stop
    if request.form == "adapter":
        unsaved = save_adapter(model, tokenizer, folder)
        config = folder / ADAPTER
        fields = read_json_object(config, "adapter's config")
        base = Path(str(fields.get("base_model_name_or_path") or ""))
        if base.is_dir():  # a local path is useless on other machines
            fields["base_model_name_or_path"] = base.resolve().name
            config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", "utf-8")
        return "float32", with_adapter(trained.base(), folder), [], unsaved
    source = UNSPLIT
    if trained.lora is not None and is_late(model):
        plain = trained.base()
        plain.generation_config = model.get_base_model().generation_config
        model, source = plain, UnsplitModel(merged_values(plain, model))
    elif trained.lora is not None:
        model = merge(model)
    if request.form == "gguf":
        file = gguf_file(request, folder)
        write_gguf(model, tokenizer, file, request.gguf_type, file.stem)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)  # a weight that the file lacks
        model.load_state_dict(read_gguf(file, model.config), strict=False)
        return request.gguf_type, model, [], []
    unsaved = save_model(model, tokenizer, folder, formats, source)
    model.to("meta")  # makes room for the copy that is read back
    after = _late_if_possible(partial(load_model, str(folder)))
    take_own_attention(after)
    names = {
        str(k).removeprefix("torch.") for k in (formats.most, *formats.exceptions.values()) if k
    }
    kind = max(names or {"float32"}, key=lambda name: TOLERANCES.get(name, 0.0))
    return kind, after, _differences(folder, tokenizer, tokens[0], stop), unsaved


def _differences(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tokens: Tensor, stop: int | None
) -> list[str]:
    """Returns differences between the trained model and a reader's copy, except weights."""
    problems = []
    stored = load_tokenizer(str(folder))
    text = tokenizer.decode(tokens)
    if stored(text)["input_ids"] != tokenizer(text)["input_ids"]:
        problems.append("the written tokenizer splits a text into other tokens")
    if stored.chat_template != tokenizer.chat_template:
        problems.append("the written tokenizer has another chat template")
    if stop is not None:
        ends = read_json_object(folder / "generation_config.json", "generation config").get(
            "eos_token_id"
        )
        if stop not in (ends if isinstance(ends, list) else [ends]):
            problems.append(f"generation doesn't stop at token {stop}, which ends trained answers")
    return problems


# What is exported, and the checks before any weight is read.


def _trained_of(request: Export) -> _Trained:
    run = request.run
    recipe = recipe_of(run)
    plan = requested_plan(recipe)
    lora = lora_of(recipe, plan)
    if request.form == "adapter" and lora is None:
        raise InputError(f"{run} trained all weights, so it has no adapter: leave --adapter out")
    if request.weights == "checkpoint":
        saving = next((t for t in plan if isinstance(t, Checkpoints)), None)
        folder = Path(saving.folder) if saving and saving.folder else run / "checkpoints"
        source = next(reversed(checkpoints(folder)), None)
        if source is None:
            raise InputError(f"{folder} has no checkpoint: choose --weights final")
    else:
        kind = "adapter" if lora is not None else "model"
        suffix = "_average" if request.weights == "average" else ""
        source = run / ("best" if request.weights == "best" else f"{kind}{suffix}")
        if not (source / (ADAPTER if lora is not None else "config.json")).is_file():
            raise InputError(
                f"{source} holds no {kind}: choose other weights of the run with --weights "
                f"({', '.join(WEIGHTS)})"
            )
        if lora is not None:
            check_adapter_base(source, recipe)
    prepared = stored_data(recipe, run / "data")
    # Another command may have prepared changed files since.
    data = prepared if prepared is not None and is_data_of(run, prepared) else None
    if request.weights != "checkpoint":
        tokenizer = load_tokenizer(str(source))
    elif data is not None:
        tokenizer = data.tokenizer
    else:
        tokenizer = load_tokenizer(recipe.tokenizer or recipe.model)
    return _Trained(recipe, source, lora, data, tokenizer, _stop_token(tokenizer, source))


def _stop_token(tokenizer: PreTrainedTokenizerBase, source: Path) -> int | None:
    """Returns the token that ends a trained answer, from the chat template.

    Raises:
        InputError: there is no template, or it begins with two tokens of the text's beginning.
    """
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {source} has no chat template: put the template that the model was "
            "trained with into chat_template.jinja there"
        )
    dialogue = (Message("user", "?"), Message("assistant", "!"))
    encode(tokenizer, Conversation(dialogue, None, f"the chat template of {source}"), 4096)
    return stop_token(tokenizer, answer_end(tokenizer))


def _check_room(request: Export, skeleton: Any, trained: _Trained) -> None:
    size = 4 if request.form == "folder" else 2
    if request.form == "folder" and (most := trained.formats().most) is not None:
        size = most.itemsize
    needed = size * sum(p.numel() for p in skeleton.parameters())
    if request.form == "adapter":
        needed = sum(file.stat().st_size for file in trained.source.iterdir() if file.is_file())
    folder = request.output.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed + ROOM:
        raise InputError(
            f"-o {request.output} needs about {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are "
            "free there: make room or choose another folder"
        )


def _load_checkpoint(model: Any, path: Path, frozen_hash: Callable[[], str] | None = None) -> None:
    """Puts a checkpoint's weights into a model, which has the frozen ones.

    Args:
        frozen_hash: returns the hash of the frozen weights, to compare it with the checkpoint's.

    Raises:
        InputError: the checkpoint is damaged, lacks a weight that was trained, or was trained on
            other frozen weights.
    """
    try:
        tensors, meta = load(path)
    except ValueError as error:
        raise InputError(str(error)) from error
    read_now(model, lambda parameter: parameter.requires_grad)  # DoRA's magnitudes
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    state = model.state_dict()
    stored = {
        name: tensors[_IN_CHECKPOINT + name] for name in state if _IN_CHECKPOINT + name in tensors
    }
    if lacking := sorted(learned - stored.keys()):
        raise InputError(f"{path} has no {lacking[0]}: it is of another model than the recipe's")
    base = meta["base"]
    if base is not None and frozen_hash is not None and frozen_hash() != base["hash"]:
        raise InputError(
            f"{path} was trained on another base: its {base['weights']} frozen weights differ from "
            "those of the recipe's model now; set model to the one that the run began with"
        )
    for name, tensor in stored.items():
        if tensor.shape != state[name].shape:
            raise InputError(f"{path} has another shape of {name} than the recipe's model")
    model.load_state_dict(stored, strict=False)


def _repair_generation(model: Any) -> str:
    """Makes a contradictory generation config valid; the sentence names the changes.

    Published models list a temperature and switch sampling off, which transformers refuses to save.

    Raises:
        InputError: it is contradictory with sampling on, too.
    """
    generation = model.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
    else:
        return ""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise InputError(
            f"the model's generation_config.json is contradictory: {one_line(error)}"
        ) from error
    return "generation_config.json has sampling settings: do_sample is written as true"


# Logits, and the comparison.


def _tokens(data: PreparedData | None, vocabulary: int) -> tuple[list[Tensor], str]:
    """Returns the first tokens of 20 eval examples; training examples if there are fewer."""
    if data is None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(vocabulary, (EXAMPLES, 64), generator=generator)
        return list(drawn), f"{EXAMPLES} sequences of drawn tokens (the run's data is gone)"
    rows: list[Tensor] = []
    names = []
    for name, examples in (("eval", data.eval_data), ("training", data.train)):
        count = min(EXAMPLES - len(rows), len(examples))
        for i in range(count):
            row = next(row for row in examples[i].rows if row.length)
            rows.append(torch.from_numpy(row.input_ids[:TOKENS].astype("int64")))
        names += [f"{count} {name} examples"] if count else []
    return rows, " and ".join(names)


@torch.no_grad()
def logits(model: Any, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Returns the logits of each sequence, (length, vocabulary) in float32.

    All go through the model together, so that weights which are read later are read once.
    """
    model.eval()
    rows = pad_sequence(list(tokens), batch_first=True)  # no position sees a later one
    with read_in_turn(model, _blocks(model)):
        scores = model(input_ids=rows, use_cache=False).logits.float()
    return [row[: len(one)] for row, one in zip(scores, tokens, strict=True)]


def _blocks(model: Any) -> list[torch.nn.Module]:
    with suppress(ValueError):  # a single layer
        return decoder_blocks(model)
    return []


def compare(
    name: str,
    kind: str,
    after: Sequence[Tensor],
    before: Sequence[Tensor],
    tolerance: float | None,
) -> LogitComparison:
    """Compares logits of the same tokens; returns the values of the worst example."""
    largest, mean, same, positions = [], [], 0, 0
    for new, old in zip(after, before, strict=True):
        difference = (new - old).double()
        largest.append(difference.abs().max() / old.abs().max())
        mean.append(difference.norm() / old.double().norm())
        same += int((new.argmax(-1) == old.argmax(-1)).sum())
        positions += len(old)
    return LogitComparison(
        name,
        kind,
        examples=len(before),
        positions=positions,
        largest=float(torch.stack(largest).max()),  # unlike Python's, NaN if one is
        mean=float(torch.stack(mean).max()),
        same_token=same / positions,
        tolerance=tolerance,
    )


@torch.no_grad()
def _own_rounding(model: Any, tokens: Sequence[Tensor], written: Sequence[Tensor]) -> float:
    """Returns the tolerance of a model that amplifies rounding, as after large updates.

    It is measured: each weight moves to the next number.
    """
    read_now(model)
    for weight in model.parameters():
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    changes = compare("", "float32", logits(model, tokens), written, None)
    return min(max(TOLERANCES["float32"], ORDERS * changes.largest), TOLERANCES["float16"])


# The files beside the weights.


def _describe(request: Export, recipe: Recipe, folder: Path, result: Exported, tell: Tell) -> None:
    """Writes `export.json` and the model card."""
    content = {
        "equal": result.is_equal,
        "form": request.form,
        "weights": request.weights,
        **asdict(result),
    }
    write_atomic(folder / RESULT_FILE, json.dumps(content, indent=1) + "\n")
    summary = request.run / "summary.json"
    if not summary.is_file():
        tell(f"no model card is written: {request.run} has no summary.json")
        return
    plain = recipe.model_dump(mode="json")
    write_card(
        folder, plain, read_json_object(summary, "run's summary"), request.report, result.rows()
    )


# What a user does next.

VLLM_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)  # that its --max-lora-rank takes


def serving_commands(request: Export) -> list[str]:
    """Returns commands that serve the exported files here; none for an adapter of a preset."""
    output, local = shlex.quote(str(request.output)), "--host 127.0.0.1"
    if request.form == "gguf":
        return [f"llama-server -m {shlex.quote(str(gguf_file(request, request.output)))}"]
    if request.form == "folder":
        return [f"transformers serve {output}", f"vllm serve {output} {local}"]
    base = recipe_of(request.run).model
    if base in PRESETS:
        return []
    rank = int(read_json_object(request.output / ADAPTER, "adapter's config")["r"])
    largest = next((each for each in VLLM_RANKS if each >= rank), rank)
    adapter = f"--enable-lora --max-lora-rank {largest} --lora-modules adapter={output}"
    return [f"vllm serve {shlex.quote(base)} {local} {adapter}"]


def gguf_file(request: Export, folder: Path) -> Path:
    """Returns the file of an export in this folder."""
    return folder / f"{request.output.resolve().name}-{request.gguf_type.upper()}.gguf"


# Upload to a hub.

# What a folder of an export has; nothing else of it is uploaded.
UPLOADED: Final = ("*.safetensors", "*.gguf", "*.json", "*.jinja", "*.txt", "README.md")


def check_upload(repository: str, is_public: bool) -> None:
    """Refuses an upload that can't succeed, or would be public without --public.

    Raises:
        InputError: the name isn't OWNER/NAME, no token is stored, the hub can't be reached, or the
            repository is public and ``is_public`` is False.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(
            f"--push {repository} is no name of a repository: {one_line(error, 500)}"
        ) from error
    if "/" not in repository:
        raise InputError(f"--push {repository} names no owner: give OWNER/NAME")
    if get_token() is None:
        raise InputError(f"--push {repository} needs a token: run `hf auth login`, or set HF_TOKEN")
    try:
        all_can_read = not HfApi().model_info(repository).private
    except RepositoryNotFoundError:  # the upload will create the repository
        return
    except (HTTPError, OSError, ValueError) as error:
        raise InputError(
            f"--push {repository} can't be checked ({one_line(error, 300)}): leave it out, and "
            "upload the folder later"
        ) from error
    if all_can_read and not is_public:
        raise InputError(
            f"--push {repository}: this repository exists and is public, so that all could read "
            "the model: add --public, or name another repository"
        )


def upload(folder: Path, repository: str, is_private: bool) -> str:
    """Uploads an exported folder in one commit and returns its address.

    Raises:
        InputError: the hub refused or can't be reached; the folder stays as it is.
    """
    import huggingface_hub
    from huggingface_hub.errors import HTTPError

    try:
        hub = huggingface_hub.HfApi()
        hub.create_repo(repository, private=is_private, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(UPLOADED),
            commit_message="Upload of hasten export",
        )
    except (HTTPError, OSError, ValueError) as error:
        raise InputError(
            f"--push {repository} failed ({one_line(error, 300)}): {folder} is complete, and "
            f"`hf upload {repository} {folder}` uploads it"
        ) from error
    return str(commit.repo_url)
