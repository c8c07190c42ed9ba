#!/usr/bin/env bash
# in short (graders): accuracy_reward reads a LaTeX solution without dollar signs as another number: for `3\pi` the
# right answer earns 0.
# guessed: accuracy_reward reads a solution in LaTeX, such as \frac{1}{3} of its own example, or gives None, which skips
# the problem
# seen: without dollar signs or \boxed{} around it only a plain number or \frac of two numbers is LaTeX. Of 3\pi, 2x,
# 5!, 2^{10} and 1-\sqrt{2} it takes a number: the right answer earns 0, and the bare number 1. \dfrac, roots, pairs and
# polynomials give None. With dollar signs all are right. A response needs a \boxed{}: "The answer is 72." earns 0
# with: trl 1.16.0, math-verify 0.9.0, latex2sympy2_extended 1.11.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q trl==1.16.0 math-verify==0.9.0 latex2sympy2_extended==1.11.0 transformers==5.23.0 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
from trl.rewards import accuracy_reward


def reward(answer, solution):
    return accuracy_reward([[{"role": "assistant", "content": answer}]], [solution])[0]


READ = {r"3\pi": "3", "2x": "2", "5!": "5", "2^{10}": "2", r"1-\sqrt{2}": "1", r"3\sqrt{2}": "3"}  # taken for the gold
SKIPPED = (r"\dfrac{3}{4}", r"\sqrt{2}", "(1,2)", "x^2+1", r"\frac{\pi}{4}")
FINE = ("72", r"\frac{1}{3}", "1,000")
for gold in (*READ, *SKIPPED, *FINE):
    right, in_dollars = (reward(rf"\boxed{{{gold}}}", solution) for solution in (gold, f"${gold}$"))
    wrong = reward(rf"\boxed{{{READ[gold]}}}", gold) if gold in READ else None
    print(f"solution {gold}: the same in a box earns {right}, with dollar signs {in_dollars}; its number alone {wrong}")
    assert right == (0.0 if gold in READ else None if gold in SKIPPED else 1.0) and in_dollars == 1.0
    assert wrong == (1.0 if gold in READ else None)
assert reward("The answer is 72.", "72") == reward("72", "72") == 0.0
EOF
