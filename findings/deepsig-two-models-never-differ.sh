#!/usr/bin/env bash
# in short (compare): multi_aso corrects the wrong way: hardly at all for many models, and for two it never finds a
# difference.
# guessed: aso with num_comparisons=m and multi_aso at its defaults correct for m comparisons as Bonferroni does, as
# deepsig's page says: at the level 1 - 0.05 / m, so that each is stricter the more there are
# seen: the level is 0.95 + 0.05 / m, which goes the other way: for two comparisons it is right, and for 45, those of
# ten models, 0.951 in place of 0.9989, as good as no correction. For one comparison it is 1, so multi_aso of two models
# never finds a difference, where use_bonferroni=False and aso do: both of its numbers are 1, or NaN if each score of
# one model is above all of the other's
# with: deepsig 1.2.8, numpy 2.4.6
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q deepsig==1.2.8 numpy==2.4.6
venv/bin/python -W ignore - <<'EOF'
import numpy as np
from deepsig import aso, multi_aso

a = [0.61, 0.55, 0.72, 0.46, 0.64, 0.39, 0.58, 0.69]  # two models' scores for eight seeds
b = [0.58, 0.41, 0.63, 0.50, 0.66, 0.47, 0.36, 0.54]
same = {"seed": 1, "show_progress": False, "num_bootstrap_iterations": 100}
settings = {"as one comparison": {}}
for m in (2, 10, 45):
    settings[f"as one of {m}"] = {"num_comparisons": m}
    settings[f"at 1 - 0.05 / {m}"] = {"confidence_level": 1 - 0.05 / m}
    settings[f"at 0.95 + 0.05 / {m}"] = {"confidence_level": 0.95 + 0.05 / m}
found = {name: aso(a, b, **same, **given) for name, given in settings.items()}
for name, value in found.items():
    print(f"aso {name:20} {value:.4f}")
for m in (2, 10, 45):
    assert abs(found[f"as one of {m}"] - found[f"at 0.95 + 0.05 / {m}"]) < 1e-9
assert abs(found["as one of 2"] - found["at 1 - 0.05 / 2"]) < 1e-9
assert found["as one comparison"] < found["as one of 45"] < found["as one of 10"] < found["as one of 2"]
assert found["at 1 - 0.05 / 45"] > found["at 1 - 0.05 / 10"] > found["at 1 - 0.05 / 2"]
assert found["as one of 10"] < 0.45 and found["at 1 - 0.05 / 10"] > 0.55  # below 0.5 the first model is the better one

for name, first in {"overlapping": a, "far apart": np.add(a, 1).tolist()}.items():
    pair = multi_aso({"a": first, "b": b}, **same)
    without = multi_aso({"a": first, "b": b}, use_bonferroni=False, **same)
    print(f"multi_aso of two models, {name}: {pair[0, 1]} and {pair[1, 0]}; without correction {without[0, 1]:.3f} and "
          f"{without[1, 0]:.3f}; aso {aso(first, b, **same):.3f}")
    assert (pair[0, 1] == pair[1, 0] == 1) if name == "overlapping" else np.isnan([pair[0, 1], pair[1, 0]]).all()
    assert without[0, 1] < 0.5 < without[1, 0] and abs(without[0, 1] - aso(first, b, **same)) < 0.05
EOF
