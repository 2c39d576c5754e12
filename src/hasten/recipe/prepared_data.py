"""Data of a recipe: read, split, tokenised once into the run's folder, then mapped.

Reading spools the examples to disk, so memory doesn't grow with their number. One
process prepares at a time, and others wait for it. The result is recorded in
``data/index.json`` under a key of everything that decides it. Other processes of the
run (ranks, variants of an experiment) and later runs therefore open it at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hasten.core.context import ExampleStats
from hasten.data.chat_template import AnswerEnd, answer_end
from hasten.data.conversation import Conversation, columns_of
from hasten.data.corpus import stdlib_corpus
from hasten.data.prompt_formats import choose_chat_template, missing_tokens
from hasten.data.readers import ReadRecords, read_sources, unread_words
from hasten.data.sources import entry_of, source_of, weighted
from hasten.data.spool import ConversationSink, IndexedConversations, Selection, spools
from hasten.data.token_store import StoredRecords, Subset, TokenStore, split, tokenize
from hasten.data.tokenize import sweep, train_bpe
from hasten.errors import InputError
from hasten.foreign_files import open_regular, path_inside, read_json_object
from hasten.formatting import shown
from hasten.machine import cache, host
from hasten.machine.files import write_atomic
from hasten.machine.locks import one_writer
from hasten.models.load import check_rows, load_tokenizer, read_config, stop_tokens
from hasten.models.presets import PRESETS
from hasten.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The conversations of a recipe, read and drawn, before anything is tokenised.
#
# (1) sources are read, each with its columns, or the embedded corpus is taken
# (2) of a source with `max_examples` of its own, the first so many are kept
# (3) with weights, the eval examples leave first, each once: no copy of one is trained on
# (4) what is left is repeated or thinned by its source's weight
# (5) `max_examples` of it are drawn
#
# Examples may lie on disk meanwhile (`data/spool.py`): everything after (1) moves rows, not
# examples.

EMBEDDED = ("stdlib", "stdlib-text")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Conversations:
    """Conversations before tokenising."""

    train: Sequence[Conversation]
    eval_data: Sequence[Conversation] | None  # None: to be split off the training examples
    shapes: dict[str, str]
    corpus_sha256: str | None = None
    rejected: list[list[Any]] = field(default_factory=list)
    containers: dict[str, str] = field(default_factory=dict)
    unread: dict[str, set[str]] = field(default_factory=dict)


def read_source(
    recipe: Recipe, tell: Tell, gathered: Callable[[], ConversationSink] = list
) -> Conversations:
    """Reads all data that the recipe names; reports its files and formats.

    ``gathered`` makes the container for the examples of a file: lists, or spools on disk.

    Raises:
        InputError: a missing or unusable file, too many rejected examples.
    """
    embedded = [data.path for data in recipe.datasets if data.path in EMBEDDED]
    if embedded and len(recipe.datasets) > 1:
        raise InputError(f"dataset: {embedded[0]} can't be mixed with files; give one or the other")
    source = (
        _embedded(recipe, embedded[0], gathered) if embedded else _files(recipe, tell, gathered)
    )
    if source.corpus_sha256:
        tell(f"embedded corpus, sha256 {source.corpus_sha256[:16]}")
    for file, shape in source.shapes.items():
        unread = unread_words(source.unread.get(file, set()))
        tell(f"{file} ({source.containers[file]}): {shape} examples{unread}")
    return replace(source, train=_draw(source.train, recipe.max_examples, recipe.seed))


def _embedded(recipe: Recipe, name: str, gathered: Callable[[], ConversationSink]) -> Conversations:
    corpus = stdlib_corpus()
    kind = "texts" if name == "stdlib-text" else "pairs"
    data = recipe.datasets[0]
    first = _first(getattr(corpus.train, kind), data.max_examples)
    train = weighted([first], [data.weight], recipe.seed)
    eval_data = _eval_file(recipe, gathered)
    if eval_data is None and not isinstance(recipe.eval_data, str):
        theirs = getattr(corpus.eval_data, kind)
        share = recipe.eval_data
        eval_data = _draw(theirs, int(share) if share >= 1 else None, recipe.seed) if share else ()
    return Conversations(train, eval_data, {}, corpus.sha256)


def _files(recipe: Recipe, tell: Tell, gathered: Callable[[], ConversationSink]) -> Conversations:
    readings = read_sources(
        [
            source_of(d.path, columns_of(recipe.columns if d.columns is None else d.columns))
            for d in recipe.datasets
        ],
        recipe.max_rejected,
        gathered,
    )
    groups = [
        _first(reading.conversations, data.max_examples)
        for reading, data in zip(readings, recipe.datasets, strict=True)
    ]
    weights = [data.weight for data in recipe.datasets]
    eval_data = _eval_file(recipe, gathered)
    if any(weight != 1 for weight in weights):
        if eval_data is None and not isinstance(recipe.eval_data, str):
            groups, eval_data = _split_eval(groups, recipe.eval_data, recipe.seed)
        train = weighted(groups, weights, recipe.seed)
        for data, group in zip(recipe.datasets, groups, strict=True):
            tell(f"{data.path}: {len(group):,} examples to train on, weight {data.weight:g}")
    else:
        train = Selection(groups)
    return Conversations(
        train,
        eval_data,
        _merged(readings, "shapes"),
        rejected=[[*row] for reading in readings for row in reading.rejected],
        containers=_merged(readings, "containers"),
        unread=_merged(readings, "unread"),
    )


def _eval_file(
    recipe: Recipe, gathered: Callable[[], ConversationSink]
) -> Sequence[Conversation] | None:
    """The examples of the eval file, with the recipe's columns; None where it names none."""
    if not isinstance(recipe.eval_data, str):
        return None
    source = source_of(recipe.eval_data, columns_of(recipe.columns))
    return Selection([read_sources([source], recipe.max_rejected, gathered)[0].conversations])


def _split_eval(
    groups: Sequence[Selection], eval_data: float, seed: int
) -> tuple[list[Selection], Sequence[Conversation]]:
    """The groups without the eval examples, and these."""
    selection = Selection(groups)
    ours, theirs = split(selection, eval_data, seed)
    firsts = np.cumsum([0, *map(len, groups)])
    borders = np.searchsorted(ours, firsts)
    train_groups = [selection.take(ours[a:b]) for a, b in itertools.pairwise(borders)]
    return train_groups, selection.take(theirs)


def _merged(readings: Sequence[ReadRecords], name: str) -> dict[str, Any]:
    return {file: what for reading in readings for file, what in getattr(reading, name).items()}


def _first(conversations: IndexedConversations, count: int | None) -> Selection:
    """The first ``count`` of them; all of them without a count."""
    return Selection([conversations], np.arange(len(conversations))[:count])


def _draw(
    conversations: Sequence[Conversation], count: int | None, seed: int
) -> Sequence[Conversation]:
    """``count`` of them, chosen by the seed and kept in order; all of them without a count."""
    if count is None or count >= len(conversations):
        return conversations
    chosen = np.random.default_rng(seed).choice(len(conversations), count, replace=False)
    return Selection([conversations], np.sort(chosen))


# Contents of the files that a recipe names: hashes that decide whether prepared data is theirs.
#
# A size and a time don't prove that a file is the same: `cp -p`, rsync and tar set times back. So
# contents are hashed, once for each state of a file: its device, inode, size, time of change and
# status change (ctime, which no program can set back). A folder stands for all its files, those in
# its folders included, since saved data sets and tokenizers keep theirs there.

DEEPEST = 4  # levels of folders within a folder
MOST_FILES = 100_000
CONTENTS = "contents.json"  # in the folder of prepared data: hashes by the state of a file
BLOCK = 1 << 20  # bytes
# A file that is written within the resolution of its ctime looks unchanged afterwards.
SETTLED_NS = 2_000_000_000
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


class ContentHashes:
    """Hashes of files' contents, remembered in a file by device, inode, size and both times."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes: dict[str, str] = {}
        with contextlib.suppress(InputError):  # absent or damaged: computed again
            stored = read_json_object(path, "list of hashes")
            self._hashes = {k: v for k, v in stored.items() if isinstance(v, str)}
        self._current: dict[str, str] = {}

    def of(self, path: Path) -> str | None:
        """The hash of a regular file's bytes, 32 hex digits; None for anything else."""
        try:
            with open_regular(path) as file:
                stat = os.fstat(file.fileno())
                times = (stat.st_mtime_ns, stat.st_ctime_ns)
                state = "-".join(map(str, (stat.st_dev, stat.st_ino, stat.st_size, *times)))
                settled = stat.st_ctime_ns < time.time_ns() - SETTLED_NS
                content = self._hashes.get(state) if settled else None
                if content is None:
                    digest = xxhash.xxh3_128()
                    while block := file.read(BLOCK):
                        digest.update(block)
                    content = digest.hexdigest()
        except (OSError, ValueError):  # absent, a pipe, or no name of a file
            return None
        if settled:
            self._current[state] = content
        return content

    def save(self) -> None:
        """Writes the hashes in use if the folder exists and one of them is new."""
        if self._path.parent.is_dir() and self._current.items() - self._hashes.items():
            cache.write(self._path, self._current)


def content_stamps(
    names: Iterable[str], output: Path, hashes: ContentHashes, without: tuple[str, ...] = ()
) -> list[list[Any]]:
    """Name and content of each file, and of each in a folder; the names of what isn't there.

    Files with names that end with one of ``without`` are left out of folders.

    Missing files have only a name.

    Folders are read four levels deep, because data sets and tokenizers may keep files
    there. Hidden folders, folders of runs (with a recipe.yaml) and ``output`` are skipped.
    Otherwise the files that a run writes next to its own data would cause the data to be
    prepared again.
    """
    file_stamps: list[list[Any]] = []
    waiting = [(Path(name), 0) for name in names]
    while waiting:
        path, depth = waiting.pop()
        if not os.path.isdir(path):  # unlike Path's, silent about names that no file can have
            content = hashes.of(path)
            file_stamps.append([str(path)] if content is None else [str(path.resolve()), content])
            if len(file_stamps) > MOST_FILES:
                raise InputError(
                    f"{path.parent} and the other files that the recipe names are more than "
                    f"{MOST_FILES:,}: name the files that are meant, or a smaller folder"
                )
        elif depth == 0 or not _stamps_apart(path, depth, output.resolve()):
            with contextlib.suppress(OSError):  # whoever needs what is in it will say so
                inside = (i for i in path.iterdir() if not i.name.endswith(without or ("/",)))
                waiting += [(inner, depth + 1) for inner in inside]
    return sorted(file_stamps, key=str)


def _stamps_apart(folder: Path, depth: int, output: Path) -> bool:
    """Returns True if a nested folder is unrelated to the data."""
    if depth > DEEPEST or folder.name.startswith("."):
        return True
    return folder.resolve().is_relative_to(output) or (folder / "recipe.yaml").exists()


# The prepared data, and its note.

OnProgress = Callable[[int, int], None]
SHOWN_REASONS = 3  # for which examples were left out; rejected.jsonl has all
_FATE = {
    "truncate": "dialogues are cut, plain texts continue in further pieces",
    "split": "they continue in further pieces, as far as those have a part of an answer",
    "drop": "leave-one-out",
}


@dataclass(frozen=True)
class PreparedData:
    """The data on which a recipe trains and is evaluated."""

    tokenizer: PreTrainedTokenizerBase
    train: StoredRecords
    eval_data: StoredRecords | tuple[()]
    note: PreparedDataIndex
    example_stats: ExampleStats = field(init=False)
    # Which tokens are trained on, whatever files they came from; for checkpoints.
    identity: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        train = self.train
        count, tokens = len(train), int(train.lengths.sum())
        facts = ExampleStats(
            count=count,
            tokens=tokens,
            longest=int(train.lengths.max(initial=0)),
            trained_share=float(train.trained_counts.sum()) / max(tokens, 1),
        )
        store = train.examples if isinstance(train, Subset) else train
        digest = xxhash.xxh3_128(store.digest if isinstance(store, TokenStore) else b"")
        if isinstance(train, Subset):
            digest.update(train.indices.tobytes())
        identity = {"examples": count, "tokens": tokens, "hash": digest.hexdigest()[:16]}
        object.__setattr__(self, "example_stats", facts)
        object.__setattr__(self, "identity", identity)


@dataclass(frozen=True)
class PreparedDataIndex:
    """The content of ``data/index.json``: location and source of the prepared data."""

    key: str
    tokenizer: str
    tokenizer_hash: str  # of all its files
    train: str
    eval_data: str | None
    split: float | None  # share or number held out of ``train`` itself
    shapes: dict[str, str] = field(default_factory=dict)
    corpus_sha256: str | None = None
    rejected: list[list[Any]] = field(default_factory=list)
    containers: dict[str, str] = field(default_factory=dict)
    long: int = 0  # training examples that are longer than cutoff_len
    thoughts: int = 0  # of answers, which the chat template leaves out
    end_text: str | None = None  # what the chat template writes after an answer; None: no dialogues
    stop_token: int | None = None  # the end token that it begins with


def prepare_data(
    recipe: Recipe,
    folder: Path,
    tell: Tell = lambda text: None,
    on_progress: OnProgress | None = None,
) -> PreparedData:
    """Open the recipe's prepared data in ``folder``, or prepare it there first.

    Raises:
        InputError: a missing or unusable file, too many rejected examples, nothing to train on.
    """
    key = _key(recipe, folder)
    ready = _opened(recipe, folder, key)
    if ready is not None:
        return ready
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_writer(folder / "writing.lock", tell):
            ready = _opened(recipe, folder, key)  # another process may have prepared it meanwhile
            if ready is not None:
                return ready
            with spools(folder) as spooled:
                source = read_source(recipe, tell, spooled.new)
                return _prepared(recipe, source, folder, key, tell, on_progress)
    except OSError as error:
        raise InputError(
            f"the data can't be prepared in {folder}: {error.strerror or error}"
        ) from error


def _prepared(
    recipe: Recipe,
    source: Conversations,
    folder: Path,
    key: str,
    tell: Tell,
    on_progress: OnProgress | None,
) -> PreparedData:
    """Tokenise what was read, and note it."""
    tokenizer = _tokenizer(recipe, source, tell)
    end = answer_end(tokenizer) if {*source.shapes.values()} != {"text"} else None
    tell(f"tokenising {len(source.train):,} examples")

    def store(conversations: Sequence[Conversation]) -> TokenStore:
        return tokenize(
            conversations,
            tokenizer,
            folder,
            recipe.cutoff_len,
            recipe.max_rejected,
            on_progress,
            recipe.too_long,
            host.usable_cores() if recipe.data_workers == "auto" else recipe.data_workers,
            tell,
            recipe.loss_on,
        )

    train = store(source.train)
    if train.long:
        tell(
            f"{train.long:,} of {len(source.train):,} examples are longer than "
            f"cutoff_len={recipe.cutoff_len}, the most tokens that one may have: "
            f"{_FATE[recipe.too_long]} (too_long: {recipe.too_long})"
        )
    eval_data = store(source.eval_data) if source.eval_data else None
    tokenizer.save_pretrained(folder / "tokenizer")
    rejected = [*source.rejected, *([*r] for r in train.rejected)]
    has_eval_data = source.eval_data is not None
    note = PreparedDataIndex(
        key=key,
        tokenizer="tokenizer",
        tokenizer_hash=_tokenizer_hash(folder / "tokenizer"),
        train=train.path.name,
        eval_data=eval_data.path.name if eval_data is not None else None,
        split=None if has_eval_data or isinstance(recipe.eval_data, str) else recipe.eval_data,
        shapes=source.shapes,
        corpus_sha256=source.corpus_sha256,
        rejected=rejected,
        containers=source.containers,
        long=train.long,
        thoughts=train.thoughts,
        end_text=end.text if end else None,
        stop_token=stop_token(tokenizer, end),
    )
    write_atomic(folder / "index.json", json.dumps(asdict(note), indent=1))
    sweep(folder)
    return _fitted(recipe, note, tokenizer, train, eval_data)


def rejected_words(note: PreparedDataIndex) -> str:
    """How many examples were left out, and why: the most frequent reasons with their counts."""
    reasons = Counter(str(reason) for _, _, reason in note.rejected)
    common = reasons.most_common(SHOWN_REASONS)
    phrases = [f"{why} ({count:,})" if len(reasons) > 1 else why for why, count in common]
    if len(reasons) > len(common):
        phrases.append(f"{len(reasons) - len(common)} more reasons")
    return f"{len(note.rejected):,} examples left out: {', '.join(phrases)}"


def write_rejected(note: PreparedDataIndex, path: Path) -> None:
    """One line of JSON for each example that was left out: file, line, reason."""
    lines = [json.dumps({"file": f, "line": n, "reason": r}) for f, n, r in note.rejected]
    write_atomic(path, "\n".join(lines) + "\n")


def _fitted(
    recipe: Recipe,
    note: PreparedDataIndex,
    tokenizer: PreTrainedTokenizerBase,
    train: TokenStore,
    eval_data: TokenStore | None,
) -> PreparedData:
    if note.split is None:
        return PreparedData(tokenizer, train, eval_data if eval_data is not None else (), note)
    if not note.split:
        return PreparedData(tokenizer, train, (), note)
    ours, theirs = split(train, note.split, recipe.seed)
    return PreparedData(tokenizer, Subset(train, ours), Subset(train, theirs), note)


def stored_data(recipe: Recipe, folder: Path) -> PreparedData | None:
    """The data that a run has prepared in ``folder``, whatever its files are now; None if gone."""
    return _opened(recipe, folder, None)


def _opened(recipe: Recipe, folder: Path, key: str | None) -> PreparedData | None:
    """The prepared data of a folder if its key is ``key``, or of any key."""
    try:
        index = folder / "index.json"
        note = PreparedDataIndex(**read_json_object(index, "index of prepared data"))
        if key is not None and note.key != key:
            return None
        train = TokenStore(path_inside(folder, note.train, str(index)))
        eval_data = None
        if note.eval_data is not None:
            eval_data = TokenStore(path_inside(folder, note.eval_data, str(index)))
        saved = path_inside(folder, note.tokenizer, str(index))
        if _tokenizer_hash(saved) != note.tokenizer_hash:
            return None
        tokenizer = load_tokenizer(str(saved))
    except (OSError, ValueError, TypeError):
        return None  # absent, damaged or of another version: prepared again
    return _fitted(recipe, note, tokenizer, train, eval_data)


def _tokenizer_hash(folder: Path) -> str:
    """A hash of the names and bytes of a saved tokenizer's files."""
    digest = xxhash.xxh3_128()
    for path in sorted(p for p in folder.rglob("*") if not p.is_dir()):
        with open_regular(path, follow_links=False) as file:
            name, data = path.relative_to(folder).as_posix(), file.read()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return str(digest.hexdigest())


def _tokenizer(recipe: Recipe, source: Conversations, tell: Tell) -> PreTrainedTokenizerBase:
    where = recipe.tokenizer or recipe.model
    if where in PRESETS:
        tell(f"training a tokenizer of {recipe.vocabulary:,} on the data (the preset has none)")
        tokenizer = train_bpe(_texts(source.train), recipe.vocabulary)
        choose_chat_template(tokenizer, recipe.chat_template)
        return tokenizer
    tokenizer = load_tokenizer(where)
    config = read_config(recipe.model)
    check_rows(recipe.model, config, tokenizer, from_scratch=recipe.from_scratch)
    template = choose_chat_template(tokenizer, recipe.chat_template)
    tell(f"chat template: {template}")
    return tokenizer


def stop_token(tokenizer: PreTrainedTokenizerBase, end: AnswerEnd | None) -> int | None:
    """The id of the token that ends an answer; None if there is none."""
    return int(tokenizer.convert_tokens_to_ids(end.token)) if end and end.token else None


def _texts(conversations: Sequence[Conversation]) -> Iterable[str]:
    for conversation in conversations:
        if conversation.text is not None:
            yield conversation.text
        yield from (message.content for message in conversation.messages)


def _key(recipe: Recipe, folder: Path) -> str:
    """Hash of the recipe's data settings, files' sizes and times, and library versions.

    Contents aren't read: a changed file has another size or time, as for make.
    """
    # Every value of the recipe that may be a file; of a listed data set the list and the file.
    paths = [source.path for source in recipe.datasets]
    paths += [recipe.chat_template]
    paths += [recipe.eval_data] if isinstance(recipe.eval_data, str) else []
    for name, entry in [(name, entry_of(name)) for name in paths]:
        paths += [name.rpartition(":")[0], str(entry[0])] if entry else []
    fields = recipe.model_dump(
        include={
            *("model", "tokenizer", "dataset", "eval_data", "max_examples", "max_rejected"),
            *(
                "cutoff_len",
                "vocabulary",
                "seed",
                "columns",
                "too_long",
                "chat_template",
                "loss_on",
            ),
        }
    )
    hashes, output = ContentHashes(folder / CONTENTS), Path(recipe.output)
    stamps = content_stamps(paths, output, hashes)
    # A model's folder counts for its tokenizer: its weights, which take minutes to read, do not.
    tokenizer = [recipe.tokenizer or recipe.model]
    stamps += content_stamps(tokenizer, output, hashes, without=WEIGHT_FILES)
    hashes.save()
    parts = [fields, stamps, host.versions()]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode()))


# Eval examples that stand in the training data too: an eval loss that flatters.
#
# Examples are compared by their tokens, all of them; near-duplicates aren't looked for. Only
# training examples that agree with a held-out one in length and in the number of trained tokens are
# read.


@dataclass(frozen=True)
class Overlap:
    """How many of the eval examples occur in the training data, word for word."""

    count: int
    eval_data: int

    @property
    def advice(self) -> str:
        """One sentence for the user; empty without overlap."""
        if not self.count:
            return ""
        verb = "stands" if self.count == 1 else "stand"
        return (
            f"{self.count:,} of {self.eval_data:,} eval examples {verb} in the training data "
            "too, token for token, so the eval loss flatters. Take duplicates out of the data, "
            "or give eval_data a file of its own"
        )


def overlap(data: PreparedData) -> Overlap:
    """Counts the eval examples with the same tokens as a training example."""
    eval_data, train = data.eval_data, data.train
    if isinstance(eval_data, tuple) or not len(eval_data):
        return Overlap(0, 0)
    wanted = [_digest(eval_data[i]) for i in range(len(eval_data))]
    alike = np.isin(_shapes(train), _shapes(eval_data)).nonzero()[0]
    shared = set(wanted) & {_digest(train[i]) for i in alike.tolist()}
    return Overlap(sum(digest in shared for digest in wanted), len(eval_data))


# What the chat template does that a user would find out only once the model writes.


def template_advice(recipe: Recipe, data: PreparedData) -> list[str]:
    """A sentence for each cause of a model that doesn't stop, and for what isn't trained."""
    advice = []
    if missing := missing_tokens(data.tokenizer, recipe.chat_template):
        advice.append(
            f"chat_template {recipe.chat_template} needs the special tokens {', '.join(missing)}, "
            "which the tokenizer lacks: they are trained as ordinary text; add them to the "
            "tokenizer, or choose another chat_template"
        )
    text, stop = data.note.end_text, data.note.stop_token
    if text is not None and stop is None:
        written = repr(text.strip()[:40]) if text.strip() else "nothing"
        advice.append(
            f"the chat template writes {written} after an answer and no end token: the model "
            "doesn't learn to stop; choose a chat_template that ends answers with "
            f"{data.tokenizer.eos_token or 'a special token'}"
        )
    if stop is not None and recipe.finetuning_type == "lora":
        stops = stop_tokens(recipe.model)
        if stops and stop not in stops:
            token = shown(str(data.tokenizer.convert_ids_to_tokens(stop)))
            advice.append(
                f"answers end with {token}, an end token at which the base model doesn't stop: "
                f"export the merged model, or generate with eos_token_id={[*stops, stop]}"
            )
    if data.note.thoughts:
        advice.append(
            f"{data.note.thoughts:,} answers are trained without their thoughts, which the chat "
            "template leaves out of the text"
        )
    return advice


def advice_on(recipe: Recipe, data: PreparedData) -> list[str]:
    """Every sentence on the data that a user should read before anything is trained."""
    flattered = overlap(data).advice
    warnings = [f"warning: {sentence}" for sentence in template_advice(recipe, data)]
    return [flattered, *warnings] if flattered else warnings


def _shapes(examples: Any) -> NDArray[np.int64]:
    """Length and trained tokens of each example as one number."""
    counts = examples.trained_counts.astype(np.int64)
    shape_codes: NDArray[np.int64] = (examples.lengths.astype(np.int64) << 32) + counts
    return shape_codes


def _digest(example: Any) -> int:
    return int(xxhash.xxh3_128_intdigest(np.ascontiguousarray(example.input_ids).tobytes()))


# The files of examples that a recipe names.


def data_files(recipe: Recipe) -> list[Path]:
    """Files and folders, in the recipe's order; embedded corpora and names on a hub have none."""
    names = [source.path for source in recipe.datasets]
    names += [recipe.eval_data] if isinstance(recipe.eval_data, str) else []
    paths = []
    for name in names:
        entry = entry_of(name)
        paths.append(Path(str(entry[0])) if entry else Path(name))
    return [path for path in paths if path.exists()]
