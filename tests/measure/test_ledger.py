"""The ledger's memory against bytes counted by hand, and what looking must not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.timing import HostClock
from hasten.machine import host
from hasten.measure.profile import OWNERS, SavedTensors, ledger_of, memory_of, storages, utilisation
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.collate import Packed
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW
from hasten.techniques.precision import BF16MasterWeights
from tiny import VOCABULARY, examples, language_job, run, session_of, tiny_model

FLOATS = sum(p.numel() for p in tiny_model().parameters())


def trained(*techniques: Any, **job: Any) -> Session:
    session = session_of(language_job(**job), *techniques)
    session.setup.clock = HostClock()
    run(session)
    return session


def buffers_of(model: nn.Module) -> int:
    return sum(b.numel() * b.element_size() for b in model.buffers())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_each_storage_counts_once_whoever_looks_at_it(sizes: list[int]) -> None:
    tensors = [torch.zeros(n, 4) for n in sizes]
    views = [view for t in tensors for view in (t, t[1:], t.t(), t.detach(), t.view(-1))]
    assert sum(storages(views).values()) == 16 * sum(sizes)
    assert storages([torch.empty(0), torch.empty(5, device="meta")]) == {}


def test_what_autograd_keeps_is_counted_by_hand() -> None:
    x, weight = torch.randn(10, 6), torch.randn(6, 4, requires_grad=True)
    watch = SavedTensors()
    with watch.watching():
        y = (x @ weight).exp()  # keeps x for the weight's gradient, and exp's own result
        z = y.sum()  # keeps nothing
    assert sum(watch.storages.values()) == 4 * (10 * 6 + 10 * 4)
    z.backward()
    torch.testing.assert_close(weight.grad, x.t() @ y.detach())


def test_weights_gradients_and_moments_are_those_of_the_model() -> None:
    found = memory_of(trained())
    names = len(list(tiny_model().parameters()))
    assert found["weights"] == 4 * FLOATS + buffers_of(tiny_model())
    assert found["gradients"] == 4 * FLOATS
    assert found["optimizer"] == 2 * 4 * FLOATS + 4 * names  # and a count of steps each
    assert list(found) == list(OWNERS)


def test_tied_weights_count_once() -> None:
    def tied() -> nn.Module:
        model: Any = tiny_model()
        model.lm_head.weight = model.model.embed_tokens.weight
        return model

    both = memory_of(trained())["weights"] or 0
    assert both - (memory_of(trained(model=tied))["weights"] or 0) == 4 * VOCABULARY * 32


def test_true_weights_beside_bf16_belong_to_the_optimizer() -> None:
    found = memory_of(trained(BF16MasterWeights()))
    assert found["weights"] == 2 * FLOATS + buffers_of(tiny_model())
    assert found["gradients"] == 4 * FLOATS  # collected in float32, on the true weights
    assert (found["optimizer"] or 0) >= 3 * 4 * FLOATS


def test_a_compact_optimizer_is_seen_to_be_compact() -> None:
    usual, compact = memory_of(trained()), memory_of(trained(CompactAdamW()))
    assert (compact["optimizer"] or 0) < 0.6 * (usual["optimizer"] or 0)


def test_recomputing_keeps_fewer_activations() -> None:
    usual, less = memory_of(trained()), memory_of(trained(ActivationCheckpointing()))
    assert 0 < (less["activations"] or 0) < 0.5 * (usual["activations"] or 0)


def test_logits_are_as_large_as_the_widest_tensor() -> None:
    data = examples(8)
    slots = 8 * max(r.length for r in data)
    assert memory_of(trained(data=data))["logits"] == 4 * slots * VOCABULARY
    some = memory_of(trained(LabelledTokenLoss(chunk=16), data=data))["logits"]
    assert some == 4 * 16 * VOCABULARY


def test_looking_changes_nothing_that_training_goes_on_with() -> None:
    def losses(look: bool) -> list[float]:
        model: Any = tiny_model()
        model.model.layers[0].register_forward_hook(
            lambda m, a, out: nn.functional.dropout(out, 0.1)  # so that random state matters
        )
        session = session_of(language_job(lambda: model, steps=6), Packed())
        found = []
        for metrics in training(session):
            found.append(metrics.loss)
            if look and metrics.step == 3:
                before = session.progress.step, session.progress.step_in_epoch
                ledger_of(session)
                assert before == (session.progress.step, session.progress.step_in_epoch)
                assert all(p.grad is None for p in session.model.parameters())
        return found

    assert losses(look=True) == losses(look=False)


def test_what_cannot_be_known_is_none() -> None:
    def stream(epoch: int) -> Iterator[Any]:
        yield from (data[i : i + 4] for i in (0, 4, 8))

    data = examples(12)
    session = session_of(language_job(data=(), stream=stream, lengths=(), steps=2))
    run(session)
    found = ledger_of(session)
    assert found["memory"]["activations"] is found["memory"]["other"] is None
    assert found["memory"]["weights"] > 0
    assert found["step"]["forward"] is found["stability"]["p50"] is found["utilisation"] is None


def test_the_ledger_has_the_reports_keys_and_leaves_the_warm_up_out() -> None:
    session = trained(steps=6)
    session.setup.clock.steps[0]["forward"] = 1e6
    found = ledger_of(session)
    assert set(found) == {"step", "memory", "stability", "utilisation"}
    assert found["step"]["forward"] < 1e3 > found["stability"]["p99"]
    assert 0 < found["utilisation"] <= 1.1
    assert utilisation(session, warmup=100) < found["utilisation"]  # none left: all count


def test_owners_add_up_to_the_peak() -> None:
    session = trained()

    before = host.memory_peak("cpu")
    found = memory_of(session)
    assert sum(v or 0 for v in found.values()) == pytest.approx(before, rel=0.02)


def test_a_pass_that_fails_costs_only_its_own_figures() -> None:
    session = trained()

    def fails(*given: Any) -> Any:
        raise RuntimeError("not enough memory")

    session.engine.gradients = fails  # type: ignore[method-assign]
    found = memory_of(session)
    assert all(found[owner] for owner in ("weights", "optimizer"))
    assert found["activations"] is found["gradients"] is found["other"] is None
    assert isinstance(session.setup.clock, HostClock)
