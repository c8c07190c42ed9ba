"""The table of process rewards against hand computations."""
import numpy as np

from analyze import RLOO
from lab.study.process import table_process
from lab.study.test_tables import study_run
from plumbing.report import welch


def runs_of(label, areas, sampled):
    """Runs of 100 steps with seeds from 0 on."""
    method, *setting = label.split(" ", 1)
    return [study_run(method, seed, area + 0.1, " ".join(setting), area=area, tokens_sampled=sampled)
            for seed, area in enumerate(areas)]


def test_process_rewards_are_compared_on_their_seeds_with_what_they_are_added_to():
    """Guards against GRPO in place of PPO or RLOO, seeds of the main table alone, and lengths of another group."""
    steps = study_run("ppo", 0, 0.5).figures["steps"]
    added, ppo = [0.30, 0.32], [0.40, 0.44, 0.10]  # the third seed has no process reward
    table = table_process({"main": runs_of("ppo", ppo, 96 * 70 * steps) + runs_of(RLOO, [0.4, 0.5], 96 * steps),
                           "process": runs_of("ppo_process", added, 96 * 91 * steps)})
    (row,) = table.rows
    e = welch(np.array(added), np.array(ppo[:2]))
    assert row[:4] == ["`ppo_process`", "`ppo`", "2", "41.0 ± 12.7"]
    assert row[4].removesuffix(" *") == f"{100 * e.value:.1f} ± {100 * (e.high - e.value):.1f}"
    assert row[6:] == ["91.0 ± 0.0", "70.0 ± 0.0"]
