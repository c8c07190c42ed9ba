#!/usr/bin/env bash
# in short (compare): maj@4 of the MATH tasks votes on whole responses, not on answers: four right answers score 0
# unless worded as the gold solution.
# guessed: maj@4 of lighteval's MATH tasks, math:algebra and its six siblings, takes the answer out of each of four
# responses, as its math_normalizer does, and pays 1 where the most frequent answer is the gold one
# seen: the tasks pass math_normalizer under names that MajAtN does not have, and it is ignored, silently. The vote is
# over whole responses, and the winner has to repeat the gold solution word for word: four right answers in \boxed{}
# score 0, and so does any model that words its solutions itself. MajAtN(normalize=math_normalizer) scores 1
# with: lighteval 0.13.0, inspect-ai 0.3.285, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q datasets==5.2.0 accelerate==1.15.0 scikit-learn==1.9.1 sacrebleu==2.6.0 numpy==2.4.6 \
    openai==3.57.0 typer==0.29.2
venv/bin/pip install -q lighteval==0.13.0 inspect-ai==0.3.285 transformers==5.23.0 torch==2.13.0
venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
from lighteval.metrics.metrics_sample import MajAtN
from lighteval.metrics.normalizations import math_normalizer
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.tasks.math import TASKS_TABLE

GOLD = r"Each box holds $12$ eggs, so there are $6 \cdot 12 = \boxed{72}$."
SETS = {
    "four right": [r"It is $\boxed{72}$.", r"So $\boxed{72}$.", r"$6 \cdot 12 = \boxed{72}$.", r"$\boxed{72}$"],
    "four equal ones, right": [r"The answer is $\boxed{72}$."] * 4,
    "four wrong": [r"The answer is $\boxed{71}$."] * 4,
    "the gold text itself": [GOLD] * 4,
}

seen = set()
for task in TASKS_TABLE:
    [metric] = task.metrics
    doc = task.prompt_function({"problem": "How many eggs are in 6 boxes of 12?", "solution": GOLD}, task.name)
    scores = {}
    for name, texts in SETS.items():
        [score] = metric.compute_sample(doc=doc, model_response=ModelResponse(text=texts)).values()
        normal = MajAtN(n=4, strip_strings=True, normalize=math_normalizer)
        scores[name] = score, normal.compute(doc, ModelResponse(text=texts))
    seen.add(tuple(scores.items()))
print(f"{len(TASKS_TABLE)} tasks: {', '.join(task.name for task in TASKS_TABLE)}")
[same] = seen
for name, (score, right) in same:
    print(f"{name:22}: maj@4 of each task {score}, of MajAtN with normalize=math_normalizer {right}")
assert dict(same) == {"four right": (0, 1), "four equal ones, right": (0, 1), "four wrong": (0, 0),
                      "the gold text itself": (1, 1)}
EOF
