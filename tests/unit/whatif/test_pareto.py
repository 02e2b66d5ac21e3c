import pytest

from schedtrace.whatif.sweep_rows import pareto_front


@pytest.mark.parametrize(
    ("costs", "front"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([[3, 1]], [True], id="one row"),
        pytest.param([[1, 3], [2, 2], [3, 1]], [True, True, True], id="each best in something"),
        pytest.param([[1, 3], [2, 3], [2, 4]], [True, False, False], id="worse in one, equal in the other"),
        pytest.param([[1, 1], [1, 1], [2, 1]], [True, True, False], id="equal rows share it"),
        pytest.param([[1, 5, 5], [5, 1, 5], [5, 5, 1], [5, 5, 5]], [True, True, True, False], id="three"),
        pytest.param([[None, 0], [1, 1], [2, None]], [False, True, False], id="unknown beats nobody"),
        pytest.param([[None, None]], [False], id="only unknown"),
        pytest.param([[-100, 5], [-90, 6]], [True, False], id="negated: high is good"),
    ],
)
def test_the_front_has_what_nothing_beats(costs, front):
    assert pareto_front(costs) == front
