"""Pipeline schedules as explicit orders, and a simulator that makes their timetable.

A schedule gives the order of work of each rank. F is the forward pass and B the full
backward pass of a micro-batch through a stage. I is its half that computes the gradient
of the input, the only half that the previous stage waits for. W is the half that
computes the gradient of the weights. The simulator is independent of schedules: it
starts each piece of work as soon as its rank and its inputs are available. Stages may
therefore differ in length, which closed forms don't allow (``bubble_stages``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from hasten.errors import InputError
from hasten.models.architecture import Architecture
from hasten.parts.distributed.pipeline.schedules import orders as trained
from hasten.parts.distributed.pipeline.timetable import StageEvent, drawing
from hasten.planner.candidate import PlanCandidate, Span
from hasten.planner.layout import Layouts, PlannedLayout, why_impossible
from hasten.planner.seconds import bubble_stages, stage_seconds

Op = tuple[str, int, int]  # kind, stage, micro-batch
Cell = tuple[Op, ...]  # what a rank does at a time: one piece, or two that overlap (DualPipe)
Orders = list[list[Cell]]  # by rank


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in each stage: forward, gradient of inputs, of weights."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def even(cls, stages: int, forward: float, inputs: float, weights: float) -> StageSeconds:
        return cls((forward,) * stages, (inputs,) * stages, (weights,) * stages)

    def __call__(self, op: Op) -> float:
        kind, stage, _ = op
        if kind == "F":
            return self.forward[stage]
        backward = 0.0 if kind == "W" else self.inputs[stage]
        return backward + (0.0 if kind == "I" else self.weights[stage])


def orders(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> Orders:
    """The order of work on each of ``stages`` ranks.

    Raises:
        InputError: a schedule that has no such order, and for which numbers it has one.
    """
    problem = why_impossible(schedule, stages, micro_batches, virtual)
    if problem:
        raise InputError(problem)
    if schedule == "interleaved":
        return _interleaved(stages, micro_batches, virtual)
    if schedule == "zb1p":
        return _zb1p(stages, micro_batches)
    if schedule == "dualpipe":
        return [_dualpipe(rank, stages, micro_batches) for rank in range(stages)]
    return [[(op,) for op in of_rank] for of_rank in trained(schedule, stages, micro_batches)]


def simulate(order: Orders, seconds: Callable[[Op], float]) -> list[StageEvent]:
    """The timetable of an order of passes that take ``seconds``, all of the stages' first to last.

    A cell of two takes the sum of both; its passes have the same start and end.

    Raises:
        ValueError: ranks wait for each other for ever, so the order is none.
    """
    ranks, last = len(order), max(op[1] for cells in order for cell in cells for op in cell)
    ends: dict[Op, float] = {}
    at, clock = [0] * ranks, [0.0] * ranks
    events: list[StageEvent] = []
    moved = True
    while moved:
        moved = False
        for rank, cells in enumerate(order):
            while at[rank] < len(cells):
                cell = cells[at[rank]]
                needed = [ends.get(need) for op in cell for need in _needs(op, last)]
                if None in needed:
                    break
                start = max([clock[rank], *(n for n in needed if n is not None)])
                clock[rank] = start + sum(map(seconds, cell))
                for op in cell:  # the halves of a backward pass end like the whole of one
                    ends[("B" if op[0] == "I" else op[0], op[1], op[2])] = clock[rank]
                    events.append(StageEvent(rank, *op, start, clock[rank]))
                at[rank] += 1
                moved = True
    if any(at[rank] < len(cells) for rank, cells in enumerate(order)):
        raise ValueError("in this order ranks wait for each other for ever")
    return events


def _needs(op: Op, last: int) -> list[Op]:
    kind, stage, micro = op
    if kind == "F":
        return [("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [("B", stage, micro)]
    after: list[Op] = [("B", stage + 1, micro)] if stage < last else []
    return [("F", stage, micro), *after]


def _one(kind: str, stage: int, micro: int) -> Cell:
    return ((kind, stage, micro),)


def _interleaved(P: int, M: int, v: int) -> Orders:
    """Megatron's order: rank r has stages r, r+P, ...; micro-batches travel in groups of P."""
    ahead_of = [(c, g + i) for g in range(0, M, P) for c in range(v) for i in range(P)]
    back = [(v - 1 - c, m) for c, m in ahead_of]
    rank_orders = []
    for r in range(P):
        total = M * v
        ahead = min(total, (P - r - 1) * 2 + (v - 1) * P)
        forward = [_one("F", c * P + r, m) for c, m in ahead_of]
        backward = [_one("B", c * P + r, m) for c, m in back]
        cells = forward[:ahead]
        for k in range(total - ahead):
            cells += [forward[ahead + k], backward[k]]
        rank_orders.append(cells + backward[total - ahead :])
    return rank_orders


def _zb1p(P: int, M: int) -> Orders:
    """1F1B with the weights' gradients of rank r delayed by r micro-batches.

    All ranks therefore keep P micro-batches, and each has weights' work left to fill the
    end.
    """
    rank_orders = []
    for r in range(P):
        ahead = min(P - 1 - r, M)
        cells = [_one("F", r, m) for m in range(ahead)]
        done = 0
        for m in range(M):
            if ahead + m < M:
                cells.append(_one("F", r, ahead + m))
            cells.append(_one("I", r, m))
            if m >= r:
                cells.append(_one("W", r, done))
                done += 1
        rank_orders.append(cells + [_one("W", r, m) for m in range(done, M)])
    return rank_orders


def _dualpipe(rank: int, P: int, M: int) -> list[Cell]:  # noqa: C901  # the schedule's eight phases
    """The eight phases of DeepSeek's DualPipe (github.com/deepseek-ai/DualPipe, dualpipe.py).

    Half of the micro-batches enter at each end; rank r has stages r and P-1-r. Phase 0 is the
    direction in which the rank's own half of the pipeline is nearer to the entrance.
    """
    half, mirrored = P // 2, rank >= P // 2
    near = min(rank, P - 1 - rank)
    counts = {"F": [0, 0], "B": [0, 0]}
    waiting: deque[Cell] = deque()
    cells: list[Cell] = []

    def next_op(kind: str, phase: int) -> Op:
        way = phase ^ int(mirrored)
        number = counts[kind][way]
        counts[kind][way] += 1
        return kind, (P - 1 - rank if way else rank), number + (M // 2 if way else 0)

    def forward(phase: int) -> None:
        cells.append((next_op("F", phase),))

    def backward(phase: int, split_weights: bool = False) -> None:
        kind, stage, micro = next_op("B", phase)
        cells.append((("I" if split_weights else kind, stage, micro),))
        if split_weights:
            waiting.append(_one("W", stage, micro))

    def both(ahead: int, back: int) -> None:
        cells.append((next_op("F", ahead), next_op("B", back)))

    for _ in range((half - near - 1) * 2):  # 1: F0
        forward(0)
    for _ in range(near + 1):  # 2: F0 F1
        forward(0)
        forward(1)
    for _ in range(half - near - 1):  # 3: I1 W1 F1
        backward(1, split_weights=True)
        cells.append(waiting.popleft())
        forward(1)
    for turn in range(M // 2 - P + near + 1):  # 4, most of the time: F0&B1 F1&B0
        if turn == 0 and near == half - 1:
            forward(0)
            backward(1)
        else:
            both(0, 1)
        both(1, 0)
    for _ in range(half - near - 1):  # 5: B1 F1&B0
        backward(1)
        both(1, 0)
    for turn in range(near + 1):  # 6: B1 B0, the second half of them without weights
        late = turn > (near + 1) // 2 or (turn == (near + 1) // 2 and near % 2 == 1)
        backward(1, split_weights=late)
        backward(0, split_weights=late or turn == (near + 1) // 2)
    for _ in range(half - near - 1):  # 7: W I0
        cells.append(waiting.popleft())
        backward(0, split_weights=True)
    cells.extend(waiting)  # 8: W
    return cells


# The pipeline of one candidate played through, and its timetable as a drawing.
#
# A prediction of many layouts at once takes the schedule's closed form. For the few that matter the
# order itself is simulated, with layers dealt to uneven stages so that the slowest is as quick as
# can be; the last stage has the head and the loss, which weigh as much as several layers where the
# vocabulary is long. What was predicted of the rest of the step stays.

PLAYED = 2, 3  # of many micro-batches so many times twice the stages are played
PIPELINE = ("compute", "attention", "head", "recompute", "tp", "pp", "ep")


@dataclass(frozen=True)
class PlannedMicroBatch:
    """Seconds of one micro-batch: through all layers, the head, and handing over on one rank."""

    forward: float
    inputs: float
    weights: float
    head: float
    sends: float

    @property
    def layers(self) -> float:
        return self.forward + self.inputs + self.weights


def resimulated(model: Architecture, candidate: PlanCandidate, lora: bool = False) -> PlanCandidate:
    """The candidate with its pipeline simulated; as it is where it has none, or ends as stages."""
    layout, count = candidate.layout, candidate.micro_batches
    if layout.pp == 1 or layout.pp * layout.virtual > model.layers:
        return candidate
    if why_impossible(layout.schedule, layout.pp, count, layout.virtual):
        return candidate
    one = micro_batch(model, candidate, lora)
    layers, seconds = stages(model, layout, one)
    pipeline = pipeline_seconds(layout, count, seconds)
    before = sum(candidate.step_parts[part] for part in PIPELINE)
    parts = candidate.step_parts | {"pp": candidate.step_parts["pp"] + pipeline - before}
    ratio = sum(parts.values()) / candidate.step_seconds.middle
    rate = candidate.tokens_per_second_per_device
    return replace(
        candidate,
        step_parts=parts,
        step_seconds=candidate.step_seconds.times(ratio),
        tokens_per_second_per_device=Span(*(v / ratio for v in (rate.middle, rate.low, rate.high))),
        mfu=candidate.mfu / ratio,
        simulated=True,
        stage_layers=layers,
    )


def pipeline_seconds(layout: PlannedLayout, count: int, seconds: StageSeconds) -> float:
    """Seconds of a step's pipeline.

    A full pipeline repeats the same work. With many micro-batches, two shorter steps are
    simulated, and their difference is the cost of each further micro-batch.
    """

    def played(micro_batches: int) -> float:
        order = orders(layout.schedule, layout.pp, micro_batches, layout.virtual)
        return max(event.end for event in simulate(order, seconds))

    few, more = (2 * times * layout.pp for times in PLAYED)
    if count <= more:
        return played(count)
    one, other = played(few), played(more)
    return one + (count - few) * (other - one) / (more - few)


def micro_batch(model: Architecture, candidate: PlanCandidate, lora: bool) -> PlannedMicroBatch:
    """One micro-batch's seconds, calculated from those of a step.

    Forward to backward, products have the ratio 1:2 and attention 1:2.5. Half of the
    backward products are weights' gradients (none for frozen weights). Recomputation
    precedes backward.
    """
    layout, count = candidate.layout, candidate.micro_batches
    part = {name: value * layout.pp / count for name, value in candidate.step_parts.items()}
    products, attention, comm_seconds = part["compute"], part["attention"], part["tp"] + part["ep"]
    weights = 0.0 if lora else products / 3
    forward = products / (2 if lora else 3) + attention / 3.5 + comm_seconds / 2
    total_seconds = products + attention + comm_seconds + part["recompute"]
    # Taken apart as the prediction put it together: uneven stages, handing over, bubble.
    rows = Layouts.of([layout])
    slow, mean = stage_seconds(model.layers, rows, total_seconds, part["head"])
    bubble = float(bubble_stages(rows)[0])
    waits = candidate.step_parts["pp"] - count * float((slow - mean)[0]) - bubble * float(mean[0])
    sends = max(0.0, waits / (count + bubble))
    return PlannedMicroBatch(
        forward, total_seconds - forward - weights, weights, part["head"], sends
    )


def stages(
    model: Architecture, layout: PlannedLayout, one: PlannedMicroBatch
) -> tuple[tuple[int, ...], StageSeconds]:
    """Layers per stage (of every chunk where stages are interleaved), and their seconds."""
    chunks = layout.pp * layout.virtual
    layers = layers_per_stage(model.layers, chunks, one.head / (one.layers / model.layers))
    send = one.sends / layout.virtual / 2
    forward, inputs, weights = (
        [getattr(one, name) / model.layers * n for n in layers]
        for name in ("forward", "inputs", "weights")
    )
    for part in (forward, inputs, weights):
        part[-1] += one.head / 3
    return tuple(layers), StageSeconds(
        tuple(s + send for s in forward), tuple(s + send for s in inputs), tuple(weights)
    )


def layers_per_stage(layers: int, stages: int, head: float) -> list[int]:
    """Layers of each stage, the last of which also has a head as long as ``head`` layers.

    One layer at a time to the stage that is least loaded: the largest load is then the least
    possible, since all layers are alike.
    """
    counts = [1] * stages
    loads = [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(layers - stages):
        least = min(range(stages), key=loads.__getitem__)
        counts[least] += 1
        loads[least] += 1
    return counts


MOST_CELLS = 3000  # more boxes than that are slow to show and can't be told apart


def draw_schedule(
    schedule: str, stages: int, micro_batches: int, virtual: int, seconds: StageSeconds
) -> str:
    """Draws a schedule with the lengths of its stages.

    With many micro-batches, only enough are drawn to show all phases, and the title states
    this.
    """
    fits = MOST_CELLS // (3 * stages * virtual)
    few = max(2 * stages, fits // stages * stages)
    shown = min(micro_batches, few)
    events = simulate(orders(schedule, stages, shown, virtual), seconds)
    title = f"{schedule}, {stages} stages, {shown} micro-batches"
    title += f" drawn of {micro_batches}" if shown < micro_batches else ""
    return drawing(events, title)
