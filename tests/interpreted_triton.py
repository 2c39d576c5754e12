"""Imported first by the tests: without a GPU, Triton's kernels run as Python, in every process.

Triton reads the variable while it is imported, and Transformers imports it.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
