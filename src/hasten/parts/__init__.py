"""Plain PyTorch parts, each useful alone in any training loop."""
