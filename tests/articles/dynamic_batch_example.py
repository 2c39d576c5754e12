"""The dynamic batch as the articles use it, and a loader with a budget of tokens."""

import torch
from torch.utils.data import DataLoader

from hasten import DynamicBatcher, DynamicBatchSampler

# Batches that grow while there is memory.
torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs.sum(dim=1, keepdim=True)
loader = DataLoader(list(zip(inputs, targets, strict=True)), batch_size=64)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batcher = DynamicBatcher(initial_size=32, max_size=512, growth_factor=1.2, memory_threshold=0.8)
sizes = []
for data in loader:
    x, y = batcher.adjust_batch(data)
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    batcher.update_after_step()
    sizes.append(len(x))
rest = [len(x) for x, y in batcher.flush()]

# Texts of uneven length: as many per batch as fit 4,096 tokens.
texts = [torch.ones(1 + 37 * i % 500, dtype=torch.long) for i in range(200)]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


sampler = DynamicBatchSampler(texts, max_tokens=4096)
token_loader = DataLoader(texts, batch_sampler=sampler, collate_fn=padded)
shapes = [tuple(batch.shape) for batch in token_loader]
