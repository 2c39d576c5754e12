"""Checkpoints: what was saved comes back bit for bit, or the one before it does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from hasten.parts import checkpoint
from hasten.parts.checkpoint import (
    MANIFEST,
    STATE,
    NewerFormatError,
    commit,
)
from hasten.parts.checkpoint.commit import Folder
from hasten.parts.checkpoint.format import REASON, Disk
from saved import load_latest, save

META = {"step": 3, "plan": [{"packed": {}}], "loss": 1.5, "none": None, "words": "词 é"}


def state(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(7, 5, generator=generator)
    return {
        "weights": weights,
        "half": weights.bfloat16(),
        "counts": torch.arange(6, dtype=torch.int64) + step,
        "random": torch.randint(256, (50,), generator=generator, dtype=torch.uint8),
        "step": torch.tensor(float(step)),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "transposed": weights.T,
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


def two(folder: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(folder, step, _unshared(state(step)), {"step": step})
    return folder


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.contiguous() for n, t in tensors.items()}


def hidden(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def test_every_format_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "b", 3, state(), META)
    tensors, meta = checkpoint.load(path)
    assert same(tensors, state())
    assert tensors["step"].ndim == 0
    assert meta == META


def test_the_newest_is_loaded_and_nothing_is_no_error(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "missing") is None
    assert load_latest(tmp_path) is None
    found = load_latest(two(tmp_path))
    assert found is not None
    assert same(found[0], state(2))
    assert (found[1], found[2].name) == ({"step": 2}, "step-00000002")


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step, state(), {})
    order = [int(p.name[5:]) for p in checkpoint.checkpoints(tmp_path)]
    assert order == [5, 99_999_999, 100_000_000]


def test_a_step_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    two(tmp_path)
    save(tmp_path, 2, state(7), {"step": 7})
    tensors, meta = checkpoint.load(tmp_path / "step-00000002")
    assert same(tensors, state(2))
    assert meta == {"step": 2}


def falls_back(folder: Path, name: str = "step-00000002") -> bool:
    """Whether step 1 is restored and the damaged step 2 is kept under another name."""
    found = load_latest(folder)
    assert found is not None
    restored = found[1] == {"step": 1} and same(found[0], state(1))
    moved = [h for h in hidden(folder) if h.startswith(f".damaged-{name}-")]
    return restored and len(moved) == 1 and not (folder / name).exists()


def written(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Writes what ``change`` makes of a file of the checkpoint."""
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def replaced_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


OTHER_KINDS = (b"not json", b"[]", b"3", b"null", b"{}", b'{"seal": 1}', b"\xff\xfe")
DAMAGE: dict[str, Callable[[Path], object]] = {
    # Text mode would translate it and hide that the file isn't the one that was written.
    "newline of another system": written(MANIFEST, lambda data: data.replace(b"\n", b"\r", 1)),
    "a file in its place": replaced_by_a_file,
    **{f"{name} missing": lambda path, n=name: (path / n).unlink() for name in (STATE, MANIFEST)},
    **{f"{name} empty": written(name, lambda data: b"") for name in (STATE, MANIFEST)},
    **{f"{name} cut": written(name, lambda data: data[:100]) for name in (STATE, MANIFEST)},
    **{str(text): written(MANIFEST, lambda data, t=text: t) for text in OTHER_KINDS},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_as_it_was_written_is_damage(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    damage(two(tmp_path) / "step-00000002")
    assert falls_back(tmp_path)


def test_the_same_step_may_be_damaged_twice(tmp_path: Path) -> None:
    two(tmp_path)
    for times in (1, 2):
        save(tmp_path, 2, _unshared(state(2)), {"step": 2})
        (tmp_path / "step-00000002" / STATE).unlink()
        found = load_latest(tmp_path)
        assert found is not None
        assert found[1] == {"step": 1}
        assert len(hidden(tmp_path)) == times


def test_a_folder_where_nothing_can_be_renamed_still_gives_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (two(tmp_path) / "step-00000002" / STATE).unlink()

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(self)

    monkeypatch.setattr(Path, "rename", refuse)
    found = load_latest(tmp_path)
    assert found is not None
    assert found[1] == {"step": 1}


def test_another_versions_checkpoint_is_left_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "FORMAT", 4)
    two(tmp_path)
    monkeypatch.undo()
    with pytest.raises(NewerFormatError, match="has format 4 and this version reads 3"):
        load_latest(tmp_path)
    Folder(tmp_path).prune(1, lambda name, reason: None)
    assert len(checkpoint.checkpoints(tmp_path)) == 2


def test_meta_that_is_not_json_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, 1, state(), {"set": {1}})
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    path = save(tmp_path, 1, {"a": whole, "b": whole[::2], "c": whole}, {})
    tensors, _ = checkpoint.load(path)
    assert same(tensors, {"a": whole, "b": whole[::2].clone(), "c": whole})


def test_a_tensor_that_safetensors_can_not_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"masks is a torch\.sparse_coo tensor"):
        save(tmp_path, 1, {"masks": torch.eye(3).to_sparse()}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_there_is_durable_before_it_is_relied_on(tmp_path: Path) -> None:
    class Noting(Disk):
        forced: ClassVar[list[Path]] = []

        def sync(self, path: Path) -> None:
            self.forced.append(path)

    save(tmp_path, 1, state(), {})
    assert Folder(tmp_path, Noting()).holds("step-00000001", lambda name, reason: None)
    assert Noting.forced == [tmp_path]


def test_a_damaged_checkpoint_does_not_block_its_step(tmp_path: Path) -> None:
    two(tmp_path)
    (tmp_path / "step-00000002" / STATE).write_bytes(b"no")
    save(tmp_path, 2, _unshared(state(2)), {"step": 2})
    assert same(checkpoint.load(tmp_path / "step-00000002")[0], state(2))
    (moved,) = hidden(tmp_path)
    assert "has 2 bytes instead of" in (tmp_path / moved / REASON).read_text()


def test_a_checkpoint_under_the_name_of_another_step_is_damage(tmp_path: Path) -> None:
    (two(tmp_path) / "step-00000002").rename(tmp_path / "step-00000009")
    assert falls_back(tmp_path, "step-00000009")
