"""The picture of lab/picture.py against the arrays it shows."""
import numpy as np
import pytest

from lab import picture
from tests.fixtures import check_texts

PIECES = (" Try", " 3", " +", " 4", "</think>", "\n", "<answer>", "7", "")


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [PIECES, (" +", " 4", "")], ids=len)
def test_picture_shows_tokens_and_shades(pieces, tmp_path, figures):
    """Guards against shades that are off by a token, or of another response or measure, and tokens that vanish or
    overlap."""
    rng, L = np.random.default_rng(0), len(pieces)  # four responses to two puzzles; the last but one is right
    truth = {"response": np.repeat(np.arange(4), L), "position": np.tile(np.arange(L), 4),
             "advantage": np.repeat([0.0, 0.0, 1.5, -0.5], L), "success": np.repeat([0, 0, 1, 0], L),
             "a_star": rng.normal(size=4 * L), "piece": np.tile(pieces, 4),
             "prompts": np.repeat(["3 -> 7", "1 -> 9"], 2)}
    truth["a_star"][-1] = 9.0  # the wrong response with the largest A*
    credit = rng.normal(size=4 * L)
    picture.draw(truth, tmp_path / "a.png", credit, "credit of mine")
    check_texts(figures[-1])
    for i, (rows, verdict) in enumerate(((slice(2 * L, 3 * L), "right"), (slice(3 * L, 4 * L), "wrong"))):
        for axis, values, heading in zip(figures[-1].axes[2 * i : 2 * i + 2], (truth["a_star"], credit),
                                         (f"1 → 9, {verdict}. A*: ", "credit of mine, "), strict=True):
            shares = values[rows] / np.percentile(np.abs(values[2 * L :]), 99)
            assert axis.get_title(loc="left").startswith(heading)
            assert [t.get_text() for t in axis.texts] == [p.replace("\n", "↵") or "■" for p in pieces]
            assert [patch.get_facecolor() for patch in axis.patches] == list(map(tuple, picture.SHADES(
                0.5 + shares / 2)))


def test_tokens_are_wrapped_without_loss():
    """Guards against a token that overlaps its neighbour, or is pushed to the next line though it fits."""
    placed = picture.place_tokens(["a" * 80, "bcde", "f", "\n", "", "y"])
    assert placed == [(0, 0, "a" * 80), (80, 0, "bcde"), (0, 1, "f"), (1, 1, "↵"), (0, 2, "■"), (1, 2, "y")]
