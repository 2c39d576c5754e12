"""``node.sh``, which every node runs whatever started it; and torchrun over plain hosts, by ssh.

    scheduler -> node.sh -> torchrun -> node.sh rank -> hasten train recipe.yaml

A scheduler says that a node goes away by SIGTERM or SIGUSR1. The script hands it to the ranks as
SIGUSR1, upon which all ranks of the job finish their step, save, and end with 75 (EX_TEMPFAIL).
torchrun would take 75 for a failure and start them again on a machine that is about to go; so
``node.sh rank`` turns it into 0 with a mark beside it, and ``node.sh`` turns the mark back into 75.
"""

from __future__ import annotations

import shlex

from hasten.launch.targets.job import Launch, exports, script


def node_script(launch: Launch, meeting: str, preempted_code: int = 75) -> str:
    """The text; ``meeting`` are torchrun's words for nodes and rendezvous, in shell.

    ``preempted_code`` is the code that the scheduler is told where the job was asked to leave.
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
        f'if [ -f "$HASTEN_NODE/left" ]; then code={preempted_code}; fi',
        'exit "$code"',
    ]
    head = script("node_head", left=preempted_code, python=shlex.quote(launch.python))
    return head + "\n".join(lines) + "\n" + script("node_agent") + "\n".join(agent) + "\n"


def meeting_at(launch: Launch, nodes: str, head: str, name: str, first: str) -> str:
    """torchrun's words for nodes that meet at ``head``; each given as shell would read it.

    ``first`` says which node keeps the meeting's store, and the node's own address. Left alone,
    torchrun takes the host's name for both, and waits for ever where that is of another network.
    """
    if launch.cloud.nodes == 1:
        return "--standalone"
    options = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={head} --rdzv-id={name}"
    return f"{options} \\\n  {first}" if first else options


# torchrun over plain hosts: ``node.sh`` for each of them, and ``start.sh`` that goes round by ssh.
#
# Hosts see the folder under the same path (a shared file system). Without ``--hosts`` there is no
# ``start.sh``: whoever has a terminal on each host runs ``node.sh FIRST_HOST:PORT`` there.

# Set by start.sh; a person on a host leaves it to torchrun to find out.
FIRST = (
    '${HASTEN_FIRST:+"--rdzv-conf=is_host=$HASTEN_FIRST"} '
    '${HASTEN_ADDRESS:+"--local-addr=$HASTEN_ADDRESS"}'
)


def files(launch: Launch) -> dict[str, str]:
    """The scripts and the recipe."""
    first = f"{launch.hosts[0]}:{launch.port}" if launch.hosts else ""
    missing = f"say where ranks meet: node.sh FIRST_HOST:{launch.port}"
    head = f'"${{1:-{first}}}"' if first else f'"${{1:?{missing}}}"'
    text = node_script(launch, meeting_at(launch, launch.nodes, head, launch.name, FIRST))
    texts = {"recipe.yaml": launch.recipe, "node.sh": text}
    if launch.hosts:
        hosts = " ".join(map(shlex.quote, launch.hosts))
        texts["start.sh"] = script("start", hosts=hosts)
    return texts
