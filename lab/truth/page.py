"""A page and a picture of what every token did, and of the credit that each method gave it. It only reads a file.

    python -m lab.truth.page runs/truth/ground_truth.npz      writes credit.html and truth.png beside it

lab/truth/measure.py writes that file. The page is one HTML file that needs no network, credit_page.html with the
numbers put in: every token lies on the colour of its A* and above the colour of its credit by a method of the reader's
choice. Orange is above 0; purple and underlined is below 0.
"""
import json
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.truth.file import by_response, read_truth
from lab.truth.measure import PACKET, SURE
from lab.truth.scoring import seed_measures
from methods import MITIGATIONS
from plumbing.flags import new_parser
from plumbing.progress import one_sentence
from plumbing.report import LETTERS, MINUS, PALETTE, PLUS, SHADES, WIDTH, draw_tokens, place_tokens, plt, save_figure

CURVE = PALETTE[0]
FULL = 99  # percentile of the sizes that gets the full colour
FAINT = 0.05  # a smaller share of the scale looks like 0, and is not underlined
PUZZLES = 12  # on the page
TEMPLATE = Path(__file__).with_suffix(".html")


class Response(NamedTuple):
    """One response of the file."""

    number: int  # among all responses of the file
    rows: np.ndarray  # (L,) where its tokens are in the columns
    right: bool


def rank_responses(truth: dict) -> list[Response]:
    """All responses, those with the token of largest |A*| first."""
    responses = [Response(number, rows, bool(truth["success"][rows[0]] > 0.5))
                 for number, rows in enumerate(by_response(truth))]
    return sorted(responses, key=lambda response: -np.abs(truth["a_star"][response.rows]).max())  # stable


def choose_puzzles(truth: dict, ranked: list[Response]) -> list[list[Response]]:
    """The first right and the first wrong response, if it has both, of each of the first PUZZLES puzzles."""
    puzzles = {}
    for response in ranked:
        puzzles.setdefault(int(truth["group"][response.rows[0]]), {}).setdefault(response.right, response)
    pairs = list(puzzles.values())[:PUZZLES]
    return [[pair[verdict] for verdict in (True, False) if verdict in pair] for pair in pairs]


def quantities(truth: dict) -> list[tuple[str, str, np.ndarray]]:
    """Name, meaning and values (N,) of everything that tokens can be coloured by: A* first, GRPO's credit second."""
    found = [("A*", "how much the token changed the probability of success V", truth["a_star"])]
    for method, credit in zip(truth["methods"].tolist(), truth["credits"]):
        found.append(("GRPO" if method == "none" else method, MITIGATIONS[method].summary, credit))
    meanings = ("the original work's measure of GRPO's credit, with the sign of the credit",
                "GRPO's credit times the size of the token's gradient at the logits")
    return found + [(name, meaning, x) for (name, x), meaning in zip(seed_measures(truth).items(), meanings)]


def scale_of(values: np.ndarray) -> float:
    """The size that gets the full colour: a percentile of |values|; their maximum, or 1, where that is 0."""
    return float(np.percentile(np.abs(values), FULL) or np.abs(values).max() or 1)


def curve(truth: dict, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V (L + 1,) before each of L tokens and after the last, and its standard error; the outcome's is 0."""
    outcome = truth["value"][rows[-1]] + truth["a_star"][rows[-1]]
    return np.append(truth["value"][rows], outcome), np.append(truth["value_error"][rows], 0)


def hundredths(values: np.ndarray | float) -> list[int] | int:
    """Numbers are rounded here, once, so that the page writes each of them one way everywhere."""
    return np.rint(100 * np.asarray(values, float)).astype(int).tolist()


def response_data(truth: dict, response: Response, values: list[np.ndarray]) -> dict:
    """What the page shows of one response; `values` holds one list over tokens per quantity."""
    number, rows, right = response
    group = (truth["group"] == truth["group"][rows[0]]) & (truth["position"] == 0)
    return {"number": number, "right": right, "reward": hundredths(truth["reward"][rows[0]]), "group": int(group.sum()),
            "mean": hundredths(truth["reward"][group].mean()), "V": hundredths(curve(truth, rows)[0]),
            "p": hundredths(np.exp(truth["logprob"][rows])), "values": [hundredths(column[rows]) for column in values]
            } | {name: truth[name][rows].tolist() for name in ("piece", "kind", "reachable")
            } | {name: hundredths(truth[name][rows]) for name in ("entropy", "a_star_error")}


def facts(truth: dict, fitted: bool) -> dict[str, str]:
    """How the numbers were measured, for the page's footer. `fitted`: a critic was fitted for them."""
    settings, tried = json.loads(str(truth["settings"])), truth["packets"] > 0
    count, sampled = len(truth["prompts"]), int(truth["packets"].sum()) * PACKET
    rate = (truth["packets"][tried] * PACKET / -np.expm1(truth["logprob"][tried])).min()  # see packets_wanted
    flags = [f"{name} {', '.join(f'{flag} {value}' for flag, value in method.parameters.items())}"
             for name in truth["methods"].tolist() if (method := MITIGATIONS[name]).parameters]
    return {"Model": settings["model"],
            "Measured on": f"{count} responses to {settings['questions']} "
                           f"{'puzzles of ' + settings['data'] if settings['data'] else 'generated held-out puzzles'}, "
                           f"{len(tried):,} tokens; at most {settings['max_new_tokens']} tokens in a response; "
                           f"seed {settings['seed']}",
            "Rollouts": f"{sampled:,}, about {rate:.0f} · (1 − p) for a token of probability p, none where 1 − p "
                        f"was at most {SURE}",
            "Shown": f"the {PUZZLES} puzzles whose responses have the largest |A*|, and of each one right and one "
                     "wrong response, where there are both",
            "Critic of ppo and value_change": "critic.safetensors, " + (
                "fitted for this measurement" if fitted else "beside the model"),
            "Flags, all at their defaults": "; ".join(flags) + "; the others have none"}


def page(truth: dict, puzzles: list[list[Response]], fitted: bool) -> str:
    """The whole page. `<` is escaped in its data, so that no token can close the script element they are in.

    ValueError for a file with a method that mitigations.py lacks.
    """
    if unknown := set(truth["methods"].tolist()) - set(MITIGATIONS):
        raise ValueError(f"the file has methods that mitigations.py lacks: {', '.join(sorted(unknown))}")
    found, rows = quantities(truth), np.concatenate([response.rows for pair in puzzles for response in pair])
    columns = [values for *_, values in found]
    data = {"quantities": [{"name": name, "meaning": meaning, "scale": max(1, hundredths(scale_of(values[rows])))}
                           for name, meaning, values in found],
            "puzzles": [{"name": str(truth["prompts"][pair[0].number]).replace("->", "→"),
                         "responses": [response_data(truth, response, columns) for response in pair]}
                        for pair in puzzles],
            "kinds": truth["kinds"].tolist(), "faint": FAINT, "facts": facts(truth, fitted)}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    html = TEMPLATE.read_text(encoding="utf-8")
    return html.replace("PLUS", PLUS).replace("MINUS", MINUS).replace("CURVE", CURVE).replace("DATA", text)


# --------------------------------------------------------------------------------------------------- picture

LINE = 0.2  # inches, height of a line of text
CAPTIONS = {"a_star": "A*: how the token changed the probability of success", "advantage": "GRPO's credit"}


def examples(truth: dict, shown: list[Response]) -> list[Response]:
    """The first right and the first wrong response with some credit and a length that suits a picture."""
    ordered = sorted(shown, key=lambda response: not (  # stable, and False comes first
        40 <= len(response.rows) <= 80 and truth["advantage"][response.rows[0]]))
    pair = [next((response for response in ordered if response.right is verdict), None) for verdict in (True, False)]
    return pair if all(pair) else ordered[:2]


def draw(truth: dict, shown: list[Response], file: Path, captions: dict[str, str] = CAPTIONS) -> None:
    """Two responses, each with its tokens coloured by A*, the same by a credit, and V.

    captions: the column of A* and that of the credit, each with what it is called.
    """
    pair = examples(truth, shown)
    drawn = np.concatenate([response.rows for response in pair])
    scales = {name: scale_of(truth[name][drawn]) for name in captions}
    pieces = [truth["piece"][response.rows].tolist() for response in pair]
    lines = [place_tokens(texts, LETTERS)[-1][1] + 1 for texts in pieces]
    heights = [height for count in lines for height in (LINE * count, LINE * count, 1.2)]  # 3 per response
    figure, axes = plt.subplots(len(heights), figsize=(WIDTH, sum(heights) + 0.45 * len(heights) + 1.1),
                                height_ratios=heights)
    for (number, rows, right), texts, count, (*blocks, bottom) in zip(pair, pieces, lines, axes.reshape(-1, 3)):
        head = f"{truth['prompts'][number]}: {'right' if right else 'wrong'}, reward {truth['reward'][rows[0]]:.2f}"
        above, below = captions.values()
        for axis, name, title in zip(blocks, captions, (f"{head}. {above}".replace("->", "→"), below)):
            axis.set(xlim=(0, LETTERS), ylim=(count, 0))
            axis.axis("off")
            axis.set_title(title, loc="left", fontsize=10, parse_math=False)
            draw_tokens(axis, texts, truth[name][rows] / scales[name])
        draw_curve(bottom, truth, rows)
    for name, label in zip(reversed(captions), (f"{below} (↵ line break, ■ end token)", "A*")):  # from the bottom up
        colours = plt.cm.ScalarMappable(plt.Normalize(-scales[name], scales[name]), SHADES)
        meaning = f"{label}; full colour at ±{scales[name]:.2f}, the {FULL}th percentile of these tokens"
        figure.colorbar(colours, ax=axes, location="bottom", extend="both", aspect=90, pad=0.01,
                        label=textwrap.fill(meaning, 110))
    save_figure(figure, file)


def draw_curve(axes: plt.Axes, truth: dict, rows: np.ndarray) -> None:
    """V after each number of tokens, its 95% interval, and the text of the tokens that changed it most."""
    V, error = curve(truth, rows)  # (L + 1,), (L + 1,)
    low, high = np.maximum(V - 1.96 * error, 0), np.minimum(V + 1.96 * error, 1)  # (L + 1,), (L + 1,)
    axes.fill_between(np.arange(len(V)), low, high, step="mid", color=CURVE, alpha=0.3, lw=0)
    axes.step(np.arange(len(V)), V, where="mid", color=CURVE, lw=1.8)
    axes.set(xlim=(-0.5, len(rows) + 0.5), ylim=(-0.03, 1.03), yticks=(0, 0.5, 1))
    axes.set(xlabel="tokens written (shaded: 95% interval of V)", ylabel="P(success) V")
    for t in landmarks(truth["a_star"][rows]):
        text = f"“{truth['piece'][rows[t]].strip() or '↵'}” {truth['a_star'][rows[t]]:+.2f}".replace("-", "−")
        late = t > 0.85 * len(rows)  # too near the right edge for text on the right
        large = abs(V[t + 1] - V[t]) > 0.3  # text fits beside the jump; otherwise it goes above the curve
        y = V[t : t + 2].mean() if large else high[t : t + max(1, len(rows) // 7)].max() + 0.08
        axes.text(t + (0.1 if late else 0.9), y, text, va="center", ha="right" if late else "left",
                  parse_math=False)


def landmarks(a_star: np.ndarray) -> list[int]:
    """Up to four tokens of large |A*| (L,), far enough apart for their texts."""
    found = []
    for t in np.argsort(-np.abs(a_star), kind="stable"):
        if len(found) < 4 and abs(a_star[t]) >= 0.1 and all(abs(t - other) > len(a_star) / 7 for other in found):
            found.append(int(t))
    return found


@one_sentence()
def main() -> None:
    """Write the page and the picture."""
    parser = new_parser(description="Write a page and a picture of the credit of every token.")
    parser.add_argument("truth", type=Path, help="the .npz file that lab/truth/measure.py wrote")
    parser.add_argument("--out", type=Path, help="folder for credit.html and truth.png (default: beside the file)")
    args = parser.parse_args()
    truth, out = read_truth(args.truth), args.out or args.truth.parent
    ranked, fitted = rank_responses(truth), (args.truth.parent / "critic.safetensors").is_file()
    text = page(truth, choose_puzzles(truth, ranked), fitted)
    out.mkdir(parents=True, exist_ok=True)
    (out / "credit.html").write_text(text, encoding="utf-8")
    draw(truth, ranked, out / "truth.png")
    print(f"wrote {out / 'credit.html'} and truth.png beside it")


if __name__ == "__main__":
    main()
