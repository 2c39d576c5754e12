"""The ways to keep ranks together that bench_communication.py compares, each a model with its own
loop.

All have the same model, weights, records of a rank, AdamW, clipping and bf16 autocast, and fused
layers and attention where the processor's kernels can be compiled. A method's name is ``KIND`` or
``KIND:NUMBER``: ``stream:4`` has four fragments in 4 bits, ``signs:4`` four in one, ``stream``
chooses for itself, ``diloco:50`` averages every 50 steps,
``powersgd:16`` has rank 16, ``topk:0.05`` keeps 5 %; ``topk_dense:0.05`` does so after 100 steps
with full gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.parts.distributed.ddp import under_way, watch_reducer
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.fused_layers import fuse_layers, why_not

SIZES = {"10M": (384, 1024, 6, 6), "3M": (256, 688, 4, 4), "tiny": (64, 128, 2, 2)}
LENGTH = 256  # tokens of a record
COMPRESSED = ("half", "bf16", "int8", "int4", "topk", "topk_dense", "powersgd")
DENSE_START = 100  # steps, of topk_dense


def build(size: str, seed: int, perturbed: bool = False) -> nn.Module:
    """A Llama of bytes; the perturbed one starts from weights that differ in the sixth digit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, layers, heads = SIZES[size]
    torch.manual_seed(100 + seed)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=LENGTH,
            attn_implementation="sdpa",
        )
    )
    if perturbed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
    if not why_not():
        fuse_layers(model)
        use_document_attention(model)
    return model


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


class Method:
    """A model, its optimizer and records, and what joins it to the other ranks."""

    def __init__(self, name: str, size: str, seed: int, rank: int, text: Tensor, rows: int) -> None:
        self.kind, _, number = name.partition(":")
        self.number = float(number) if number else None
        self.text, self.rank, self.rows = text, rank, rows
        self.net = build(size, seed, perturbed=self.kind == "again")
        self.model: nn.Module = self.net
        self.part: Any = None
        self._exposed = self._hidden = 0.0
        self._watched = False
        self.draw = torch.Generator().manual_seed(1000 + rank + 10 * seed)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._join()

    def _join(self) -> None:
        if self.kind in ("ddp", "again", *COMPRESSED):
            self.model = DistributedDataParallel(self.net, gradient_as_bucket_view=True)
        if self.kind in COMPRESSED:
            self.part = _compressor(self.kind, self.number)
            self.part.attach(self.model)
        elif self.kind in ("diloco", "nesterov", "local"):
            from hasten.parts.comm.codecs import codec
            from hasten.parts.comm.local_sgd import LocalSteps

            outer = "nesterov" if self.kind == "nesterov" else "mean"
            found = None if self.kind == "local" else codec("int4")
            self.part = LocalSteps(self.net.parameters(), int(self.number or 20), outer, found)
        elif self.kind in ("stream", "signs"):
            from hasten.parts.comm.codecs import codec
            from hasten.parts.comm.streaming_local_sgd import Stream

            fragments = int(self.number) if self.number else None
            found = codec("sign") if self.kind == "signs" else None
            self.part = Stream(self.net.parameters(), found, fragments)
        elif self.kind not in ("apart", "alone", "ddp", "again"):
            raise SystemExit(f"{self.kind} isn't a method")
        if isinstance(self.model, DistributedDataParallel):
            self._watched = watch_reducer(self.model)

    def step(self, rate: float = 1e-3) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        places = torch.randint(len(self.text) - LENGTH, (self.rows,), generator=self.draw).tolist()
        ids = torch.stack([self.text[p : p + LENGTH].long() for p in places])
        loss_of(self.model, ids).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.drifts:
            self.part.after_step()
        if self._watched and isinstance(self.model, DistributedDataParallel):
            found = under_way(self.model)
            if found is not None:
                self._exposed += found.exposed
                self._hidden += found.hidden

    @property
    def drifts(self) -> bool:
        return self.kind in ("diloco", "nesterov", "local", "stream", "signs")

    def settle(self) -> None:
        if self.drifts:
            self.part.synchronize()

    def waited(self) -> float:
        """Seconds so far in which nothing was computed for want of other ranks."""
        return self._exposed + float(getattr(self.part, "waited_seconds", 0.0))

    def hidden(self) -> float:
        """Seconds so far in which messages travelled beside the computation."""
        return self._hidden + float(getattr(self.part, "hidden_seconds", 0.0) or 0.0)

    @torch.no_grad()
    def eval_data(self, text: Tensor) -> float:
        """Loss on the same 128 stretches of text that was never trained on."""
        draw = torch.Generator().manual_seed(7)
        self.net.eval()
        losses = []
        for _ in range(8):
            places = torch.randint(len(text) - LENGTH, (16,), generator=draw).tolist()
            losses.append(
                loss_of(self.net, torch.stack([text[p : p + LENGTH].long() for p in places]))
            )
        self.net.train()
        return float(torch.stack(losses).mean())


def _compressor(kind: str, number: float | None) -> Any:
    from hasten.parts.comm.gradient_compressor import GradientCompressor

    method = kind.removesuffix("_dense")
    settings: dict[str, Any] = {"sparsity_method": method, "communication_backend": "gloo"}
    if method == "topk":
        settings["compression_ratio"] = number or 0.05
        settings["dense_steps"] = DENSE_START if kind != method else 0
    elif kind == "powersgd":
        settings["rank"] = int(number or 16)
    return GradientCompressor(**settings)
