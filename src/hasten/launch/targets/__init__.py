"""Files that start a job on a cluster.

Targets: plain hosts, Slurm, Kubernetes, SkyPilot.

    Launch (what, where, how long) -> one function per target -> {file: text} -> write

These functions submit nothing and run no user input. ``shlex.quote`` quotes texts in shell
scripts, and ``yaml`` those in YAML files. Names that a scheduler reads are checked.
"""

from hasten.launch.targets.job import TARGETS, Launch
from hasten.launch.targets.writing import files, submission, write

__all__ = ["TARGETS", "Launch", "files", "submission", "write"]
