"""Help of every command: group, documentation page and three examples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer.core

from hasten.machine.signals import interrupt_behind, report_stop

# Groups at the margin; below each its commands with their page in docs/, and three examples.
_TABLE = """
Start
  demo: tutorials/first-run.md
    demo
    demo -o /tmp/demo
    report runs/demo
  init: tutorials/first-run.md
    init deepseek-llm-tiny stdlib
    init deepseek-ai/deepseek-llm-7b-base data/train.jsonl
    init models/qwen2.5-0.5b data/ -o sft.yaml
  import: how-to/import.md
    import sft.yaml -o recipe.yaml
    import axolotl.yml output=runs/sft
    import ds_config.json nproc=8 -o recipe.yaml
  check: how-to/resume.md
    check recipe.yaml
    check recipe.yaml nproc=4 --faults
    check --ds-config ds_config.json
Train
  train: reference/recipe.md
    train recipe.yaml
    train recipe.yaml max_steps=100 plan=auto
    train recipe.yaml nproc=4 max_restarts=3 resume=auto
  export: how-to/use-the-model.md
    export runs/sft -o exported
    export runs/sft -o gguf --to gguf --gguf-type q8_0
    export runs/lora -o adapter --adapter --push me/my-adapter
  chat: how-to/use-the-model.md
    chat runs/sft
    chat runs/sft --compare base
    chat runs/sft --weights best
  eval: how-to/use-the-model.md
    eval runs/sft
    eval runs/sft --tasks questions.jsonl --limit 100
    eval runs/sft --tasks task.yaml -o results.json
  checkpoint: reference/techniques/checkpoints.md
    checkpoint ls runs/sft
    checkpoint verify runs/sft
    checkpoint convert models/old -o models/new
  checkpoint ls: reference/techniques/checkpoints.md
    checkpoint ls runs/sft
    checkpoint ls runs/sft/checkpoints
    checkpoint ls /shared/checkpoints
  checkpoint verify: reference/techniques/checkpoints.md
    checkpoint verify runs/sft
    checkpoint verify runs/sft/checkpoints/step-00000100
    checkpoint verify /shared/checkpoints
  checkpoint diff: reference/techniques/checkpoints.md
    checkpoint diff runs/a runs/b
    checkpoint diff runs/a/checkpoints/step-00000050 runs/a/checkpoints/step-00000100
    checkpoint diff runs/a /shared/checkpoints
  checkpoint convert: reference/techniques/checkpoints.md
    checkpoint convert models/old -o models/new
    checkpoint convert pytorch_model.bin -o models/new
    checkpoint convert models/v3 --to deepseek_v32 -o models/sparse
Measure
  speedup: tutorials/which-technique-pays.md
    speedup recipe.yaml --budget 20m
    speedup recipe.yaml --design leave-one-out --write
    speedup --rerun runs/before --tolerance 0.05
  verify: explanation/measuring.md
    verify recipe.yaml
    verify recipe.yaml --seeds 3 --budget 1h
    verify recipe.yaml --json
  tune: how-to/tune.md
    tune recipe.yaml --budget 10m
    tune recipe.yaml --objective memory --budget 20m
    tune recipe.yaml --only packed,fused_layers --write
  profile: tutorials/which-technique-pays.md
    profile recipe.yaml
    profile recipe.yaml --steps 20 --json
    profile recipe.yaml nproc=2 -o profiles
Look
  report: tutorials/which-technique-pays.md
    report runs/sft
    report runs/a runs/b
    report runs/sft output/trainer_state.json --json
  monitor: how-to/monitor.md
    monitor runs/sft
    monitor runs --terminal
    monitor runs --alert '["notify-send", "hasten"]'
  data: how-to/data.md
    data inspect recipe.yaml
    data stats recipe.yaml
    data pack recipe.yaml -o rows.parquet
  data inspect: how-to/data.md
    data inspect recipe.yaml
    data inspect recipe.yaml --count 10
    data inspect recipe.yaml dataset=other.jsonl chat_template=qwen3
  data stats: how-to/data.md
    data stats recipe.yaml
    data stats recipe.yaml -o stats.html
    data stats recipe.yaml cutoff_len=4096 --json
  data pack: how-to/data.md
    data pack recipe.yaml
    data pack recipe.yaml -o rows.arrow
    data pack recipe.yaml --row-tokens 4096 --force
  data convert: how-to/data.md
    data convert data/train.parquet -o train.jsonl
    data convert a.json b.csv -o all.jsonl
    data convert data/ --max-rejected 10 -o all.jsonl
  env: reference/models.md
    env
    env --no-measure --json
    env --bench -o rates.json
  keys: reference/recipe.md
    keys
    keys learning_rate
    keys gradient_accumulation --json
Cluster
  estimate: how-to/estimate.md
    estimate deepseek-llm-7b --cluster dgx_h100 --nodes 4
    estimate recipe.yaml --gpu a100 --gpus-per-node 4
    estimate recipe.yaml --gpu h100 -o estimate.html
  launch: how-to/several-gpus.md
    launch recipe.yaml --nodes 2 --hosts a,b
    launch recipe.yaml --target slurm --nodes 4 --time 24h
    launch recipe.yaml --target kubernetes --dry-run
"""


class CommandHelp(NamedTuple):
    """The parts of the help of a command besides its summary and options."""

    group: str
    page: str
    examples: list[str]

    @property
    def epilog(self) -> str:
        lines = [f"  hasten {example}" for example in self.examples]
        # \b keeps the lines of a paragraph as they are.
        return "\n".join(["\b", "Examples:", *lines, "", f"Documentation: {self.page}"])


def _read_table() -> Iterator[tuple[str, CommandHelp]]:
    group, examples = "", list[str]()
    for line in _TABLE.strip().splitlines():
        text = line.strip()
        indent = len(line) - len(text)
        if indent == 0:
            group = text
        elif indent == 2:
            name, _, page = text.partition(": ")
            examples = []
            yield name, CommandHelp(group, f"docs/{page}", examples)
        else:
            examples.append(text)


HELP = dict(_read_table())
GROUPS = list(dict.fromkeys(entry.group for entry in HELP.values()))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        interrupt = interrupt_behind(error)
        if interrupt is None:
            raise
        raise typer.Exit(report_stop(interrupt)) from None


class CommandGroup(typer.core.TyperGroup):
    """A group of commands; its help lists them by group, with uncut summaries.

    It prints a line if a signal ends a command before it can save; typer prints nothing.
    """

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        with _reported():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _reported():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                summary = (command.help or "").strip().partition("\n")[0]
                section = getattr(command, "rich_help_panel", None) or "Commands"
                sections.setdefault(section, []).append((name, summary))
        for section in sorted(sections, key=lambda s: GROUPS.index(s) if s in GROUPS else -1):
            with formatter.section(section):
                formatter.write_dl(sections[section])
