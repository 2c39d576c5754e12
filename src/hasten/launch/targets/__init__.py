"""Files that start a job on a cluster.

Targets: plain hosts, Slurm, Kubernetes, SkyPilot.

    Launch (what, where, how long) -> one function per target -> {file: text} -> write

Nothing is submitted, and no user input is run or pasted. Texts become shell words by
``shlex.quote``, and values of YAML by its own writer. Names that a scheduler reads are
checked.
"""

from hasten.launch.targets.job import TARGETS, Launch
from hasten.launch.targets.writing import files, submission, write

__all__ = ["TARGETS", "Launch", "files", "submission", "write"]
