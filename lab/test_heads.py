"""The heads of a fixed model, and what they learn from."""
import countdown_task
from countdown_task import split
from lab import heads
from methods import MITIGATIONS
from methods.heads import HEADS, Critic, Importance
from rollout import Policy
from tasks import latin_task


def test_heads_are_fitted_once_and_to_training_puzzles(tokenizer, random_model, monkeypatch, tmp_path):
    """Guards against heads fitted again, or to the same responses or scored puzzles, and one that is not found."""
    asked, learned, policy = [], [], Policy(random_model.float(), tokenizer, countdown_task)
    rollout = heads.rollout

    def recorded(policy, puzzles, s, step):
        asked.append((len(puzzles), {split(puzzle) for puzzle in puzzles}, s.seed, step))
        return rollout(policy, puzzles, s, step)

    for name, small in {"SIZE": 4, "PUZZLES": 2, "LIMIT": 25, "rollout": recorded}.items():
        monkeypatch.setattr(heads, name, small)
    for kind in (Critic, Importance):
        monkeypatch.setattr(kind, "learn", lambda head, batch: learned.append(type(head)))
    for _ in range(2):
        found = heads.find_heads(tmp_path, policy, 3)
        assert {name: type(head) for name, head in found.items()} == {"critic": Critic, "importance": Importance}
    assert asked == [(4, {"train"}, 0, step) for step in (1, 2, 3)]
    assert learned == [Critic, Importance] * 3


def test_methods_without_their_heads_or_task_are_left_out():
    """Guards against a head that nobody fits, and the truth as a method beside itself."""
    assert MITIGATIONS.keys() - heads.fitted_methods(countdown_task) == {"oracle", "ppo_process"}
    assert MITIGATIONS.keys() - heads.fitted_methods(countdown_task, HEADS) == {"oracle"}
    assert not {"ppo", "learned_importance"} & heads.fitted_methods(countdown_task, ()).keys()
    assert "causal_ablation" not in heads.fitted_methods(latin_task)
