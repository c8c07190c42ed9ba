"""Silent groups: their tokens by hand, the algebra by brute force, and the page by its arrays."""
from itertools import product

import numpy as np
import pytest
import torch

from grpo import ADVANTAGES
from lab.gradients import silent
from plumbing.metrics import COLUMNS


def test_silent_tokens_by_hand(tmp_path):
    """Step 1 has 3 tokens without credit of 4, step 2 none of 2; of 2 groups 1 and 0 are silent."""
    rows = [[step, *("nan" if not step else {"zero_variance_groups": 2 - step}.get(name, 0) for name in COLUMNS[1:])]
            for step in range(3)]
    (tmp_path / "metrics.csv").write_text("\n".join(",".join(map(str, row)) for row in [COLUMNS, *rows]) + "\n")
    np.savez(tmp_path / "credit.npz", step=np.array([1, 1, 1, 1, 2, 2]), credit=np.array([0, 0, 0, 1.5, -1, 1]))
    found = silent.silent(tmp_path, 2)
    assert found["silent groups"].tolist() == [0.5, 0.0] and found["silent tokens"].tolist() == [0.75, 0.0]


@pytest.mark.parametrize("p", (0.1, 0.5, 0.9))
def test_a_group_is_silent_as_often_as_the_page_says(p):
    """Sums the probability of all 2^4 groups of rewards whose advantages are all 0: p^4 + (1 - p)^4."""
    groups = torch.tensor([*product((0.0, 1.0), repeat=4)])  # (16, 4)
    weight = torch.where(groups > 0, p, 1 - p).prod(1)  # (16,)
    quiet = (ADVANTAGES["grpo"](groups, groups) == 0).all(1)
    assert float(weight[quiet].sum()) == pytest.approx(p**4 + (1 - p) ** 4)
