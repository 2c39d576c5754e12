"""``hasten data``: inspects, measures, packs and converts a data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.cli.arguments import AsJson, Overrides, RecipePath, output_option
from hasten.cli.output import say
from hasten.errors import InputError

if TYPE_CHECKING:
    from hasten.data.conversation import Conversation
    from hasten.data.prepared import PreparedData
    from hasten.recipe.schema import Recipe

app = typer.Typer(help="Inspect, measure, pack or convert data.", no_args_is_help=True)

BAR = 40  # characters of the longest bar


@app.command("inspect")
def inspect(
    path: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=1, help="examples to show")] = 3,
) -> None:
    """Show examples as token text with the trained parts marked."""
    from hasten.data.token_store import inspect as rendered
    from hasten.recipe.schema import load_recipe

    prepared_data = _prepared_data(load_recipe(path, overrides or []))
    colour = sys.stdout.isatty()
    tokenizer = prepared_data.tokenizer
    bos = tokenizer.bos_token_id
    for index in range(min(count, len(prepared_data.train))):
        example = prepared_data.train[index]
        rows = [row for row in example.rows if row.length]
        if bos is not None and any((row.input_ids[:2] == bos).sum() == 2 for row in rows):
            raise InputError(
                f"example {index + 1} begins with two {tokenizer.bos_token}: the chat "
                "template and the tokenizer both add one; correct the template"
            )
        lengths = " + ".join(str(row.length) for row in rows)
        say(f"--- {index + 1}: {lengths} tokens, {example.trained_tokens} of them trained")
        # Texts are escaped in it; its only control characters are colours.
        sys.stdout.write(f"{rendered(tokenizer, example, colour)}\n")


@app.command("stats")
def stats(
    path: RecipePath,
    overrides: Overrides = None,
    output: Annotated[Path | None, output_option("an HTML page with drawings")] = None,
    as_json: AsJson = False,
) -> None:
    """Show lengths, duplicates, padding and packing of the data."""
    from hasten.data.statistics import layout_advice, layouts, statistics_of
    from hasten.data.token_store import row_lengths
    from hasten.recipe.build import context_of
    from hasten.recipe.candidates import first_plan_sentence
    from hasten.recipe.schema import DEFAULT_BATCH, load_recipe
    from hasten.report.data_page import bin_name, facts_of, write_page

    if output is not None and output.is_dir():
        raise InputError(f"--output: {output} is a folder; name a file")
    recipe = load_recipe(path, overrides or [])
    prepared_data = _prepared_data(recipe)
    statistics = statistics_of(prepared_data.train)
    batch = recipe.global_batch_size or DEFAULT_BATCH
    lengths = prepared_data.train.lengths
    ways = layouts(lengths, batch, recipe.cutoff_len, row_lengths(prepared_data.train))
    chosen = layout_advice(lengths, batch, recipe.cutoff_len)
    if output is not None:
        write_page(output, f"Data of {path.name}", statistics, ways, chosen)
    if as_json:
        values = {**statistics.__dict__, "bins": [b.__dict__ for b in statistics.bins]}
        values |= {"padding_share": 1 - ways[0].fullness, "batch": batch, "advice": chosen}
        say(json.dumps({**values, "layouts": [w.__dict__ for w in ways]}, indent=1))
        return
    for name, fact in facts_of(statistics):
        say(f"{name:<16} {fact}")
    say()
    most = max(b.examples for b in statistics.bins)
    for one in statistics.bins:
        bar = "█" * round(BAR * one.examples / most) or ("▏" if one.examples else "")
        share = one.tokens / statistics.tokens
        say(f"{bin_name(one):>15} {bar:<{BAR}} {one.examples:>9,}  {share:5.1%} of tokens")
    say(f"\n{'laid out as':<34} {'technique':<15} {'full':>7} {'rows':>11} {'bound':>11}")
    for way in ways:
        bound = "-" if way.bound is None else f"{way.bound:,}"
        figures = f"{way.fullness:>7.1%} {way.rows:>11,} {bound:>11}"
        say(f"{way.method:<34} {way.technique:<15} {figures}")
    say(f"\nfullest: {chosen}; other examples then share a step: hasten verify compares losses")
    say(first_plan_sentence(recipe, context_of(recipe, prepared_data)))
    if output is not None:
        say(f"\nwritten: {output}")


@app.command("pack")
def pack(
    path: RecipePath,
    overrides: Overrides = None,
    output: Annotated[Path, output_option("an .arrow or .parquet file")] = (Path("packed.parquet")),
    row_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of a row at most; cutoff_len if left out")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
) -> None:
    """Write a recipe's examples as packed rows."""
    from hasten.data.packed_file import COLUMNS, check_name, write_packed
    from hasten.progress import Display
    from hasten.recipe.prepared_data import prepare_data, template_advice
    from hasten.recipe.schema import load_recipe

    check_name(output)
    if output.is_dir():
        raise InputError(f"--output: {output} is a folder; name a file")
    if output.exists() and not force:
        raise InputError(f"{output} exists; give another name, or --force to replace it")
    recipe = load_recipe(path, overrides or [])
    if recipe.stage != "sft":
        raise InputError(f"stage: {recipe.stage} has pairs, and only examples of sft become rows")
    with Display() as display:
        prepared_data = prepare_data(recipe, Path(recipe.output) / "data", display.tell)
        for sentence in template_advice(recipe, prepared_data):
            display.tell(f"warning: {sentence}")
        display.begin()
        packing = write_packed(
            prepared_data.train,
            output,
            row_tokens or recipe.cutoff_len,
            recipe.seed,
            lambda done, total: display.show(f"packing, {done:,} of {total:,} rows", done / total),
        )
    examples = len(prepared_data.train)
    say(
        f"examples    {examples:,}, {packing.tokens:,} tokens; the held-out ones are not among them"
    )
    say(
        f"rows       {packing.rows:,} of {packing.row_tokens:,} tokens, {packing.fullness:.2%} full"
    )
    say(f"bound      {packing.lower_bound:,}: no packing has fewer rows")
    say(f"written    {output}: {', '.join(COLUMNS)}")


@app.command("convert")
def convert(
    sources: Annotated[list[Path], typer.Argument(help="files or folders to read")],
    output: Annotated[Path, output_option("a JSONL file")],
    max_rejected: Annotated[
        float, typer.Option(min=0, help="unusable examples allowed: a share below 1, or a number")
    ] = 0.001,
) -> None:
    """Write examples of any supported format as JSONL messages."""
    from hasten.data.readers import placeholder_words, read_examples, unread_words
    from hasten.machine.files import replacing

    if output.suffix != ".jsonl":
        raise InputError(f"{output}: what is written is JSONL; give a name that ends in .jsonl")
    if output.exists():
        raise InputError(f"{output} exists; give another name")
    reading = read_examples(sources, max_rejected)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output, durable=False) as file:
            for conversation in reading.conversations:
                file.write(f"{json.dumps(_row(conversation), ensure_ascii=False)}\n".encode())
    except OSError as error:
        raise InputError(f"{output} can't be written: {error.strerror or error}") from error
    for file_name, shape in reading.shapes.items():
        unread = unread_words(reading.unread.get(file_name, ()))
        say(f"{file_name}: {shape} examples{unread}")
        if sentence := placeholder_words(reading.placeholders.get(file_name, {})):
            say(f"warning: {file_name}: {sentence}")
    for rejected in reading.rejected:
        say(f"left out {rejected.file}:{rejected.line}: {rejected.reason}")
    say(f"{len(reading.conversations):,} examples: {output}")


def _prepared_data(recipe: Recipe) -> PreparedData:
    from hasten.recipe.prepared_data import prepare_data, template_advice

    def tell(text: str) -> None:
        say(text, file=sys.stderr)

    prepared_data = prepare_data(recipe, Path(recipe.output) / "data", tell)
    for sentence in template_advice(recipe, prepared_data):
        tell(f"warning: {sentence}")
    return prepared_data


def _row(conversation: Conversation) -> dict[str, object]:
    from hasten.data.tool_calls import split_tools, template_turns
    from hasten.data.turns import THOUGHTS

    if conversation.text is not None:
        return {"text": conversation.text}
    tools, turns = split_tools(conversation.messages)
    written = template_turns(turns)
    for turn, row in zip(turns, written, strict=True):
        for key in (*THOUGHTS[1:], "instruction", "input"):
            row.pop(key, None)
        row |= {} if turn.trained else {"weight": 0}
    return {"messages": written} | ({"tools": tools} if tools else {})
