"""An exchange that fails names the rank that it failed for, within the time limit."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hasten.launch.ranks import LinkError, naming_ranks
from hasten.machine.environment import World
from ranks import on_ranks

pytestmark = pytest.mark.waits


def test_a_rank_that_does_not_answer_is_named_with_its_host(tmp_path: Path) -> None:
    found, _ = on_ranks("verify_rank_jobs:waits_for_one_that_hangs", tmp_path)
    assert f"rank 1 ({socket.gethostname()}) did not answer within 5 s" in found["words"]
    assert found["code"] == LinkError.code == 7
    assert found["seconds"] < 60, "not the group's own limit of minutes"


def test_one_rank_alone_has_nobody_to_name() -> None:
    with pytest.raises(RuntimeError, match="gloo is not the matter"), naming_ranks(World()):
        raise RuntimeError("gloo is not the matter")
