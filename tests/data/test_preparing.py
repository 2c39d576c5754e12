"""Preparing in chunks: the same bytes by any number of processes, after kills, beside others."""

from __future__ import annotations

import contextlib
import copy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Regex, pre_tokenizers

from data import preparation
from data.preparation import CHUNK, COUNT, dialogues
from hasten.data import arrow_file, renderer
from hasten.data import tokenize as preparing
from hasten.data import tokenize as workers_module
from hasten.data.chat_template import answer_end
from hasten.data.conversation import Conversation
from hasten.data.token_store import tokenize
from hasten.errors import InputError
from offspring import children


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "_CHUNK_RECORDS", CHUNK)
        patch.setattr(preparing, "_WORTH_A_WORKER", 1)
        patch.setattr(preparing, "stop_renderer", renderer.stop)
        yield


@pytest.fixture(scope="module")
def undisturbed(_trained: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a preparation gives that nothing happens to."""
    folder = tmp_path_factory.mktemp("plain")
    return tokenize(dialogues(COUNT), _trained, folder, 64).path.read_bytes()


@pytest.fixture
def start(tokenizer: Any, tmp_path: Path) -> Any:
    """Starts `preparation.py`; whatever is left of it at the end is killed."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    begun: list[subprocess.Popen[str]] = []

    def start(workers: int = 1, pause: str = "never") -> subprocess.Popen[str]:
        order = [sys.executable, str(Path(preparation.__file__))]
        begun.append(
            subprocess.Popen(
                [*order, str(tmp_path / "out"), str(workers), str(tmp_path / pause)],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def until(process: subprocess.Popen[str], word: str) -> list[str]:
    """The words of the next line that begins with `word`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.split()
    raise AssertionError(f"the process ended without saying {word!r}")


def gone(pids: list[int]) -> bool:
    """Whether no such process runs, soon: one may be loading its libraries and has to look up."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not any(map(running, pids)):
            return True
        time.sleep(0.01)
    return False


def running(pid: int) -> bool:
    """One that nobody waits for keeps its number, but does nothing more."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def started() -> Callable[[], list[psutil.Process]]:
    """The processes that this one has started since the test began."""
    before = {child.pid for child in children()}
    return lambda: [child for child in children() if child.pid not in before]


def kill_all(processes: list[psutil.Process], killed: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
        killed.append(process.pid)


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_any_number_of_workers_writes_the_same_bytes_and_leaves_no_process(
    tokenizer: Any, undisturbed: bytes, tmp_path: Path, started: Any, workers: int
) -> None:
    assert answer_end(tokenizer) is not None
    rendering = started()
    assert len(rendering) == 1
    calls: list[int] = []
    store = tokenize(
        dialogues(COUNT),
        tokenizer,
        tmp_path / "out",
        64,
        on_progress=lambda done, total: calls.append(done),
        workers=workers,
    )
    assert store.path.read_bytes() == undisturbed
    assert calls == sorted(calls)
    assert calls[-1] == COUNT
    assert [path.name for path in (tmp_path / "out").iterdir()] == [store.path.name]
    assert gone([process.pid for process in [*rendering, *started()]])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_preparation_goes_on_where_it_was(
    tokenizer: Any, undisturbed: bytes, tmp_path: Path, start: Any, workers: int
) -> None:
    process = start(workers)
    _, _, *children = until(process, f"done {CHUNK}")
    process.kill()
    process.wait()
    assert len(children) == workers  # one alone has a process that renders
    assert gone([int(child) for child in children])
    parts = list((tmp_path / "out").glob("*.parts/*.arrow"))
    before = {path: path.stat().st_mtime_ns for path in parts}
    calls: list[int] = []
    written: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, written)
        store = tokenize(
            dialogues(COUNT),
            tokenizer,
            tmp_path / "out",
            64,
            on_progress=lambda done, total: calls.append(done),
        )
    assert store.path.read_bytes() == undisturbed
    assert 1 <= len(before) < -(-COUNT // CHUNK)
    assert not {*before} & {*written}
    assert calls[0] == len(before) * CHUNK
    assert calls[-1] == COUNT


def watch(patch: pytest.MonkeyPatch, written: list[Path]) -> None:
    """Note every file that is written from examples."""
    plain: Callable[..., None] = arrow_file.write

    def noting(path: Path, *args: Any, **kwargs: Any) -> None:
        written.append(path)
        plain(path, *args, **kwargs)

    patch.setattr(arrow_file, "write", noting)


def test_a_part_that_was_damaged_is_done_again(
    tokenizer: Any, undisturbed: bytes, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 3 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(dialogues(COUNT), tokenizer, tmp_path / "out", 64, on_progress=interrupt)
    parts = sorted((tmp_path / "out").glob("*.parts/*.arrow"))
    assert len(parts) == 3
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    parts[2].write_bytes(b"")
    calls: list[int] = []
    store = tokenize(
        dialogues(COUNT),
        tokenizer,
        tmp_path / "out",
        64,
        on_progress=lambda done, total: calls.append(done),
    )
    assert calls[0] == CHUNK
    assert store.path.read_bytes() == undisturbed


def test_a_worker_that_dies_is_replaced_and_the_order_unchanged(
    tokenizer: Any, undisturbed: bytes, tmp_path: Path, started: Any
) -> None:
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if len(killed) < 2:  # both workers at once, then the two that took their places run on
            kill_all(started(), killed)

    store = tokenize(dialogues(COUNT), tokenizer, tmp_path / "out", 64, on_progress=kill, workers=2)
    assert len(killed) >= 2
    assert store.path.read_bytes() == undisturbed
    assert gone([process.pid for process in started()])


def test_a_chunk_whose_workers_die_is_named_and_what_is_done_stays(
    tokenizer: Any,
    undisturbed: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: Any,
) -> None:
    usual = workers_module._started

    @contextlib.contextmanager
    def doomed() -> Iterator[Any]:
        """Workers that replace others die with their first chunk."""
        with usual() as worker:
            if len(seen) >= 2:
                worker.process.send_signal(signal.SIGKILL)
            seen.append(worker.process.pid)
            yield worker

    seen: list[int] = []
    monkeypatch.setattr(workers_module, "_started", doomed)
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if not killed:
            kill_all(started(), killed)

    words = (
        r"the chunk of examples \d+ to \d+ \(data.jsonl:\d+ to data.jsonl:\d+\) was ended by sig"
    )
    with pytest.raises(InputError, match=words):
        tokenize(dialogues(COUNT), tokenizer, tmp_path / "out", 64, on_progress=kill, workers=2)
    assert gone([process.pid for process in started()])
    assert list((tmp_path / "out").glob("*.parts/*.arrow"))
    store = tokenize(dialogues(COUNT), tokenizer, tmp_path / "out", 64)
    assert store.path.read_bytes() == undisturbed


@pytest.mark.parametrize("count", [1, 2])
def test_a_template_that_fails_names_the_record(
    tokenizer: Any, tmp_path: Path, started: Any, count: int
) -> None:
    tokenizer.chat_template = (
        "{% if messages[0].content == 'question 34' %}{{ 1 / 0 }}{% endif %}"
        "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    )
    with pytest.raises(
        InputError,
        match=r"data\.jsonl:35: the chat template fails on it: its line 1 fails: division",
    ):
        tokenize(dialogues(COUNT), tokenizer, tmp_path, 64, workers=count)
    assert gone([process.pid for process in started()])


@pytest.mark.parametrize("workers", [1, 2])
def test_any_other_fault_names_its_chunk(tokenizer: Any, tmp_path: Path, workers: int) -> None:
    none: Any = None
    with pytest.raises(InputError, match=r"examples \d+ to \d+ .*can't be tokenised: TypeError"):
        tokenize(dialogues(COUNT), tokenizer, tmp_path, none, workers=workers)


def test_ctrl_c_ends_the_workers_too(start: Any, tmp_path: Path) -> None:
    process = start(workers=2)
    _, _, *children = until(process, "done")
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    assert len(children) == 2
    assert gone([int(child) for child in children])
    assert not list((tmp_path / "out").glob("*.lock"))


def test_one_process_writes_and_the_other_waits_and_says_for_whom(
    start: Any, undisturbed: bytes, tmp_path: Path
) -> None:
    writer = start(pause="go")
    until(writer, "done")
    waiter = start(pause="go")
    said = until(waiter, "waiting for process")
    assert said[3] == str(writer.pid)
    assert said[4] == "(since"
    (tmp_path / "go").touch()
    until(writer, "ready")
    assert waiter.communicate(timeout=120)[0] == "ready\n"  # and nothing was tokenised
    (left,) = (tmp_path / "out").iterdir()
    assert left.read_bytes() == undisturbed


def test_the_lock_of_a_dead_process_blocks_nobody(
    start: Any, tokenizer: Any, undisturbed: bytes, tmp_path: Path
) -> None:
    writer = start()
    until(writer, "done")
    waiter = start(pause="tokenizer")  # there already: it doesn't pause
    until(waiter, "waiting")
    writer.kill()
    assert waiter.communicate(timeout=120)[0].endswith("ready\n")
    (left,) = (tmp_path / "out").iterdir()
    assert left.read_bytes() == undisturbed


def test_what_dead_preparations_left_is_swept_and_a_living_one_is_not(
    tokenizer: Any, undisturbed: bytes, start: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    living = start(pause="go")
    until(living, f"done {CHUNK}")
    (kept,) = out.glob("*.parts")
    dead = out / "0123.parts"
    dead.mkdir()
    (dead / "00000000.arrow").write_bytes(b"half")
    (out / ".0123.arrow.abc.part").write_bytes(b"half")
    (out / f".{kept.stem}.arrow.abc.part").write_bytes(b"half")
    ready = tokenize(dialogues(5), tokenizer, out, 64).path
    preparing.sweep(out)
    lock = kept.with_suffix(".lock")
    assert {*out.iterdir()} == {ready, kept, lock, out / f".{kept.stem}.arrow.abc.part"}
    (tmp_path / "go").touch()
    until(living, "ready")
    assert next(path for path in out.glob("*.arrow") if path != ready).read_bytes() == undisturbed
    preparing.sweep(out)
    assert {path.suffix for path in out.iterdir()} == {".arrow"}


def test_a_folder_that_is_not_there_is_swept_in_silence(tmp_path: Path) -> None:
    preparing.sweep(tmp_path / "none")


def test_long_texts_make_small_chunks(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_CHUNK_BYTES", 1000)
    calls: list[int] = []
    texts = [Conversation((), "word " * 100, f"t:{n}") for n in range(6)]
    tokenize(texts, tokenizer, tmp_path, 64, on_progress=lambda done, _: calls.append(done))
    assert calls == [2, 4, 6]


def test_a_tokenizer_whose_expression_takes_too_long_is_a_sentence(
    tokenizer: Any, tmp_path: Path
) -> None:
    exploding = pre_tokenizers.Split(Regex("(d+)+$"), "isolated")
    tokenizer = copy.deepcopy(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([exploding, backend.pre_tokenizer])
    texts = [replace(dialogues(1)[0], text="d" * 40 + "!", messages=())]
    with pytest.raises(InputError, match=r"the tokenizer can't encode an example \(.*retry-limit"):
        tokenize(texts, tokenizer, tmp_path, 64)
