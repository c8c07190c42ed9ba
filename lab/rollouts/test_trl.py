"""Our losses beside TRL's on the same batch, for every setting that docs/trl.md calls equal."""
import pytest

from lab.rollouts import trl as beside

pytest.importorskip("trl")
pytest.importorskip("datasets")


def test_gradients_are_those_of_trl_up_to_the_derived_factor():
    """Guards against a norm, clip, ratio or KL gradient that is another one than TRL's, which is found to differ where
    the flags are those of another row."""
    k3 = next(pair for pair in beside.PAIRS if "use_bias_correction_kl" in pair.theirs)
    wrong = k3._replace(flags=k3.flags + " --kl_gradient unbiased", equal=0)
    for pair, derived, measured in beside.measure([*beside.PAIRS, wrong]):
        equal = [cosine > 1 - 1e-6 and ratio == pytest.approx(derived, rel=1e-4) for cosine, ratio in measured]
        assert equal == [pair.equal > 0, pair.equal > 1], (pair.name, derived, measured)
