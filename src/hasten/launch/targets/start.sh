#!/usr/bin/env bash
@mark@: starts node.sh on every host by ssh, and waits.
# Ctrl-C or SIGTERM asks the job to save and leave: the first rank looks for the file `leave`.
set -u
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && printf '%s/' "$PWD")
rm -f -- "${here}leave"
heard=0
leave() {
  heard=1
  touch -- "${here}leave"
  echo "asked to leave; waiting for the ranks to save" >&2
}
trap leave INT TERM
started=()
first=1
for host in @hosts@; do
  # By standard input, so that the host's own shell reads nothing of the path.
  printf 'cd -- %q && HASTEN_FIRST=%d HASTEN_ADDRESS=%q exec bash node.sh\n' \
    "$here" "$first" "$host" |
    ssh -o BatchMode=yes -- "$host" bash -s >"$here$host.log" 2>&1 &
  started+=("$!")
  first=0
done
ended=0
for process in "${started[@]}"; do
  while :; do # a signal ends bash's wait early
    code=0
    wait "$process" || code=$?
    [ "$heard" = 1 ] || break
    heard=0
  done
  if [ "$code" -gt "$ended" ]; then ended=$code; fi
done
exit "$ended"
