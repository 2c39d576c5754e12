"""Whether verdicts are right: intervals against drawn rounds, planted truths against real ones.

    python benchmarks/bench_verdicts.py --coverage
    python benchmarks/bench_verdicts.py --replays 100
    python benchmarks/bench_verdicts.py --real 5 --rounds 24 --builds 2 --steps 12
    python benchmarks/bench_verdicts.py --spread 6 --rounds 4 --steps 12
    python benchmarks/bench_verdicts.py --record tests/measure/data/step_speeds.json --rounds 400

Coverage: how often 95 % intervals hold a known ratio. Replays: seven variants of which the truth is
known, beside a baseline and its second copy, in speeds that were recorded on a busy machine, by
number of rounds. Real: the same variants as processes that take turns, so many experiments. Spread:
how far fresh builds of one program lie apart, by default and with memory kept in huge pages, as the
real experiments have it. Record: measures the speeds anew.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/common"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from smoke import arguments as asked_of

from measure.planted import RECORDED, TRUTHS, Proofs, Truth, counts, recorded, word_of
from measure.planted_techniques import small_proofs
from measure.simulated import NOISES, ROUNDS, coverage

BUSY_ROUNDS, CALM_ROUNDS = (8, 200, 1000, 2000, 3000), (5, 8, 12, 20, 40, 80)
ALIKE = ("again", "nothing")  # both do what the baseline does
CALM = (0.01, 0.02, 0.03, 0.05)  # how far a round's ratio strays where there is little else to do


def main() -> None:
    chosen = arguments()
    if chosen.coverage:
        print_coverage(chosen.draws)
    if chosen.replays:
        print_replays(chosen.replays)
    if chosen.real:
        print_real(chosen.real, chosen.rounds, chosen.steps, chosen.builds)
    if chosen.spread:
        print_spread(chosen.spread, chosen.rounds, chosen.steps)
    if chosen.record:
        from verdicts.record import record

        command = f"python benchmarks/bench_verdicts.py --record PATH --rounds {chosen.rounds}"
        record(chosen.record, copies=4, rounds=chosen.rounds, command=command)


def print_coverage(draws: int) -> None:
    """Per noise: the share of intervals that hold 1.07, and of those of two copies that hold 1."""
    print(f"| noise | {' | '.join(f'{n} rounds' for n in ROUNDS)} | A/A, 8 rounds |")
    print("|---" * (len(ROUNDS) + 2) + "|")
    for name, draw in NOISES.items():
        shares = [coverage(draw, rounds, draws) for rounds in ROUNDS]
        shares.append(coverage(draw, 8, min(draws, 1000), truth=1.0))
        print(f"| {name} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |")


def print_replays(replays: int) -> None:
    """Per truth and number of rounds: how many replays of all seven call it what it is."""
    speeds, proofs = recorded(), small_proofs()
    print(f"\n{RECORDED.name}, {len(speeds)} rounds: called what it is, of {replays}\n")
    _print_table(speeds, BUSY_ROUNDS, replays, proofs)
    for sigma in CALM:
        print(f"\nrounds that stray by {100 * sigma:g} %: called what it is, of {replays}\n")
        drawn = np.random.default_rng(1).lognormal(0, sigma / 2**0.5, (4000, 4, 1))
        _print_table(drawn, CALM_ROUNDS, replays, proofs)
    print("\nin brackets: called something else; the rest is undecided")


def _print_table(speeds: Any, shown: Sequence[int], replays: int, proofs: Proofs) -> None:
    print(f"| truth | {' | '.join(map(str, shown))} |")
    print("|---" * (len(shown) + 1) + "|")
    found = {rounds: counts(speeds, rounds, proofs, replays) for rounds in shown}
    for truth in TRUTHS:
        cells = (_cell(truth, found[rounds][truth.name]) for rounds in shown)
        print(f"| {truth.name} | {' | '.join(cells)} |", flush=True)


def _cell(truth: Truth, words: Counter[str]) -> str:
    """How often the one sure word was said, and in brackets how often a wrong one."""
    sure = truth.right[0]
    wrong = sum(words.values()) - words[sure] - words["undecided"]
    return f"{words[sure]} ({wrong})" if wrong else str(words[sure])


def print_real(experiments: int, rounds: int, steps: int, builds: int) -> None:
    """Per truth: its word in each experiment; then the intervals of variants that are alike."""
    from verdicts.real import real

    proofs, found = small_proofs(), []
    for seed in range(experiments):
        found.append(real(rounds, steps, builds, seed, proofs))
        words = (f"{truth.name} {_told(found[-1][truth.name])}" for truth in TRUTHS)
        print(f"experiment {seed + 1}/{experiments}: {'; '.join(words)}", flush=True)
    size = f"{experiments} experiments of {rounds} rounds in {builds} builds"
    print(f"\n| truth | right | words in {size} |")
    print("|---|---|---|")
    for truth in TRUTHS:
        said = [word_of(rows[truth.name]) for rows in found]
        good = sum(word in truth.right for word in said)
        print(f"| {truth.name} | {good} of {experiments} | {', '.join(said)} |")
    for name in ALIKE:
        ratios = [rows[name]["ratio"] for rows in found]
        holding = sum(ratio["low"] <= 1 <= ratio["high"] for ratio in ratios)
        print(f"\n{name}: {holding} of {experiments} intervals hold 1: {_intervals(ratios)}")


def print_spread(builds: int, rounds: int, steps: int) -> None:
    """Of processes of one program and of their rounds, with the allocator as it is and steadied."""
    from verdicts.spread import spreads

    print("| memory | step | a process strays by | a round by |\n|---|---|---|---|")
    for kind, found in spreads(builds, rounds, steps).items():
        shares = f"{100 * found.process:.2f} % | {100 * found.round:.2f} %"
        print(f"| {kind} | {1e3 * found.step_seconds:.1f} ms | {shares} |", flush=True)


def _told(row: dict[str, Any]) -> str:
    return f"{word_of(row)} {_intervals([row['ratio']])}"


def _intervals(ratios: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}]" for r in ratios)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coverage", action="store_true", help="intervals against drawn rounds")
    parser.add_argument("--draws", type=int, default=5000, help="of the coverage, per cell")
    parser.add_argument("--replays", type=int, default=0, help="per truth and number of rounds")
    parser.add_argument("--real", type=int, default=0, help="real experiments")
    parser.add_argument("--rounds", type=int, default=60, help="of a real one, or of a recording")
    parser.add_argument("--steps", type=int, default=12, help="of a turn in a real one")
    parser.add_argument("--builds", type=int, default=2, help="of each variant in a real one")
    parser.add_argument("--spread", type=int, default=0, help="builds of copies of one program")
    parser.add_argument("--record", type=Path, help="where to write a recording")
    modes = {"coverage": True, "draws": 3}
    if len(sys.argv) > 2:  # a mode of those that train
        modes = {"rounds": 6, "steps": 2}
    chosen = asked_of(parser, **modes, BUSY_ROUNDS=(8,), CALM_ROUNDS=(5,), CALM=(0.01,))
    if not (chosen.coverage or chosen.replays or chosen.real or chosen.record or chosen.spread):
        parser.error("nothing to do: say --coverage, --replays, --real, --spread or --record")
    return chosen


if __name__ == "__main__":
    main()
