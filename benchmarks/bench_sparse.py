"""DeepSeek's sparse attention: memory and CPU time of a layer, transformers' and hasten's.

    python benchmarks/bench_sparse.py [--rounds 5] [--tokens 2048] [--growth 4096,16384]
        [--longest 24576,49152] [--steps 400] [--parts memory,longest,seconds,learning,model]

The layer is DeepSeek-V3.2's attention with a real config's 64 index heads, but narrow, in float32
on one thread: a forward and a backward pass of one document. Memory is what the pass adds to the
process at its highest, each in a process of its own. CPU times take turns in one process, and a
ratio is the median over rounds. ``longest`` trains two such layers for a step of AdamW, with the
indexers' loss, and reports the process's peak. ``learning`` trains the indexer of a smaller layer
for some steps. ``model`` converts a small dense model that copies far tokens, trains it in both
stages, and compares its eval loss with dense training on as many tokens. The last column of the
first table is arithmetic: transformers' memory for twice the tokens is four times as much.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from smoke import arguments
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from turns import in_turns, ratio, timed

from hasten.models.indexers import add_indexers
from hasten.models.load import load_model
from hasten.parts.nn import attention, rebind, sparse_attention

LAYER = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 256,
    "index_head_dim": 32,
    "index_n_heads": 64,
    "num_hidden_layers": 1,
}
WAYS = ("transformers", "hasten", "hasten, indexer learns", "hasten, warm-up")
STAGES = dict(zip(WAYS, ("", "", "sparse", "warmup"), strict=True))
MIB = 2**20


class Layers(nn.Module):
    """Attention layers of the class of transformers, each added to its input."""

    def __init__(self, way: str, count: int = 1, **sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = DeepseekV32Config(**{**LAYER, **sizes}, attn_implementation="sdpa")
        self.layers = nn.ModuleList(v32.DeepseekV32Attention(config, 0) for _ in range(count))
        self.rotary = v32.DeepseekV32RotaryEmbedding(config)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.08)
        self.way = way
        for layer in self.layers if way != "transformers" else ():
            rebind.bind(layer, attention._sparse_forward)
            if STAGES[way]:
                sparse_attention.learn(layer, sparse_attention.IndexerLearning(STAGES[way]))
        self.requires_grad_(True)
        for layer in self.layers:
            layer.indexer.requires_grad_(bool(STAGES[way]))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        more: dict[str, Any] = {"position_embeddings": self.rotary(x, torch.arange(tokens)[None])}
        if self.way == "transformers":
            more["attention_mask"] = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
        else:
            more["attention_mask"] = torch.empty(1, 1, 0, 0, dtype=torch.bool)
            more["document_lengths"] = (tokens,)
        for layer in self.layers:
            x = x + layer(hidden_states=x, **more)[0]
        return x


def inputs(tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, tokens, LAYER["hidden_size"], generator=generator, requires_grad=True)


def one_pass(model: Layers, x: Tensor) -> float:
    """The loss of a forward and a backward pass."""
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return float(loss.detach())


def alone(way: str, tokens: int, count: int, results: Any) -> None:
    """Sends this process's peak in bytes and CPU seconds; two layers train for a step."""
    torch.set_num_threads(1)
    model = Layers(way if way != "nothing" else "hasten", count)
    x, began = inputs(tokens), time.process_time()
    if way != "nothing":
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        one_pass(model, x)
        if count > 1:
            optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.send((peak, time.process_time() - began))


def process(way: str, tokens: int, count: int = 1) -> tuple[int, float]:
    """What `alone` sends from a process of its own, forked after the imports."""
    context = multiprocessing.get_context("fork")
    results, theirs = context.Pipe(duplex=False)
    child = context.Process(target=alone, args=(way, tokens, count, theirs))
    child.start()
    theirs.close()
    found: tuple[int, float] = results.recv()
    child.join()
    return found


def memory(asked: argparse.Namespace) -> None:
    added: dict[tuple[str, int], float] = {}
    lengths = (asked.tokens, *asked.growth)
    base = process("nothing", asked.tokens)[0]
    for way in WAYS:
        for tokens in lengths if way != "transformers" else lengths[:1]:
            added[way, tokens] = process(way, tokens)[0] - base
    theirs, twice = added[WAYS[0], asked.tokens], 2 * asked.tokens
    print(f"memory of a pass, MiB above the process's base; transformers {theirs / MIB:.0f}")
    for way in WAYS[1:]:
        ours = ", ".join(f"{n:,} tokens {added[way, n] / MIB:.0f}" for n in lengths)
        line = f"{way}: {ours}; transformers over it {theirs / added[way, asked.tokens]:.1f}"
        if twice in asked.growth:
            line += f", at {twice:,} by arithmetic {4 * theirs / added[way, twice]:.1f}"
        if len(asked.growth) > 1:
            grown = added[way, asked.growth[-1]] / added[way, asked.growth[0]]
            line += f"; growth {asked.growth[0]:,} to {asked.growth[-1]:,} tokens {grown:.1f}"
        print(line, flush=True)


def seconds(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    x = inputs(asked.tokens)
    models = {way: Layers(way) for way in WAYS}
    losses = [one_pass(models[way], x) for way in WAYS[:3]]
    assert max(losses) - min(losses) < 1e-5 * max(losses), losses
    passes: dict[str, Callable[[], float]] = {
        way: partial(timed, partial(one_pass, model, x), time.process_time)
        for way, model in models.items()
    }
    times = in_turns(passes, asked.rounds)
    for way in WAYS:
        ours = [round(value, 2) for value in times[way]]
        over = ratio(times[WAYS[0]], times[way])
        print(f"{way}: CPU seconds {ours}; transformers over it {over:.2f}", flush=True)


def longest(asked: argparse.Namespace) -> None:
    base = process("nothing", asked.tokens, 2)[0]
    theirs = process(WAYS[0], asked.tokens, 2)[0] - base
    most = int(asked.tokens * ((8e9 - base) / theirs) ** 0.5)
    print(f"two layers and AdamW within 8 GB: transformers {most:,} tokens by arithmetic")
    for tokens in asked.longest:
        peak, cpu = process(WAYS[2], tokens, 2)
        print(
            f"{WAYS[2]}: {tokens:,} tokens, {tokens / most:.1f} times, the process's peak "
            f"{peak / 1e9:.2f} GB, {cpu:.0f} CPU seconds",
            flush=True,
        )


TOY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "index_topk": 16}


def learning(asked: argparse.Namespace) -> None:
    """Trains the indexer of a small layer in a warm-up, each step on eight new documents.

    Their states have a constant part: an index head's weight has no bias, so without that part no
    head could keep its sign. The share is that of attention in the 16 chosen of up to 128 keys,
    over attention in the best 16.
    """
    model = Layers(WAYS[3], **TOY, index_n_heads=16)
    (layer,) = model.layers
    for name, weight in layer.named_parameters():
        if weight.ndim > 1:  # the queries so large that attention differs from key to key
            nn.init.normal_(weight, std=(2 if "q_b_proj" in name else 1) * weight.shape[1] ** -0.5)
    model.requires_grad_(False)
    layer.indexer.requires_grad_(True)
    learns = sparse_attention.IndexerLearning("warmup", factor=1 / (8 * 128))
    sparse_attention.learn(layer, learns)
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=2e-2)
    spread = 1 / (1 + torch.arange(64) / 8)
    shares, divergences = [], []
    for step in range(asked.steps):
        x = torch.randn(8, 128, 64) * spread
        x[..., 0] = 2
        optimizer.param_groups[0]["lr"] = 2e-2 * (1 - step / asked.steps)
        optimizer.zero_grad()
        model(x / x.square().mean(-1, keepdim=True).sqrt()).sum().backward()
        optimizer.step()
        divergence, queries, captured, best, _ = sparse_attention.take_sums(model)[0].tolist()
        shares.append(captured / best)
        divergences.append(divergence / queries)
    last = shares[-20:]
    print(
        f"warm-up of {asked.steps} steps: captured over the best possible {shares[0]:.3f} -> "
        f"{sum(last) / len(last):.3f}, divergence {divergences[0]:.3f} -> {divergences[-1]:.3f}"
    )


# A model of two layers reads 48 random tokens, and then the same ones again. The second half can
# be predicted from keys that are 48 tokens away, three times as far as the keys that are chosen.
HALF, LETTERS, ROWS = 48, 24, 16
COPYING = {
    "vocab_size": LETTERS + 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "initializer_range": 0.05,
}


def copies(seed: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(0, LETTERS, (rows, HALF), generator=generator)
    return torch.cat([half, torch.full((rows, 1), LETTERS), half], dim=1)


def loss_of(model: Any, ids: Tensor, begin: int = 0) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, begin:-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, begin + 1 :].flatten())


@torch.no_grad()
def eval_losses(model: Any) -> tuple[float, float]:
    """Of held-out rows: of all tokens, and of the second half."""
    ids = copies(10**6, 256)
    return float(loss_of(model, ids)), float(loss_of(model, ids, HALF))


def train(model: Any, first: int, steps: int, rate: float = 2e-3) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        loss_of(model, copies(first + step)).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()


def learn_in(model: Any, stage: str) -> None:
    model.requires_grad_(stage == "sparse")
    for _, layer in sparse_attention.indexed_attentions(model):
        layer.indexer.requires_grad_(True)
        factor = 1 / (ROWS * (2 * HALF + 1))
        sparse_attention.learn(layer, sparse_attention.IndexerLearning(stage, factor=factor))


def rest(model: Any) -> None:
    for _, layer in sparse_attention.indexed_attentions(model):
        sparse_attention.learn(layer, None)


def whole_model(asked: argparse.Namespace) -> None:
    dense, warm_up, sparse = asked.steps * 9 // 8, asked.steps * 3 // 10, asked.steps * 3 // 8
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**COPYING)).train()
    train(made, 0, dense)
    with tempfile.TemporaryDirectory() as name:
        folder, new = Path(name) / "dense", Path(name) / "sparse"
        made.save_pretrained(folder)
        add_indexers(str(folder), new, heads=16, width=16, topk=16)
        theirs, ours = load_model(str(folder)), load_model(str(new))
    for model in (theirs, ours):
        attention.use_document_attention(model)
    at_first = eval_losses(ours)
    train(theirs, dense, warm_up + sparse)
    learn_in(ours, "warmup")
    train(ours, dense, warm_up, rate=1e-2)
    rest(ours)
    warm = eval_losses(ours)
    learn_in(ours, "sparse")
    train(ours, dense + warm_up, sparse)
    rest(ours)
    expected, found = eval_losses(theirs), eval_losses(ours)
    print(f"eval loss of all tokens and of the copied ones; {warm_up} and {sparse} steps")
    rows = {"new indexers": at_first, "after the warm-up": warm, "after both": found}
    for title, (both, second) in {**rows, "dense": expected}.items():
        print(f"{title}: {both:.4f}, {second:.4f}; over dense {both / expected[0] - 1:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = partial(str.split, sep=",")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--growth", type=numbers, default="4096,16384")
    parser.add_argument("--longest", type=numbers, default="24576,49152")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--parts", type=numbers, default="memory,longest,seconds,learning,model")
    asked = arguments(parser, rounds=1, tokens=320, growth="640", longest="400", steps=2)
    asked.growth, asked.longest = ([int(n) for n in a] for a in (asked.growth, asked.longest))
    parts = {"memory": memory, "longest": longest, "seconds": seconds, "learning": learning}
    for name, measure in {**parts, "model": whole_model}.items():  # forks come first
        if name in asked.parts:
            measure(asked)


if __name__ == "__main__":
    main()
