"""Student's t against scipy and its textbook values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hasten.errors import InputError
from hasten.measure.statistics import student_quantile, student_tail


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 7, 9, 10, 19, 30, 99, 1000, 31_623, 100_000, 2.5])
def test_the_student_quantile_agrees_with_scipy(dof: float) -> None:
    for p in [1e-9, 1e-6, 1e-3, 0.005, 0.025, 0.05, 0.1, 0.3, 0.499, 0.5, 0.6, 0.975, 0.9995]:
        expected = stats.t.ppf(p, dof)
        assert student_quantile(p, dof) == pytest.approx(expected, rel=1e-8, abs=1e-8), p


def test_the_student_quantile_has_its_textbook_values() -> None:
    assert student_quantile(0.975, 4) == pytest.approx(2.7764451052, abs=1e-9)
    assert student_quantile(0.75, 1) == pytest.approx(1.0, abs=1e-12)  # Cauchy: tan(pi / 4)


@given(p=st.floats(min_value=1e-6, max_value=1 - 1e-6), dof=st.integers(1, 200))
def test_the_distribution_function_undoes_the_quantile(p: float, dof: int) -> None:
    assert stats.t.cdf(student_quantile(p, dof), dof) == pytest.approx(p, rel=1e-8)


@given(t=st.floats(min_value=0, max_value=1e3), dof=st.floats(min_value=1, max_value=1e4))
def test_the_tail_agrees_with_scipy(t: float, dof: float) -> None:
    assert student_tail(t, dof) == pytest.approx(stats.t.sf(t, dof), rel=1e-7, abs=1e-290)


def test_nothing_lies_beyond_infinity() -> None:
    assert student_tail(math.inf, 4) == 0.0
    assert student_tail(1e200, 4) == 0.0
    assert student_tail(0.0, 4) == 0.5


@pytest.mark.parametrize(
    ("p", "dof"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.9, 0), (0.9, math.inf)]
)
def test_a_quantile_outside_its_domain_is_rejected(p: float, dof: float) -> None:
    with pytest.raises(InputError):
        student_quantile(p, dof)
