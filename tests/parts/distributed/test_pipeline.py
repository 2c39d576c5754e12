"""AsyncPipeline in one process and over ranks: the gradients of a model in one piece."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import stage as torch_stage

from covering import covering
from hasten import AsyncPipeline
from hasten.parts.data.collate import packed
from hasten.parts.distributed.pipeline import stages as partition
from hasten.parts.distributed.pipeline.model import piece_rows
from hasten.parts.distributed.pipeline.one_process import LocalRunner
from hasten.parts.distributed.pipeline.runtime import (
    Pass,
    PipelineSettings,
    PipelineWork,
    equal_micro_batches,
)
from hasten.parts.distributed.pipeline.schedules import (
    SCHEDULES,
    SPLIT,
    StageEvent,
    stages_per_rank,
)
from hasten.parts.distributed.pipeline.stages import Layers
from pipeline_rank_jobs import (
    bubbles,
    language_batch,
    language_model,
    largest_error,
    plain_loss,
    schedules,
    updates,
)
from ranks import on_ranks
from tiny import ARCHITECTURES, examples

of_sequential = pytest.mark.skipif(
    not hasattr(torch_stage, "InferenceMode"),
    reason="stages of an nn.Sequential need torch 2.13",
)


@pytest.mark.parametrize(("schedule", "tied"), covering(SCHEDULES, [False, True]))
def test_stages_in_one_process_give_the_gradients_of_the_whole_model(
    schedule: str, tied: bool
) -> None:
    model, reference = (language_model("llama", tied) for _ in range(2))
    pipeline = AsyncPipeline(2, 2, schedule=schedule, optimizer=False)
    stages = pipeline.partition_model(model)
    for batch in (language_batch(width=9), language_batch(width=6)):
        loss = pipeline.step(stages, batch)
        expected = plain_loss(reference, batch)
        expected.backward()  # type: ignore[no-untyped-call]
        assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert largest_error(stages, model, reference) < 1e-14
    assert len(stages.sizes) == 2 * stages_per_rank(schedule)


@pytest.mark.parametrize(
    ("architecture", "checkpoint"), covering(ARCHITECTURES, ["never", "except_last", "always"])
)
def test_every_known_architecture_can_be_cut_and_computed_again(
    architecture: str, checkpoint: str
) -> None:
    model, reference = (language_model(architecture) for _ in range(2))
    pipeline = AsyncPipeline(4, 4, checkpoint=checkpoint, optimizer=False)
    stages = pipeline.partition_model(model)
    batch = language_batch()
    pipeline.step(stages, batch)
    plain_loss(reference, batch).backward()  # type: ignore[no-untyped-call]
    assert largest_error(stages, model, reference) < 1e-7  # V3's routers are float32
    again = {"never": 0, "except_last": 4, "always": 8}  # 4 stages x 2 micro-batches
    assert stages.runner.work.recomputed == again[checkpoint]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def in_order(events: Any) -> None:
    """Each pass begins after the passes it needs have ended."""
    ends = {("B" if e.kind == "I" else e.kind, e.stage, e.micro_batch): e.end for e in events}
    last = max(e.stage for e in events)
    for e in events:
        needs = [("F", e.stage - 1)] if e.kind == "F" and e.stage else []
        if e.kind in "BI":
            needs = [("F", e.stage)] + ([("B", e.stage + 1)] if e.stage < last else [])
        if e.kind == "W":
            needs = [("B", e.stage)]
        assert all(ends[kind, stage, e.micro_batch] <= e.start for kind, stage in needs), e


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AsyncPipeline(6).partition_model(layers()), "5 layers can't be cut into 6"),
        (lambda: AsyncPipeline(2, 0), "microbatch_size is 0"),
        (lambda: AsyncPipeline(2, schedule="gPipe"), "no schedule 'gPipe'"),
        (lambda: AsyncPipeline(2).partition_model(nn.Linear(2, 2)), "not a Hugging Face causal"),
        (lambda: AsyncPipeline(2).partition_model(layers(), [1.0]), "each of the 5 layers"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_sentence(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_no_mean_is_refused(reduction: str) -> None:
    pipeline = AsyncPipeline(2, 1, loss_fn=nn.MSELoss(reduction=reduction))
    with pytest.raises(ValueError, match=f"reduction='{reduction}', and a step needs the mean"):
        pipeline.step(pipeline.partition_model(layers()), (torch.ones(4, 6), torch.ones(4, 3)))


def test_batches_that_cannot_be_cut_are_refused_in_one_sentence() -> None:
    pipeline = AsyncPipeline(stages=2, microbatch_size=5, schedule="dualpipev")
    stages = pipeline.partition_model(layers())
    x, y = torch.randn(12, 5).double(), torch.randn(12, 3).double()
    with pytest.raises(ValueError, match="not 3; change the batch or microbatch_size"):
        pipeline.step(stages, (x, y), F.mse_loss)
    with pytest.raises(ValueError, match="a batch has no rows"):
        pipeline.step(stages, (x[:0], y[:0]), F.mse_loss)
    with pytest.raises(
        ValueError, match=r"type list has no usual loss; .*give loss_fn\(output, y\)"
    ):
        pipeline.step(stages, (x, [1] * 12))
    with pytest.raises(ValueError, match=r"takes \(x, y\): give loss_fn"):
        pipeline.step(stages, {"x": x, "y": y}, F.mse_loss)
    with pytest.raises(ValueError, match="what partition_model returned"):
        pipeline.step(layers(), (x, y), F.mse_loss)  # type: ignore[arg-type]
    whole = AsyncPipeline(2, 2, schedule="dualpipev")
    language = whole.partition_model(language_model("llama"))
    with pytest.raises(ValueError, match="leave loss_fn out"):
        whole.step(language, language_batch(), F.mse_loss)
    with pytest.raises(ValueError, match="needs input_ids and labels"):
        whole.step(language, {"input_ids": torch.ones(2, 2)})


@given(st.lists(st.lists(st.integers(3, 12), min_size=1, max_size=3), min_size=1, max_size=4))
def test_filler_makes_packed_rows_alike_and_stays_a_document_of_its_own(
    lengths: list[list[int]],
) -> None:
    pool = {r.length: r for r in examples(400, longest=12)}
    batches = [packed([pool[n] for n in row]) for row in lengths]
    found = equal_micro_batches(batches, len(batches) + 1)
    width = max(sum(row) for row in lengths)
    for before, after in zip(batches, found, strict=False):
        size = before["input_ids"].shape[1]
        assert after["input_ids"].shape == after["position_ids"].shape == (1, width)
        assert torch.equal(after["input_ids"][:, :size], before["input_ids"])
        assert bool((after["labels"][:, size:] == -100).all())
        assert sum(after["document_lengths"]) == width
        wanted = torch.cat([torch.arange(n) for n in after["document_lengths"]])
        assert torch.equal(after["position_ids"][0], wanted)
        assert after["boundaries"].tolist()[-1] == width
        assert after["boundaries"].dtype == torch.int32
    assert bool((found[-1]["labels"] == -100).all())


def test_inputs_whose_filler_is_not_known_are_refused() -> None:
    row = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="'pixels'"):
        equal_micro_batches([{"input_ids": row, "labels": row, "pixels": row}], 1)


@of_sequential
def test_over_ranks_every_schedule_gives_loss_and_gradients_of_one_process(tmp_path: Path) -> None:
    over_ranks = on_ranks(schedules, tmp_path)
    for found in over_ranks:
        for case, values in found.items():
            tolerance = 1e-7 if "deepseek" in case else 1e-13
            assert values["loss"] < tolerance, case
            assert values["gradient"] < tolerance, case
    for case, values in over_ranks[0].items():  # no rank holds the whole model
        if "parameters" in values:
            assert values["parameters"] < 0.75 * values["all"], case
            assert values["layers"] in (2, 3), case  # of 5; the rest is gone from memory


def test_over_ranks_the_pipeline_s_own_optimizer_moves_all_weights_as_one_would(
    tmp_path: Path,
) -> None:
    first, second = on_ranks(updates, tmp_path)
    assert first["tied"] == second["tied"]
    assert max(first["error"], second["error"]) < 1e-7
    assert first["left"]  # a rank was asked for its parameters: all leave theirs
    assert second["left"]


@of_sequential
def test_over_ranks_recorded_passes_are_all_there_and_in_order(tmp_path: Path) -> None:
    first, second = on_ranks(bubbles, tmp_path)
    for schedule, found in first.items():
        events = [StageEvent(*values) for values in found["events"]]
        in_order(events)
        assert found["events"] == second[schedule]["events"]
        kinds = "".join(sorted({e.kind for e in events}))
        assert kinds == {"zero_bubble": "FIW", "zbv": "FIW", "dualpipev": "BFIW"}.get(
            schedule, "BF"
        )
        forward = {(e.stage, e.micro_batch) for e in events if e.kind == "F"}
        assert len(forward) == 2 * stages_per_rank(schedule) * 4
        assert 0 < found["share"] < 1


def test_a_gradient_that_was_there_is_added_to() -> None:
    model = layers()
    pipeline = AsyncPipeline(stages=2, microbatch_size=3, optimizer=False)
    stages = pipeline.partition_model(model)
    batch: tuple[Tensor, Tensor] = torch.randn(6, 5).double(), torch.randn(6, 3).double()
    pipeline.step(stages, batch, F.mse_loss)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    pipeline.step(stages, batch, F.mse_loss)
    for before, p in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * before)


def classes(rows: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 5, generator=draw).double()
    return x, torch.randint(0, 3, (rows,), generator=draw)


ADDED = "gradients of two steps add up and no optimizer has moved a weight"


def test_gradients_that_nobody_takes_are_told_once() -> None:
    pipeline = AsyncPipeline(stages=2, microbatch_size=4, optimizer=False, loss_fn=F.cross_entropy)
    stages = pipeline.partition_model(layers())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(stages, classes())
        stages.zero_grad()
        pipeline.step(stages, classes())
        torch.optim.SGD(stages.parameters(), lr=0.1).step()  # moved, and gradients left
        pipeline.step(stages, classes())
    with pytest.warns(UserWarning, match=ADDED):
        pipeline.step(stages, classes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(stages, classes())


@pytest.mark.parametrize("kind", ["usual", "given"])
def test_without_an_optimizer_the_pipeline_moves_the_weights(kind: str) -> None:
    model, reference = layers(), layers()
    make = {"usual": torch.optim.AdamW, "given": torch.optim.SGD}[kind]
    settings: dict[str, Any] = {"learning_rate": 0.05}
    if kind == "given":
        settings = {"optimizer": lambda found: torch.optim.SGD(found, lr=0.05)}
    pipeline = AsyncPipeline(stages=2, microbatch_size=4, loss_fn=F.cross_entropy, **settings)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):  # cut anew, it is the same model
            stages = pipeline.partition_model(model)
            for _ in range(2):
                pipeline.step(stages, classes())
    optimizer = make(reference.parameters(), lr=0.05)  # afterwards: so that none was there
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(reference(classes()[0]), classes()[1]).backward()
        optimizer.step()
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    said = ["no optimizer was built over model.parameters(), so AdamW(lr=0.05) is used"]
    assert len(heard) == (kind == "usual")
    assert all(words in str(one.message) for words, one in zip(said, heard, strict=False))


@pytest.mark.parametrize("over", ["stages", "whole model", "by hand"])
def test_weights_that_somebody_else_moves_are_left_to_them(over: str) -> None:
    model = layers()
    mine = torch.optim.SGD(model.parameters(), lr=0.1) if over == "whole model" else None
    pipeline = AsyncPipeline(stages=2, microbatch_size=4)
    stages = pipeline.partition_model(model)
    if over == "stages":
        mine = torch.optim.SGD(stages.parameters(), lr=0.1)
    if over == "by hand":
        assert len(list(stages.parameters())) == 6
    before = [p.detach().clone() for p in model.parameters()]
    pipeline.step(stages, classes(), F.cross_entropy)
    assert pipeline.state_dict() == {"optimizer": None}
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is not None
    del mine


def test_the_pipeline_s_own_optimizer_goes_on_from_its_state() -> None:
    def run(*counts: int) -> list[Tensor]:
        model, state = layers(), None
        for count in counts:
            pipeline = AsyncPipeline(2, 4, optimizer=torch.optim.AdamW, loss_fn=F.cross_entropy)
            if state is not None:
                pipeline.load_state_dict(state)
            stages = pipeline.partition_model(model)
            for _ in range(count):
                pipeline.step(stages, classes())
            state = pipeline.state_dict()
        return [p.detach() for p in model.parameters()]

    for one, two in zip(run(4), run(2, 2), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("y", "loss", "name"),
    [
        (classes()[1], F.cross_entropy, "cross-entropy"),
        (torch.ones(12, 3).double(), F.mse_loss, "the mean squared error"),
    ],
)
def test_without_a_loss_the_target_s_usual_one_is_taken_and_told(
    y: Tensor, loss: Any, name: str
) -> None:
    model, x = layers(), classes()[0]
    expected = float(loss(model(x), y).detach())
    pipeline = AsyncPipeline(stages=2, microbatch_size=4, optimizer=False)
    with pytest.warns(UserWarning, match=f"no loss_fn was given, so {name} is taken"):
        found = pipeline.step(pipeline.partition_model(model), (x, y))
    assert float(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        None,  # the usual one
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]).double(), label_smoothing=0.1),
    ],
    ids=["function", "usual", "weights of classes"],
)
def test_pieces_with_unlike_numbers_of_labels_are_the_mean_over_all_labels(loss: Any) -> None:
    model, reference = layers(), layers()
    x, y = classes()
    y[:3], y[4:8] = -100, -100  # one label in four, none, and four
    expected = (loss or F.cross_entropy)(reference(x), y)
    expected.backward()
    pipeline = AsyncPipeline(stages=2, microbatch_size=4, optimizer=False, loss_fn=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pipeline.step(pipeline.partition_model(model), (x, y))
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-12)
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-12)


def test_an_output_of_another_shape_has_no_squared_error() -> None:
    pipeline = AsyncPipeline(stages=2, microbatch_size=12, optimizer=False)
    stages = pipeline.partition_model(layers())
    with pytest.raises(ValueError, match=r"output has shape \(12, 3\) and the target \(12,\), so"):
        pipeline.step(stages, (classes()[0], torch.ones(12).double()))


@pytest.mark.parametrize(("rows", "pieces"), [(12, 2), (16, 2), (5, 1), (14, 2), (13, 13)])
def test_a_batch_that_is_not_divided_goes_in_the_largest_equal_pieces(
    rows: int, pieces: int
) -> None:
    assert len(piece_rows({"x": torch.ones(rows, 2)}, 8)) == pieces
    model, reference = layers(), layers()
    pipeline = AsyncPipeline(stages=2, microbatch_size=8, optimizer=False)
    stages, (x, y) = pipeline.partition_model(model), classes(rows)
    loss = pipeline.step(stages, (x, y), F.cross_entropy)
    expected = F.cross_entropy(reference(x), y)
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert largest_error(stages, model, reference) < 1e-14


def test_language_batches_are_filled_up_for_a_schedule_that_wants_more_pieces() -> None:
    model, reference = (language_model("llama") for _ in range(2))
    pipeline = AsyncPipeline(2, 2, schedule="dualpipev", optimizer=False)
    stages, batch = pipeline.partition_model(model), language_batch(rows=4)
    loss = pipeline.step(stages, batch)
    expected = plain_loss(reference, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert largest_error(stages, model, reference) < 1e-14


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_that_failed_leaves_nothing_to_the_next(schedule: str) -> None:
    model, reference = layers(), layers()
    pipeline = AsyncPipeline(2, 2, schedule=schedule, optimizer=False)
    stages = pipeline.partition_model(model)
    x, y = torch.randn(8, 5).double(), torch.randn(8, 3).double()
    losses = 0

    def fails(output: Tensor, wanted: Tensor) -> Tensor:
        nonlocal losses
        losses += 1
        if losses == 2:  # one micro-batch is through, others are on their way
            raise RuntimeError("out of memory")
        return F.mse_loss(output, wanted)

    with pytest.raises(RuntimeError, match="out of memory"):
        pipeline.step(stages, (x + 1, y), fails)
    stages.zero_grad()
    pipeline.step(stages, (x, y), F.mse_loss)
    F.mse_loss(reference(x), y).backward()
    assert largest_error(stages, model, reference) < 1e-14


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_loss_beside_a_stage_takes_part_in_the_stages_backward_pass(
    schedule: str, checkpoint: str
) -> None:
    """Each stage adds the mean square of its output, as a balance of experts does."""
    if checkpoint == "always" and schedule in SPLIT:
        return  # refused
    each = 2 * stages_per_rank(schedule)
    model, reference = layers().double(), layers().double()
    whole, spans = Layers(model), partition.ranges([1] * (each - 1) + [len(model) - each + 1])
    said: list[Tensor] = []

    def beside(number: int, run: Pass) -> tuple[Tensor, Tensor | None]:
        out = run()
        said.append(out.square().mean())
        return out, said[-1]

    stages = {index: whole.stage(span) for index, span in enumerate(spans)}
    settings = PipelineSettings(schedule, 2, checkpoint)
    work = PipelineWork(settings, torch.device("cpu"), run_forward=beside)
    x, y = torch.randn(4, 2, 5).double(), torch.randn(4, 2, 3).double()
    pieces = [{"x": x[i], "y": y[i], "loss_fn": F.mse_loss} for i in range(4)]
    total = LocalRunner(stages, work, [torch.device("cpu")]).run(pieces, 0.5)
    expected = torch.zeros((), dtype=torch.float64)
    for piece in pieces:
        hidden = piece["x"]
        for span in spans:
            for index in span:
                hidden = reference[index](hidden)
            if span is not spans[-1]:
                expected = expected + hidden.square().mean()
        loss = F.mse_loss(hidden, piece["y"])
        expected = expected + loss + loss.square()
    (0.5 * expected).backward()  # type: ignore[no-untyped-call]
    assert float(total) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert len(said) == 4 * each
    for here, there in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-10, atol=1e-12)
