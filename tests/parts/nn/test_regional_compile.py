"""Compiled blocks train as the plain ones do, and nothing makes them compile again at each step."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor, nn

from hasten.parts.data.collate import packed, padded
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.compile import CompiledBlocks, filled_rows
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.parts.nn.recompute import BlockRecompute
from tiny import compiled_in, examples, tiny_model

counters = torch._dynamo.utils.counters


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Different graphs that were compiled in this test."""
    return int(counters["stats"]["unique_graphs"])


def documents(seed: int, bucket: int = 64) -> dict[str, Any]:
    """A packed row of four documents, other lengths for other seeds, in a row of fixed length."""
    return filled_rows(packed(examples(4, seed=seed, longest=12)), bucket)


def pair_of_models(architecture: str, part: str = "all") -> tuple[nn.Module, nn.Module]:
    plain = tiny_model(architecture)
    use_document_attention(plain)
    if part != "all":
        compiled_in(part, plain)
    compiled = copy.deepcopy(plain)
    return WholeLogitsLoss(plain), WholeLogitsLoss(compiled)


def pair(
    architecture: str, part: str = "all", **settings: Any
) -> tuple[nn.Module, nn.Module, CompiledBlocks]:
    """The same model twice, document by document; this part of the second's blocks compiled."""
    one, other = pair_of_models(architecture, part)
    blocks = CompiledBlocks(**{"backend": "aot_eager", **settings})
    blocks(other)
    return one, other, blocks


def gradients(module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    module.zero_grad()
    loss, _ = module(**inputs)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("architecture", "parts", "kinds"),
    [
        # Two norms, attention and MLP of two blocks: norm, attention before and after its kernel,
        # MLP. The second block of the other models has an MLP of experts.
        ("llama", 8, 4),
        ("deepseek_v3", 8, 5),
        pytest.param("deepseek_v2", 8, 5, marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_the_plain_blocks_and_each_kind_of_part_compiles_once(
    architecture: str, parts: int, kinds: int
) -> None:
    """Other documents, an evaluation and blocks of the same kind compile nothing again."""
    plain, compiled, blocks = pair(architecture)
    for seed in range(3):
        inputs = documents(seed)
        torch.testing.assert_close(
            gradients(compiled, inputs), gradients(plain, inputs), rtol=1e-4, atol=1e-5
        )
        compiled_so_far = graphs()
        # torch 2.11 compiles two parts of an attention with latents once more.
        assert compiled_so_far == kinds or Version(torch.__version__) < Version("2.12")
    assert blocks.parts == parts
    assert blocks.passes == 3 * parts
    assert blocks.eager_passes == 0
    rows = padded(examples(3, seed=5))
    with torch.no_grad():
        assert compiled(**rows)[0].item() == pytest.approx(plain(**rows)[0].item(), rel=1e-5)
    assert graphs() == compiled_so_far


def test_shapes_beyond_the_limit_run_as_they_are_and_are_counted() -> None:
    plain, compiled, blocks = pair("llama", "mlp", shapes=2)
    for bucket in (64, 96, 128):
        inputs = documents(0, bucket)
        torch.testing.assert_close(
            gradients(compiled, inputs), gradients(plain, inputs), rtol=1e-4, atol=1e-5
        )
    assert blocks.compiled_shapes == 2
    assert blocks.eager_passes == blocks.parts
    compiled_so_far = graphs()
    gradients(compiled, documents(1, 160))
    assert graphs() == compiled_so_far


@pytest.mark.parametrize("part", ["mlp", pytest.param("all", marks=pytest.mark.long)])
def test_dynamic_lengths_are_one_shape(part: str) -> None:
    _, compiled, blocks = pair("llama", part, dynamic=True)
    gradients(compiled, documents(0, 64))
    first = graphs()
    gradients(compiled, documents(1, 96))
    assert graphs() == first
    assert blocks.eager_passes == 0


def test_recomputed_blocks_run_their_compiled_parts_twice() -> None:
    models = tiny_model("llama"), tiny_model("llama")
    for model in models:
        use_document_attention(model)
    plain, compiled = map(WholeLogitsLoss, models)
    blocks = CompiledBlocks(backend="aot_eager")
    BlockRecompute()(compiled)
    blocks(compiled)
    inputs = documents(2)
    torch.testing.assert_close(
        gradients(compiled, inputs), gradients(plain, inputs), rtol=1e-4, atol=1e-5
    )
    assert blocks.passes == 2 * blocks.parts


def test_parts_with_code_of_their_own_are_left_to_it() -> None:
    model = tiny_model("llama")
    layers: Any = model.model.layers
    for layer in layers:
        layer.mlp.forward = layer.mlp.forward
    blocks = CompiledBlocks(backend="aot_eager")
    blocks(model)
    assert blocks.parts == 6
    bound = tiny_model("llama")
    for module in bound.modules():
        module.forward = module.forward
    with pytest.raises(ValueError, match="nothing is left to compile"):
        CompiledBlocks()(bound)


@given(st.integers(1, 6), st.integers(0, 50), st.integers(1, 70))
def test_filler_rounds_up_trains_nothing_and_is_a_document_of_its_own(
    count: int, seed: int, bucket: int
) -> None:
    drawn = examples(count, seed=seed)
    for inputs in (packed(drawn), padded(drawn)):
        length = inputs["input_ids"].shape[1]
        found = filled_rows(inputs, bucket)
        rows, slots = found["input_ids"].shape
        assert slots % bucket == 0
        assert 0 <= slots - length < bucket
        assert torch.equal(found["input_ids"][:, :length], inputs["input_ids"])
        assert (found["labels"] != -100).sum() == (inputs["labels"] != -100).sum()
        if "document_lengths" in found:
            assert sum(found["document_lengths"]) == slots
            ends = [0, *torch.tensor(found["document_lengths"]).cumsum(0).tolist()]
            assert found["boundaries"].tolist() == ends
            assert found["position_ids"].shape == (rows, slots)


def test_inputs_of_another_kind_are_left_alone() -> None:
    pictures = {"pixels": torch.zeros(1, 3)}
    assert filled_rows(pictures, 8) == pictures
    strange = {"input_ids": torch.zeros(1, 3), "mask_of_my_own": torch.ones(1, 3)}
    assert filled_rows(strange, 8)["input_ids"].shape == (1, 3)


@pytest.mark.long  # a C++ compiler for half a minute; the backend above traces the same parts
@pytest.mark.parametrize("part", ["mlp", "all"])
def test_inductor_computes_the_same_gradients(part: str) -> None:
    """One kind of part stands for all, which the other tests trace."""
    if " " in torch.__path__[0]:
        pytest.skip("inductor can't call the C++ compiler if torch's path has a space")
    plain, compiled = pair_of_models("llama", part)
    blocks = CompiledBlocks(backend="inductor")
    blocks(compiled)
    assert blocks.parts == (8 if part == "all" else 2)
    inputs = documents(0)
    torch.testing.assert_close(
        gradients(compiled, inputs), gradients(plain, inputs), rtol=1e-3, atol=1e-4
    )
    assert blocks.seconds > 0


@pytest.mark.long
def test_code_for_another_instruction_set_is_not_taken_from_the_disk(tmp_path: Path) -> None:
    """Torch's key of stored graphs leaves it out: the second process used to be aborted."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs a processor with two sets of vector instructions that inductor knows")
    name = f"{__file__}::{test_inductor_computes_the_same_gradients.__name__}[mlp]"
    for capability in ("avx2", "avx512"):
        places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "long", name],
            env={**os.environ, **places},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_cuda_graphs_are_told_where_a_pass_begins(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a pass, not once a block: what one block has left is the next one's input."""
    begun: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    model = tiny_model("llama")
    CompiledBlocks(mode=mode, backend="aot_eager")(model)
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 4, dtype=torch.int64))
    assert len(begun) == (2 if mode == "reduce-overhead" else 0)
