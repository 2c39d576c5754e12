"""A pipeline's pace in closed form: its slowest stage, and the idle time at its two ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hasten.planner.layout import SCHEDULES, Column, Layouts
from hasten.planner.numbers import ModelNumbers, Value

ZB1P, ZB2P, DUALPIPE = (SCHEDULES.index(s) for s in ("zb1p", "zb2p", "dualpipe"))


@dataclass(frozen=True)
class StageLayers:
    """Layers of the first stage, of the fullest and of the last, a rank's chunks together."""

    first: Column
    most: Column
    last: Column


def stage_layers(layers: Value, stages: Value, virtual: Value) -> StageLayers:
    """Layers dealt evenly; where that doesn't go, embedding and head count as a layer each.

    So 126 layers make 128 stages of which the first and the last have one layer fewer (Llama 3,
    arXiv 2407.21783, section 3.3.2). Where that doesn't go either, the last stage gets what is
    left. Without stages all three are all layers.
    """
    virtual = np.where(np.asarray(stages) > 1, virtual, 1)
    chunks = stages * virtual
    most = np.ceil(layers / chunks) * virtual
    ends = (np.mod(layers, chunks) > 0) & (np.mod(layers + 2, chunks) == 0)
    left = np.maximum(layers - most * (stages - 1), 0)
    return StageLayers(np.where(ends, most - 1, most), most, np.where(ends, most - 1, left))


def stage_seconds(
    model: ModelNumbers, layouts: Layouts, layers: Column, head: Column
) -> tuple[Column, Column]:
    """Seconds of the slowest stage and of the mean one for a micro-batch, both directions.

    ``layers`` are those of all layers together; the last stage has the head as well.
    """
    dealt = stage_layers(model.layers, layouts.pp, layouts.virtual)
    one = layers / model.layers
    slow = np.maximum(dealt.most * one, dealt.last * one + head)
    mean = (layers + head) / layouts.pp
    return np.where(layouts.pp > 1, np.maximum(slow, mean), mean), mean


def bubble_stages(layouts: Layouts) -> Column:
    """Idle time in mean stage times, with a backward pass of two forward passes' length.

    1F1B and GPipe (P-1)(F+B), interleaved a v-th of it (arXiv 2104.04473), ZB1P (P-1)(F+B-2W)
    (arXiv 2401.10241), DualPipe (P/2-1)(F&B+B-3W) (arXiv 2412.19437); F = W = B/2 = 1/3.
    """
    P, code = layouts.pp, layouts.schedule
    idle = (P - 1) / layouts.virtual
    idle = np.where(code == ZB1P, (P - 1) / 3, idle)
    idle = np.where(code == ZB2P, 0.0, idle)
    return np.where(code == DUALPIPE, np.maximum(P / 2 - 1, 0) * 2 / 3, idle)
