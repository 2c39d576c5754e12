"""``hasten chat``: questions to a run's model, in the terminal or from a pipe."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.cli.output import say
from hasten.errors import InputError
from hasten.formatting import shown

if TYPE_CHECKING:
    from rich.table import Table

    from hasten.data.turns import Message
    from hasten.release.trained_model import LoadedModel, Sampling

Run = Annotated[Path, typer.Argument(help="the folder of a finished run", metavar="RUN")]
Weights = Annotated[
    str,
    typer.Option(help="weights of the run: a folder in it such as best; default: model or adapter"),
]


def chat(
    run: Run,
    compare: Annotated[
        str | None,
        typer.Option(help="model to compare with: base, another run, or a model"),
    ] = None,
    weights: Weights = "",
    system: Annotated[str, typer.Option(help="system message of each conversation")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="most tokens of an answer")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, max=10, help="0: the most probable token, always")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1, help="probability that sampled tokens share")
    ] = 1.0,
    sampling_seed: Annotated[int, typer.Option(min=0, help="seed of the sampling")] = 0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="print the result as JSON to stdout: an object for each question"
        ),
    ] = False,
) -> None:
    """Ask a run's model; from a pipe, each line is a question."""
    import torch

    from hasten.release.trained_model import Sampling, check_template, load_other, load_run

    models = [load_run(run, weights)]
    if compare:
        models.append(load_other(compare, run, weights))
    for model in models:
        check_template(model)
    torch.manual_seed(sampling_seed)
    conversation = _Conversation(models, system, Sampling(max_new_tokens, temperature, top_p))
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `ask` refuses what isn't UTF-8
    if interactive:
        say("/new starts a new conversation, /quit or Ctrl-D ends.", file=sys.stderr)
    for question in _questions(interactive):
        if not interactive or question == "/new":
            conversation.start()
        if interactive and question == "/new":
            continue
        try:
            answers = conversation.ask(question, printed=not as_json)
        except InputError as error:
            if not interactive:
                raise
            say(error, file=sys.stderr)
            continue
        if as_json:
            names = _names(models)
            row = {"question": question, "answers": dict(zip(names, answers, strict=True))}
            say(json.dumps(row, ensure_ascii=False), flush=True)


class _Conversation:
    """The turns of a conversation, with the answers of each model."""

    def __init__(self, models: Sequence[LoadedModel], system: str, sampling: Sampling) -> None:
        self._models, self._system, self._sampling = models, system, sampling
        self.start()

    def start(self) -> None:
        """Removes all turns but the system message."""
        from hasten.data.turns import Message

        first = [Message("system", self._system)] if self._system else []
        self._turns: list[list[Message]] = [list(first) for _ in self._models]

    def ask(self, question: str, printed: bool) -> list[str]:
        """Returns every model's answer, and prints it while it is generated if ``printed``.

        Raises:
            InputError: the conversation is too long, or a text isn't UTF-8. The question is then
                not added to the conversation.
        """
        from hasten.data.turns import Message
        from hasten.release.trained_model import answer

        prompts = [[*turns, Message("user", question)] for turns in self._turns]
        with _Display(_names(self._models), printed) as display:
            answers = [
                answer(model, turns, self._sampling, display.writer(number))
                for number, (model, turns) in enumerate(zip(self._models, prompts, strict=True))
            ]
        replies = [Message("assistant", text) for text in answers]
        self._turns = [[*turns, reply] for turns, reply in zip(prompts, replies, strict=True)]
        return answers


def _questions(interactive: bool) -> Iterator[str]:
    """Yields the non-empty lines of the standard input; in a terminal up to /quit."""
    if not interactive:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line


def _names(models: Sequence[LoadedModel]) -> list[str]:
    names = [model.name for model in models]
    return names if len(set(names)) == len(names) else [f"{n} {i}" for i, n in enumerate(names, 1)]


class _Display:
    """Prints answers while they are generated: two in columns on a terminal, else in turn."""

    def __init__(self, names: Sequence[str], printed: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._names, self._printed = names, printed
        self._texts = [""] * len(names)
        self._begun: set[int] = set()
        console = Console()
        columns = printed and len(names) > 1 and console.is_terminal
        self._live = Live(console=console, refresh_per_second=8) if columns else None

    def __enter__(self) -> _Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._begun:
            say(flush=True)

    def writer(self, number: int) -> Callable[[str], None]:
        """Returns the function that receives one model's answer in parts."""

        def write(text: str) -> None:
            text = shown(text)  # a model may write control characters, which terminals obey
            self._texts[number] += text
            if self._live is not None:
                self._live.update(self._columns())
            elif self._printed:
                if number not in self._begun and len(self._names) > 1:
                    say(f"{chr(10) if self._begun else ''}[{self._names[number]}]")
                self._begun.add(number)
                say(text, end="", flush=True)

        return write

    def _columns(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True)
        for name in self._names:
            table.add_column(Text(name), ratio=1)
        table.add_row(
            *(Text(text) for text in self._texts)
        )  # Text: markup in answers has no effect
        return table
