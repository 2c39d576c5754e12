#!/usr/bin/env bash
# Makes a release's files and checks them; uploads nothing and tags nothing.
#   scripts/release.sh 0.2.0    version that pyproject.toml and hasten.__version__ must have
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:?which version: scripts/release.sh 0.2.0}
python=${PYTHON:-.venv/bin/python}
fail() {
  echo "release: $1" >&2
  exit 1
}

[[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "'$version' is no version: write 0.2.0"
[ -z "$(git status --porcelain)" ] || fail "the tree isn't clean: commit or remove what is there"
grep -qx "version = \"$version\"" pyproject.toml || fail "pyproject.toml has another version"
grep -qx "__version__ = \"$version\"" src/hasten/version.py || fail "__version__ is another"
grep -q '^Repository = "https://' pyproject.toml ||
  fail "pyproject.toml has no address: set Repository under [project.urls]"
grep -q "^## $version (20[0-9-]*)$" CHANGELOG.md ||
  fail "CHANGELOG.md has no heading '## $version (YEAR-MONTH-DAY)'"
git rev-parse -q --verify "refs/tags/v$version" >/dev/null && fail "the tag v$version is there"

make lint test
rm -rf dist
"$python" -m pip wheel --quiet --no-deps --wheel-dir dist .
"$python" -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null

# In an environment of its own, with this one's dependencies behind it.
place=$(mktemp -d)
trap 'rm -rf -- "$place"' EXIT
"$python" -m venv "$place/venv"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  >"$("$place/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
"$place/venv/bin/python" -m pip install --quiet --no-deps dist/*.whl
found=$(cd "$place" && ./venv/bin/python -c 'import hasten; print(hasten.__version__, hasten.__file__)')
[[ "$found" == "$version $place/venv/"* ]] || fail "the wheel installs as: $found"
(cd "$place" && ./venv/bin/hasten --help >/dev/null)

# What a release depends on, as a CycloneDX bill of materials, and whether faults of it are known.
"$python" -m venv "$place/tools"
"$place/tools/bin/python" -m pip install --quiet cyclonedx-bom
PYTHONWARNINGS=ignore "$place/tools/bin/python" -m cyclonedx_py requirements requirements.lock \
  --pyproject pyproject.toml --mc-type library --output-reproducible --of JSON \
  --output-file "dist/hasten-$version.cdx.json"
scripts/audit.sh || [ $? -eq 3 ] || fail "dependencies have known vulnerabilities"

ls -l dist
echo "release: dist/ is ready. By hand: git tag v$version, git push --tags, upload dist/*"
