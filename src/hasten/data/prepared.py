"""The prepared data of a training: read, split and tokenised once, then mapped from its folder.

Reading spools the examples to disk, so memory doesn't grow with their number. One
process prepares at a time, and others wait for it. The result is recorded in
``data/index.json`` under a key of everything that decides it. Other processes of the
run (ranks, variants of an experiment) and later runs therefore open it at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hasten.data.chat_template import (
    CALLS_IN_PYTHON,
    EMPTY,
    EQUAL,
    MERGED,
    THOUGHTS_LEFT_OUT,
    UNOPENED,
    AnswerEnd,
    LossOn,
    TooLong,
    answer_end,
)
from hasten.data.content_hashes import CONTENTS, WEIGHT_FILES, ContentHashes, content_stamps
from hasten.data.conversation import Conversation
from hasten.data.prompt_formats import choose_chat_template, missing_tokens
from hasten.data.response_template import is_published, response_template
from hasten.data.selection import Conversations, DataSelection, Tell, read_conversations
from hasten.data.sources import entry_of
from hasten.data.spool import spools
from hasten.data.token_store import (
    Pairs,
    StoredExamples,
    Subset,
    TokenStore,
    complete_store,
    row_lengths,
    split,
    text_parts,
    token_bytes,
    tokenize,
)
from hasten.data.tokenize import sweep, train_bpe
from hasten.errors import InputError
from hasten.foreign_files import open_regular, path_inside, read_json_object
from hasten.formatting import shown
from hasten.machine import host
from hasten.machine.files import write_atomic
from hasten.machine.locks import one_writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnProgress = Callable[[int, int], None]
SHOWN_CHARACTERS = 500  # characters of an example that are printed
SHOWN_REASONS = 3  # printed reasons for rejected examples; rejected.jsonl has all
_FATE = {
    "truncate": "dialogues are cut, plain texts continue in further pieces",
    "split": "they continue in further pieces, if these have a part of an answer",
    "drop": "they are left out",
}


@dataclass(frozen=True)
class DataSettings(DataSelection):
    """Everything that decides the prepared data.

    Args:
        recorded: the settings as plain values, for the key of the prepared data.
        output: the run's folder; data isn't read from it.
        model: folder or hub name of the tokenizer, which also decides the data.
        base_tokenizer: loads the model's tokenizer; None: one is trained on the data.
        saved_tokenizer: loads a tokenizer from the folder of prepared data.
        model_type: returns the model's type of ``transformers``.
        stage: sft, or a stage with preference pairs as examples.
    """

    cutoff_len: int
    too_long: TooLong
    loss_on: LossOn
    chat_template: str
    vocabulary: int
    workers: int
    recorded: Mapping[str, Any]
    output: Path
    model: str
    base_tokenizer: Callable[[], PreTrainedTokenizerBase] | None
    saved_tokenizer: Callable[[str], PreTrainedTokenizerBase]
    model_type: Callable[[], str]


@dataclass(frozen=True)
class ExampleCounts:
    """Counts of the training examples, as ``ExampleStats`` has them."""

    count: int
    tokens: int
    longest: int  # positions of the longest; of a pair: two rows of the longer answer
    trained_share: float
    shared_share: float = 0.0


@dataclass(frozen=True)
class PreparedData:
    """The data on which a job trains and is evaluated."""

    tokenizer: PreTrainedTokenizerBase
    train: StoredExamples
    eval_data: StoredExamples | tuple[()]
    note: PreparedDataIndex
    example_stats: ExampleCounts = field(init=False)
    # Identifies the trained tokens in checkpoints, independent of file names.
    identity: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        train, store = self.train, complete_store(self.train)
        count, tokens = len(train), int(train.lengths.sum())
        pairs = store if isinstance(store, Pairs) else None
        counts = ExampleCounts(
            count=count,
            tokens=tokens,
            longest=int(row_lengths(train).max(initial=0)) * (2 if pairs else 1),
            trained_share=float(train.trained_counts.sum()) / max(tokens, 1),
            shared_share=pairs.shared_share if pairs else 0.0,
        )
        rows = pairs.rows if pairs else store
        digest = xxhash.xxh3_128(rows.digest if isinstance(rows, TokenStore) else b"")
        if isinstance(train, Subset):
            digest.update(train.indices.tobytes())
        identity = {"examples": count, "tokens": tokens, "hash": digest.hexdigest()[:16]}
        object.__setattr__(self, "example_stats", counts)
        object.__setattr__(self, "identity", identity)

    def first_example(self) -> str:
        """Returns the first example as text, which shows template and loss mask."""
        parts = text_parts(self.tokenizer, self.train[0])
        most = SHOWN_CHARACTERS // len(parts)
        lines = [f"the first {'pair' if len(parts) > 1 else 'example'}, trained parts in [[ ]]:"]
        for name, text in parts.items():
            cut = text if len(text) <= most else text[:most] + " ..."
            lines.append(f"{name}: {cut}" if name else cut)
        return "\n".join(lines)


@dataclass(frozen=True)
class PreparedDataIndex:
    """The content of ``data/index.json``: location and source of the prepared data."""

    key: str
    tokenizer: str
    tokenizer_hash: str  # hash of the tokenizer's files
    train: str
    eval_data: str | None
    split: float | None  # share or number held out of ``train`` itself
    shapes: dict[str, str] = field(default_factory=dict)
    corpus_sha256: str | None = None
    rejected: list[list[Any]] = field(default_factory=list)
    containers: dict[str, str] = field(default_factory=dict)
    long: int = 0  # training examples that are longer than cutoff_len
    notes: dict[str, int] = field(default_factory=dict)  # counts of effects of the chat template
    end_text: str | None = None  # the chat template's text after an answer; None: no dialogues
    stop_token: int | None = None  # the end token at the beginning of ``end_text``


def prepare(
    settings: DataSettings,
    folder: Path,
    tell: Tell = lambda text: None,
    on_progress: OnProgress | None = None,
) -> PreparedData:
    """Opens the prepared data of these settings in ``folder``, or prepares it there first.

    Raises:
        InputError: a missing or unusable file, too many rejected examples, nothing to train on,
            or a link instead of the folder.
    """
    if folder.is_symlink():
        raise InputError(
            f"output: {folder} is a link, and a run writes only in its own folder; remove the "
            "link, or give its target as output"
        )
    key = _key(settings, folder)
    ready = _opened(settings, folder, key)
    if ready is not None:
        return ready
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_writer(folder / "writing.lock", tell):
            ready = _opened(settings, folder, key)  # another process may have prepared it meanwhile
            if ready is not None:
                return ready
            with spools(folder) as spooled:
                source = read_conversations(settings, tell, spooled.new)
                return _prepared(settings, source, folder, key, tell, on_progress)
    except OSError as error:
        raise InputError(
            f"the data can't be prepared in {folder}: {error.strerror or error}"
        ) from error


def _prepared(
    settings: DataSettings,
    source: Conversations,
    folder: Path,
    key: str,
    tell: Tell,
    on_progress: OnProgress | None,
) -> PreparedData:
    """Tokenises conversations, and writes the index."""
    tokenizer = _tokenizer(settings, source, tell)
    written = answer_end(tokenizer)
    texts = {*source.files.shapes.values()} == {"text"} or (
        settings.stage != "sft" and source.train[0].text is not None
    )
    end = None if texts else written
    tell(f"tokenising {len(source.train):,} examples")

    def store(conversations: Sequence[Conversation]) -> TokenStore:
        return tokenize(
            conversations,
            tokenizer,
            folder,
            settings.cutoff_len,
            settings.max_rejected,
            on_progress,
            settings.too_long,
            settings.workers,
            tell,
            settings.loss_on,
            settings.stage,
        )

    train = store(source.train)
    if train.long:
        fate = _FATE if settings.stage == "sft" else _FATE | {"truncate": "answers are cut"}
        tell(
            f"{train.long:,} of {len(source.train):,} examples are longer than "
            f"cutoff_len={settings.cutoff_len}, the most tokens that one may have: "
            f"{fate[settings.too_long]} (too_long: {settings.too_long})"
        )
    eval_data = store(source.eval_data) if source.eval_data else None
    if settings.chat_template != "auto" or not is_published(tokenizer.response_template):
        kind = settings.model_type()
        answers = int(train.conversations[-1]) + 1
        opens_thoughts = train.notes.get(UNOPENED, 0) < answers  # at least one answer does
        fitting = response_template(tokenizer, written, kind, opens_thoughts)
        tokenizer.response_template = fitting
    tokenizer.save_pretrained(folder / "tokenizer")
    rejected = [[*row] for row in (*source.files.rejected, *train.rejected)]
    has_eval_data = source.eval_data is not None
    note = PreparedDataIndex(
        key=key,
        tokenizer="tokenizer",
        tokenizer_hash=_tokenizer_hash(folder / "tokenizer"),
        train=train.path.name,
        eval_data=eval_data.path.name if eval_data is not None else None,
        split=None if has_eval_data or isinstance(settings.eval_data, str) else settings.eval_data,
        shapes=source.files.shapes,
        corpus_sha256=source.corpus_sha256,
        rejected=rejected,
        containers=source.files.containers,
        long=train.long,
        notes=train.notes,
        end_text=end.text if end else None,
        stop_token=stop_token(tokenizer, end),
    )
    write_atomic(folder / "index.json", json.dumps(asdict(note), indent=1))
    sweep(folder)
    return _fitted(settings, note, tokenizer, train, eval_data)


def rejected_words(note: PreparedDataIndex) -> str:
    """Returns the number of rejected examples, and the most frequent reasons with their counts."""
    reasons = Counter(str(reason) for _, _, reason in note.rejected)
    common = reasons.most_common(SHOWN_REASONS)
    phrases = [f"{why} ({count:,})" if len(reasons) > 1 else why for why, count in common]
    if len(reasons) > len(common):
        phrases.append(f"{len(reasons) - len(common)} more reasons")
    return f"{len(note.rejected):,} examples left out: {', '.join(phrases)}"


def write_rejected(note: PreparedDataIndex, path: Path) -> None:
    """Writes a line of JSON for each rejected example: file, line, reason."""
    lines = [json.dumps({"file": f, "line": n, "reason": r}) for f, n, r in note.rejected]
    write_atomic(path, "\n".join(lines) + "\n")


def _fitted(
    settings: DataSettings,
    note: PreparedDataIndex,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenStore,
    eval_rows: TokenStore | None,
) -> PreparedData:
    train: TokenStore | Pairs = rows
    eval_data: TokenStore | Pairs | None = eval_rows
    if settings.stage != "sft":
        train, eval_data = Pairs(rows), Pairs(eval_rows) if eval_rows is not None else None
    if note.split is None:
        return PreparedData(tokenizer, train, eval_data if eval_data is not None else (), note)
    if not note.split:
        return PreparedData(tokenizer, train, (), note)
    ours, theirs = split(train.conversations, note.split, settings.seed)
    return PreparedData(tokenizer, Subset(train, ours), Subset(train, theirs), note)


def stored(settings: DataSettings, folder: Path) -> PreparedData | None:
    """Opens the prepared data in ``folder``, even if its files have changed; None if absent."""
    return _opened(settings, folder, None)


def _opened(settings: DataSettings, folder: Path, key: str | None) -> PreparedData | None:
    """Opens the prepared data of a folder if it has this key; None accepts any key."""
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
        tokenizer = settings.saved_tokenizer(str(saved))
    except (OSError, ValueError, TypeError):
        return None  # if absent, damaged or of another version, data is prepared again
    return _fitted(settings, note, tokenizer, train, eval_data)


def _tokenizer_hash(folder: Path) -> str:
    """Returns a hash of the names and bytes of a saved tokenizer's files."""
    digest = xxhash.xxh3_128()
    for path in sorted(p for p in folder.rglob("*") if not p.is_dir()):
        with open_regular(path, follow_links=False) as file:
            name, content = path.relative_to(folder).as_posix(), file.read()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return str(digest.hexdigest())


def _tokenizer(
    settings: DataSettings, source: Conversations, tell: Tell
) -> PreTrainedTokenizerBase:
    if settings.base_tokenizer is None:
        tell(f"training a tokenizer of {settings.vocabulary:,} on the data (the preset has none)")
        tokenizer: PreTrainedTokenizerBase = train_bpe(_texts(source.train), settings.vocabulary)
        choose_chat_template(tokenizer, settings.chat_template)
        return tokenizer
    tokenizer = settings.base_tokenizer()
    tell(f"chat template: {choose_chat_template(tokenizer, settings.chat_template)}")
    return tokenizer


def stop_token(tokenizer: PreTrainedTokenizerBase, end: AnswerEnd | None) -> int | None:
    """Returns the id of the token that ends an answer; None if there is none."""
    return int(tokenizer.convert_tokens_to_ids(end.token)) if end and end.token else None


def _texts(conversations: Sequence[Conversation]) -> Iterable[str]:
    for conversation in conversations:
        if conversation.text is not None:
            yield conversation.text
        for turns in (conversation.messages, *(conversation.answers or ())):
            if isinstance(turns, str):
                yield turns
            else:
                yield from (message.content for message in turns or ())


def _key(settings: DataSettings, folder: Path) -> str:
    """Returns a hash of the data settings, the contents of their files, and library versions."""
    # Every setting that may be a file; for a listed data set, the list and the file.
    paths = [*settings.names(), settings.chat_template]
    for name, entry in [(name, entry_of(name, settings.stage)) for name in paths]:
        paths += [name.rpartition(":")[0], str(entry[0])] if entry else []
    hashes = ContentHashes(folder / CONTENTS)
    stamps = content_stamps(paths, settings.output, hashes)
    # Only the tokenizer of a model's folder decides the data, and weights take minutes to read.
    stamps += content_stamps([settings.model], settings.output, hashes, without=WEIGHT_FILES)
    hashes.save()
    parts = [settings.recorded, stamps, host.versions()]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode()))


# Eval examples that are also in the training data: the eval loss is then too low.
#
# Examples are compared token by token; near-duplicates aren't detected. Only training examples with
# the length and the number of trained tokens of an eval example are read.


@dataclass(frozen=True)
class Overlap:
    """Numbers of eval examples that are also in the training data, and of divided texts.

    ``texts`` have pieces in the eval data and in the training data.
    """

    count: int = 0
    eval_data: int = 0
    texts: int = 0

    @property
    def advice(self) -> str:
        """Sentences for the user; empty without overlap."""
        sentences = []
        if self.count:
            verb = "is" if self.count == 1 else "are"
            sentences.append(
                f"{self.count:,} of {self.eval_data:,} eval examples {verb} in the training data "
                "too, token for token, so the eval loss is too low. Remove duplicates from the "
                "data, or give eval_data a separate file"
            )
        if self.texts:
            sentences.append(
                f"{self.texts:,} texts have pieces in the eval data and in the training data, "
                "so the eval loss is too low. The texts are too few or too long for a split: "
                "give eval_data a separate file"
            )
        return ". ".join(sentences)


def overlap(prepared: PreparedData) -> Overlap:
    """Counts the eval examples with the same tokens as a training example, and shared texts."""
    eval_data, train = prepared.eval_data, prepared.train
    if isinstance(eval_data, tuple) or not len(eval_data):
        return Overlap()
    wanted = [_digest(eval_data[i]) for i in range(len(eval_data))]
    alike = np.isin(_shapes(train), _shapes(eval_data)).nonzero()[0]
    shared = set(wanted) & {_digest(train[i]) for i in alike.tolist()}
    texts = 0
    if isinstance(train, Subset) and isinstance(eval_data, Subset):
        assert isinstance(train.examples, TokenStore | Pairs)
        texts_of = train.examples.conversations
        texts = len(np.intersect1d(texts_of[train.indices], texts_of[eval_data.indices]))
    return Overlap(sum(digest in shared for digest in wanted), len(eval_data), texts)


def advice_on_template(
    prepared: PreparedData, chat_template: str, base_stops: Sequence[int] = ()
) -> list[str]:
    """Returns a sentence for each cause of missing stop tokens, and for untrained tokens.

    ``base_stops`` are the tokens at which a frozen base model stops.
    """
    advice = []
    if missing := missing_tokens(prepared.tokenizer, chat_template):
        advice.append(
            f"chat_template {chat_template} needs the special tokens {', '.join(missing)}, "
            "which the tokenizer lacks: they are trained as ordinary text; add them to the "
            "tokenizer, or choose another chat_template"
        )
    text, stop = prepared.note.end_text, prepared.note.stop_token
    if text is not None and stop is None:
        written = repr(text.strip()[:40]) if text.strip() else "nothing"
        advice.append(
            f"the chat template writes {written} after an answer and no end token: the model "
            "doesn't learn to stop; choose a chat_template that ends answers with "
            f"{prepared.tokenizer.eos_token or 'a special token'}"
        )
    if stop is not None and base_stops and stop not in base_stops:
        token = shown(str(prepared.tokenizer.convert_ids_to_tokens(stop)))
        advice.append(
            f"answers end with {token}, an end token at which the base model doesn't stop: "
            f"export the merged model, or generate with eos_token_id={[*base_stops, stop]}"
        )
    if count := prepared.note.notes.get(THOUGHTS_LEFT_OUT):
        advice.append(
            f"{count:,} answers are trained without their thoughts, which the chat "
            "template leaves out of the text"
        )
    if count := prepared.note.notes.get(CALLS_IN_PYTHON):
        advice.append(
            f"the tool calls of {count:,} examples are trained with values in Python's notation, "
            "as the chat template writes them: None, True and False for null, true and false. If "
            "your server reads calls as JSON, choose a chat_template that writes values with tojson"
        )
    if count := prepared.note.notes.get(UNOPENED):
        advice.append(
            f"a prompt ends with <think> under this chat template, and {count:,} "
            "answers have no thought: generation begins in another way than these answers. Write "
            "thoughts into the answers, or choose a chat_template such as deepseek-r1-thoughts, "
            "which adds an empty thought"
        )
    advice += _pair_advice(prepared.note.notes)
    if "text" in prepared.note.shapes.values() and prepared.tokenizer.eos_token is None:
        advice.append(
            "the tokenizer has no end token, so texts have none: the model doesn't learn to stop; "
            "set eos_token in its tokenizer_config.json"
        )
    return advice


def _pair_advice(notes: Mapping[str, int]) -> list[str]:
    """Returns sentences on preference pairs that are trained, but with little use."""
    sentences = {
        EQUAL: "pairs have equal answers, so nothing is learnt from them: leave them out",
        EMPTY: "pairs have an answer of which cutoff_len leaves nothing: raise cutoff_len",
        MERGED: "prompts have other last tokens before an answer than alone, and count from there "
        "as a part of the answer. End prompts with a line break, or choose a chat_template that "
        "writes a prompt alike in both",
    }
    return [f"{notes[name]:,} {text}" for name, text in sentences.items() if notes.get(name)]


def all_advice(
    prepared: PreparedData, chat_template: str, base_stops: Sequence[int] = ()
) -> list[str]:
    """Returns the advice on overlap, and warnings on the chat template."""
    overlap_advice = overlap(prepared).advice
    sentences = advice_on_template(prepared, chat_template, base_stops)
    return [*filter(None, [overlap_advice]), *(f"warning: {sentence}" for sentence in sentences)]


def _shapes(examples: Any) -> NDArray[np.int64]:
    """Returns length and trained tokens of each example as one number."""
    counts = examples.trained_counts.astype(np.int64)
    shape_codes: NDArray[np.int64] = (examples.lengths.astype(np.int64) << 32) + counts
    return shape_codes


def _digest(example: Any) -> int:
    return int(xxhash.xxh3_128_intdigest(token_bytes(example)))
