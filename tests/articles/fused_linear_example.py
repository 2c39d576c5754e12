"""The articles' fused layer: a linear layer and its ReLU in one call."""

import torch
import torch.nn as nn

from hasten import fused_linear_relu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + fused_linear_relu(x, self.linear.weight, self.linear.bias)


torch.manual_seed(0)
model = nn.Sequential(Block(8), Block(8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)
losses = []
for _ in range(30):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
