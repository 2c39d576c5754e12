#!/usr/bin/env bash
# Runs one finding or all of them: findings/run.sh [NAME]
#
# Exit code: 0 if all behave as described, 1 if one changed, 2 if one couldn't be run.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

names=()
for script in "$here"/*.sh; do
  name=$(basename "$script" .sh)
  if [[ $name != run ]]; then names+=("$name"); fi
done
if (($#)); then
  name=$(basename "$1" .sh)
  if [[ ! -f $here/$name.sh || $name == run ]]; then
    printf 'There is no finding "%s". Findings: %s\n' "$name" "${names[*]}" >&2
    exit 2
  fi
  names=("$name")
fi

rows=()
changed=0 missing=0
for name in "${names[@]}"; do
  printf '== %s\n' "$name"
  began=$SECONDS code=0
  "$here/$name.sh" || code=$?
  case $code in
    0) outcome="as described" ;;
    1) outcome="changed" changed=1 ;;
    *) outcome="not run" missing=1 ;;
  esac
  rows+=("$(printf '%-36s %-14s %4d s' "$name" "$outcome" $((SECONDS - began)))")
done

printf '\n%-36s %-14s %6s\n' finding outcome time
printf '%s\n' "${rows[@]}"
if ((changed)); then exit 1; fi
if ((missing)); then exit 2; fi
