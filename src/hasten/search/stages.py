"""A pipeline's pace in closed form: its slowest stage, and the idle time at its two ends."""

from __future__ import annotations

import numpy as np

from hasten.search.layout import SCHEDULES, Column, Layouts
from hasten.search.quantities import ModelNumbers

ZB1P, ZB2P, DUALPIPE = (SCHEDULES.index(s) for s in ("zb1p", "zb2p", "dualpipe"))


def stage_seconds(
    model: ModelNumbers, layouts: Layouts, layers: Column, head: Column
) -> tuple[Column, Column]:
    """Seconds of the slowest stage and of the mean one for a micro-batch, both directions.

    Where layers don't divide evenly the last stage, which has the head, gets the fewer.
    """
    most: Column
    chunks = layouts.pp * layouts.virtual
    most = np.ceil(model.layers / chunks) * layouts.virtual
    missing = most * layouts.pp - model.layers
    one = layers / model.layers
    slow = np.maximum(most * one, np.maximum(most - missing, 0) * one + head)
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
