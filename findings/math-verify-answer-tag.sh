#!/usr/bin/env bash
# in short (graders): parse finds no number in `<answer>9</answer>` and takes the last one of the thoughts. With
# spaces inside the tags it is read.
# guessed: parse reads the number of <answer>9</answer>, the layout that R1's template asks for, or finds nothing at all
# seen: it finds nothing there, nor with words behind the number, and then takes the last number of the thoughts: after
# "7 apples and 2 pears" a right answer is graded as 2, and a wrong one as right where the thoughts end in the gold
# number. With spaces or line breaks on both sides, in LaTeX or behind words it is read
# with: math-verify 0.9.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q math-verify==0.9.0
venv/bin/python - <<'EOF'
from math_verify import parse, verify


def right(answer, thoughts="", gold="$9$"):
    return verify(parse(gold), parse(f"{thoughts}<answer>{answer}</answer>"))


def show(what, found):
    print(f"{what:62} {found}")
    return found


assert not show("<answer>9</answer>", right("9")) and not parse("<answer>9</answer>")
assert not show("<answer>9 apples</answer>", right("9 apples"))
assert all(show(f"<answer>{text!r}</answer>", right(text)) for text in (" 9 ", "\n9\n", "$9$", r"\boxed{9}", "It is 9"))
thoughts = "<think>There are 7 apples and 2 pears.</think>\n"
assert not show("the same answer after thoughts that end in 2", right("9", thoughts))
assert show("a wrong answer, 8, where the thoughts end in the gold number", right("8", thoughts, "$2$"))
EOF
