#!/usr/bin/env bash
# huggingface_hub 2.4.0: offline, snapshot_download returns a folder without the files asked for.
#
# Guess: it raises LocalEntryNotFoundError if a file of allow_patterns isn't in the cache, as
# hf_hub_download does.
# Seen: it returns the folder of any cached snapshot, whatever that holds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check huggingface_hub==2.4.0
commit=$(printf 'a%.0s' {1..40})
model=cache/models--some-owner--some-model
mkdir -p "$model/snapshots/$commit" "$model/refs"
printf %s "$commit" > "$model/refs/main"
echo '{}' > "$model/snapshots/$commit/config.json"
HF_HUB_OFFLINE=1 HF_HUB_CACHE=$folder/cache venv/bin/python - <<'END'
import os
import sys

import huggingface_hub
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

print("huggingface_hub", huggingface_hub.__version__)
name, file = "some-owner/some-model", "model.safetensors"
try:
    hf_hub_download(name, file)
except LocalEntryNotFoundError:
    print(f"hf_hub_download of {file}: LocalEntryNotFoundError")
else:
    sys.exit(1)
try:
    found = snapshot_download(name, allow_patterns=[file])
except LocalEntryNotFoundError:
    print(f"snapshot_download of {file}: LocalEntryNotFoundError, so the behaviour has changed")
    sys.exit(1)
print(f"snapshot_download of {file}: a folder with {os.listdir(found)}")
sys.exit(int(os.path.exists(os.path.join(found, file))))
END
