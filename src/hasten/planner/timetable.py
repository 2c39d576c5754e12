"""The timetable of a pipeline as a drawing: a row per rank, a box per piece of work."""

from __future__ import annotations

from hasten.planner.schedules import Event, StageSeconds, Timetable, orders, simulate
from hasten.report.svg import px, rect, svg, svg_text

MOST_CELLS = 3000  # more boxes than that are slow to show and can't be told apart
LEFT, TOP, ROW = 64.0, 8.0, 24.0
NAMES = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
STYLE = (
    "<style>text{font:11px system-ui,sans-serif;fill:#555}.mid{text-anchor:middle;fill:#fff}"
    ".F{fill:#2a6fb0}.B{fill:#3a7d44}.I{fill:#5a9a63}.W{fill:#b5651d}.lane{fill:#8882}"
    ".end{text-anchor:end}</style>"
)


def drawing(table: Timetable, title: str, width: int = 960) -> str:
    """The timetable as one SVG; what a box is appears under the mouse."""
    scale = (width - LEFT - 8) / table.seconds
    height = TOP + ROW * table.ranks + 44
    body = [STYLE]
    for rank in range(table.ranks):
        y = TOP + ROW * rank
        body.append(rect("lane", LEFT, y, width - LEFT - 8, ROW - 4))
        body.append(svg_text("", 4, y + 14, f"rank {rank}"))
    for event in table.events:
        body += _boxes(event, scale)
    below = TOP + ROW * table.ranks
    body.append(svg_text("", LEFT, below + 12, "0"))
    body.append(svg_text("end", width - 8, below + 12, f"{table.seconds:.3g} s"))
    used = {op[0] for event in table.events for op in event.cell}
    for place, kind in enumerate(k for k in NAMES if k in used):
        body.append(rect(kind, LEFT + 170 * place, below + 22, 12, 12))
        body.append(svg_text("", LEFT + 170 * place + 18, below + 32, NAMES[kind]))
    account = (f"{table.ranks} ranks", f"{table.idle_share:.1%} of their time idle")
    return svg(title, account, (width, height), body)


def _boxes(event: Event, scale: float) -> list[str]:
    """A cell's boxes, those of two that overlap one above the other, with their numbers."""
    x, wide = LEFT + event.start * scale, max((event.end - event.start) * scale - 0.5, 0.3)
    tall = (ROW - 4) / len(event.cell)
    found = []
    for place, (kind, stage, micro) in enumerate(event.cell):
        y = TOP + ROW * event.rank + tall * place
        said = f"{NAMES[kind]} of micro-batch {micro}, stage {stage}"
        found.append(rect(kind, x, y, wide, tall, said))
        if wide > 7 * len(str(micro)) and len(event.cell) == 1:
            found.append(
                f'<text class="mid" x="{px(x + wide / 2)}" y="{px(y + 14)}">{micro}</text>'
            )
    return found


def draw_schedule(
    schedule: str, stages: int, micro_batches: int, virtual: int, seconds: StageSeconds
) -> str:
    """A schedule drawn with its stages' own lengths.

    Of many micro-batches only so many are drawn that all phases are seen; the title says so.
    """
    fits = MOST_CELLS // (3 * stages * virtual)
    few = max(2 * stages, fits // stages * stages)
    shown = min(micro_batches, few)
    table = simulate(orders(schedule, stages, shown, virtual), seconds)
    title = f"{schedule}, {stages} stages, {shown} micro-batches"
    title += f" drawn of {micro_batches}" if shown < micro_batches else ""
    return drawing(table, title)
