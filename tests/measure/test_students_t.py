"""Student's t: its textbook values, and what lies outside its domain."""

import math

import pytest

from hasten.errors import InputError
from hasten.measure.statistics import student_quantile, student_tail


def test_quantile_and_tail_have_their_textbook_values() -> None:
    assert student_quantile(0.975, 4) == pytest.approx(2.7764451052, abs=1e-9)
    assert student_quantile(0.75, 1) == pytest.approx(1.0, abs=1e-12)  # Cauchy: tan(pi / 4)
    assert student_tail(2.7764451052, 4) == pytest.approx(0.025, abs=1e-10)
    assert [student_tail(t, 4) for t in (math.inf, 1e200, 0.0)] == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("p", "dof"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.9, 0), (0.9, math.inf)]
)
def test_a_quantile_outside_its_domain_is_rejected(p: float, dof: float) -> None:
    with pytest.raises(InputError):
        student_quantile(p, dof)
