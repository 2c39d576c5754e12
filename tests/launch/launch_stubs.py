"""Stand-ins for programs of a cluster: small scripts that note how they were called."""

from __future__ import annotations

from pathlib import Path

PYTHON = """#!/usr/bin/env bash
# python: an agent (torch.distributed.run) starts one rank as torchrun would; a rank trains
here=$(dirname -- "$0")
printf '%s\\0' "$PWD" "$@" >"$here/called-$2"
if [ "$2" = torch.distributed.run ]; then
  while [ "$1" != --no-python ]; do shift; done
  shift
  LOCAL_RANK=0 "$@"
  exit $?
fi
if [ -e "$here/slow" ]; then
  trap 'exit 75' USR1
  until [ -s "$HASTEN_NODE/rank-$LOCAL_RANK" ]; do sleep 0.01; done # the node knows its number
  touch "$here/training"
  while :; do sleep 0.05; done
fi
exit "$(cat "$here/ends" 2>/dev/null || echo 0)"
"""
SRUN = """#!/usr/bin/env bash
# srun: signals it gets go to the task's whole group
while [ "$1" != bash ]; do shift; done
heard=0
trap 'heard=1; kill -USR1 -- "-$!"' USR1
SLURM_NODEID=0 setsid "$@" &
while :; do # a signal ends the wait early; who has ended in between is waited for all the same
  wait "$!"
  code=$?
  [ "$heard" = 1 ] || exit "$code"
  heard=0
done
"""
SCONTROL = """#!/usr/bin/env bash
# scontrol: names of hosts, and a note of what is queued again
if [ "$1" = show ]; then printf 'node1\\nnode2\\n'; else echo "$@" >>"$NOTES"; fi
"""


def program(place: Path, text: str) -> Path:
    """Make it a program."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    place.chmod(0o755)
    return place


def called(place: Path, module: str) -> list[str]:
    """The work folder and the words with which the stand-in for Python was called."""
    return (place.parent / f"called-{module}").read_bytes().decode().split("\0")[:-1]
