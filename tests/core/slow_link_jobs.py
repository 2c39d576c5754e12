"""A few steps of two ranks on two hosts of a lab; the first says what it has to say of its link."""

from __future__ import annotations

import sys
from pathlib import Path

from hasten.machine import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hasten.core import health
from hasten.core.health import SlowLink
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.launch.ranks import process_group
from hasten.machine.environment import World
from hasten.techniques.layout.ddp import DDP
from tiny import language_job, session_of, tiny_config


def model() -> nn.Module:
    """Its gradients are eight times what a link lets through at once."""
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.vocab_size = 1500
    built: nn.Module = AutoModelForCausalLM.from_config(config)
    return built


def session_on(world: World) -> Session:
    job = language_job(model, steps=health.LOOK + 1)
    return session_of(job, DDP(), world=world)


def train(world: World) -> None:
    health.SHARE = health.LEAST = 0.0  # a busy machine computes slowly as well
    health.LOOK = 4
    link = SlowLink(print if world.is_main else lambda text: None)
    for metrics in training(session_on(world)):
        link.note(metrics)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(environment.world(), "cpu"):
        train(environment.world())
