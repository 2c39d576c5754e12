"""A process that tokenises chunks: `python -m hasten.data.worker FD`, started by `tokenize`.

FD is a socket to the process that started it. First comes a `TokenizeWork`, then for every chunk a
`ExampleChunk`; each is answered by None, or by a sentence on what went wrong. The end of the socket
is the end of the process, so none outlives its parent. It is a plain program and no
`multiprocessing` child, because those import the caller's main module again, which a script without
``if __name__ == "__main__"`` doesn't survive.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.data import arrow_file
from hasten.data.chat_template import LossOn, TooLong, encode_all
from hasten.data.pair_tokens import encode_pairs
from hasten.data.spool import unpack
from hasten.errors import InputError, is_panic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from hasten.parts.data.collate import TokenizedExample


class TokenizeWork(NamedTuple):
    """The settings that are the same for all chunks."""

    tokenizer: PreTrainedTokenizerBase
    cutoff_len: int
    too_long: TooLong
    loss_on: LossOn
    stage: str = "sft"


class ExampleChunk(NamedTuple):
    """Packed conversations, and the file that their token examples go to."""

    path: Path
    packed: list[bytes]


def write_part(work: TokenizeWork, chunk: ExampleChunk) -> None:
    """Tokenises a chunk into its file, which is complete or absent.

    Its summary holds the rejected examples as (file, line, reason), and of each conversation with
    several examples the first and their number. It counts examples, conversations longer than
    cutoff_len, and what `chat_template` notes.
    """
    rejected: list[tuple[str, int, str]] = []
    pieces: list[tuple[int, int]] = []
    count = long = 0
    notes: Counter[str] = Counter()

    def examples() -> Iterator[TokenizedExample]:
        nonlocal count, long
        conversations = [unpack(content) for content in chunk.packed]
        limits = (work.tokenizer, conversations, work.cutoff_len, work.too_long)
        if work.stage == "sft":
            encoded = encode_all(*limits, work.loss_on)
        else:
            encoded = encode_pairs(*limits, separate=work.stage == "kto")
        for conversation, rendered in zip(conversations, encoded, strict=True):
            if rendered.reason is not None:
                file, _, line = conversation.location.rpartition(":")
                rejected.append((file, int(line) if line.isdecimal() else 0, rendered.reason))
            long += rendered.long
            notes.update(rendered.notes)
            if len(rendered.examples) > 1:
                pieces.append((count, len(rendered.examples)))
            count += len(rendered.examples)
            yield from rendered.examples

    def summary() -> dict[str, Any]:
        return {
            "examples": count,
            "pieces": pieces,
            "rejected": rejected,
            "long": long,
            "notes": notes,
        }

    try:
        arrow_file.write(chunk.path, examples(), summary, durable=False)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise InputError(
            f"the tokenizer can't encode an example ({' '.join(str(error).split())[:200]}): "
            "correct its tokenizer.json, or choose another"
        ) from error


def main(handle: int) -> None:
    """Processes chunks until the socket is closed."""
    # Read by the tokenizers library itself, at its first batch: the processes are the parallelism.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    with Connection(handle) as parent:
        try:
            payload = parent.recv_bytes()
            work: TokenizeWork | None = None
            while True:
                chunk: ExampleChunk = parent.recv()
                try:
                    work = work or pickle.loads(payload)
                except Exception as error:  # a class that only the parent's main module has
                    parent.send((False, f"{error} in a new process; set data_workers to 1"))
                else:
                    parent.send(_answer(work, chunk))
        except (EOFError, ConnectionError):
            return


def _answer(work: TokenizeWork, chunk: ExampleChunk) -> tuple[bool, str] | None:
    """Returns None; or True for a user's error, else False, and the message."""
    try:
        write_part(work, chunk)
    except InputError as error:
        return True, str(error)
    except Exception as error:  # told by the parent, which knows the chunk's place
        return False, f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
