"""A preparation of data in a process of its own: `python preparation.py FOLDER WORKERS PAUSE`.

It says what it does, and after its first chunk it waits until something lies at PAUSE.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from hasten.data import tokenize as preparing
from hasten.data.conversation import Conversation
from hasten.data.token_store import tokenize
from hasten.data.turns import Message
from offspring import children

CHUNK, COUNT = 10, 95


def dialogues(count: int) -> list[Conversation]:
    return [
        Conversation(
            (Message("user", f"question {n}"), Message("assistant", "word " * (n % 7 + 1))),
            None,
            f"data.jsonl:{n + 1}",
        )
        for n in range(count)
    ]


def main(folder: Path, workers: int, pause: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores Ctrl-C
    preparing._CHUNK_RECORDS, preparing._WORTH_A_WORKER = CHUNK, 1

    def progress(done: int, total: int) -> None:
        say("done", done, *(child.pid for child in children()))
        while done == CHUNK and not pause.exists():
            time.sleep(0.01)

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder.parent / "tokenizer"))
    data = dialogues(COUNT)
    tokenize(data, tokenizer, folder, 64, on_progress=progress, workers=workers, tell=say)
    say("ready")


def say(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
