"""The articles' compressor in a plain loop: each gradient compressed by hand, then all averaged."""

import torch
import torch.nn as nn

from hasten import GradientCompressor

torch.manual_seed(0)
inputs = torch.randn(512, 64)
targets = inputs @ torch.randn(64, 64)
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)

compressor = GradientCompressor(
    compression_ratio=0.05, sparsity_method="topk", communication_backend="nccl"
)
losses = []
for _ in range(60):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = compressor.compress(parameter.grad)
    kept = (model.weight.grad != 0).float().mean().item()
    compressor.synchronize_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"{kept:.1%} of the gradient travels; loss {losses[0]:.2f} -> {losses[-1]:.2f}")
