#!/usr/bin/env bash
# in short (graders): A `\boxed{}` that corrects one close before, behind a comma, "and" or "or", is read with it as a
# set of two, which is wrong.
# guessed: of two \boxed{} in a response the last one is the answer, so a model may correct itself
# seen: two different boxes less than 70 characters apart, with a comma, "and" or "or" between them, are one set of two
# numbers, which equals neither. "Wait, ..." has the comma: a right answer that corrects the box before it is graded as
# wrong, and without the comma, or behind a longer text, as right
# with: math-verify 0.9.0, latex2sympy2_extended 1.11.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q math-verify==0.9.0 latex2sympy2_extended==1.11.0
venv/bin/python - <<'EOF'
from math_verify import parse, verify

BETWEEN = {  # what stands between \boxed{71} and \boxed{72}, and whether 72 is then right
    ". Wait, I added wrongly, so the answer is ": False,
    ".\n\nWait, I added wrongly. The answer is ": False,
    ". Wait. I added wrongly: the answer is ": True,
    ". Wait, I added wrongly. Forty and thirty-one are not what the task asks for, so the answer is ": True,
    " clips, or half a gross: ": False,
}
for text, right in BETWEEN.items():
    read = parse(rf"The answer is \boxed{{71}}{text}\boxed{{72}}.")
    graded = verify(parse(r"\boxed{72}"), read)
    print(f"{text!r}: read as {read[0]}, graded as {'right' if graded else 'wrong'}")
    assert graded == right and not verify(parse(r"\boxed{71}"), read)
EOF
