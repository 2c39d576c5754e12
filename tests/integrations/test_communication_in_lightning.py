"""Two ranks of Lightning under DDP: hasten's losses, a compressed communication, and both
resumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.integrations import lightning
from hasten.integrations.lightning import with_techniques
from hasten.techniques.collate import Packed
from hasten.techniques.communication.compress import Half
from hasten.techniques.loss import LabelledTokenLoss
from integrations.test_techniques_in_lightning import (
    GROUPED,
    lightning_only,
    loader,
    module_of,
    own_losses,
    trainer_of,
)
from ranks import by_torchrun
from tiny import tiny_model

pytestmark = [lightning_only, pytest.mark.timeout(600)]  # two ranks train six times over
JOB = Path(__file__).with_name("lightning_on_ranks.py")


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    failed = by_torchrun(JOB, folder)
    assert not failed, failed[-3000:]
    assert (folder / "topk" / "hasten" / "step-00000006").is_dir()
    return tuple(json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1))


@pytest.fixture(scope="module")
def found(of_ranks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """What both ranks found, losses as the mean of theirs."""
    one, two = of_ranks
    return {
        name: {
            "losses": mean(one[name]["losses"], two[name]["losses"]),
            "sent": one[name]["sent"],
            "steps": one[name]["steps"],
        }
        for name in one
    }


def test_a_metric_of_padded_rows_on_one_rank_keeps_packing_on_both(
    of_ranks: tuple[dict[str, Any], ...],
) -> None:
    acted = [set(one["metric"]["sent"]) for one in of_ranks]
    assert acted[0] == acted[1] >= {"fused_layers", "packed"}


def mean(one: list[float], two: list[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(one, two, strict=True)]


ALONE = (GROUPED, Packed(), LabelledTokenLoss(chunk=128))


def test_ranks_have_the_losses_of_one(found: dict[str, Any]) -> None:
    assert found["none"]["losses"] == pytest.approx(own_losses(ALONE), rel=1e-3)
    assert found["half"]["losses"] == pytest.approx(own_losses(ALONE), rel=1e-2)


def test_accumulated_passes_of_ranks_have_them_too(found: dict[str, Any]) -> None:
    passes = found["passes"]["losses"]
    assert mean(passes[::2], passes[1::2]) == pytest.approx(own_losses(ALONE), rel=1e-3)


def test_a_compressed_wire_sends_fewer_bytes_and_learns(found: dict[str, Any]) -> None:
    assert found["topk"]["losses"][-1] < found["topk"]["losses"][0]
    assert 0 < found["topk"]["sent"] < found["half"]["sent"]


def test_a_resumed_wire_goes_on_with_what_it_remembers(found: dict[str, Any]) -> None:
    whole, then = found["topk"]["losses"], found["resumed"]["losses"]
    assert found["resumed"]["steps"] == found["topk"]["steps"] == 6
    assert len(then) == 2
    assert then[0] == pytest.approx(whole[4], rel=1e-5)
    # DDP lays its buckets anew after its first step, so that others are the largest numbers of one.
    assert then[1] == pytest.approx(whole[5], rel=2e-2)


def test_what_lightning_decides_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    plugin = pytest.importorskip("lightning.pytorch.plugins").MixedPrecision
    scaler = torch.amp.GradScaler("cpu")
    scaled = trainer_of(tmp_path, plugins=[plugin("16-mixed", "cpu", scaler)])
    with pytest.raises(InputError, match="half: with 16-mixed"):
        with_techniques(scaled, module_of(tiny_model()), loader(), [Half()])
    two = trainer_of(tmp_path, devices=2, strategy="ddp")
    with pytest.raises(InputError, match="torchrun"):
        with_techniques(two, module_of(tiny_model()), loader(), [GROUPED])
    world = lightning.environment.World(rank=0, local_rank=0, size=2)
    monkeypatch.setattr(lightning.environment, "world", lambda: world)
    with pytest.raises(InputError, match=r"length_grouped: .*use_distributed_sampler=False"):
        with_techniques(two, module_of(tiny_model()), loader(), [GROUPED])
    sharded = trainer_of(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(lightning, "REPLICATED", ("DDPStrategy",))
    with pytest.raises(InputError, match="SingleDeviceStrategy deals the model out"):
        with_techniques(sharded, module_of(tiny_model()), loader(), [GROUPED])
