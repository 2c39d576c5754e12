#!/usr/bin/env bash
# Checks the locked dependencies against the package index's list of known vulnerabilities.
# Exit code: 0 none is known, 1 some are, 3 the index has no such list, so nothing was checked.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 3
python=${PYTHON:-.venv/bin/python}
place=$(mktemp -d)
trap 'rm -rf -- "$place"' EXIT
"$python" -m venv "$place/venv" &&
  "$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check pip-audit || exit 3
# Without --strict, a package without data counts as one without faults.
told=$("$place/venv/bin/python" -m pip_audit --strict --no-deps --disable-pip \
  --requirement requirements.lock --requirement requirements-cuda.lock 2>&1)
case $? in
0) echo "audit: no vulnerability of the locked dependencies is known" ;;
*)
  if grep -qi "found [0-9]* known vulnerabilit" <<<"$told"; then
    printf '%s\n' "$told"
    exit 1
  fi
  echo "audit: nothing was checked, since this package index has no list of vulnerabilities:" >&2
  tail -n 1 <<<"$told" >&2
  exit 3
  ;;
esac
