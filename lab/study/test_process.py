"""The table of process rewards against hand computations."""
import numpy as np

from analyze import RLOO
from lab.estimates import points
from lab.study.process import table_process
from lab.study.test_tables import area_runs, study_run
from plumbing.report import welch


def test_process_rewards_are_compared_on_their_seeds_with_what_they_are_added_to():
    """Guards against GRPO in place of PPO or RLOO, seeds of the main table alone, and lengths of another group."""
    steps = study_run("ppo", 0, 0.5).figures["steps"]
    added, ppo = [0.30, 0.32], [0.40, 0.44, 0.10]  # the third seed has no process reward
    table = table_process({"main": area_runs("ppo", *ppo, tokens_sampled=96 * 70 * steps)
                           + area_runs(RLOO, 0.4, 0.5, tokens_sampled=96 * steps),
                           "process": area_runs("ppo_process", *added, tokens_sampled=96 * 91 * steps)})
    (row,) = table.rows
    assert row[:4] == ["`ppo_process`", "`ppo`", "2", "41.0 ± 12.7"]
    assert row[4].removesuffix(" *") == points(welch(np.array(added), np.array(ppo[:2])))
    assert row[6:] == ["91.0 ± 0.0", "70.0 ± 0.0"]
