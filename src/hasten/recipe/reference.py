"""Log-probabilities of preference pairs' answers under the policy before its first step.

Before the first update the policy *is* the reference of DPO. So its own session computes
them: the same weights, adapter, number formats, kernels and layout. No second model is in
memory, and a step has no second forward pass.

Before its first step, a training computes the sums of all pairs that it will need. A file
keeps them for resumed runs. A measured variant computes each step's pairs in that step,
with a copy of the initial weights. So its times contain the reference.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.core.job import MicroBatch
from hasten.core.setup import Session
from hasten.core.step import most_on_a_rank, without_loss
from hasten.errors import InputError
from hasten.foreign_files import open_regular
from hasten.machine.files import replacing
from hasten.parts.data.pairs import with_other_answer
from hasten.parts.distributed.fsdp import reshard_all
from hasten.parts.nn.preference import PreferenceLoss

OnPass = Callable[[int, int], None]
PAIRS_AT_ONCE = 16  # most pairs of a micro-batch
CHECKED = 8  # pairs that are computed again before a file is used
ROUNDING = 64  # times the precision of the weights: an equal policy's sums are closer


class PairNumbers:
    """Pairs that have their number in the table of sums, from ``first`` on.

    ``has_others``: each also has the answer of the pair before it, for KTO.
    """

    def __init__(self, pairs: Any, first: int = 0, has_others: bool = False) -> None:
        self.pairs, self.first, self.has_others = pairs, first, has_others
        self.lengths, self.trained_counts = pairs.lengths, pairs.trained_counts

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        row = range(len(self))[index]
        pair = self.pairs[row]._replace(index=self.first + row)
        return with_other_answer(pair, self.pairs[row - 1]) if self.has_others else pair


class ReferenceSums:
    """The sums of all pairs; NaN until they are computed.

    Args:
        train: pairs of the training.
        eval_data: pairs of evaluations, numbered after those.
        key: identifies pairs and settings in the file.
        other: builds a session of another model, which is the reference then.
        has_others: KTO's sums of a prompt with another pair's answer are needed too.
    """

    def __init__(
        self,
        train: Any,
        eval_data: Any,
        key: str,
        other: Callable[[], Session] | None = None,
        has_others: bool = False,
    ) -> None:
        self.train = PairNumbers(train, 0, has_others)
        self.eval_data: Any = ()
        if len(eval_data):
            self.eval_data = PairNumbers(eval_data, len(train), has_others)
        self._columns = 3 if has_others else 2
        self.key, self.is_start = key, other is None
        size = len(train) + len(eval_data), self._columns
        self.sums = torch.full(size, torch.nan, dtype=torch.float64)
        self.is_complete = False
        self._start: list[Tensor] | None = None  # a copy of the initial weights
        self._build, self._other = other, list[Session]()

    def of(self, pairs: Sequence[Any]) -> Tensor:
        numbers = torch.tensor([pair.index for pair in pairs])
        return torch.where((numbers < 0).unsqueeze(1), 0.0, self.sums[numbers])

    def complete(
        self, session: Session, micro_batches: tuple[MicroBatch, ...]
    ) -> tuple[MicroBatch, ...]:
        self.ready(session)
        if self.is_complete:
            return micro_batches
        missing = [
            pair for m in micro_batches for pair in m.examples if self.of([pair]).isnan().any()
        ]
        if most_on_a_rank(session.setup, len(missing)):
            with self._initial_weights(session):
                self._compute(self._reference(session), missing)
        device = session.setup.job.device
        return tuple(
            replace(m, inputs={**m.inputs, "reference": self.of(m.examples).to(device)})
            if m.counts.units
            else m
            for m in micro_batches
        )

    def ready(self, session: Session) -> None:
        """Computes the sums of evaluations, and copies the initial weights for those of steps.

        Every rank calls it before the first step and before each evaluation.
        """
        if self.is_complete or self._start is not None:
            return
        if session.progress.step:
            raise InputError(
                "reference: this session has no log-probabilities of its initial weights; start "
                "the training again"
            )
        self._join_ranks(session)
        learning = self._learning(session)
        self._start = [p.detach().clone() for p in learning]
        eval_pairs = [self.eval_data[i] for i in range(len(self.eval_data))]
        layout = session.setup.layout
        reference = self._reference(session)
        self._compute(reference, eval_pairs[layout.data_rank :: layout.data_size])
        self._share(session)

    def prepare(
        self,
        session: Session,
        file: Path,
        tell: Callable[[str], None],
        on_pass: OnPass = lambda done, passes: None,
    ) -> None:
        """Computes all sums of the training and its evaluations, before its first step.

        Sums in ``file`` are used if its key is this one, and if the first of them are those of
        the session's policy. Every rank calls it, before the session resumes. ``on_pass`` is
        called with the number of finished passes, and of all.
        """
        self._join_ranks(session)
        needed = [*self._trained(session), *range(len(self.train), len(self.sums))]
        session = self._reference(session)
        self._read(session, file, needed)
        missing = [i for i in needed if self.sums[i].isnan().any()]
        if missing:
            tell(f"reference: log-probabilities of {len(missing):,} pairs, once")
            layout = session.setup.layout
            ordered = sorted(missing, key=lambda i: -self._pair(i).length)
            pairs = [self._pair(i) for i in ordered[layout.data_rank :: layout.data_size]]
            self._compute(session, pairs, on_pass)
            self._share(session)
            if session.setup.context.world.is_main:
                self._write(file)
        self.is_complete = True
        self._other.clear()

    def _join_ranks(self, session: Session) -> None:
        """Makes KTO's divergence a mean over the pairs of all ranks."""
        if isinstance(session.loss_module, PreferenceLoss):
            session.loss_module.all_reduce = session.setup.layout.all_reduce_data

    def _reference(self, session: Session) -> Session:
        """Returns the session of the reference: the policy's own, or of another model."""
        if self._build is None:
            return session
        if not self._other:
            self._other.append(self._build())
        return self._other[0]

    def _learning(self, session: Session) -> list[Tensor]:
        """Returns the weights that the reference must have as they were; of shards, the shards."""
        if self._build is not None:
            return []
        module = session.loss_module
        reshard_all(module)
        learning = [p for p in module.parameters() if p.requires_grad]
        return [tensor.detach() for tensor in (*learning, *module.buffers())]

    def _trained(self, session: Session) -> list[int]:
        """Returns the numbers of the pairs that the training may meet.

        These are all pairs, unless a number of steps below one epoch ends it.
        """
        setup, everything = session.setup, list(range(len(self.train)))
        assert setup.sampler is not None  # pairs have a length
        if setup.job.stop.steps is None or setup.spike_policy is not None:  # that may skip steps
            return everything
        steps = list(itertools.islice(setup.sampler.steps(0), setup.job.stop.steps + 1))
        if len(steps) <= setup.job.stop.steps:
            return everything
        return sorted({index for step in steps[:-1] for index in step})

    def _pair(self, index: int) -> Any:
        count = len(self.train)
        return self.train[index] if index < count else self.eval_data[index - count]

    @contextlib.contextmanager
    def _initial_weights(self, session: Session) -> Iterator[None]:
        """Puts the initial weights in place inside."""
        weights = self._learning(session)
        now = [p.clone() for p in weights]
        for weight, start in zip(weights, self._start or (), strict=True):
            weight.copy_(start)
        try:
            yield
        finally:
            weights = self._learning(session)
            for weight, moved in zip(weights, now, strict=True):
                weight.copy_(moved)

    def _compute(
        self,
        session: Session,
        pairs: Sequence[Any],
        on_pass: OnPass = lambda done, passes: None,
    ) -> None:
        """Computes the sums of this rank's pairs; every rank calls it."""
        for batch, sums in self._passes(session, pairs, on_pass):
            self.sums[[pair.index for pair in batch]] = sums

    def _passes(
        self,
        session: Session,
        pairs: Sequence[Any],
        on_pass: OnPass = lambda done, passes: None,
    ) -> Iterable[tuple[Sequence[Any], Tensor]]:
        """Yields pairs and their sums (pairs, 2), on the host.

        The modules are in the mode of training, so the kernels are those of the policy.
        """
        setup = session.setup
        collate = setup.collate or setup.job.collate
        parts: list[list[Any]] = []
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            parts += setup.split_micro_batches(pairs[start : start + PAIRS_AT_ONCE])
        passes = most_on_a_rank(setup, len(parts))
        for number in range(passes):
            has_part = number < len(parts)
            filler = [self._pair(0)]
            batch = collate(parts[number]) if has_part else without_loss(collate(filler))
            batch = batch.to(setup.job.device)
            with torch.no_grad(), torch.random.fork_rng(), setup.precision.region():
                sums, _ = session.loss_module(log_probs=True, **batch.inputs)
            if has_part:
                yield parts[number], sums.double().cpu()[:, : self._columns]
            on_pass(number + 1, passes)
        if setup.routing is not None:
            setup.routing.discard()

    def _share(self, session: Session) -> None:
        """Gives all ranks the sums of each."""
        values, counts = torch.nan_to_num(self.sums), (~self.sums.isnan()).double()
        both = session.setup.layout.all_reduce_data(torch.cat([values, counts], dim=1))
        total, ranks = both.chunk(2, dim=1)
        self.sums.copy_(torch.where(ranks > 0, total / ranks, torch.nan))

    def _read(self, session: Session, file: Path, needed: Sequence[int]) -> None:
        """Reads sums of an earlier run, if this policy has the same."""
        stored = self._stored(file) if session.setup.context.world.is_main else None
        world = session.setup.layout.all_reduce_world
        is_main = session.setup.context.world.is_main
        values = torch.zeros_like(self.sums) if stored is None else stored
        flags = (~values.isnan()).double() * (stored is not None)
        both = torch.cat([torch.nan_to_num(values), flags], dim=1) * float(is_main)
        both = world(both)
        stored_sums, known_sums = both.chunk(2, dim=1)
        if not known_sums.any():
            return
        sums = torch.where(known_sums > 0, stored_sums, torch.nan)
        stored_indices = [i for i in needed if not sums[i].isnan().any()]
        chosen = stored_indices[:: max(len(stored_indices) // CHECKED, 1)][:CHECKED]
        layout = session.setup.layout
        local_pairs = [self._pair(i) for i in chosen[layout.data_rank :: layout.data_size]]
        is_other = False
        weight = next(p for p in session.loss_module.parameters() if p.is_floating_point())
        for pairs, computed in self._passes(session, local_pairs):
            earlier = sums[[pair.index for pair in pairs]]
            difference = (computed - earlier).abs() / earlier.abs().clamp(min=1.0)
            is_other |= not bool((difference <= ROUNDING * torch.finfo(weight.dtype).eps).all())
        ranks_that_differ = layout.all_reduce_world(torch.tensor([float(is_other)]).double())
        if not ranks_that_differ.item():
            self.sums.copy_(sums)

    def _stored(self, file: Path) -> Tensor | None:
        """Returns the sums in a file of this key; None if there is none."""
        try:
            with open_regular(file) as opened:
                head = json.loads(opened.readline(4096))
                if head != {"key": self.key, "pairs": len(self.sums)}:
                    return None
                content = bytearray(opened.read(self.sums.nbytes + 1))
                return torch.frombuffer(content, dtype=torch.float64).view(self.sums.shape)
        except (OSError, ValueError, RuntimeError, InputError):
            return None

    def _write(self, file: Path) -> None:
        head = json.dumps({"key": self.key, "pairs": len(self.sums)}) + "\n"
        with replacing(file) as opened:
            opened.write(head.encode() + self.sums.numpy().tobytes())
