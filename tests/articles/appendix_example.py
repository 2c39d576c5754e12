"""The appendix's example: a classifier trained by the optimized trainer with every switch on."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import CloudConfig, OptimizedTrainer

# A small image classifier on images whose class can be learned.
torch.manual_seed(0)
labels = torch.randint(0, 4, (256,))
images = torch.randn(256, 3, 16, 16) + labels[:, None, None, None]
train_loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(3, 16, kernel_size=3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()

trainer = OptimizedTrainer(
    model=model,
    optimizer=optimizer,
    loss_fn=loss_fn,
    compress_gradients=True,
    mixed_precision=True,
    dynamic_batch=True,
)
cloud_config = CloudConfig(
    nodes=4, gpus_per_node=8, topology="fat_tree", network_priority="low_latency"
)
summary = trainer.train(
    train_loader=train_loader,
    epochs=3,
    cloud_config=cloud_config,
    checkpoint_dir="./checkpoints",
    resume=True,
)
