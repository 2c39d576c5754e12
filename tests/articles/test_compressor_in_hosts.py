"""The compressor in Hugging Face's Trainer, on two ranks: a callback attaches it."""

from __future__ import annotations

from pathlib import Path

from ranks import on_ranks


def test_the_trainer_s_replicas_learn_alike_with_few_bytes(tmp_path: Path) -> None:
    one, two = on_ranks("articles.compressor_host_jobs:hugging_face", tmp_path)
    assert one["weights"] == two["weights"]
    assert one["losses"][-1] < one["losses"][0]
    assert one["steps"] == 8
    assert one["sent"] > 0
    assert one["predicted"] < 0.14 * one["dense"]
