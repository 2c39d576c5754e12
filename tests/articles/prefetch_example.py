"""The articles' prefetcher in a plain loop: the same batches, read while the step computes."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import SmartPrefetcher

torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

prefetcher = SmartPrefetcher(lookahead=4, pattern_detection=True)
batches = prefetcher.wrap(loader)
losses = []
for _ in range(3):
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print(prefetcher.statistics)
