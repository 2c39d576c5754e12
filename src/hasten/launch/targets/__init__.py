"""Files that start a job on a cluster: for plain hosts, Slurm, Kubernetes, SkyPilot, Megatron-LM.

    Launch (what, where, how long)  ->  one function per target  ->  {file name: text}  ->  write

Nothing is submitted and nothing that a user gave is run or pasted: texts become shell words by
``shlex.quote``, values of YAML by its own writer, and names that a scheduler reads are checked.
"""

from hasten.launch.targets.job import TARGETS, Launch
from hasten.launch.targets.writing import files, submission, write

__all__ = ["TARGETS", "Launch", "files", "submission", "write"]
