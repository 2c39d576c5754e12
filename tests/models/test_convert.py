"""Pickled weights become safetensors with every bit, and nothing in a pickle runs."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from hasten.errors import InputError
from hasten.models import pickled
from hasten.models.convert import convert
from hasten.models.load import load_model
from tiny import tiny_model


def saved(model: Any, folder: Path, shards: int = 1, tied: bool = False) -> Path:
    """As older models were published: pickles, an index, and files beside them."""
    model.config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling_own.py").write_text("raise SystemExit('code of the folder ran')")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    names = list(model.state_dict())
    for index in range(shards):
        part = {name: model.state_dict()[name] for name in names[index::shards]}
        name = f"pytorch_model-{index + 1:05d}-of-{shards:05d}.bin"
        torch.save(part, folder / (name if shards > 1 else "pytorch_model.bin"))
    return folder


@pytest.fixture(autouse=True)
def _reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in this process, without limits, but where a test has the mark ``cold``."""
    if request.node.get_closest_marker("cold"):
        return

    def run(command: Sequence[str], **given: Any) -> subprocess.CompletedProcess[str]:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = pickled.main(*map(Path, command[-2:]))
        return subprocess.CompletedProcess(command, code, "", said.getvalue())

    monkeypatch.setattr(pickled, "limit", lambda size: None)
    monkeypatch.setattr("hasten.models.convert.subprocess.run", run)


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.cold), 3])
def test_a_folder_of_pickles_loads_as_the_same_model(tmp_path: Path, shards: int) -> None:
    model = tiny_model("llama")
    source, to = saved(model, tmp_path / "old", shards), tmp_path / "new"
    assert convert(source, to) == len(model.state_dict())
    assert same(model, load_model(str(to)))
    names = {path.name for path in to.iterdir()}
    assert "tokenizer_config.json" in names
    assert not any(name.endswith((".py", ".bin")) or "bin.index" in name for name in names)


def renamed(folder: Path, rename: Callable[[str], str | None]) -> Path:
    """Its one pickle with other names; None leaves a tensor out."""
    file = folder / "pytorch_model.bin"
    names = {name: rename(name) for name in torch.load(file)}
    torch.save({names[n]: t for n, t in torch.load(file).items() if names[n] is not None}, file)
    return folder


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
    ],
    ids=["parallel", "compiled", "a compiled layer"],
)
def test_transformers_opens_what_was_saved_inside_wrappers(
    architecture: str, rename: Callable[[str], str], tmp_path: Path
) -> None:
    model = tiny_model(architecture)
    source = renamed(saved(model, tmp_path / "old"), rename)
    convert(source, tmp_path / "new")
    assert same(model, AutoModelForCausalLM.from_pretrained(tmp_path / "new"))


@pytest.mark.parametrize(
    ("rename", "reason"),
    [
        (lambda name: f"base_model.model.{name}", "names of a wrapper.*base_model.model.lm_head"),
        (lambda name: f"net.{name}", r"don't fit.*missing.*unknown \(net\.lm_head"),
        (lambda name: None if "norm" in name else name, "don't fit its config.json, .* missing"),
    ],
    ids=["peft", "another program's", "missing"],
)
def test_names_that_are_not_the_models_are_refused_and_nothing_is_left(
    rename: Callable[[str], str | None], reason: str, tmp_path: Path
) -> None:
    source = renamed(saved(tiny_model("llama"), tmp_path / "old"), rename)
    with pytest.raises(InputError, match=reason):
        convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_part_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    tensors = {"module.weight": torch.ones(2), "head.weight": torch.zeros(2)}
    torch.save(tensors, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == tensors.keys()


def test_a_pickled_adapter_becomes_one_that_peft_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "old")
    weights = tmp_path / "old" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    (tmp_path / "old" / "optimizer.bin").write_bytes(b"not read")
    convert(tmp_path / "old", tmp_path / "new")
    assert same(adapted, PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "new"))


@pytest.mark.parametrize("around", pickled.AROUND)
def test_the_weights_inside_a_trainers_file_are_found(tmp_path: Path, around: str) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.tensor(7, dtype=torch.bfloat16)}
    torch.save({around: tensors, "step": 3, "args": {"lr": 0.1}}, tmp_path / "checkpoint.pt")
    assert convert(tmp_path / "checkpoint.pt", tmp_path / "new") == 2
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def hostile(kind: str, folder: Path) -> Path:
    file = folder / "pytorch_model.bin"
    evil = {"a": torch.ones(2), "b": Evil(folder / "ran")}
    if kind == "torch":
        torch.save(evil, file)
    elif kind == "pickle":
        file.write_bytes(pickle.dumps(evil))
    elif kind == "compressed":
        torch.save({"a": torch.zeros(100_000)}, folder / "plain")
        with zipfile.ZipFile(folder / "plain") as old:
            entries = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
            for name, content in entries.items():
                new.writestr(name, content)
    elif kind == "cut off":
        torch.save({"a": torch.zeros(1000)}, file)
        file.write_bytes(file.read_bytes()[:-500])
    elif kind == "numbers":
        torch.save({"a": 1}, file)
    elif kind == "list":
        torch.save([torch.ones(1)], file)
    elif kind == "empty":
        file.write_bytes(b"")
    return file


@pytest.mark.parametrize(
    "kind", ["torch", "pickle", "compressed", "cut off", "numbers", "list", "empty"]
)
def test_a_file_that_is_more_or_less_than_weights_is_refused_and_nothing_runs(
    tmp_path: Path, kind: str
) -> None:
    file = hostile(kind, tmp_path)
    with pytest.raises(InputError, match=r"pytorch_model\.bin") as refused:
        convert(file, tmp_path / "new")
    assert "\n" not in str(refused.value)
    assert kind != "compressed" or "unfolds" in str(refused.value)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new").exists()


def test_a_folder_without_pickles_or_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to convert"):
        convert(tmp_path, tmp_path / "new")
    with pytest.raises(InputError, match="doesn't exist"):
        convert(tmp_path / "nowhere", tmp_path / "new")
    source = saved(tiny_model("llama"), tmp_path / "old")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match=r"mine\.txt"):
        convert(source, taken)
    assert (taken / "mine.txt").read_text() == "keep"


@pytest.mark.cold
def test_reading_ends_where_its_process_would_take_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are the reader's own; here they are set below what torch itself needs."""
    package = tmp_path / "copy" / "hasten"
    beside = shutil.ignore_patterns("*.so", "__pycache__")  # others may be writing there
    shutil.copytree(Path(pickled.__file__).parents[1], package, ignore=beside)
    reader = package / "models" / "pickled.py"
    reader.write_text(reader.read_text().replace("12 * 2**30", "2**28"))
    monkeypatch.setattr("hasten.models.convert.PACKAGES", package.parent)
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"weights\.pt broke the limits"):
        convert(tmp_path / "weights.pt", tmp_path / "new")
