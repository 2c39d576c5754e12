"""What compressed gradients do on two ranks, and what each thing that goes wrong doesn't do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hasten import GradientCompressor
from hasten.machine.environment import World
from parts.comm.compression_kit import (
    LEARNT,
    METHODS,
    Small,
    averaged,
    compressor,
    given_and_applied,
    inputs,
    loss_of,
    memory,
    replicas,
    same_everywhere,
)
from parts.comm.compression_trouble_jobs import troubled
from ranks import once_on_ranks


def every_method(world: World) -> dict[str, Any]:
    return {
        "trained": {m: _trained(m, world) for m in METHODS},
        "conserved": {m: _conserved(m, world) for m in ("int8", "int4", "topk", "powersgd")},
        "close": {m: _one_mean(m, world) for m in METHODS},
        "bytes": {m: _bytes(m) for m in METHODS},
        "fp16": {m: _in_fp16(m) for m in ("none", "int4")},
    }


def _trained(method: str, world: World) -> dict[str, Any]:
    """DDP with small buckets, AdamW and clipping."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method)
    c.attach(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(12):
        loss = loss_of(ddp, inputs(world.rank, step % 4))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    c.check(ddp.parameters())
    return {
        "first": losses[0],
        "last": losses[-1],
        "same": same_everywhere(list(ddp.parameters())),
        "norms": norms,
        "names": sorted(memory(c)),
    }


def _conserved(method: str, world: World) -> float:
    """Greatest error of: all that was given = all that was applied + mean of the memories."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method)
    c.attach(ddp)
    given, applied = given_and_applied(ddp, world)
    left = memory(c)
    errors = []
    for name, total in given.items():
        expected = averaged(total)
        found = applied[name] + averaged(left[name]).view_as(total)
        errors.append(float((found - expected).norm() / expected.norm()))
    return max(errors)


def _one_mean(method: str, world: World) -> dict[str, float]:
    """The first compressed mean of a plain loop against float64."""
    model, c = Small(), compressor(method)
    loss_of(model, inputs(world.rank, 0)).backward()
    exact = [averaged(torch.zeros(p.shape) if p.grad is None else p.grad) for p in _all(model)]
    c.synchronize_gradients(model)
    error = sum(float((p.grad - e).square().sum()) for p, e in zip(_all(model), exact, strict=True))  # type: ignore[operator]
    size = sum(float(e.square().sum()) for e in exact)
    same = same_everywhere([p.grad for p in _all(model) if p.grad is not None])
    return {"error": (error / size) ** 0.5, "same": float(same)}


def _all(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _bytes(method: str) -> dict[str, int]:
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(12)))
    ddp, c = replicas(model), compressor(method)
    before = c.predicted(model, bucket_cap_mb=0.01)
    c.attach(ddp)
    sizes = []
    for _ in range(4):
        start = c.sent_bytes
        ddp(torch.ones(2, 96)).sum().backward()
        sizes.append(c.sent_bytes - start)
    numbers = sum(p.numel() for p in model.parameters())
    return {
        "predicted before": before,
        "predicted": c.predicted(model),
        "sent": sizes[-1],
        "dense": sizes[0],
        "numbers": numbers,
    }


def _in_fp16(method: str) -> list[int]:
    """Of a gradient that travels in full: bytes sent and predicted, and its error."""
    c = compressor(method, minimum=10**6)
    weight = nn.Parameter(torch.zeros(5000, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    c.synchronize_gradients([weight])
    return [c.sent_bytes, c.predicted([weight]), int((weight.grad != 1).sum())]


REMEMBERING = ("int8", "int4", "topk", "powersgd")
every = pytest.mark.parametrize("method", METHODS)
learnt = pytest.mark.parametrize("method", LEARNT)


found = once_on_ranks(every_method)
trouble = once_on_ranks(troubled)


@every
def test_replicas_learn_and_keep_the_same_bits(found: list[Any], method: str) -> None:
    for rank in found:
        seen = rank["trained"][method]
        assert seen["same"]
        assert seen["last"] < 0.75 * seen["first"]


@every
def test_the_norm_to_clip_by_is_the_same_on_every_rank(found: list[Any], method: str) -> None:
    one, two = (rank["trained"][method]["norms"] for rank in found)
    assert one == two


@pytest.mark.parametrize("method", REMEMBERING)
def test_tied_weights_are_remembered_once_and_by_name(found: list[Any], method: str) -> None:
    names = found[0]["trained"][method]["names"]
    assert "first.weight" in names
    assert "head.weight" not in names


@pytest.mark.parametrize("method", REMEMBERING)
def test_all_that_was_given_is_applied_or_remembered(found: list[Any], method: str) -> None:
    # PowerSGD's sum over ranks is taken in bf16; the rest is exact up to float32.
    bound = 5e-3 if method == "powersgd" else 1e-6
    assert all(rank["conserved"][method] < bound for rank in found)


def test_a_mean_is_as_close_to_float64_as_its_format(found: list[Any]) -> None:
    bounds = {"none": 1e-6, "half": 1e-3, "bf16": 5e-3, "int8": 2e-2, "int4": 0.3}
    for rank in found:
        assert all(rank["close"][m]["error"] < bound for m, bound in bounds.items())
        assert all(rank["close"][m]["error"] < 1 for m in ("topk", "powersgd"))
        assert all(rank["close"][m]["same"] for m in METHODS)


@every
def test_predicted_bytes_are_those_that_travel(found: list[Any], method: str) -> None:
    for rank in found:
        seen = rank["bytes"][method]
        assert seen["predicted"] == seen["sent"]
        assert seen["predicted before"] == pytest.approx(seen["sent"], rel=0.05)
        assert seen["dense"] == 4 * seen["numbers"]  # the first two steps under DDP


def test_gradients_in_fp16_travel_in_full_as_they_are(found: list[Any]) -> None:
    for rank in found:
        for sent, predicted, wrong in rank["fp16"].values():
            assert sent == predicted == 2 * 5000
            assert not wrong


def test_momentum_correction_lets_the_velocity_of_what_waits_go_on() -> None:
    """Lin et al., arXiv:1712.01887, section 3.1, in a loop of its own."""
    c = compressor("topk", compression_ratio=16 / 256, momentum=0.9)
    velocity, waiting = torch.zeros(256), torch.zeros(256)
    for step in range(6):
        gradient = torch.randn(256, generator=torch.Generator().manual_seed(step))
        velocity = velocity * 0.9 + gradient
        waiting = waiting + velocity
        chosen = waiting.abs().topk(16).indices
        sent = torch.zeros(256)
        sent[chosen] = waiting[chosen].bfloat16().float()
        assert torch.equal(c.compress(gradient, "weight"), sent)
        waiting, velocity[chosen] = waiting - sent, 0.0


@pytest.mark.slow
@learnt
def test_an_infinite_gradient_is_seen_by_all_and_poisons_nothing(
    trouble: list[Any], method: str
) -> None:
    for rank in trouble:
        seen = rank["infinite"][method]
        assert seen["finite"] == [True, True, True, True, False, True]
        assert seen["memory stays"]
        assert (seen["memory"] > 0) == (method != "none")


@learnt
def test_micro_batches_move_memory_once_a_step(trouble: list[Any], method: str) -> None:
    for rank in trouble:
        assert rank["accumulated"][method]["error"] < 1e-2
        assert rank["accumulated"][method]["steps"] == 4


@pytest.mark.parametrize("method", ["int4", "topk", "powersgd"])
def test_memory_knows_nothing_of_the_loss_scale(trouble: list[Any], method: str) -> None:
    assert all(rank["scaled"][method]["error"] < 1e-6 for rank in trouble)


@learnt
def test_bf16_weights_have_a_float32_memory(trouble: list[Any], method: str) -> None:
    for rank in trouble:
        seen = rank["bf16"][method]
        assert seen["same"]
        assert seen["last"] < 0.85 * seen["first"]
        assert seen["formats"] == ([] if method == "none" else ["torch.float32"])


@learnt
def test_what_is_owed_to_an_unused_layer_waits_for_it(trouble: list[Any], method: str) -> None:
    found = [rank["unused"][method] for rank in trouble]
    assert all(seen["same"] and seen["waits"] for seen in found)
    assert (sum(seen["remembered"] for seen in found) > 0) == (method != "none")


@every
def test_a_loop_that_compresses_by_hand_learns_alike(trouble: list[Any], method: str) -> None:
    for rank in trouble:
        seen = rank["hand"][method]
        assert seen["same"]
        assert seen["last"] < seen["first"]
    if method == "topk":  # what was chosen is sent as it is
        assert all(rank["hand"]["topk"]["error"] == 0 for rank in trouble)


@learnt
def test_a_resumed_loop_goes_on_with_the_same_bits(trouble: list[Any], method: str) -> None:
    assert all(rank["resumed"][method] for rank in trouble)


def test_replicas_that_drift_apart_are_named(trouble: list[Any]) -> None:
    for rank in trouble:
        assert "the weights of rank 1 are not those of rank 0" in rank["drifted"]


def test_ranks_that_disagree_about_the_method_are_named(trouble: list[Any]) -> None:
    for rank in trouble:
        assert "rank 1 has method 'int4' and rank 0 has 'int8'" in rank["disagreeing"]


@every
def test_complex_gradients_keep_both_parts_or_are_refused(trouble: list[Any], method: str) -> None:
    said = "" if method == "none" else f"{method} compresses real numbers"
    assert all(rank["complex"][method].startswith(said) for rank in trouble)
    assert not (method == "none" and any(rank["complex"][method] for rank in trouble))


@every
def test_gradients_without_numbers_are_left_as_they_are(trouble: list[Any], method: str) -> None:
    assert [rank["empty"][method] for rank in trouble] == ["", ""]


def test_a_rank_that_fails_says_why_and_the_other_stops_waiting(trouble: list[Any]) -> None:
    assert "averaging gradients failed on rank 1: no such codes" in trouble[1]["ended"]
    assert "averaging gradients failed" in trouble[0]["ended"]
    assert "rank 1: no such codes" in trouble[0]["ended"]  # the other one hears why


def test_alone_nothing_travels_and_hand_compression_still_feeds_back() -> None:
    c = GradientCompressor(0.5, "topk", "gloo", minimum=0)
    given = torch.randn(512)
    total = torch.zeros(512)
    for _ in range(40):
        total += c.compress(given, "weight")
        c.synchronize_gradients([])
    assert c.sent_bytes == 0
    assert (total / 40 - given).norm() < 0.06 * given.norm()


@every
def test_a_compressed_tensor_is_dense_and_of_the_same_shape(method: str) -> None:
    c = compressor(method)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = torch.randn(5, 7, 9).to(dtype)
        got = c.compress(given, str(dtype))
        assert got.shape == given.shape
        assert got.dtype == dtype
        assert got.layout is torch.strided


def test_a_tensor_that_is_not_finite_comes_back_and_teaches_nothing() -> None:
    c = compressor("int4")
    bad = torch.tensor([1.0, torch.nan])
    assert c.compress(bad, "w") is bad
    assert torch.equal(c.compress(torch.zeros(2), "w"), torch.zeros(2))


def test_a_changed_order_of_unnamed_tensors_is_an_error() -> None:
    c = compressor("topk")
    for _ in range(2):
        c.compress(torch.ones(300))
        c.compress(torch.ones(20, 20))
        c.synchronize_gradients([])
    with pytest.raises(ValueError, match=r"has shape \(20, 20\) and had \(300,\) before"):
        c.compress(torch.ones(20, 20))
    c.compress(torch.ones(300))
    with pytest.raises(ValueError, match=r"1 tensors without a name .* and 2 before"):
        c.synchronize_gradients([])


def test_the_articles_misspelling_is_understood_with_a_hint() -> None:
    with pytest.warns(UserWarning, match="spelt sparsity_method"):
        c = GradientCompressor(communication_backend="gloo", sparisty_method="int8")
    assert c.settings()["method"] == "int8"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_gloo_in_one_sentence() -> None:
    with pytest.warns(UserWarning, match="gloo is used"):
        assert GradientCompressor().communication_backend == "gloo"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientCompressor(communication_backend="gloo")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparsity_method": "topq"}, "did you mean 'topk'"),
        ({"sparsity_method": "diloko"}, "did you mean 'diloco'"),
        ({"sparsity_method": "diloco", "every": 0}, "every is 0"),
        ({"sparsity_method": "stream", "scope": "hosts"}, "scope='hosts' is for gradients"),
        ({"scope": "rack"}, "it is all or hosts"),
        ({"compression_ratio": 0.0}, "share of kept numbers is 0.0"),
        ({"sparsity_method": "powersgd", "rank": 0}, "rank is 0"),
        ({"sparsity_method": "int8", "momentum": 0.9}, "momentum corrects topk"),
        ({"momentum": 1.0}, "below 1"),
        ({"dense_steps": -1}, "can't be negative"),
        ({"communication_backend": "mpi"}, "communication_backend is 'mpi'"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GradientCompressor(**{"communication_backend": "gloo", **changes})


def test_memory_of_another_method_or_model_is_refused() -> None:
    c = compressor("int8")
    with pytest.raises(ValueError, match="the memory is of int4"):
        c.load_state_dict(compressor("int4").state_dict())
    c.compress(torch.ones(10), "w")
    c.synchronize_gradients([])
    d = compressor("int8")
    d.load_state_dict(c.state_dict())
    with pytest.raises(ValueError, match="of another model"):
        d.compress(torch.ones(11), "w")


def test_a_minimum_that_keeps_everything_whole_is_said_once() -> None:
    layer = torch.nn.Linear(20, 64)
    layer(torch.randn(8, 20)).square().mean().backward()
    compressor = GradientCompressor(communication_backend=None)
    compressor.compress(layer.weight.grad)
    with pytest.warns(UserWarning, match=r"compression_ratio=0.05 acts on .* 4096 .* has 1280"):
        compressor.synchronize_gradients(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compressor.compress(layer.weight.grad)
        compressor.synchronize_gradients(layer)
        other = GradientCompressor(communication_backend=None, minimum=0)
        other.compress(layer.weight.grad)
        other.synchronize_gradients(layer)
