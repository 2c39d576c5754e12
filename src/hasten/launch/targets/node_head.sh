#!/usr/bin/env bash
@mark@: starts the ranks of one node; every node runs this file.
#   node.sh         the agent of this node, which starts the ranks and waits for them
#   node.sh rank    one rank
# It ends with hasten's exit codes; @left@: the job was asked to leave, has saved, and can go on.
set -u
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && printf '%s/' "$PWD") # ends in no newline
python=@python@
heard=0
wait_for() { # a signal ends bash's wait early: wait until none did
  while :; do
    code=0
    wait "$1" || code=$?
    [ "$heard" = 1 ] || return 0
    heard=0
  done
}

if [ "${1-}" = rank ]; then
  trap 'heard=1' TERM INT # torchrun tells the rank as well
  rm -f -- "$HASTEN_NODE/left"
  "$python" -m hasten train "${here}recipe.yaml" &
  echo "$!" >"$HASTEN_NODE/rank-$LOCAL_RANK"
  wait_for "$!"
  if [ "$code" = 75 ]; then
    touch -- "$HASTEN_NODE/left"
    code=0
  fi
  exit "$code"
fi

