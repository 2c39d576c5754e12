"""The report's shapes: what a report may hold, key by key, as docs/report-schema.md describes it.

float is a number or null, bool a truth value or null, object a number, text, truth value or null,
dict any object; [x] is a list of x and [x, y] a pair; a key that ends with ? may be missing or
null. A key is new where it is optional, so that reports written before it was there still read.
"""

from typing import Any

STEP_TERMS = (
    *("data", "copy", "forward", "backward"),
    *("communication", "optimizer", "checkpoint", "idle"),
)
MEMORY_TERMS = ("weights", "gradients", "optimizer", "activations", "logits", "other")

SPAN = {"median": float, "low": float, "high": float}
_CLAIM = ("technique", "metric", "claimed", "source", "measured", "verdict")
LEDGER = {
    "step?": {f"{term}?": float for term in STEP_TERMS},  # seconds per step
    "memory?": {f"{term}?": float for term in MEMORY_TERMS},  # bytes
    "stability?": dict.fromkeys(("relative_spread?", "p50?", "p99?", "stalls?"), float),
    "utilisation?": float,
}
ARM = {
    "name": str,
    "kind?": str,
    "techniques": [str],
    "tokens_per_second": SPAN,
    "ratio": SPAN,
    "verdict": str,
    "p_value?": float,
    "corrected?": bool,
    "rounds_needed?": object,
    "rebuilt?": {"ratio?": SPAN, "text?": str},
    "luck?": {"error": float, "freedom": float, "builds": float},
    "peak_memory_bytes?": float,
    "held_out_loss?": float,
    "held_out_curve?": [[float, float]],  # (tokens, loss)
    "loss_curve?": [[float, float]],
    "step_seconds?": {"median?": float, "p50?": float, "p99?": float},
    "rounds?": [float],
    "beside?": [float],
    "foreign_load?": [float],
    "padding_share?": float,
    "mfu?": float,
    "ledger?": LEDGER,
    "startup_seconds?": {"imports?": float, "data?": float, "model?": float},
    "warmup?": {"steps?": float, "seconds?": float, "compile_seconds?": float},
    "acted?": [{"technique": str, "acted": bool, "evidence": str}],
}
_DESIGN = {
    **dict.fromkeys(("rounds?", "steps?", "warmup?", "seed?", "builds?", "seconds?"), float),
    "budget_seconds?": float,
    "grouping?": str,
    "dropped?": [str],
    "resumed?": bool,
    "redone_rounds?": float,
    "ranks?": float,
}
_INVARIANCE = {"what": str, "verdict": str, "found?": object, "tolerance?": object, "text?": str}
_GUARD = {
    "technique": str,
    "fidelity?": str,
    "test?": str,
    "verdict": str,
    "found?": object,
    "allowed?": object,
    "seeds?": object,
    "text?": str,
}
_COST = {
    "currency?": str,
    "per_device_hour?": float,
    "per_million_tokens?": dict,
    "energy?": {"kwh_per_million_tokens?": dict, "source?": str},
    "experiment?": {"seconds?": float, "money?": float, "kwh?": float},
    "payback?": {"text?": str, "hours?": float},
}
REPORT: dict[str, Any] = {
    "schema": int,
    "title": str,
    "created": str,
    "command": str,
    "arms": [ARM],
    "design?": _DESIGN,
    "noise?": {"ratio?": SPAN, "floor?": float, "text?": str},
    "interaction?": {"ratio?": SPAN, "text?": str},
    "claims?": [dict.fromkeys(_CLAIM, str)],
    "quality?": {"margin": float, "text": str, "verdict": str},
    "invariance?": [_INVARIANCE],
    "guard?": [_GUARD],
    "predicted?": {
        "text?": str,
        "rows?": [
            {
                "name": str,
                "unit": str,
                "predicted": float,
                "measured?": float,
                "within?": bool,
            }
        ],
    },
    "samples?": [{"prompt": str, "answer": str, "arm": str}],
    "hardware": dict,
    "versions": dict,
    "recipe": dict,
    "seed": int,
    "cost?": _COST,
    "mfu?": str,
}
