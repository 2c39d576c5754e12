"""SAMPLER: which examples share a step and a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.context import JobContext
from hasten.core.job import ShuffledOrder
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.technique import EffectCheck, Fidelity, Forecast, Technique, knob
from hasten.errors import InputError
from hasten.parts.data.epoch_order import GroupedOrder, PackedOrder, quadratic_share
from hasten.techniques import probes


@dataclass(frozen=True)
class PackedEpoch(Technique):
    """Fills rows from the examples of the full epoch and divides them over ranks by cost.

    A row is a micro-batch of its rank, which BATCH can cut but never mixes with another. A step
    has ``global_batch_tokens // row_tokens`` rows, or as many as hold ``global_batch_size``
    examples on average; a row never takes more than a step's tokens. Lay rows out with ``packed``.
    """

    slot = Slot.SAMPLER
    fidelity = Fidelity.LOSSY  # a step has other examples than in the shuffled order
    row_tokens: int = knob(4096, "tokens of a row at most", low=256, high=65536, log=True, least=1)

    def apply(self, setup: Setup) -> None:
        if setup.sampler is None:
            return  # the user's own loader decides
        order = self.order(setup)
        rows, world = order.rows_per_step, setup.context.world.size
        if rows < world:
            raise InputError(
                f"packed_epoch: a step has {rows} row(s) of {order.efficiency.row_tokens} tokens "
                f"for {world} ranks; lower row_tokens or raise the global batch"
            )
        setup.sampler = order

    def order(self, setup: Setup) -> PackedOrder:
        """Returns the order for this job's lengths and global batch."""
        job = setup.job
        longest, total = max(job.lengths), sum(job.lengths)
        if longest > self.row_tokens:
            raise InputError(f"packed_epoch: {_too_long(self.row_tokens, longest)}")
        of_step = job.batch.tokens or total * (job.batch.examples or 1) // len(job.lengths)
        row = max(min(self.row_tokens, of_step), longest)
        quadratic = quadratic_share(setup.context.model.hidden_size)
        order = PackedOrder(job.lengths, row, max(of_step // row, 1), job.seed, quadratic)
        # not all rows are full, so the mean number of examples is used
        if job.batch.examples:
            rows = order.efficiency.rows * job.batch.examples / len(job.lengths)
            order.rows_per_step = max(round(rows), 1)
        return order

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        if context.examples.longest > self.row_tokens:
            return (_too_long(self.row_tokens, context.examples.longest),)
        return _no_lengths("packing an epoch", context)

    def check_effect(self, session: Session) -> EffectCheck:
        order = session.setup.sampler
        if not isinstance(order, PackedOrder):
            return EffectCheck(False, "the examples were not packed over the epoch")
        # Measured, not planned: a micro-batch with one example had nothing packed into it.
        done, ranks = session.progress, session.setup.layout.data_size
        passes = max(done.micro_batches * ranks, 1)
        examples, tokens = done.examples / passes, done.tokens / passes
        return EffectCheck(
            examples > 1,
            f"{examples:.1f} examples and {tokens:,.0f} tokens to a micro-batch in {done.step} "
            f"steps; rows of at most {order.efficiency.row_tokens} tokens",
        )


@dataclass(frozen=True)
class LengthGrouped(Technique):
    """Examples of similar length share a step, so rows need little padding.

    The shuffled epoch is sorted within windows and cut into steps of the global batch, which are
    shuffled again. A cut by ``micro_batch_size`` keeps like lengths together.
    """

    slot = Slot.SAMPLER
    fidelity = Fidelity.LOSSY  # the draw of a step's examples depends on their length
    auto = "try"
    window: int = knob(
        4096, "examples that are sorted together", low=64, high=65536, log=True, least=1
    )

    def apply(self, setup: Setup) -> None:
        job = setup.job
        if setup.sampler is not None:  # the order's checks of the global batch have passed
            setup.sampler = GroupedOrder(
                job.lengths,
                window=self.window,
                examples=job.batch.examples,
                tokens=job.batch.tokens,
                seed=job.seed,
            )

    def unsupported_reasons(self, context: JobContext) -> tuple[str, ...]:
        return _no_lengths("grouping by length", context)

    def forecast(self, context: JobContext) -> Forecast:
        examples = context.examples
        if not examples.tokens:
            return Forecast()
        return Forecast(positions=examples.tokens / (examples.count * max(examples.longest, 1)))

    def check_effect(self, session: Session) -> EffectCheck:
        order = session.setup.sampler
        if not isinstance(order, GroupedOrder):
            return EffectCheck(False, "the examples were not grouped by length")
        setup = session.setup
        collate = setup.collate or setup.job.collate
        usual = ShuffledOrder(setup.job.lengths, setup.job.batch, setup.job.seed)
        grouped = probes.laid_out(session, order, collate)
        shuffled = probes.laid_out(session, usual, collate)
        if grouped is None or shuffled is None:
            return EffectCheck(False, "no step was made yet")
        return EffectCheck(
            grouped.padding_share < shuffled.padding_share,
            f"{grouped.padding_share:.1%} padding where the shuffled order has "
            f"{shuffled.padding_share:.1%}, in as many steps as were made, {probes.STEPS} at most",
        )


def _too_long(row_tokens: int, longest: int) -> str:
    return (
        f"row_tokens={row_tokens} can't hold the longest example of {longest} tokens; raise it to "
        f"at least {longest} or lower cutoff_len"
    )


def _no_lengths(what: str, context: JobContext) -> tuple[str, ...]:
    if context.examples.longest > 0 or not context.examples.count:
        return ()
    return (f"{what} needs the examples' lengths in tokens, and this job gives none",)
