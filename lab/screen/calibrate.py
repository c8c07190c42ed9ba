"""Every function that was ever screened, judged again from its stored runs by the screen's rule and by the one before.

Run it:  python -m lab.screen.calibrate
"""
from lab import arms
from lab.screen import __main__ as program
from lab.screen import bounds
from lab.screen.simulation import former
from lab.statistics import points
from plumbing.comparison import Group
from plumbing.report import Table


def screened() -> list[Group]:
    """The runs of each screen, in the order of their rows: of an arm from seed 20 on, or from 30 on, and so on."""
    found = {}
    for folder in ("calibration", "trial"):
        for row in arms.Room(program.BOX.folder / folder, "", (), {}).rows().values():
            seed = int(row["seed"])
            found.setdefault((row["arm"], seed // 10), {})[seed] = arms.figures_of(row)
    return [Group(arm, rows) for (arm, _), rows in found.items()]


def beside(own: Group) -> dict[str, Group]:
    """The box by axis, without the runs that are judged."""
    judged = own.rows if own.label == program.RLOO else {}
    return {axis: Group("RLOO", {seed: row for seed, row in group.rows.items() if seed not in judged})
            for axis, group in program.stored(own.label.partition(" --task ")[2] or "countdown").items()}


def before(own: Group, axis: str) -> str:
    """The word of the rule before this one, on the box of its time; *open* where it asks for more runs."""
    if any(row["steps"] < 100 for row in own.rows.values()):
        return "open"
    areas = arms.areas(own, beside(own)["equal cost"], program.AXES[axis])
    (word,), (took,) = former(*(x[None] for x in areas))
    return f"{word}, {took}" if word != "undecided" or len(own.rows) > 7 else "open"


def table(screens: list[Group]) -> Table:
    """Both rules' words, and what this one's rests on."""
    rows, controls = [], {group.label: group for group in screens}
    for own in screens:
        control = controls.get(f"shuffled --of {own.label}")
        ahead = program.over(own, control) if control else None
        for e in program.judge("", own, beside(own), 1.0, ahead):
            open_yet = e.word == "undecided" and len(own.rows) < bounds.LAST and "random" not in e.why
            rows.append([own.label, f"{min(own.rows)}", e.axis, "open" if open_yet else e.word, f"{e.decided:g}",
                         points(e.looks[e.decided].estimate), e.why, f"{e.cost:.2f}",
                         points(ahead.estimate) if ahead and e.word == "try" else "", before(own, e.axis)])
    return Table("Calibration", (
        "Known functions, users' (second_draw, late_echo) and those of the trial, on Countdown but where a task is "
        "named, whose box has five runs. Word, runs and lead in points by the present rule, as of the first function "
        "that is screened; cost of all of them, RLOO's = 1; over its control, its credit in random order; the word of "
        "the rule before, and its seeds. Open: more runs would have been trained."),
        ["function", "first seed", "at", "word", "runs", "lead", "why", "cost", "over its control", "before"], rows)


if __name__ == "__main__":
    print(table(screened()))
