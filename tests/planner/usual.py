"""Two models, a job and a cluster that tests of the planner share."""

from __future__ import annotations

from hasten.models.architecture import Architecture, Experts
from hasten.planner.cluster import Cluster
from hasten.planner.layout import PlannedJob
from hasten.planner.numbers import Calibration

PLAIN = Calibration()  # before any fit: tests don't depend on measurements
MODEL = Architecture("seven", 32, 4096, 32, 8, 128, 14336, 128256)
SPARSE = Architecture(
    "sparse", 16, 2048, 16, 16, 128, 8192, 32000, moe=Experts(16, 2, 1024, dense_layers=1)
)
JOB = PlannedJob(4096, 256, tokens=1e9)
TWO = Cluster.preset("dgx_h100", 2)
