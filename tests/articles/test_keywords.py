"""Each keyword of the articles' classes acts, or says that it doesn't: the tests that show it."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.parts.checkpoint import SmartCheckpointer

TESTS = Path(__file__).parents[1]
KEYWORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "OptimizedTrainer": {
        "test_optimized_trainer.py::test_weights_equal_those_of_a_plain_loop_over_whole_batches": (
            "loss_fn",
            "count",
        ),
        "test_optimized_trainer.py::test_it_trains_the_very_objects_it_was_given": (
            *("model", "optimizer"),
        ),
        "test_trainer_batches.py::test_the_size_of_buckets_is_the_layout_s": ("bucket_cap_mb",),
        "test_own_examples.py::test_the_appendix_example_runs_and_learns": (
            *("compress_gradients", "mixed_precision", "dynamic_batch"),
        ),
        "test_optimized_trainer.py::test_accumulated_batches_are_the_step_of_their_records": (
            "accum_steps",
        ),
        "test_keywords.py::test_a_gradient_is_clipped_to_the_norm_that_was_given": (
            "max_grad_norm",
        ),
        "test_epoch_progress.py::test_quiet_is_quiet": ("progress",),
    },
    "OptimizedTrainer.train": {
        "test_trainer_batches.py::test_a_plain_loader_is_dealt_out_and_every_record_trained": (
            "train_loader",
            "epochs",
        ),
        "test_keywords.py::test_what_a_cloud_config_does_not_do_is_said": ("cloud_config",),
        "test_optimized_trainer.py::"
        "test_checkpoints_of_an_earlier_run_are_neither_overwritten_nor_mixed_in": (
            "checkpoint_dir",
        ),
        "test_optimized_trainer.py::test_a_resumed_run_ends_where_the_whole_run_ends": ("resume",),
        "test_trainer_batches.py::test_on_request_every_rank_trains_all_and_records_count_once": (
            "deal",
        ),
    },
    "CloudConfig": {
        "test_optimized_trainer.py::"
        "test_machines_that_are_not_here_are_said_with_the_way_to_them": (
            *("nodes", "gpus_per_node"),
        ),
        "test_keywords.py::test_what_a_cloud_config_does_not_do_is_said": (
            *("topology", "network_priority"),
        ),
    },
    "GradientCompressor": {
        "test_gradient_compressor.py::test_replicas_learn_and_keep_the_same_bits": (
            *("sparsity_method", "rank"),
        ),
        "test_gradient_compressor.py::"
        "test_alone_nothing_travels_and_hand_compression_still_feeds_back": ("compression_ratio",),
        "test_gradient_compressor.py::test_nccl_without_a_gpu_is_gloo_in_one_sentence": (
            "communication_backend",
        ),
        "test_gradient_compressor.py::"
        "test_momentum_correction_lets_the_velocity_of_what_waits_go_on": ("momentum",),
        "test_gradient_compressor.py::test_predicted_bytes_are_those_that_travel": ("dense_steps",),
        "test_gradient_compressor.py::test_a_minimum_that_keeps_everything_whole_is_said_once": (
            "minimum",
        ),
        "test_gradient_compressor_scope.py::test_a_host_sends_what_one_rank_of_two_would": (
            "scope",
        ),
        "test_local_steps.py::test_between_exchanges_ranks_differ": ("every",),
        "test_gradient_compressor.py::"
        "test_a_rank_that_fails_says_why_and_the_other_stops_waiting": ("timeout_seconds",),
        "test_gradient_compressor.py::test_the_articles_misspelling_is_understood_with_a_hint": (
            "sparisty_method",
        ),
    },
    "DynamicBatcher": {
        "test_dynamic_batcher.py::test_beyond_the_largest_size_or_what_fits_the_rest_waits": (
            *("initial_size", "max_size"),
        ),
        "test_dynamic_batcher.py::test_it_grows_on_head_room_and_shrinks_before_the_threshold": (
            *("growth_factor", "memory_threshold", "meter"),
        ),
        "test_keywords.py::test_the_memory_of_the_device_that_was_given_counts": ("device",),
    },
    "AsyncPipeline": {
        "test_pipeline.py::test_stages_in_one_process_give_the_gradients_of_the_whole_model": (
            *("stages", "microbatch_size", "checkpoint"),
        ),
        "test_pipeline.py::"
        "test_over_ranks_every_schedule_gives_loss_and_gradients_of_one_process": (
            *("schedule", "overlap_communication"),
        ),
        "test_pipeline.py::test_without_an_optimizer_the_pipeline_moves_the_weights": (
            *("optimizer", "learning_rate"),
        ),
        "test_pipeline.py::test_without_a_loss_the_target_s_usual_one_is_taken_and_told": (
            "loss_fn",
        ),
        "test_keywords.py::test_the_group_of_a_pipeline_is_the_one_that_was_given": ("group",),
    },
    "SmartPrefetcher": {
        "test_prefetcher.py::test_it_reads_ahead_as_far_as_it_was_told_and_no_further": (
            "lookahead",
        ),
        "test_access_pattern.py::"
        "test_a_loader_behind_the_prefetcher_gives_the_same_batches_for_fewer_requests": (
            "pattern_detection",
        ),
        "test_prefetcher.py::test_on_an_accelerator_the_batches_arrive_whole": ("device",),
        "test_prefetcher.py::"
        "test_the_look_ahead_grows_with_stalls_and_goes_back_when_the_queue_stays_full": (
            "max_lookahead",
        ),
        "test_prefetcher.py::test_memory_bounds_what_waits": ("memory_bytes",),
    },
    "TopoAwareCollective": {
        "test_collectives.py::test_nccl_without_a_gpu_means_gloo_and_says_so": ("backend",),
        "test_collectives.py::test_each_way_gives_the_sum_and_the_same_bits_on_every_rank": (
            "way",
            "host",
        ),
        "test_collectives.py::test_measured_links_are_the_same_on_all_ranks": ("topology",),
        "test_collectives.py::test_codecs_round_twice_and_a_memory_sends_the_rest_later": (
            "within",
            "between",
        ),
        "test_collectives.py::test_a_rank_that_has_ended_is_named_by_all_others": ("timeout",),
    },
    "TopoAwareCollective.all_reduce": {
        "test_collectives.py::test_what_is_begun_is_there_after_wait_and_what_is_dropped_at_once": (
            *("tensor", "op", "async_op"),
        ),
        "test_collectives.py::test_codecs_round_twice_and_a_memory_sends_the_rest_later": (
            "route",
            "memory",
            "name",
        ),
    },
    "SmartCheckpointer": {
        "test_smart_checkpointer.py::test_a_loop_goes_on_bit_for_bit": (
            *("compression", "asynchronous", "folder"),
        ),
        "test_remote.py::test_a_machine_without_the_folder_finds_the_newest": ("max_checkpoints",),
        "test_keywords.py::test_a_checkpointer_s_interval_is_made_of_its_settings": (
            *("interval", "longest_loss", "between_failures", "agree"),
        ),
    },
    "DynamicBatchSampler": {
        "test_dynamic_sampler.py::"
        "test_every_record_comes_once_over_the_ranks_and_no_batch_exceeds_the_budget": (
            *("max_tokens", "lengths", "shuffle", "rank", "world_size", "padded"),
        ),
        "test_dynamic_sampler.py::test_lengths_come_from_the_records": ("dataset",),
        "test_dynamic_sampler.py::test_a_resumed_epoch_goes_on_where_it_stopped": ("seed",),
        "test_dynamic_sampler.py::test_dropping_leaves_out_fewer_batches_than_there_are_ranks": (
            "drop_last",
        ),
        "test_dynamic_sampler.py::"
        "test_a_record_beyond_the_budget_is_alone_or_refused_or_left_out_and_said": ("too_long",),
    },
    "PipeDream": {
        "test_pipeline_schedules.py::test_outputs_and_gradients_are_those_of_the_whole_model": (
            *("model", "num_worker", "chunks", "checkpoint"),
        ),
        "test_pipeline_schedules.py::test_stages_are_runs_of_layers_of_about_the_same_work": (
            "num_workers",
        ),
    },
    "autocast": {
        "test_mixed_precision.py::test_what_was_asked_for_is_kept": (
            *("device_type", "dtype", "cache_enabled"),
        ),
        "test_mixed_precision.py::test_products_are_in_bf16_where_the_processor_has_it": (
            "enabled",
        ),
    },
    "GradScaler": {
        "test_mixed_precision.py::"
        "test_a_scaler_of_fp16_takes_torch_s_settings_and_skips_an_overflow": (
            *("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval"),
            *("enabled", "dtype"),
        ),
    },
    "benchmark": {
        "test_trainer_batches.py::test_the_rate_is_samples_over_seconds_and_all_is_put_back": (
            *("model", "loader", "epochs", "optimizer"),
        ),
        "test_trainer_batches.py::test_the_loss_is_the_caller_s_or_follows_from_the_target": (
            "loss_fn",
        ),
    },
    "checkpoint_sequential": {
        "test_recompute.py::test_checkpoint_sequential_leaves_every_layer_its_gradient": (
            *("functions", "segments", "input", "use_reentrant", "preserve_rng_state"),
        ),
    },
    "collate_fn": {
        "test_collate.py::test_the_articles_records_are_padded_behind_each": (
            *("batch", "padding", "target_padding"),
        ),
    },
    "gradual_optimize": {
        "test_gradual.py::test_what_is_surely_faster_and_not_worse_is_kept_and_trained_with": (
            *("job", "dataloader", "optimizer", "techniques", "rounds"),
        ),
        "test_gradual.py::test_the_order_may_follow_the_gain_alone": ("order", "steps"),
        "test_gradual.py::test_calls_of_wrong_kinds_are_refused": ("loss_fn",),
        "test_experiment.py::test_gradual_optimisation_keeps_what_pays": ("experiment",),
    },
    "monitor_performance": {
        "test_load.py::test_a_line_per_interval_until_the_seconds_are_over": (
            *("interval", "seconds"),
        ),
        "test_load.py::test_gpus_are_told_by_mean_and_deviation": ("file",),
    },
    "optimize_for_inference": {
        "test_inference.py::test_in_eval_mode_it_is_torch_s_own": ("model", "sample"),
    },
    "fused_linear_relu": {
        "test_inference.py::test_results_and_gradients_are_those_of_two_operators": (
            *("x", "weight", "bias"),
        ),
    },
}
SAME_AS_THEIRS = {"LoraConfig", "get_peft_model"}  # PEFT's own objects


@functools.cache
def functions_of(file: str) -> set[str]:
    trees = [ast.parse(found.read_text()) for found in TESTS.rglob(file)]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", KEYWORDS)
def test_every_keyword_has_a_test_that_is_there(name: str) -> None:
    owner: Any = hasten
    for part in name.split("."):
        owner = getattr(owner, part)
    known = set(inspect.signature(owner).parameters) - {"self"}
    assert known == {word for words in KEYWORDS[name].values() for word in words}
    for place in KEYWORDS[name]:
        file, _, test = place.partition("::")
        assert test in functions_of(file), place


def test_the_table_has_all_names_of_the_articles() -> None:
    nouns = {"Job", "Plan", "Technique", "InputError", "speed_up", "train"}  # hasten's own
    without = {"check_hardware"}  # it takes none
    names = {name.partition(".")[0] for name in KEYWORDS}
    assert names == set(hasten.__all__) - nouns - without - SAME_AS_THEIRS
    assert hasten.LoraConfig.__module__.startswith("peft")
    assert hasten.get_peft_model.__module__.startswith("peft")


# What no other test shows.


def test_a_gradient_is_clipped_to_the_norm_that_was_given() -> None:
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    moves = []
    for norm in (None, 0.01):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        before = [p.detach().clone() for p in model.parameters()]
        trainer = hasten.OptimizedTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            nn.CrossEntropyLoss(),
            max_grad_norm=norm,
        )
        trainer.train(DataLoader(TensorDataset(x, y), batch_size=8))
        moved = [p - b for p, b in zip(model.parameters(), before, strict=True)]
        moves.append(torch.cat([m.flatten() for m in moved]).norm().item())
    assert moves[1] == pytest.approx(0.01, rel=1e-3)
    assert moves[0] > 0.05


def test_what_a_cloud_config_does_not_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hasten.OptimizedTrainer(model, optimizer, nn.CrossEntropyLoss())
    batch = (torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    cloud = hasten.CloudConfig(topology="fat_tree", network_priority="low_cost")
    trainer.train([batch], cloud_config=cloud)
    assert (
        "cloud_config: fat_tree is for planning; training takes the network that is here, and "
        "network_priority low_cost changes nothing"
    ) in capsys.readouterr().out


def test_the_memory_of_the_device_that_was_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def meter(device: Any) -> Any:
        asked.append(device)
        return lambda: (0.0, 1.0)

    monkeypatch.setattr("hasten.parts.data.dynamic_batch.memory_meter", meter)
    hasten.DynamicBatcher(device="meta")
    assert asked == ["meta"]


def test_the_group_of_a_pipeline_is_the_one_that_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"mine": 3, "all": 5}
    where = "hasten.parts.distributed.pipeline.model.dist"
    monkeypatch.setattr(f"{where}.is_initialized", lambda: True)
    monkeypatch.setattr(f"{where}.get_world_size", lambda group=None: sizes[group or "all"])
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    group: Any = "mine"
    with pytest.raises(ValueError, match="2 stages and its group 3 ranks"):
        hasten.AsyncPipeline(2, group=group).partition_model(layers)


def test_a_checkpointer_s_interval_is_made_of_its_settings(tmp_path: Path) -> None:
    asked: list[Any] = []

    def agree(numbers: Any) -> Any:
        asked.append(list(numbers))
        return numbers

    model = nn.Linear(2, 2)
    settings = {"longest_loss": 7.0, "between_failures": 11.0, "agree": agree}
    with SmartCheckpointerOf(tmp_path, **settings) as keeper:
        assert keeper.interval.longest_loss == 7.0
        assert keeper.interval.between_failures == 11.0
        assert keeper.interval.seconds() <= 7.0
        keeper.protect(model=model)
        assert [step for step in range(1, 7) if keeper.after_step(step)] == [3, 6]
    assert [due for due, _ in asked] == [1.0, 1.0]


class SmartCheckpointerOf:
    """A checkpointer of every third step, closed at the end."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.keeper = SmartCheckpointer(3, folder=folder, **settings)

    def __enter__(self) -> SmartCheckpointer:
        return self.keeper

    def __exit__(self, *given: object) -> None:
        self.keeper.close()
