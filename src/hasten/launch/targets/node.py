"""``node.sh``: what every node runs, whatever started it: torchrun's agent, and so the ranks.

    scheduler -> node.sh -> torchrun -> node.sh rank -> hasten train recipe.yaml

A scheduler says that a node goes away by SIGTERM or SIGUSR1. The script hands it to the ranks as
SIGUSR1, upon which all ranks of the job finish their step, save, and end with 75 (EX_TEMPFAIL).
torchrun would take 75 for a failure and start them again on a machine that is about to go; so
``node.sh rank`` turns it into 0 with a mark beside it, and ``node.sh`` turns the mark back into 75.
"""

from __future__ import annotations

import shlex

from hasten.launch.targets.environment import exports
from hasten.launch.targets.job import MARK, Launch

HEAD = """\
#!/usr/bin/env bash
{mark}: starts the ranks of one node; every node runs this file.
#   node.sh         the agent of this node, which starts the ranks and waits for them
#   node.sh rank    one rank
# It ends with hasten's exit codes; {left}: the job was asked to leave, has saved, and can go on.
set -u
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && printf '%s/' "$PWD") # ends in no newline
python={python}
heard=0
wait_for() {{ # a signal ends bash's wait early: wait until none did
  while :; do
    code=0
    wait "$1" || code=$?
    [ "$heard" = 1 ] || return 0
    heard=0
  done
}}

if [ "${{1-}}" = rank ]; then
  trap 'heard=1' TERM INT # torchrun tells the rank as well
  rm -f -- "$HASTEN_NODE/left"
  "$python" -m hasten train "${{here}}recipe.yaml" &
  echo "$!" >"$HASTEN_NODE/rank-$LOCAL_RANK"
  wait_for "$!"
  if [ "$code" = 75 ]; then
    touch -- "$HASTEN_NODE/left"
    code=0
  fi
  exit "$code"
fi

"""
AGENT = """
HASTEN_NODE=$(mktemp -d) || exit 1
export HASTEN_NODE
trap 'rm -rf -- "$HASTEN_NODE"' EXIT
leave() {
  heard=1
  for mark in "$HASTEN_NODE"/rank-*; do
    if [ -f "$mark" ]; then kill -USR1 "$(cat -- "$mark")" 2>/dev/null; fi
  done
}
trap leave TERM USR1 INT
# A session of its own: schedulers signal the whole group, and torchrun dies of SIGUSR1.
"""


def node_script(launch: Launch, meeting: str, left: int = 75) -> str:
    """The text; ``meeting`` are torchrun's words for nodes and rendezvous, in shell.

    ``left`` is the code that the scheduler is told where the job was asked to leave.
    """
    lines = [
        *exports(launch.cloud, launch.interface, launch.grace),
        "",
        f"cd -- {shlex.quote(launch.workdir)} || exit 2",
    ]
    agent = [
        'setsid "$python" -m torch.distributed.run \\',
        *([f"  {meeting} \\"] if meeting else []),
        f"  --nproc-per-node={launch.cloud.gpus_per_node} --max-restarts={launch.restarts} \\",
        '  --no-python bash "${here}node.sh" rank &',
        'wait_for "$!"',
        f'if [ -f "$HASTEN_NODE/left" ]; then code={left}; fi',
        'exit "$code"',
    ]
    head = HEAD.format(mark=MARK, left=left, python=shlex.quote(launch.python))
    return head + "\n".join(lines) + "\n" + AGENT + "\n".join(agent) + "\n"


def meeting_at(launch: Launch, nodes: str, head: str, name: str, first: str) -> str:
    """torchrun's words for nodes that meet at ``head``; each given as shell would read it.

    ``first`` says which node keeps the meeting's store, and the node's own address. Left alone,
    torchrun takes the host's name for both, and waits for ever where that is of another network.
    """
    if launch.cloud.nodes == 1:
        return "--standalone"
    words = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={head} --rdzv-id={name}"
    return f"{words} \\\n  {first}" if first else words
