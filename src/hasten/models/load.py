"""Loads models and tokenizers from a preset's name, a local folder or a hub name.

A preset gives random weights from its seed. A folder or hub name gives trained weights.
Every way in which they could be wrong without notice is an error here. The library
transformers fills a missing tensor with noise, skips an unknown one, and only logs
both. The module `hasten.models.weights` handles the contents of a folder's weights.

Nothing from a folder is ever executed. Weights come from safetensors alone (a pickle
can run code) and custom model code is refused. ``source`` is looked up as a preset
first. For a folder with the name of a preset, write ``./name``.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from hasten.errors import InputError, is_panic
from hasten.foreign_files import read_json_object
from hasten.formatting import one_line
from hasten.models.presets import PRESETS, build_config, with_vocabulary
from hasten.models.slices import stored_sources
from hasten.models.source_check import check_folder, check_native, check_source, check_tokenizer
from hasten.models.weights import (
    ADAPTER,
    INDEX,
    NumberFormats,
    StoredWeights,
    read_weights,
)
from hasten.parts.nn.causal_lm import freeze_indexers
from hasten.parts.nn.late_weights import read_now
from hasten.parts.nn.new_weights import (
    UnknownSourceError,
    expect_weights,
    seeded,
    seeded_by_name,
)

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

_NAMES_SHOWN: Final = 3
# Files of a tokenizer on the hub
_TOKENIZER: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("*chat_template*", "config.json"),
)
_REASON_SHOWN: Final = 300  # characters; transformers' explanations are long


def load_model(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    from_scratch: bool = False,
    seed: int = 0,
    vocab_size: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    stop_token_id: int | None = None,
    skeleton: bool = False,
    late: bool = False,
) -> PreTrainedModel:
    """Returns a causal language model in training mode on the CPU, in ``dtype``.

    A preset has random weights, and so has any source with ``from_scratch``. Each is drawn
    in float32 from ``seed`` and its name, and then rounded to ``dtype``. So every precision
    starts from the same model. The embedding has ``vocab_size`` rows. Buffers (rotary
    frequencies, the router's balancing bias) stay float32 in every precision, as when
    transformers loads them. Weights that transformers never trains are frozen (`freeze_indexers`).

    A ``skeleton`` is the same model with tensors on the meta device: shapes and no weights.
    With ``late``, only its parameters are there, and each can be read in parts
    (:mod:`hasten.parts.nn.late_weights`).

    Trained weights keep their embedding, which ``vocab_size`` may not exceed. The token ids
    are written to the configs of the model and of its generation. The generation config
    also keeps the stop tokens of trained weights and adds ``stop_token_id``. Raises
    InputError for anything that the source lacks, and UnknownSourceError if the parts of a
    ``late`` weight aren't known.
    """
    tokens = {
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    random = from_scratch or source in PRESETS
    if source in PRESETS:
        config = build_config(PRESETS[source], vocab_size=vocab_size, **tokens)
    else:
        config = read_config(source, needs_weights=not from_scratch)
        if not from_scratch:
            _check_rows(source, config, vocab_size or 0)
        with_vocabulary(config, vocab_size=vocab_size if random else None, **tokens)
    # Built without its padding token: transformers would set its row of the embedding to zero and
    # freeze it. DeepSeek's tokenizers pad with the end-of-text token, which would never be trained.
    padding, config.pad_token_id = config.pad_token_id, None
    if skeleton:
        with torch.device("meta"):
            model = _built(config, dtype)
    elif late:
        model = _late(None if random else source, config, seed, dtype)
    else:
        model = _from_seed(config, seed, dtype) if random else _from_weights(source, config, dtype)
    model.config.pad_token_id = padding
    generation = model.generation_config
    existing_stops = [] if random else [*_listed(generation.eos_token_id), *stop_tokens(source)]
    for name, token_id in tokens.items():
        if token_id is not None:
            setattr(generation, name, token_id)
    stops = list(dict.fromkeys([*existing_stops, *_listed(eos_token_id), *_listed(stop_token_id)]))
    if stops:
        generation.eos_token_id = stops if len(stops) > 1 else stops[0]
    freeze_indexers(model)
    model.train()
    return model


def as_reward_model(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Returns the model with one score per token instead of its vocabulary's logits.

    It is transformers' class for sequence classification with one label, so other programs can
    read what is saved. The score's weight is new and drawn from ``seed``. ``model`` must not be
    used any more.

    Raises:
        InputError: transformers has no such class for this architecture.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    config = model.config
    if type(config) not in CLASSES:
        raise InputError(
            f"transformers has no reward model of the type {config.model_type}; choose a model of "
            "another type for stage: rm"
        )
    config.num_labels = 1
    weight = next(model.parameters())
    with quiet(), _advice(_cant_build(config)), torch.device("meta"):
        scored: PreTrainedModel = CLASSES[type(config)](config)
    setattr(scored, scored.base_model_prefix, getattr(model, model.base_model_prefix))
    with seeded_by_name(seed, "score.weight"):
        rows = torch.empty(1, config.hidden_size).normal_(0.0, config.initializer_range)
    scored.score.weight = torch.nn.Parameter(rows.to(weight.device, weight.dtype))
    scored.name_or_path = model.name_or_path
    scored.train(model.training)
    return scored


def stop_tokens(source: str) -> list[int]:
    """Returns the stop tokens of a local folder or cached hub name; empty if it defines none."""
    with suppress(InputError):
        folder = check_source(source) or hub_folder(source, "config.json", only_cached=True)
        for name in ("generation_config.json", "config.json"):
            with suppress(InputError):
                content = read_json_object(folder / name, "model's config")
                if stops := _listed(content.get("eos_token_id")):
                    return stops
    return []


def hub_folder(source: str, *files: str, only_cached: bool = False) -> Path:
    """Returns the folder of a hub name in the local cache, with the files of these patterns.

    They are fetched if the hub can be reached. Raises InputError if the first of them is missing.
    """
    from huggingface_hub import constants, errors, snapshot_download

    try:
        with quiet():
            folder = snapshot_download(
                source, allow_patterns=[*files], local_files_only=only_cached
            )
    except errors.GatedRepoError as error:
        raise InputError(
            f"{source} is gated: accept its agreement on the model's page of the hub, and log in "
            "with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{source} is no folder here, and the hub has no such model for you: check the name, "
            "or log in with `hf auth login`"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub can't be reached"
        raise InputError(
            f"{source} is no folder here and not in the hub's local cache, and {why}: run `hf "
            f"download {source}` with a network, or give the folder of a copy"
        ) from error
    except Exception as error:  # errors of its HTTP client
        raise InputError(
            f"{source} can't be fetched from the hub: {one_line(error, _REASON_SHOWN)}"
        ) from error
    if not (Path(folder) / files[0]).is_file():
        raise InputError(
            f"{source} on the hub, or its copy in the local cache, has no {files[0]}: run `hf "
            f"download {source}` with a network, or choose another model"
        )
    return Path(folder)


def _listed(ids: object) -> list[int]:
    """Returns one or several token ids; -1 means none in the first Llama conversions.

    Raises:
        InputError: one is no whole number.
    """
    several = ids if isinstance(ids, list | tuple) else [ids]
    listed = []
    for token_id in several:
        if token_id is None:
            continue
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InputError(
                f"the model's generation config has eos_token_id {str(token_id)[:60]!r}; "
                "write the number of a token, or a list of them"
            )
        listed.append(token_id)
    return [token_id for token_id in listed if token_id >= 0]


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a local folder or hub name, as in its ``tokenizer.json``.

    The class that transformers 5 chooses by model type is not used on purpose. For qwen2,
    and so for the R1 distillations, it replaces the file's splitting rules with its own.
    The same text then gets other ids. Raises InputError for a preset, which has no
    tokenizer.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if source in PRESETS:
        raise InputError(
            f"the preset {source} has no tokenizer: give the folder of one, or train one"
        )
    folder = check_source(source) or hub_folder(source, *_TOKENIZER)
    check_tokenizer(folder)
    with quiet(), _advice(f"the tokenizer of {source} can't be loaded"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        if get_tokenizer_config(folder).get("add_bos_token") is True:
            _begin_with_bos(tokenizer)
    tokenizer.name_or_path = source
    return tokenizer


def fitting_tokenizer(source: str, model: str, *, from_scratch: bool) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a folder or hub name after a check of the embedding's size."""
    tokenizer = load_tokenizer(source)
    check_rows(model, read_config(model), tokenizer, from_scratch=from_scratch)
    return tokenizer


def model_type(source: str) -> str:
    """Returns the model's type of ``transformers``."""
    return str(read_config(source).model_type)


def _begin_with_bos(tokenizer: Any) -> None:
    """Makes a tokenizer write the bos token before a text.

    Files of DeepSeek leave it to the class of transformers 4 (``add_bos_token``), and
    transformers 5 reads tokenizer.json alone.
    """
    from tokenizers import processors

    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    if number is None or tokenizer("a")["input_ids"][:1] == [number]:
        return
    backend = tokenizer.backend_tokenizer
    first = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
    former = backend.post_processor
    backend.post_processor = processors.Sequence([former, first]) if former else first


def skeleton_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the modules of a config's model, without memory for weights."""
    from transformers import AutoModelForCausalLM

    with quiet(), _advice(_cant_build(config)), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def take_own_attention(model: Any) -> None:
    """Sets a model's attention to SDPA, or to its own code if SDPA isn't supported.

    Raises:
        InputError: transformers refuses.
    """
    kind = "sdpa" if model._supports_sdpa else "eager"
    with quiet(), _advice(f"a {model.config.model_type} model can't take {kind} attention"):
        model.set_attn_implementation(kind)


@contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Hides progress bars of transformers and the hub client inside; only errors are logged.

    Loggers of further ``libraries`` log errors only, too. Notices of what a future version will do
    are dropped: they speak to peft, not to the user.
    """
    from transformers.utils import logging as hf_logging

    names = ("transformers", "huggingface_hub", *libraries)
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    had_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            hf_logging.enable_progress_bar()


def read_config(
    source: str, *, needs_weights: bool = False, vocab_size: int | None = None
) -> PreTrainedConfig:
    """Returns the source's config, after all checks that don't load weights.

    ``vocab_size`` is that of a preset's tokenizer, and of no effect on any other source.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

    if source in PRESETS:
        return build_config(PRESETS[source], vocab_size=vocab_size)
    folder = check_source(source)
    if folder is not None:
        check_folder(folder, needs_weights=needs_weights)
    folder = folder or hub_folder(source, "config.json")
    with quiet(), _advice(f"the config of {source} can't be read"):
        # Read strictly: of two equal keys transformers takes the last.
        read_json_object(folder / "config.json", "model's config")
        raw, _ = PreTrainedConfig.get_config_dict(folder)
        check_native(source, raw, needs_weights=needs_weights)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.name_or_path = source
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{source} is a {config.model_type} model, which predicts no next token")
    if (text := config.get_text_config()) is not config:
        raise InputError(
            f"{source} is a {config.model_type} model, which reads more than text; supported are "
            f"models of text alone: give one, for example of the type {text.model_type}"
        )
    # The published V3's config describes quantised weights; new ones aren't quantised.
    vars(config).pop("quantization_config", None)
    return config


def _late(
    source: str | None, config: PreTrainedConfig, seed: int, dtype: torch.dtype
) -> PreTrainedModel:
    """Returns a model with weights to be read later; new ones if ``source`` is None."""
    folder = None if source is None else local_folder(source)
    stored = None if folder is None else read_weights(folder, config)
    with torch.device("meta"):
        model = _built(config, dtype)
    sources = {} if stored is None else stored_sources(model, stored)
    expect_weights(model, seed, {name: source.copy for name, source in sources.items()})
    if folder is not None:
        model.generation_config = _generation_config(folder)
        model.name_or_path = model.config.name_or_path = source
    elif stored is None:
        _deal_tables(model, seed)
    return model


def _from_seed(config: PreTrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model = _late(None, config, seed, dtype)
        read_now(model)
    except UnknownSourceError:  # the model's own constructor knows more
        with seeded(seed):
            model = _built(config, dtype)
        _deal_tables(model, seed)
    return model


def _deal_tables(model: PreTrainedModel, seed: int) -> None:
    for name, module in model.named_modules():
        table: Any = getattr(module, "tid2eid", None)
        if isinstance(table, torch.Tensor):
            with seeded_by_name(seed, f"{name}.tid2eid"):
                _deal_experts(table, cast(Any, module).num_experts)


def _deal_experts(table: torch.Tensor, experts: int) -> None:
    """Assigns experts to each token in a router with a table (DeepSeek-V4's first layers).

    Without trained weights transformers leaves zeros: one expert for all tokens, several times.
    Each token gets as many different ones as it has places, and all get about as many tokens.
    """
    tokens, places = table.shape
    first = torch.randperm(tokens).remainder(experts)
    steps = torch.randperm(experts - 1)[: places - 1].add(1) if places > 1 else first[:0]
    table.copy_((first.unsqueeze(1) + torch.cat([first.new_zeros(1), steps])).remainder(experts))


def _built(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with quiet(), _advice(_cant_build(config)):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _from_weights(source: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    folder = local_folder(source)
    stored = read_weights(folder, config)
    model = _taken(source, config, stored.tensors, dtype=dtype)
    model.generation_config = _generation_config(folder)
    model.name_or_path = model.config.name_or_path = source  # peft's name of an adapter's base
    for weight in model.parameters():  # transformers 5.24 leaves a router's in float32
        if weight.is_floating_point() and weight.dtype != dtype:
            weight.data = weight.data.to(dtype)
    return model


def _taken(
    source: str, config: PreTrainedConfig, tensors: Mapping[str, Any], **how: Any
) -> PreTrainedModel:
    """Returns a model with these tensors as its weights; raises InputError unless all fit."""
    with quiet(), _advice(f"the weights of {source} can't be loaded"):
        model, report = type(skeleton_of(config)).from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # only so that the report contains them
            **how,
        )
    reshaped = [
        f"{name} {list(actual)} instead of {list(expected)}"
        for name, actual, expected in report["mismatched_keys"]
    ]
    findings = {
        "missing": report["missing_keys"],
        "unknown": report["unexpected_keys"],
        "of another shape": reshaped,
    }
    wrong = [
        f"{len(names)} {what} ({', '.join(sorted(names)[:_NAMES_SHOWN])})"
        for what, names in findings.items()
        if names
    ]
    if wrong:
        raise InputError(
            f"the weights of {source} don't fit its config.json, {'; '.join(wrong)}: "
            "give the config and the weights of the same model"
        )
    loaded: PreTrainedModel = model
    return loaded


def check_weights(source: str, folder: Path, config: PreTrainedConfig) -> list[str]:
    """Returns sentences about trained weights that their user should read.

    Only headers are read, and the model is built without memory. ``folder`` is the source's.

    Raises:
        InputError: whatever `load_model` would raise about the weights or the generation config.
    """
    stored = read_weights(folder, config)
    skeletons = {name: tensor.skeleton() for name, tensor in stored.tensors.items()}
    _taken(source, config, skeletons, device_map={"": "meta"})
    _check_tied(source, config, stored)
    _check_frequencies(source, config, stored)
    return [*stored.notes(), *_invalid(_generation_config(folder))]


def config_folder(source: str) -> Path:
    """Returns the folder of a source's config.json; only this file is fetched from the hub."""
    return check_source(source) or hub_folder(source, "config.json")


def local_folder(source: str) -> Path:
    """Returns the folder of a source, fetched from the hub once if it is a name there."""
    folder = check_source(source)
    return folder if folder is not None else _snapshot(source)


def stored_folder(source: str) -> Path | None:
    """Returns the folder of a source; None for a name on the hub without fetched weights."""
    folder = check_source(source)
    if folder is None:
        with suppress(InputError):
            folder = _snapshot(source, only_cached=True)
    return folder


def _snapshot(source: str, only_cached: bool = False) -> Path:
    weights = ("generation_config.json", ADAPTER, "model*.safetensors", INDEX)
    fetched = hub_folder(source, "config.json", *weights, only_cached=only_cached)
    check_folder(fetched, needs_weights=True)
    return fetched


def stored_formats(source: str, config: PreTrainedConfig) -> NumberFormats:
    """Returns the number formats of a source's weights."""
    return read_weights(local_folder(source), config).formats()


def _generation_config(folder: Path) -> GenerationConfig:
    """Returns the folder's generation config, or the keys of its config.json in old releases."""
    from transformers import GenerationConfig

    file = "generation_config.json"
    with quiet(), _advice(f"the {file} of {folder} can't be used"):
        if (folder / file).is_file():
            read_json_object(folder / file, "generation config")  # strictly
            return GenerationConfig.from_pretrained(folder)
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


def _invalid(generation: GenerationConfig) -> Iterator[str]:
    try:
        generation.validate(strict=True)
    except ValueError as error:
        keys = ", ".join(key for key in generation.to_diff_dict() if f"`{key}`" in str(error))
        yield (
            "transformers calls the model's generation_config.json contradictory "
            f"({keys or one_line(error, _REASON_SHOWN)}); it is saved as it is"
        )


def _check_tied(source: str, config: PreTrainedConfig, stored: StoredWeights) -> None:
    """Raises InputError if embedding and head are stored with different values, but tied."""
    names = ("embed_tokens.weight", "lm_head.weight")
    pair = [tensor for name, tensor in stored.tensors.items() if name.endswith(names)]
    if not getattr(config, "tie_word_embeddings", False) or len(pair) != 2:
        return
    if pair[0].shape != pair[1].shape or not torch.equal(pair[0][...], pair[1][...]):
        raise InputError(
            f"the config.json of {source} has tie_word_embeddings, and its weights hold an "
            f"embedding and a head that differ: set it to false to keep both, or remove "
            f"{pair[1].name}"
        )


def _check_frequencies(source: str, config: PreTrainedConfig, stored: StoredWeights) -> None:
    """Raises InputError if an old release's stored rotary frequencies aren't the config's.

    Releases before 4.32 stored them and computed with what was stored; later ones compute them
    from the config. Scaled ones are not compared: they were stored before scaling.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if not stored.frequencies or rope.get("rope_type") != "default":
        return
    rotary = next(m for n, m in skeleton_of(config).named_modules() if n.endswith("rotary_emb"))
    with quiet(), torch.device("cpu"):
        expected = type(rotary)(config=config).inv_freq
    for tensor in stored.frequencies:
        frequencies = tensor[...].float()
        if frequencies.shape != expected.shape or not torch.allclose(
            frequencies, expected, rtol=0.02, atol=1e-4 if tensor.dtype != "F32" else 1e-7
        ):
            raise InputError(
                f"the rotary frequencies that {source} stores ({tensor.name}) are not those of its "
                f"config.json (rope_theta {rope['rope_theta']:g}): correct rope_theta, or remove "
                "the stored ones"
            )


def check_rows(
    source: str, config: PreTrainedConfig, tokenizer: Any, *, from_scratch: bool
) -> None:
    """Raises InputError if a tokenizer or config has ids without a row of the embedding.

    An embedding with random weights gets a row for each token.
    """
    ids = tokenizer.get_vocab()
    token = max(ids, key=ids.__getitem__)
    if not from_scratch and source not in PRESETS:
        with_vocabulary(
            copy.deepcopy(config),
            vocab_size=None,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        _check_rows(source, config, ids[token] + 1, f" (the last is {token!r})")
    elif ids[token] >= len(tokenizer):
        raise InputError(
            f"the tokenizer has {len(tokenizer)} tokens and ids up to {ids[token]} ({token!r}), "
            "beyond an embedding with a row for each token: number its tokens without gaps"
        )


def _check_rows(source: str, config: PreTrainedConfig, rows: int, which: str = "") -> None:
    if rows > config.vocab_size:
        raise InputError(
            f"the tokenizer needs an embedding of {rows} rows{which} and that of {source} has only "
            f"{config.vocab_size}: use the model's own tokenizer, or train from scratch"
        )


def _cant_build(config: PreTrainedConfig) -> str:
    return f"a {config.model_type} model can't be built"


@contextmanager
def _advice(failed: str) -> Iterator[None]:
    """Turns library exceptions about the user's files into one sentence after ``failed``."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = one_line(error, _REASON_SHOWN)
        if "automatic conversion of the weights" in reason:
            reason = "some experts' weights are missing or differ in shape from the others'"
        raise InputError(f"{failed}: {reason}") from error
