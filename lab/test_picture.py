"""The picture of lab/picture.py against the arrays it shows."""
import numpy as np
import pytest

from lab import picture

REWARDS = [[1.1, 0.1, 1.1], [0.1, 0.0, 0.0], [0.1, 0.1, 0.1]]  # of three puzzles; the second one's are for format


def make_truth(pieces=(" Try", " 3", " +", " 4", "</think>", "\n", "<answer>", "7", "")):
    """What lab/truth/measure.py writes of them, with random numbers: nine responses to three puzzles."""
    rng, reward = np.random.default_rng(0), np.array(REWARDS)
    L, N = len(pieces), len(pieces) * reward.size
    A = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    V = rng.uniform(0, 1, (reward.size, L + 1))
    V[:, -1] = reward.ravel() > 1
    return {"response": np.repeat(np.arange(reward.size), L), "position": np.tile(np.arange(L), reward.size),
            "group": np.repeat([0, 1, 2], 3 * L),
            "advantage": A.repeat(L), "reward": reward.repeat(L), "success": (reward > 1).repeat(L),
            "value": V[:, :-1].ravel(), "value_error": rng.uniform(0, 0.1, N), "a_star": np.diff(V).ravel(),
            "piece": np.tile(pieces, reward.size),
            "prompts": np.repeat(["[3, 4] -> 7", "[1, 2] -> 9", "[5, 5] -> 1"], 3)}


@pytest.mark.parametrize("pieces", [make_truth.__defaults__[0], (" +", " 4", "")], ids=len)
def test_picture_shows_tokens_shades_and_V(pieces, tmp_path, figures):
    """Guards against shades or steps that are off by a token, or of another response or measure; short ones crashed."""
    truth, L = make_truth(pieces), len(pieces)
    pair = picture.examples(truth)
    picture.draw(truth, tmp_path / "a.png")
    axes, drawn = figures[0].axes, np.concatenate(pair)
    assert [truth["success"][rows[0]] for rows in pair] == [True, False]
    for i, rows in enumerate(pair):
        *texts, bottom = axes[3 * i : 3 * i + 3]
        for text, name in zip(texts, ("a_star", "advantage")):
            share = truth[name][rows] / picture.scale_of(truth[name][drawn])
            assert [t.get_text() for t in text.texts[-L:]] == [p.replace("\n", "↵") or "■" for p in truth["piece"][:L]]
            assert [patch.get_facecolor() for patch in text.patches] == [picture.SHADES(0.5 + x / 2) for x in share]
        assert bottom.lines[0].get_ydata() == pytest.approx([*truth["value"][rows], 1.0 - i])
        named = {float(text.get_text().split()[-1].replace("−", "-")) for text in bottom.texts}
        a_star = truth["a_star"][rows]
        assert named == {round(x, 2) for x in a_star[picture.landmarks(a_star)]}


def test_landmarks_are_large_and_far_apart():
    """Guards against texts that cover each other, and names of tokens that changed nothing."""
    a_star = np.zeros(70)
    a_star[[5, 15, 16, 30, 45, 46, 60, 69]] = 0.5, -0.45, 0.4, 0.1, -0.9, 0.8, 0.3, 0.2
    assert picture.landmarks(a_star) == [45, 5, 16, 60]
    assert picture.landmarks(np.array([0.09, 0.5, -0.11, 0.2])) == [1, 3, 2]


def test_tokens_are_wrapped_without_loss():
    """Guards against a token that vanishes, overlaps its neighbour, or is pushed to the next line though it fits."""
    texts = [" Maybe", " 5", "\n", "<answer>", "1+2=", "x" * 9, "\n", "", "y"]
    placed = picture.place_tokens(texts, 12)
    assert [text for *_, text in placed] == [" Maybe", " 5", "↵", "<answer>", "1+2=", "x" * 9, "↵", "■", "y"]
    assert [(x, y) for x, y, _ in placed] == [
        (0, 0), (6, 0), (8, 0), (0, 1), (8, 1), (0, 2), (9, 2), (0, 3), (1, 3)]
