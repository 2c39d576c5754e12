"""Write the generated parts of the reference pages from the code.

    python scripts/write_docs.py

A generated part lies between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``. The rest of
a page is written by hand. ``scripts/docs_data.yaml`` has meanings of fields that have none in code.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel

import hasten
from hasten.cli.help import HELP
from hasten.cli.keys import type_text
from hasten.cli.main import app
from hasten.core.health import SpikePolicy
from hasten.core.slot import Slot
from hasten.core.technique import Knob, Technique
from hasten.core.timing import StepMetrics
from hasten.data.prompt_formats import PROMPT_FORMATS
from hasten.models.presets import PRESETS, preset
from hasten.recipe.schema import AutoPlan, DataSource, Preference, Price, Recipe
from hasten.report.schema import REPORT
from hasten.techniques import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NESTED: dict[str, type[BaseModel]] = {
    "dataset": DataSource,
    "preference": Preference,
    "price": Price,
    "auto_plan": AutoPlan,
}
AUTO = {
    "usual": "in the initial plan",
    "try": "used if a measurement shows a gain",
    "no": "not considered",
}
# Recipe keys in sections: the first key of each section, in the schema's order.
SECTIONS = {
    "model": "Model and data",
    "finetuning_type": "LoRA",
    "max_steps": "Length",
    "global_batch_size": "Optimization",
    "eval_every": "Evaluation and reports",
    "output": "Output and machine",
    "max_restarts": "Faults",
    "plan": "Techniques",
}
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@functools.cache
def data() -> dict[str, Any]:
    """Meanings of fields, as written by hand in ``docs_data.yaml``."""
    text = Path(__file__).with_name("docs_data.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; pipes and line ends in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([str(c).replace("|", "\\|").replace("\n", " ") for c in line] for line in lines)
    return "\n".join(re.sub(r" +\|", " |", f"| {' | '.join(line)} |") for line in cells)


def code(value: Any) -> str:
    return f"`{value}`"


# Command line


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf command with its full name, in the order of the help."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def parameter_rows(name: str, command: Any) -> list[list[str]]:
    """Names and meaning of each argument and option, as the help prints them."""
    context = type(command).context_class(command, info_name=name)
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record and parameter.name != "help":
            names = re.sub(r"<(list\[\w+\]|path|int range|float range)>", "", record[0])
            rows.append([code(names.strip()), record[1]])
    return rows


def command_line() -> str:
    root: Any = typer.main.get_command(app)
    chunks = []
    for name, command in commands(root):
        summary = (command.help or "").strip()
        rows = parameter_rows(name, command)
        help_ = HELP[name]
        examples = "\n".join(f"hasten {example}" for example in help_.examples)
        chunks.append(f"### hasten {name}\n\n{summary}\n")
        if rows:
            chunks.append(table(("argument or option", "meaning"), rows) + "\n")
        chunks.append(f"```bash\n{examples}\n```\n")
    return "\n".join(chunks).rstrip()


# Recipe


def default_text(value: Any) -> str:
    if value is None:
        return "none"
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    return code(str(value).lower() if isinstance(value, bool) else value)


def field_rows(model: type[BaseModel], names: Iterable[str]) -> list[list[str]]:
    rows = []
    for name in names:
        field = model.model_fields[name]
        default = "required"
        if not field.is_required():
            default = default_text(field.get_default(call_default_factory=True))
        rows.append([code(name), type_text(field.annotation), default, str(field.description)])
    return rows


def recipe_keys() -> str:
    head = ("key", "type", "default", "meaning")
    names = list(Recipe.model_fields)
    starts = [*(names.index(name) for name in SECTIONS), len(names)]
    chunks = []
    for title, start, end in zip(SECTIONS.values(), starts[:-1], starts[1:], strict=True):
        chunks.append(f"## {title}\n\n{table(head, field_rows(Recipe, names[start:end]))}")
    spikes = [
        [code(field.name), str(field.type), default_text(field.default), meaning]
        for field, meaning in zip(
            dataclasses.fields(SpikePolicy), data()["loss_spike"].values(), strict=True
        )
    ]
    chunks.append(f"## Settings of loss_spike\n\n{table(head, spikes)}")
    for key, model in NESTED.items():
        rows = field_rows(model, model.model_fields)
        chunks.append(f"## Settings of {key}\n\n{table(head, rows)}")
    return "\n\n".join(chunks)


def presets() -> str:
    rows: dict[str, list[str]] = {}
    for name in PRESETS:
        rows.setdefault(preset(name).architecture, []).append(code(name))
    return table(("architecture", "presets"), ((code(k), ", ".join(v)) for k, v in rows.items()))


def chat_formats() -> str:
    return f"```text\n{textwrap.fill(' '.join(PROMPT_FORMATS), 100, break_on_hyphens=False)}\n```"


# Techniques


def first_paragraph(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


def knob_text(knob: Knob | None) -> str:
    if knob is None:
        return ""
    if knob.low is not None:
        return f"{knob.low} to {knob.high}"
    return ", ".join(map(str, knob.choices))


def technique_head(kind: type[Technique]) -> str:
    instance = kind()
    lines = [first_paragraph(kind), ""]
    rows = [
        ["slot", f"{kind.slot.name}: {kind.slot.value}"],
        ["[fidelity](index.md)", instance.fidelity.name.lower()],
        ["`plan: auto`", AUTO[kind.auto]],
    ]
    for claim in instance.claims:
        rows.append(["claim", f"{claim.ratio:.2f}× `{claim.metric}` ({claim.source})"])
    lines += [table(("", ""), rows), ""]
    knobs = kind.knobs()
    settings = [
        [code(f.name), code(f.default), f.metadata["doc"], knob_text(knobs.get(f.name))]
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
    ]
    if settings:
        lines.append(table(("setting", "default", "meaning", "values for tuning"), settings))
    else:
        lines.append("Settings: none.")
    return "\n".join(lines)


def technique_index() -> str:
    rows = []
    for slot in Slot:
        names = [k.name() for k in CATALOGUE if k.slot is slot]
        links = ", ".join(f"[{name}]({name}.md)" for name in names)
        rows.append([slot.name, slot.value, data()["slot_defaults"][slot.name], links])
    return table(("slot", "decision", "without a technique", "techniques"), rows)


# Metrics and files


def field_table(rows: Mapping[str, Sequence[str]]) -> str:
    return table(("field", "unit", "meaning"), ([code(k), *v] for k, v in rows.items()))


def step_fields() -> str:
    known = data()["metrics"]
    names = [field.name for field in dataclasses.fields(StepMetrics)]
    if sorted(names) != sorted(known):
        missing = sorted(set(names) ^ set(known))
        raise SystemExit(
            f"docs_data.yaml: metrics: these fields differ from StepMetrics: {missing}"
        )
    return field_table({name: known[name] for name in names})


def exit_codes() -> str:
    return table(("code", "meaning"), ((str(k), v) for k, v in data()["exit_codes"].items()))


def exit_code_4() -> str:
    rows = ((f"`hasten {command}`", why) for command, why in data()["exit_code_4"].items())
    return table(("command", "code 4"), rows)


def shape_text(shape: Any) -> str:
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    if isinstance(shape, list):
        if len(shape) > 1:
            return f"pair of {' and '.join(map(shape_text, shape))}"
        return f"list of {shape_text(shape[0])}"
    if isinstance(shape, dict):
        if set(shape) == {"median", "low", "high"}:
            return "span"
        return "object: " + ", ".join(map(key_text, shape, shape.values()))
    return names.get(shape, "value" if shape is object else "object")


def key_text(key: str, shape: Any) -> str:
    """A key, with the keys of its own object in brackets."""
    inner = shape[0] if isinstance(shape, list) else shape
    text = code(key.removesuffix("?"))
    if not isinstance(inner, dict) or not inner or shape_text(inner) == "span":
        return text
    return f"{text} ({', '.join(map(key_text, inner, inner.values()))})"


def report_keys() -> str:
    def rows(shapes: Mapping[str, Any]) -> list[list[str]]:
        return [
            [code(key.removesuffix("?")), "" if key.endswith("?") else "yes", shape_text(shape)]
            for key, shape in shapes.items()
            if key != "variants"
        ]

    head = ("key", "required", "kind")
    variant = REPORT["variants"][0]
    return (
        f"{table(head, [*rows(REPORT), ['`variants`', 'yes', 'list of variants']])}\n\n"
        f"Keys of a variant:\n\n{table(head, rows(variant))}"
    )


# Python API


def signature(thing: Any) -> str:
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"(: | -> )'([^']*)'", r"\1\2", text.removesuffix(" -> 'None'"))
    return ADDRESS.sub("", text.removesuffix(" -> None"))


def api() -> str:
    chunks = []
    for name in hasten.__all__:
        module = hasten._HOMES[name]
        thing = getattr(importlib.import_module(module), name)
        if module == "peft":
            chunks.append(f"### {name}\n\nPEFT's `{name}`, re-exported.")
            continue
        shown = f"{name}{signature(thing)}"
        if len(shown) > 88:
            shown = shown.replace("(", "(\n    ", 1).replace(", ", ",\n    ")
        text = inspect.getdoc(thing) or ""
        summary = text.partition("\n\n")[0]
        start = re.search(r"^(Args|Returns|Raises|Yields):$", text, re.MULTILINE)
        details = text[start.start() :] if start else ""
        chunk = f"### {name}\n\n{' '.join(summary.split())}\n\n"
        chunk += f"```text\n{shown}\n"
        chunk += f"\n{details}\n" if details else ""
        chunk += "```"
        if inspect.isclass(thing):
            methods = [
                [code(key), first_paragraph(value)]
                for key, value in vars(thing).items()
                if inspect.isfunction(value) and not key.startswith("_") and value.__doc__
            ]
            if methods:
                chunk += "\n\n" + table(("method", "meaning"), methods)
        chunks.append(chunk)
    return "\n\n".join(chunks)


def parts() -> dict[Path, dict[str, str]]:
    """The generated parts of each page."""
    pages = {
        REFERENCE / "cli.md": {"commands": command_line()},
        REFERENCE / "recipe.md": {
            "keys": recipe_keys(),
            "presets": presets(),
            "chat formats": chat_formats(),
        },
        REFERENCE / "metrics.md": {
            "step": step_fields(),
            "summary": field_table(data()["summary"]),
            "exit codes": exit_codes(),
            "exit code 4": exit_code_4(),
            "report": report_keys(),
        },
        REFERENCE / "python-api.md": {"api": api()},
        REFERENCE / "techniques" / "index.md": {"slots": technique_index()},
    }
    for kind in CATALOGUE:
        path = REFERENCE / "techniques" / f"{kind.name()}.md"
        pages[path] = {"head": technique_head(kind)}
    return pages


def filled(text: str, generated: Mapping[str, str], page: str) -> str:
    """The page's text with its generated parts.

    Raises:
        SystemExit: a part's markers are missing, or markers have no part.
    """
    names = re.findall(r"^<!-- generated: (.*?) -->$", text, re.MULTILINE)
    if sorted(names) != sorted(generated):
        raise SystemExit(f"{page}: markers {sorted(names)}, generated parts {sorted(generated)}")
    for name, part in generated.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        head, _, rest = text.partition(begin)
        if end not in rest:
            raise SystemExit(f"{page}: {end} is missing")
        text = f"{head}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    for path, generated in parts().items():
        text = path.read_text(encoding="utf-8")
        new = filled(text, generated, str(path.relative_to(ROOT)))
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
