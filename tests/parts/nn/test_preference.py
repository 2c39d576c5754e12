"""Losses of preference pairs: a plain loop over the pairs gives the same numbers.

The loop runs each answer alone, in float64, with log-softmax over whole logits. Transformers' norms
compute in float32 whatever the model is; where rows are laid out otherwise, they are replaced by
norms in their own format.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from covering import covering
from hasten.models.load import as_reward_model
from hasten.parts.data.collate import tokenized_example
from hasten.parts.data.pairs import (
    EMPTY,
    PreferencePair,
    packed_pairs,
    padded_pairs,
    with_other_answer,
)
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.losses import LabelOnlyHead
from hasten.parts.nn.preference import OnePassPreferenceLoss, PairLoss, PreferenceLoss, RewardLoss
from hasten.parts.nn.preference_objectives import LOSSES, Objective
from pairs import example, loop, pairs, references, sigma, softplus, token_log_probs
from tiny import VOCABULARY, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # between peft and transformers
PAIRS = pairs()
TERMS: dict[str, dict[str, Any]] = {
    **{name: {"loss": name} for name in LOSSES if name != "bradley_terry"},
    "robust": {"loss": "robust", "label_smoothing": 0.2},
    "cdpo": {"loss": "cdpo", "label_smoothing": 0.2},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.7, "label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.5},
    "sigmoid with sft": {"loss": "sigmoid", "sft_weight": 0.3},
    "hinge with sft of rows": {"loss": "hinge", "beta": 0.01, "sft_weight": 0.3, "sft_span": "all"},
    "cpo with sft by example": {"loss": "cpo", "sft_weight": 1.5, "sft_mean": "examples"},
    "orpo of answers": {"loss": "orpo", "sft_span": "answer", "sft_mean": "examples"},
    "sigmoid, longer answers less": {"loss": "sigmoid", "ld_alpha": 0.4},
}
LAYOUTS = ("padded", "packed", "shared")
WAYS = [
    (layout, head)
    for layout, head in zip(LAYOUTS * 2, ("whole logits", "one pass") * 3, strict=True)
]
DENSE = partial(tiny_model, dtype=torch.float64)


@pytest.fixture(autouse=True)
def norms_in_their_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(norm: Any, x: Tensor) -> Tensor:
        scaled: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * scaled

    for kind in (LlamaRMSNorm, Qwen2RMSNorm, DeepseekV3RMSNorm):
        monkeypatch.setattr(kind, "forward", forward)


def laid_out(layout: str, given: list[PreferencePair], objective: Objective) -> dict[str, Any]:
    if layout == "padded":
        return padded_pairs(given, 0, **objective.layout)
    return packed_pairs(given, layout == "shared", **objective.layout)


def loss_of(kind: str, model: nn.Module, objective: Objective, chunk: int = 7) -> PreferenceLoss:
    if kind == "whole logits":
        return PreferenceLoss(model, objective)
    return OnePassPreferenceLoss(model, objective, chunk)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance of a gradient, over the norm of all."""
    assert found.keys() == expected.keys()
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    return max(float((found[n] - expected[n]).norm()) for n in found) / norm


def check(
    terms: dict[str, Any],
    layout: str,
    head: str,
    build: Any = DENSE,
    bound: float = 1e-12,
    given: list[PreferencePair] = PAIRS,
) -> None:
    objective = Objective(**terms)
    reference = references(given) if objective.needs_reference else None
    plain = build()
    expected = loop(plain, given, reference, **terms)
    wanted = gradients(plain, expected)
    model = build()
    if layout != "padded":
        use_document_attention(model)
    module = loss_of(head, model, objective)
    batch = laid_out(layout, given, objective)
    loss, count = module(**batch, reference=reference)
    assert count == len(given)
    assert (loss / count).item() == pytest.approx(expected.item(), rel=bound, abs=bound)
    assert apart(gradients(model, loss / count), wanted) < bound


@pytest.mark.parametrize(("terms", "way"), covering(TERMS, WAYS, rounds=2), ids=str)
def test_each_objective_is_that_of_a_plain_loop(terms: str, way: tuple[str, str]) -> None:
    """The default rows have each objective with both heads."""
    check(TERMS[terms], *way)


def biased() -> Any:
    model: Any = tiny_model(dtype=torch.float64)
    torch.manual_seed(3)
    head = nn.Linear(32, VOCABULARY, dtype=torch.float64)
    head.weight = model.lm_head.weight
    model.lm_head = head
    return model


def capped() -> Any:
    """Cohere scales its logits, and Gemma 2 caps them; both do so after the head."""
    import transformers as hf

    from tiny import COMMON

    torch.manual_seed(0)
    config = hf.Gemma2Config(
        **{**COMMON, "head_dim": 8}, num_key_value_heads=4, final_logit_softcapping=2.0
    )
    config.layer_types = ["full_attention"] * 2
    return hf.Gemma2ForCausalLM(config).to(torch.float64)


def adapted() -> Any:
    """The head has an adapter too, so it stays and is called for each chunk."""
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return get_peft_model(tiny_model(dtype=torch.float64), lora).to(torch.float64)


MODELS: dict[str, tuple[Any, float]] = {
    "tied": (partial(tiny_model, tied=True, dtype=torch.float64), 1e-12),
    "qwen2": (partial(tiny_model, "qwen2", dtype=torch.float64), 1e-12),
    "biased": (biased, 1e-12),
    "deepseek_v3": (partial(tiny_model, "deepseek_v3", dtype=torch.float64), 1e-6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_each_model_learns_the_same_from_labels_alone(name: str, layout: str) -> None:
    """Tied: the gradients of head and embedding add up in one weight."""
    build, bound = MODELS[name]
    check({"loss": "sigmoid", "sft_weight": 0.2}, layout, "one pass", build, bound)


def test_logits_are_scaled_and_capped() -> None:
    check({"loss": "ipo"}, "padded", "one pass", capped, 1e-6)  # its norms compute in float32


def test_a_head_with_an_adapter_is_called() -> None:
    check({"loss": "sigmoid"}, "padded", "one pass", adapted)
    assert not isinstance(
        OnePassPreferenceLoss(adapted(), Objective()).model.base_model.model.lm_head, LabelOnlyHead
    )


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_chunks_change_nothing(chunk: int) -> None:
    """Of one label: every pair is larger than four chunks, so its logits are computed twice."""
    objective, reference = Objective(), references(PAIRS)
    batch = laid_out("padded", PAIRS, objective)
    usual = PreferenceLoss(tiny_model(dtype=torch.float64), objective)
    module = OnePassPreferenceLoss(tiny_model(dtype=torch.float64), objective, chunk)
    expected, _ = usual(**batch, reference=reference)
    loss, _ = module(**batch, reference=reference)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    assert apart(gradients(module.model, loss), gradients(usual.model, expected)) < 1e-13
    # A pair of up to four chunks is whole: none of PAIRS in chunks of one label, some of five.
    by_pair = [pair.trained_tokens for pair in PAIRS]
    assert 4 < min(by_pair) <= 20 < max(by_pair)
    whole = max(n for n in by_pair if n <= 20)
    assert module.largest_logits == {1: 1, 5: whole, 1000: sum(by_pair)}[chunk]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_in_narrow_formats_one_pass_is_the_baseline(dtype: torch.dtype, layout: str) -> None:
    objective, reference = Objective(beta=0.5), references(PAIRS)
    batch = laid_out(layout, PAIRS, objective)
    found = {}
    for kind in ("whole logits", "one pass"):
        model = tiny_model(dtype=dtype)
        use_document_attention(model)
        loss, _ = loss_of(kind, model, objective)(**batch, reference=reference)
        found[kind] = loss.item(), gradients(model, loss)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    (one, of_one), (other, of_other) = found.values()
    assert other == pytest.approx(one, rel=bound)
    assert apart(of_other, of_one) < bound


def test_an_equal_reference_gives_ln_2_exactly() -> None:
    """Also in bf16 and for pairs of any length, because sums of equal numbers are equal."""
    for dtype in (torch.float32, torch.bfloat16):
        for layout in LAYOUTS:
            model = tiny_model(dtype=dtype)
            use_document_attention(model)
            module = OnePassPreferenceLoss(model, Objective())
            batch = laid_out(layout, PAIRS, Objective())
            reference, counts = module(**batch, log_probs=True)
            assert not reference.requires_grad
            assert counts.tolist() == [
                [p.chosen.trained_tokens, p.rejected.trained_tokens] for p in PAIRS
            ]
            loss, count = module(**batch, reference=reference)
            assert (loss / count).item() == pytest.approx(math.log(2), abs=1e-15)


def test_long_sums_are_as_exact_as_their_terms() -> None:
    """In float32 the sum of 300 log-probabilities would lose 1e-5 of a log-ratio."""
    given = [
        PreferencePair(example([3, 4], range(5, 95)), example([3, 4], range(6, 96)))
        for _ in range(2)
    ]
    truth = PreferenceLoss(tiny_model(dtype=torch.float64), Objective())
    module = OnePassPreferenceLoss(tiny_model(), Objective())
    batch = padded_pairs(given)
    expected, _ = truth(**batch, log_probs=True)
    sums, _ = module(**batch, log_probs=True)
    assert sums.dtype == torch.float64
    # each term is rounded to half a unit of float32 near 4.5, plus the states' own error
    assert float((sums - expected).abs().max()) < 90**0.5 * 4 * 2.4e-7


# Empty answers, prefixes beyond the prompt, pairs without weight


ODD = {
    "an answer without a token": PreferencePair(example([4, 5, 6], [7, 8]), example([4, 5, 6], [])),
    "one answer begins with the other": PreferencePair(
        example([4, 5], [7, 8, 9]), example([4, 5], [7, 8])
    ),
    "the other way round": PreferencePair(example([4, 5], [7, 8]), example([4, 5], [7, 8, 9])),
    "equal answers": PreferencePair(example([4, 5], [7, 8]), example([4, 5], [7, 8])),
    "no prompt": PreferencePair(example([], [7, 8, 4]), example([], [9, 8])),
    "one answer alone": PreferencePair(example([4, 5], [7, 8]), tokenized_example([])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ODD)
def test_odd_pairs_count_like_any_other(name: str, layout: str) -> None:
    given = [PAIRS[0], ODD[name], PAIRS[1]]
    check({"loss": "apo_zero"}, layout, "one pass", given=given)
    check({"loss": "ipo"}, layout, "whole logits", given=given)


def test_an_empty_answer_has_finite_odds() -> None:
    given = [ODD["an answer without a token"], PAIRS[0]]
    for terms in ({"loss": "orpo"}, {"loss": "simpo"}):
        objective = Objective(**terms)
        model = tiny_model(dtype=torch.float64)
        loss, _ = PreferenceLoss(model, objective)(**laid_out("padded", given, objective))
        assert loss.isfinite()
        assert all(g.isfinite().all() for g in gradients(model, loss).values())


@pytest.mark.parametrize("head", ["whole logits", "one pass"])
def test_a_pair_without_weight_changes_nothing(head: str) -> None:
    """As on a rank without pairs; its reference may be unknown."""
    terms: dict[str, Any] = {"loss": "sigmoid", "sft_weight": 0.5}
    objective, reference = Objective(**terms), references(PAIRS)
    reference[1] = torch.nan
    batch = laid_out("padded", PAIRS, objective)
    batch["weights"][1] = 0
    others = [PAIRS[0], *PAIRS[2:]]
    plain = tiny_model(dtype=torch.float64)
    expected = loop(plain, others, reference[[0, 2, 3]], **terms)
    module = loss_of(head, tiny_model(dtype=torch.float64), objective)
    loss, count = module(**batch, reference=reference)
    assert count == 3
    assert (loss / count).item() == pytest.approx(expected.item(), rel=1e-12)
    assert apart(gradients(module.model, loss / count), gradients(plain, expected)) < 1e-12
    assert module.take_statistics()[0] == 3


def test_a_step_of_several_micro_batches_divides_by_its_own_tokens() -> None:
    terms: dict[str, Any] = {"loss": "orpo", "beta": 0.3}
    objective = Objective(**terms)
    model = tiny_model(dtype=torch.float64)
    expected = loop(model, PAIRS, None, **terms)
    module = OnePassPreferenceLoss(model, objective)
    batches = [laid_out("padded", part, objective) for part in (PAIRS[:1], PAIRS[1:])]
    tokens = sum(int(objective.nll_tokens(batch["counts"]).sum()) for batch in batches)
    unit = torch.tensor(len(PAIRS) / tokens, dtype=torch.float64)
    loss = sum(module(**batch, nll_unit=unit)[0].item() for batch in batches) / len(PAIRS)
    assert loss == pytest.approx(expected.item(), rel=1e-12)


# Statistics


def statistics(module: PairLoss) -> list[float]:
    return [float(n) for n in module.take_statistics()]


def test_statistics_are_those_of_the_pairs() -> None:
    objective, reference = Objective(beta=0.2), references(PAIRS)
    module = OnePassPreferenceLoss(tiny_model(dtype=torch.float64), objective)
    expected, counts = module(**laid_out("padded", PAIRS, objective), log_probs=True)
    for part in (slice(0, 1), slice(1, 4)):
        module(**laid_out("padded", PAIRS[part], objective), reference=reference[part])
    ratios = expected - reference
    margins = 0.2 * (ratios[:, 0] - ratios[:, 1])
    assert statistics(module) == pytest.approx([
        4,
        int((margins > 0).sum()),
        float(margins.sum()),
        *(float(n) for side in (0, 1) for n in (expected[:, side].sum(), counts[:, side].sum())),
        float(ratios.sum()),
    ])  # fmt: skip
    assert statistics(module) == [0] * 8


def test_ties_are_not_correct() -> None:
    module = PreferenceLoss(tiny_model(dtype=torch.float64), Objective())
    same = ODD["equal answers"]
    loss, _ = module(**padded_pairs([same]))
    assert loss.item() == pytest.approx(math.log(2), abs=1e-15)
    assert statistics(module)[:3] == [1, 0, 0]


# Answers judged alone


def alone(count: int = 5) -> list[PreferencePair]:
    """Good and bad answers; each also has the answer of the one before."""
    rows = [
        PreferencePair(pair.chosen, EMPTY) if index % 3 else PreferencePair(EMPTY, pair.rejected)
        for index, pair in enumerate(pairs(count, seed=5))
    ]
    return [with_other_answer(row, rows[index - 1]) for index, row in enumerate(rows)]


@pytest.mark.parametrize("shift", [3.0, -3.0], ids=["divergent", "not divergent"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("head", ["whole logits", "one pass"])
@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_answers_judged_alone(name: str, head: str, layout: str, shift: float) -> None:
    """The divergence is the mean log-ratio of the other answers, at least 0, without gradient."""
    given, beta = alone(), 0.2
    plain = tiny_model(dtype=torch.float64)
    reference = torch.zeros(len(given), 3, dtype=torch.float64)
    with torch.no_grad():
        for index, pair in enumerate(given):
            for side, row in enumerate((pair.chosen, pair.rejected, pair.other)):
                assert row is not None
                row_sum = token_log_probs(plain, row)[torch.from_numpy(row.trained[1:])].sum()
                reference[index, side] = row_sum + 0.3 * index - (shift if side == 2 else 0)
    kl = max(shift - 0.3 * 2, 0.0) if name == "kto" else 0.0
    losses = []
    for index, pair in enumerate(given):
        is_good = pair.chosen.length > 0
        row = pair.chosen if is_good else pair.rejected
        ratio = token_log_probs(plain, row)[torch.from_numpy(row.trained[1:])].sum()
        ratio = ratio - reference[index, 0 if is_good else 1]
        loss = 1 - sigma(beta * (ratio - kl)) if is_good else 1 - sigma(beta * (kl - ratio))
        losses.append(loss * (1.0 if is_good else 1.5))
    expected = torch.stack(losses).mean()
    model = tiny_model(dtype=torch.float64)
    use_document_attention(model)
    objective = Objective(name, beta=beta, undesirable_weight=1.5)
    module = loss_of(head, model, objective)
    batch = laid_out(layout, given, objective)
    loss, count = module(**batch, reference=reference)
    assert (loss / count).item() == pytest.approx(expected.item(), rel=1e-12)
    assert apart(gradients(module.model, loss / count), gradients(plain, expected)) < 1e-12
    sums, _ = module(**batch, log_probs=True)
    assert sums.shape == (len(given), 3)


def test_the_divergence_is_a_mean_over_ranks() -> None:
    """A rank whose pairs have no weight asks for the others' sum too."""
    given, asked = alone(), []

    def all_reduce(numbers: Tensor) -> Tensor:
        asked.append(numbers.clone())
        return numbers + torch.tensor([40.0, 4.0])

    objective = Objective("kto")
    module = OnePassPreferenceLoss(tiny_model(dtype=torch.float64), objective)
    module.all_reduce = all_reduce
    batch = laid_out("padded", given, objective)
    reference, _ = module(**batch, log_probs=True)
    loss, _ = module(**batch, reference=reference)
    # five log-ratios of 0 and four of 10: the divergence is 40 / 9
    kl = torch.tensor(0.1 * 40 / 9)
    good = sum(pair.chosen.length > 0 for pair in given)
    expected = good * sigma(kl) + (len(given) - good) * (1 - sigma(kl))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    batch["weights"].zero_()
    loss, count = module(**batch, reference=reference)
    assert (loss.item(), float(count)) == (0, 0)
    assert [numbers.tolist() for numbers in asked] == [[0, 5], [0, 0]]


def test_kto_needs_another_answer_to_each_prompt() -> None:
    given = [PreferencePair(PAIRS[0].chosen, EMPTY)]
    with pytest.raises(ValueError, match="another answer"):
        PreferenceLoss(tiny_model(), Objective("kto"))(**padded_pairs(given))


# Reward models


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_reward_model_compares_the_ends_of_rows(name: str, layout: str) -> None:
    objective = Objective("bradley_terry", centre=0.1)
    model: Any = as_reward_model(tiny_model(name, dtype=torch.float64), seed=3)
    model.score.weight.data *= 100  # rewards of about 1
    losses = []
    for pair in PAIRS:
        rewards = [
            model(input_ids=torch.from_numpy(row.input_ids).long()[None], use_cache=False).logits
            for row in (pair.chosen, pair.rejected)
        ]
        chosen, rejected = (reward.squeeze() for reward in rewards)
        losses.append(softplus(rejected - chosen) + 0.1 * (chosen + rejected).square())
    expected = torch.stack(losses).mean()
    wanted = gradients(model, expected)
    if layout != "padded":
        use_document_attention(model)
    module = RewardLoss(model, objective)
    loss, count = module(**laid_out(layout, PAIRS, objective))
    bound = 1e-6 if name == "deepseek_v3" else 1e-12
    assert (loss / count).item() == pytest.approx(expected.item(), rel=bound)
    assert apart(gradients(model, loss / count), wanted) < bound
    rewards, _ = module(**laid_out(layout, PAIRS, objective), log_probs=True)
    better = int((rewards[:, 0] > rewards[:, 1]).sum())
    assert 0 < better < 4
    found = [float(n) for n in module.take_statistics()]
    assert found[:4] == pytest.approx(
        [4, better, float((rewards[:, 0] - rewards[:, 1]).sum()), float(rewards[:, 0].sum())]
    )
    assert found[4:] == pytest.approx([4, float(rewards[:, 1].sum()), 4, 0])


def test_a_saved_reward_model_is_one_of_transformers(tmp_path: Path) -> None:
    model = as_reward_model(tiny_model(), seed=3)
    again = as_reward_model(tiny_model(), seed=3)
    assert torch.equal(model.score.weight, again.score.weight)
    model.save_pretrained(tmp_path)
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert read.config.num_labels == 1
    rows = padded_pairs(PAIRS, 0, sequences=0)
    rewards, _ = RewardLoss(model.eval(), Objective("bradley_terry"))(**rows, log_probs=True)
    with torch.no_grad():
        theirs = read(input_ids=rows["input_ids"]).logits.view(-1, 2)
    assert (rewards - theirs).abs().max() < 1e-6


# Settings


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"loss": "aot"}, "loss is 'aot'; give one of sigmoid"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"label_smoothing": 0.1}, "the loss sigmoid has no label_smoothing"),
        ({"loss": "robust", "label_smoothing": 0.5}, "less than 0.5"),
        ({"sft_weight": -1}, "sft_weight is -1"),
        ({"sft_mean": "pairs"}, "sft_mean is 'pairs'"),
        ({"loss": "orpo", "sft_weight": 0.5}, "orpo's weight is always 1"),
        ({"ld_alpha": 1.5}, "ld_alpha is 1.5"),
        ({"ld_alpha": 0.5, "sft_weight": 1.0}, "give one of them"),
    ],
)
def test_settings_without_sense_are_refused(terms: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**terms)


def test_a_shared_prompt_needs_an_attention_that_shows_it() -> None:
    batch = packed_pairs(PAIRS, shared_prompt=True)
    for kind in ("whole logits", "one pass"):
        with pytest.raises(ValueError, match="use document attention"):
            loss_of(kind, tiny_model(), Objective())(**batch)
