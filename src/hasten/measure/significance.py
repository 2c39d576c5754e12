"""Which measured ratios are beyond doubt: p-values, several at once, noise floor, rounds needed.

An interval judges one ratio. An experiment has many arms, and of twenty that do nothing one has a
95 % interval without 1 in it. So each arm's ratio is tested against the noise floor, and the
p-values of all arms go through Holm's correction (1979, "A simple sequentially rejective multiple
test procedure"), which bounds the chance of even one false word and needs no independence: the
arms share their baseline, so they have none.
"""

import math
from collections.abc import Sequence

from hasten.errors import InputError
from hasten.measure.statistics import DOUBT, Interval, Luck, mean_and_error, require_positive
from hasten.measure.students_t import student_quantile, student_tail

LEAST_FLOOR = 0.01  # a change of one per cent is nothing that anybody should act on
MOST_ROUNDS = 200  # beyond these the answer to "how many more?" is "too many"
POWER = 0.8  # how sure the rounds that are still needed should bring a word
HALF = 0.975  # the upper end of a 95 % interval


def p_value(ratios: Sequence[float], edge: float) -> float:
    """The chance of a mean at least this far from `edge`, on either side, if `edge` were true.

    Student's test of the mean logarithm. It is below 0.05 exactly where the 95 % interval leaves
    `edge` out; a single ratio can't leave anything out and has 1.
    """
    if not (math.isfinite(edge) and edge > 0):
        raise InputError(f"A ratio is tested against a positive, finite one, not {edge}.")
    return _chance(*_mean_and_error(ratios), math.log(edge), len(ratios))


def p_beyond(ratios: Sequence[float], floor: float, luck: Luck | None = None) -> float:
    """The p-value of a change beyond the noise floor: against its nearer edge, 1 within it.

    Neither rounds nor, where ``luck`` is known, processes alone may explain it.
    """
    mean, error = _mean_and_error(ratios)
    for edge in (math.log1p(floor), math.log1p(-floor)):
        if abs(mean) > abs(edge) and mean * edge >= 0:
            by_rounds = _chance(mean, error, edge, len(ratios))
            return by_rounds if luck is None else max(by_rounds, luck.chance(mean - edge))
    return 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's step-down correction, in their own order.

    The smallest of m is multiplied by m, the next by m - 1 and so on; none ends up below a smaller
    one, or above 1. Each may then be compared with the doubt the whole experiment may have.
    """
    for p in p_values:
        if not 0 <= p <= 1:
            raise InputError(f"A p-value lies between 0 and 1, not at {p}.")
    corrected, least, left = [1.0] * len(p_values), 0.0, len(p_values)
    for number in sorted(range(len(p_values)), key=p_values.__getitem__):
        least = max(least, min(1.0, left * p_values[number]))
        corrected[number] = least
        left -= 1
    return corrected


def noise_floor(again: Sequence[float], luck: Luck | None = None) -> float:
    """The share that nobody should act on, from ratios of the baseline to a second copy of itself.

    Twice the error of their mean, at least `LEAST_FLOOR`. Two copies that differ beyond doubt are
    a bias and no noise: then the floor reaches to what was found, too, for an arm can be favoured
    as the copy was. By what processes of one program differ anyway is in every interval already.
    """
    mean, error = _mean_and_error(again)
    if len(again) < 2:
        return LEAST_FLOOR  # one round has no error; nothing is concluded from it anyway
    found = [LEAST_FLOOR, math.expm1(min(2 * error, 1.0))]
    by_processes = 0.0 if luck is None else luck.chance(mean)
    if max(_chance(mean, error, 0.0, len(again)), by_processes) <= DOUBT:
        found.append(math.expm1(min(abs(mean), 1.0)))
    return min(max(found), 0.99)


def rounds_needed(ratio: Interval, floor: float = LEAST_FLOOR, arms: int = 1) -> int | str | None:
    """How many more rounds would turn "inconclusive" into a word with a chance of 80 %.

    Supposes that the ratio is what was measured and that rounds go on to vary as they did; `arms`
    is how many are judged at once. A floor above `LEAST_FLOOR` came from noise and shrinks with
    its root. None: a single round, which says nothing of how rounds vary. Beyond `MOST_ROUNDS` the
    answer is the text "more than 200": a true ratio at the very edge of the floor is never told
    from it.
    """
    if ratio.rounds < 2 or not (ratio.low > 0 and math.isfinite(ratio.high)):
        return None
    mean = math.log(ratio.estimate)
    half = (math.log(ratio.high) - math.log(ratio.low)) / 2
    deviation = half / student_quantile(HALF, ratio.rounds - 1) * math.sqrt(ratio.rounds)

    def tells(rounds: int) -> bool:
        wide = max(LEAST_FLOOR, floor * math.sqrt(ratio.rounds / rounds))
        beyond = abs(mean) - abs(math.log1p(math.copysign(wide, mean)))
        within = math.log1p(LEAST_FLOOR) - abs(mean)
        error = deviation / math.sqrt(rounds)
        power = student_quantile(POWER, rounds - 1)
        strict = student_quantile(1 - DOUBT / 2 / max(arms, 1), rounds - 1)
        both = student_quantile((1 + POWER) / 2, rounds - 1)  # either edge may be crossed by chance
        return beyond >= (strict + power) * error or (
            within >= (student_quantile(HALF, rounds - 1) + both) * error
        )

    low, high = ratio.rounds, ratio.rounds + MOST_ROUNDS
    if not tells(high):
        return f"more than {MOST_ROUNDS}"
    while high - low > 1:  # more rounds tell whatever fewer tell
        middle = (low + high) // 2
        low, high = (low, middle) if tells(middle) else (middle, high)
    return high - ratio.rounds


def _mean_and_error(ratios: Sequence[float]) -> tuple[float, float]:
    require_positive(ratios, "ratio")
    return mean_and_error([math.log(ratio) for ratio in ratios])


def _chance(mean: float, error: float, edge: float, rounds: int) -> float:
    if rounds < 2:
        return 1.0
    if error == 0:
        return 1.0 if mean == edge else 0.0
    return 2 * student_tail(abs(mean - edge) / error, rounds - 1)
