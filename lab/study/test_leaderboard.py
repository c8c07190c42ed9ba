"""The cost of a success, by hand."""
import numpy as np
import pytest

from lab.study.leaderboard import cost_at


def test_the_cost_is_read_where_the_mean_first_reaches_the_target():
    """Guards against the cost of the seeds that got there, and the highest success for the first that is enough."""
    success, cost = np.array([[0.2, 0.8, 0.5, 0.9], [0.2, 0.3, 0.7, 0.5]]), np.array([[0, 10, 20, 30], [0, 20, 60, 80]])
    assert cost_at(success, cost, np.array([0, 10, 20, 30])) == (20, 40.0)  # 0.55 at step 10, 0.6 at step 20
    with pytest.raises(ValueError, match="reached 70.0%, not 80%"):
        cost_at(success, cost, np.array([0, 10, 20, 30]), target=0.8)
