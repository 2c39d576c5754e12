"""Turns conversations into one file of token examples, without repeated work.

Work is done chunk by chunk:

  (1) conversations are cut into chunks by number and size alone, never by worker.
  (2) each chunk becomes a file in `<key>.parts`, complete or absent. Any worker writes
      it, in any order. The folder is the manifest: a complete file is done.
  (3) when all files exist they are joined in order, and the folder is removed.

The result is the same, byte by byte, for any number of workers and any number of kills.
Memory holds one chunk per worker for any number of chunks. If settings have changed,
the old parts aren't needed any more. They are removed when data with other settings is
ready. ``train_bpe`` trains a tokenizer if there is none.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import accumulate, chain, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.data import arrow_file
from hasten.data.chat_template import THOUGHTS_LEFT_OUT, UNOPENED
from hasten.data.prompt_formats import ensure_chat_template
from hasten.data.renderer import end_words, start_child
from hasten.data.renderer import stop as stop_renderer
from hasten.data.spool import IndexedConversations, packed
from hasten.data.worker import ExampleChunk, TokenizeWork, write_part
from hasten.errors import InputError
from hasten.machine.locks import if_free

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# A pool of processes that tokenise chunks, in any order, each into a separate file.
#
# The caller's process distributes chunks and collects answers. If a worker dies, it is replaced,
# and its chunk is tokenised again. A chunk that fails, or with two dead workers, ends the pool with
# an error that names the chunk. The processes always end with the pool. They are in separate
# sessions, so that Ctrl-C reaches only the caller.


class TokenizeTask(NamedTuple):
    """One chunk; `load` reads it when a worker is free."""

    name: str  # for error messages
    examples: int
    load: Callable[[], ExampleChunk]


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    link: Connection


def run(  # noqa: C901  # one loop over all that workers answer
    work: TokenizeWork, tasks: Iterable[TokenizeTask], workers: int
) -> Generator[int, None, None]:
    """Runs all tasks, in this process if `workers` is 1; yields each task's examples.

    A task's number of examples is yielded when it is finished. Raises InputError if a chunk
    fails or its workers die. Files of finished chunks stay.
    """
    if workers == 1 or os.name != "posix":
        try:
            for task in tasks:
                try:
                    write_part(work, task.load())
                except (InputError, OSError):
                    raise
                except Exception as error:
                    raise _failed(task, f"{type(error).__name__}: {error}") from error
                yield task.examples
        finally:
            stop_renderer()
        return
    stop_renderer()  # each worker starts its own renderer
    remaining, payload = iter(tasks), pickle.dumps(work)
    with ExitStack() as stack:
        idle = [stack.enter_context(_started()) for _ in range(workers)]
        _tell_all(idle, payload)
        busy: dict[Connection, tuple[_Worker, TokenizeTask]] = {}
        once_more: set[str] = set()  # chunks with a dead worker
        while True:
            for task in islice(remaining, len(idle)):
                worker = idle.pop()
                busy[worker.link] = worker, task
                with suppress(ConnectionError):  # a dead worker is detected below
                    worker.link.send(task.load())
            if not busy:
                return
            for link in wait(list(busy)):
                assert isinstance(link, Connection)
                worker, task = busy.pop(link)
                try:
                    answer = worker.link.recv()
                except (EOFError, OSError):
                    how = end_words(worker.process.wait())
                    if task.name in once_more:
                        raise InputError(
                            f"the process that tokenised {task.name} {how}, as the one before it "
                            "did; if memory ran out, set data_workers lower, then start again: "
                            "finished chunks are kept"
                        ) from None
                    once_more.add(task.name)
                    remaining = chain([task], remaining)
                    idle.append(stack.enter_context(_started()))
                    _tell_all(idle[-1:], payload)
                    continue
                if answer is not None:
                    users, what = answer
                    raise InputError(what) if users else _failed(task, what)
                idle.append(worker)
                yield task.examples


def _tell_all(workers: Iterable[_Worker], work: bytes) -> None:
    """Sends the settings to all workers after all have started, so that they start in parallel."""
    for worker in workers:
        with suppress(ConnectionError):  # a dead worker is detected at its first chunk
            worker.link.send_bytes(work)


def _failed(task: TokenizeTask, what: str) -> InputError:
    return InputError(f"{task.name} can't be tokenised: {what}")


@contextmanager
def _started() -> Iterator[_Worker]:
    """Context with a worker, which is killed at the end if it still runs."""
    process, link = start_child("hasten.data.worker")
    try:
        yield _Worker(process, link)
    finally:
        link.close()
        # Killing loses nothing, because files of parts are atomic. The worker's renderer also ends.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_CHUNK_RECORDS = 1 << 10  # conversations: about a quarter of a second of one core
_CHUNK_BYTES = 1 << 22  # limit of packed conversations
_WORTH_A_WORKER = 8  # chunks for which a worker is started, which takes about a second


class _Span(NamedTuple):
    """Conversations first to last - 1, and the file of their examples."""

    first: int
    last: int
    part: Path


def prepare(
    conversations: IndexedConversations,
    work: TokenizeWork,
    path: Path,
    workers: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Writes `path`; uses the finished parts of an earlier call.

    The caller is the only writer. Raises InputError if a conversation, or a worker, fails;
    OSError if the disk does.
    """
    folder = path.with_suffix(".parts")
    folder.mkdir(exist_ok=True)
    spans = list(_spans(conversations, folder))
    pending = [span for span in spans if not arrow_file.is_whole(span.part)]
    total = len(conversations)
    done = total - sum(span.last - span.first for span in pending)
    if on_progress and done:
        on_progress(done, total)
    tasks = (_task(conversations, span) for span in pending)
    workers = min(workers, max(len(pending) // _WORTH_A_WORKER, 1))
    with closing(run(work, tasks, workers)) as finished:
        for size in finished:
            done += size
            if on_progress:
                on_progress(done, total)
    arrow_file.merge(path, (span.part for span in spans), _summary)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes unfinished files of ended preparations in `folder`.

    Each key's lock shows if its preparation is still running; such files stay. Files that
    can't be removed stay too.
    """
    try:
        leftovers = [path for path in folder.iterdir() if path.suffix in (".parts", ".part")]
        for path in leftovers:
            with if_free(folder / f"{path.name.lstrip('.').partition('.')[0]}.lock") as free:
                if free and path.suffix == ".parts":
                    shutil.rmtree(path, ignore_errors=True)
                elif free:
                    path.unlink(missing_ok=True)
    except OSError:
        return  # leftovers only take disk space


def _spans(conversations: IndexedConversations, folder: Path) -> Iterator[_Span]:
    first = size = number = 0
    for at in range(len(conversations)):
        size += len(packed(conversations, at))
        if size >= _CHUNK_BYTES or at + 1 - first == _CHUNK_RECORDS:
            yield _Span(first, at + 1, folder / f"{number:08}.arrow")
            first, size, number = at + 1, 0, number + 1
    if first < len(conversations):
        yield _Span(first, len(conversations), folder / f"{number:08}.arrow")


def _task(conversations: IndexedConversations, span: _Span) -> TokenizeTask:
    def load() -> ExampleChunk:
        return ExampleChunk(
            span.part, [packed(conversations, at) for at in range(span.first, span.last)]
        )

    places = f"{conversations[span.first].location} to {conversations[span.last - 1].location}"
    name = f"the chunk of examples {span.first + 1:,} to {span.last:,} ({places})"
    return TokenizeTask(name, span.last - span.first, load)


def _summary(parts: list[Any]) -> dict[str, Any]:
    firsts = accumulate((part["examples"] for part in parts), initial=0)
    notes = sum((Counter(part["notes"]) for part in parts), Counter[str]())
    return {
        "pieces": [
            (first + at, count)
            for first, part in zip(firsts, parts, strict=False)
            for at, count in part["pieces"]
        ],
        "rejected": [row for part in parts for row in part["rejected"]],
        "long": sum(part["long"] for part in parts),
        # Zeros are written too, because the file's digest is part of a run's identity.
        THOUGHTS_LEFT_OUT: 0,
        UNOPENED: 0,
        **notes,
    }


# A byte-level BPE tokenizer that is trained on the data, for presets and the demo.
#
# Every byte is a token before any merge, so that decoding restores any text
# (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2). The special
# tokens have DeepSeek's names, which ordinary texts don't contain.

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SPECIAL = (PAD, BOS, EOS)  # ids 0, 1, 2
SMALLEST = 256 + len(SPECIAL)  # a token for every byte
_NO_LIMIT = 1 << 30  # tokens; the limit of the model is checked elsewhere


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of at most `vocab_size` tokens, with the deepseek-llm chat template.

    The same texts in the same order give the same tokenizer. Few texts give fewer tokens. Raises
    InputError if the vocabulary is too small for all bytes.
    """
    if vocab_size < SMALLEST:
        raise InputError(
            f"a vocabulary of {vocab_size} is too small for all bytes: give at least {SMALLEST}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=_NO_LIMIT,
    )
    ensure_chat_template(tokenizer, "deepseek-llm")
    return tokenizer
