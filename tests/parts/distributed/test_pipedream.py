"""PipeDream gives what the whole model gives, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hasten import PipeDream


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(6, 6), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        found: Tensor = self.layer(x).tanh()
        return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Counted() for _ in range(5))).double()


@pytest.mark.parametrize(
    ("checkpoint", "passes"), [("never", 3), ("always", 6), ("except_last", 5)]
)
def test_outputs_and_gradients_are_those_of_the_whole_model(checkpoint: str, passes: int) -> None:
    plain, x = model(), torch.randn(7, 6).double()
    plain(x).square().mean().backward()
    whole = model()
    piped = PipeDream(whole, num_worker=2, chunks=3, checkpoint=checkpoint)
    out = piped(x)
    torch.testing.assert_close(out, plain(x), rtol=1e-12, atol=0)
    out.square().mean().backward()
    for mine, usual in zip(piped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, usual.grad, rtol=1e-12, atol=1e-15)
    counted = whole[0]
    assert isinstance(counted, Counted)
    assert counted.rows[:3] == [3, 3, 1]
    assert len(counted.rows) == passes
    with torch.no_grad():
        assert torch.equal(piped(x), out)
    assert len(counted.rows) == passes + 3
    assert list(piped.state_dict()) == [f"module.{name}" for name in plain.state_dict()]


def test_stages_are_runs_of_layers_of_about_the_same_work() -> None:
    spans = [span for _, span in PipeDream(model(), num_workers=3).stages]
    assert sorted(map(len, spans)) == [1, 2, 2]
    assert [layer for span in spans for layer in span] == [0, 1, 2, 3, 4]
    assert len(PipeDream(model()).stages) == max(torch.accelerator.device_count(), 1)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="this is a Linear"):
        PipeDream(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="are the same setting"):
        PipeDream(model(), 2, num_workers=2)
    with pytest.raises(ValueError, match="checkpoint 'sometimes'"):
        PipeDream(model(), checkpoint="sometimes")
    with pytest.raises(ValueError, match="chunks is 0"):
        PipeDream(model(), chunks=0)
    with pytest.raises(ValueError, match="can't be cut into 6 stages"):
        PipeDream(model(), num_worker=6)
    pairs = nn.Sequential(nn.LSTM(2, 2))
    with pytest.raises(ValueError, match="returns a tuple"):
        PipeDream(pairs)(torch.ones(3, 2))
