"""torchrun over plain hosts: ``node.sh`` for each of them, and ``start.sh`` that goes round by ssh.

Hosts see the folder under the same path (a shared file system). Without ``--hosts`` there is no
``start.sh``: whoever has a terminal on each host runs ``node.sh FIRST_HOST:PORT`` there.
"""

from __future__ import annotations

import shlex

from hasten.launch.targets.job import MARK, Launch
from hasten.launch.targets.node import meeting_at, node_script

# Set by start.sh; a person on a host leaves it to torchrun to find out.
FIRST = (
    '${HASTEN_FIRST:+"--rdzv-conf=is_host=$HASTEN_FIRST"} '
    '${HASTEN_ADDRESS:+"--local-addr=$HASTEN_ADDRESS"}'
)
START = """\
#!/usr/bin/env bash
{mark}: starts node.sh on every host by ssh, and waits.
# Ctrl-C or SIGTERM asks the job to save and leave: the first rank looks for the file `leave`.
set -u
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && printf '%s/' "$PWD")
rm -f -- "${{here}}leave"
heard=0
leave() {{
  heard=1
  touch -- "${{here}}leave"
  echo "asked to leave; waiting for the ranks to save" >&2
}}
trap leave INT TERM
started=()
first=1
for host in {hosts}; do
  # By standard input, so that the host's own shell reads nothing of the path.
  printf 'cd -- %q && HASTEN_FIRST=%d HASTEN_ADDRESS=%q exec bash node.sh\\n' \\
    "$here" "$first" "$host" |
    ssh -o BatchMode=yes -- "$host" bash -s >"$here$host.log" 2>&1 &
  started+=("$!")
  first=0
done
ended=0
for process in "${{started[@]}}"; do
  while :; do # a signal ends bash's wait early
    code=0
    wait "$process" || code=$?
    [ "$heard" = 1 ] || break
    heard=0
  done
  if [ "$code" -gt "$ended" ]; then ended=$code; fi
done
exit "$ended"
"""


def files(launch: Launch) -> dict[str, str]:
    """The scripts and the recipe."""
    first = f"{launch.hosts[0]}:{launch.port}" if launch.hosts else ""
    missing = f"say where ranks meet: node.sh FIRST_HOST:{launch.port}"
    head = f'"${{1:-{first}}}"' if first else f'"${{1:?{missing}}}"'
    text = node_script(launch, meeting_at(launch, launch.nodes, head, launch.name, FIRST))
    found = {"recipe.yaml": launch.recipe, "node.sh": text}
    if launch.hosts:
        hosts = " ".join(map(shlex.quote, launch.hosts))
        found["start.sh"] = START.format(mark=MARK, hosts=hosts)
    return found
