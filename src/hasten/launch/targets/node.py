"""``node.sh``, which every node runs with any launcher; and torchrun over ssh.

For plain hosts, torchrun is started by ssh.

    scheduler -> node.sh -> torchrun -> node.sh rank -> hasten train recipe.yaml

A scheduler announces the loss of a node by SIGTERM or SIGUSR1. The script passes it to
the ranks as SIGUSR1. Then all ranks of the job finish their step, save, and end with 75
(EX_TEMPFAIL). If torchrun received 75, it would take it for a failure. It would restart
the ranks on a machine that is about to be lost. So ``node.sh rank`` turns 75 into 0 and
writes a mark, and ``node.sh`` turns the mark back into 75.
"""

from __future__ import annotations

import shlex

from hasten.launch.targets.job import Launch, exports, script


def node_script(launch: Launch, meeting: str, preempted_code: int = 75) -> str:
    """Returns the script's text; ``meeting``: torchrun's options for nodes and rendezvous.

    The options are in shell syntax. ``preempted_code`` is the code for the scheduler if the
    job received a stop signal.
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
    """Returns torchrun's options for nodes that meet at ``head``, each in shell syntax.

    ``first`` contains the options for the node that keeps the meeting's store, and for the
    node's own address. Without it, torchrun uses the host's name for both. It would wait
    forever if that name belongs to another network.
    """
    if launch.cloud.nodes == 1:
        return "--standalone"
    options = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={head} --rdzv-id={name}"
    return f"{options} \\\n  {first}"


# torchrun over plain hosts: ``node.sh`` runs on each, and ``start.sh`` starts it by ssh.
#
# The folder has the same path on all hosts (a shared file system). Without ``--hosts`` there is no
# ``start.sh``: the user runs ``node.sh FIRST_HOST:PORT`` on each host.

# start.sh sets these variables; without them torchrun finds out by itself.
FIRST = (
    '${HASTEN_FIRST:+"--rdzv-conf=is_host=$HASTEN_FIRST"} '
    '${HASTEN_ADDRESS:+"--local-addr=$HASTEN_ADDRESS"}'
)


def files(launch: Launch) -> dict[str, str]:
    """Returns the scripts and the recipe."""
    first = f"{launch.hosts[0]}:{launch.port}" if launch.hosts else ""
    missing = f"give the address where ranks meet: node.sh FIRST_HOST:{launch.port}"
    head = f'"${{1:-{first}}}"' if first else f'"${{1:?{missing}}}"'
    text = node_script(launch, meeting_at(launch, launch.nodes, head, launch.name, FIRST))
    texts = {"recipe.yaml": launch.recipe, "node.sh": text}
    if launch.hosts:
        hosts = " ".join(map(shlex.quote, launch.hosts))
        texts["start.sh"] = script("start", hosts=hosts)
    return texts
