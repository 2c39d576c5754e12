"""Two ways to run the same step, compared: python examples/compare_loops.py"""

from collections.abc import Callable

import torch

from hasten.report import compare


def training(foreach: bool) -> Callable[[], tuple[int, float]]:
    """A factory's work: build everything, return the function that does one step."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(24)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    examples = torch.randn(128, 64)

    def step() -> tuple[int, float]:
        loss = (model(examples) - examples).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(examples), loss.item()  # how many tokens or items, and the loss

    return step


def one_by_one() -> Callable[[], tuple[int, float]]:
    return training(foreach=False)


def all_at_once() -> Callable[[], tuple[int, float]]:
    return training(foreach=True)


if __name__ == "__main__":
    print(compare(one_by_one, all_at_once, rounds=5, steps=8, unit="tokens"))
