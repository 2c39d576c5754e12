"""A realistic report for the tests: six variants of one fine-tuning job, drawn from a seed."""

from typing import Any

import numpy as np
import pytest

from hasten.measure.statistics import claim_verdict, paired_ratio, spread, verdict

# name, techniques, speed against the baseline, GB, final eval loss, share of padding
VARIANTS: list[tuple[str, list[str], float, float, float, float]] = [
    ("baseline", [], 1.0, 61.2, 2.4131, 0.38),
    ("packing", ["PackWithinStep"], 1.47, 58.9, 2.4128, 0.004),
    ("chunked loss", ["ChunkedLoss"], 1.06, 41.7, 2.4131, 0.38),
    ("gradient compression", ["TopK"], 0.93, 62.4, 2.4197, 0.38),
    ("prefetching", ["Prefetch"], 1.001, 61.3, 2.4131, 0.38),
    ("all techniques", ["PackWithinStep", "ChunkedLoss", "Prefetch"], 1.62, 38.4, 2.4142, 0.004),
]
CLAIMED = {"packing": 1.4, "chunked loss": 1.2, "gradient compression": 1.15, "prefetching": 1.15}


@pytest.fixture
def report() -> dict[str, Any]:
    return realistic_report()


def realistic_report() -> dict[str, Any]:
    """A report in which one claim held, others did not, and one technique did harm."""
    rng = np.random.default_rng(11)
    weather = rng.lognormal(0, 0.015, 8)
    rounds = {
        name: list(21_400 * factor * weather * rng.lognormal(0, 0.012, 8))
        for name, _, factor, *_ in VARIANTS
    }
    return {
        "schema": 2,
        "title": "DeepSeek-V2-Lite, LoRA fine-tuning on 48,000 conversations",
        "created": "2026-11-20T14:03:27+00:00",
        "command": "hasten speedup recipe.yaml rounds=8 seed=20",
        "variants": [_variant(variant, rounds, rng) for variant in VARIANTS],
        "claims": [_claim(name, rounds) for name in CLAIMED],
        "quality": {
            "margin": 0.005,
            "text": "Eval loss after 10 million tokens differs by +0.0011 (95 % interval "
            "−0.0012 to +0.0034 over 3 paired seeds), within the margin.",
            "verdict": "not worse",
        },
        "samples": [
            {
                "prompt": "解释一下什么是梯度累积。",
                "answer": "梯度累积把一个大批次拆成若干小批次:依次前向和反向,"
                "把梯度相加,最后只更新一次权重。\n\n```python\nloss = total / trained_tokens\n```",
                "variant": "all techniques",
            }
        ],
        "hardware": {
            "accelerator": "NVIDIA H100 80GB HBM3",
            "processor": "AMD EPYC 9454",
            "cores": 16,
            "memory_bytes": 137_438_953_472,
        },
        "versions": {"hasten": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "triton": None},
        "recipe": {
            "model": "deepseek-ai/DeepSeek-V2-Lite",
            "dataset": {"path": "conversations.jsonl", "format": "sharegpt", "eval_data": 0.02},
            "finetuning_type": "lora",
            "cutoff_len": 4096,
            "learning_rate": 2e-4,
            "techniques": ["PackWithinStep", "ChunkedLoss", {"Prefetch": {"depth": 2}}],
        },
        "seed": 20,
        "cost": {
            "currency": "USD",
            "per_device_hour": 2.49,
            "per_million_tokens": {
                name: 2.49 / 3600 / 21_400 / factor * 1e6 for name, _, factor, *_ in VARIANTS
            },
        },
    }


def _variant(
    variant: Any, rounds: dict[str, list[float]], rng: np.random.Generator
) -> dict[str, Any]:
    name, techniques, factor, gigabytes, final_loss, padding = variant
    tokens = np.linspace(0, 1e7, 400)
    fall = 0.9 * np.exp(-tokens / 1.4e6)
    training = final_loss - 0.03 + fall + rng.normal(0, 0.03, 400)
    eval_data = final_loss + 0.87 * np.exp(-tokens[::40] / 1.4e6)
    ratio = paired_ratio(rounds["baseline"], rounds[name])
    step = 0.766 / factor
    return {
        "name": name,
        "techniques": techniques,
        "tokens_per_second": spread(rounds[name]).summary(),
        "ratio": ratio.summary(),
        "against": None if name == "baseline" else "baseline",
        "effect": ratio.summary(),
        "quality": None if name == "baseline" else "not worse",
        "peak_memory_bytes": int(gigabytes * 1e9),
        "eval_loss": final_loss,
        "eval_curve": np.stack([tokens[::40], eval_data], 1).tolist(),
        "loss_curve": np.stack([tokens, training], 1).tolist(),
        "step_seconds": {"median": step, "p50": step * 0.99, "p99": step * 1.21},
        "rounds": rounds[name],
        "padding_share": padding,
        "startup_seconds": {"imports": 6.4, "data": 0.8, "model": 11.9},
        "verdict": "baseline" if name == "baseline" else verdict(ratio),
        "effective": [
            {
                "technique": technique,
                "effective": technique != "Prefetch",
                "evidence": "The loader never waited, so there was nothing to hide."
                if technique == "Prefetch"
                else "Measured in the step: 312 of 312 micro-batches took this path.",
            }
            for technique in techniques
        ],
    }


def _claim(name: str, rounds: dict[str, list[float]]) -> dict[str, str]:
    ratio = paired_ratio(rounds["baseline"], rounds[name])
    return {
        "technique": name,
        "metric": "tokens per second",
        "claimed": f"+{100 * (CLAIMED[name] - 1):.0f} %",
        "source": "article on training speed, section 3",
        "measured": f"{100 * (ratio.median - 1):+.1f} %",
        "verdict": claim_verdict(ratio, CLAIMED[name], verdict(ratio)),
    }
