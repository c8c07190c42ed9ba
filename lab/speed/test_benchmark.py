"""The rows of the table of speeds, by hand."""
from lab.speed import benchmark
from lab.speed.benchmark import table_rows, take_turns


def test_programs_take_turns_and_warm_up(monkeypatch):
    """Guards against one program after another, whose ratio drifts with the machine, and a slow first round."""
    calls = []
    monkeypatch.setattr(benchmark, "turn", lambda name, process, case, seed: calls.append((seed, name)) or seed)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    rates = take_turns("", dict.fromkeys("ab"), {})
    assert calls == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")] and rates == {"a": [2], "b": [2]}


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    """Guards against a ratio of medians."""
    rates = {"ours": [10, 20, 60], "peer": [10, 40, 20], "other": [20, 5, 6]}
    assert table_rows("what", rates) == [
        ["what", "20 tokens/s", "peer: 20", "1.00", "0.50 to 3.00"],
        ["what", "20 tokens/s", "other: 6", "4.00", "0.50 to 10.00"]]
