"""One page, and one picture, of what every token did and of the credit that every method gave it. Reads a file only.

    python -m experiments.credit_page runs/truth/ground_truth.npz      writes credit.html and credit.png beside it

experiments/ground_truth.py makes that file. The page needs no network and nothing but a browser: responses with their
tokens coloured by a quantity of the reader's choice, the probability of success V beside them, numbers at the pointer.
Orange is above 0, purple and underlined below, as in the pictures of analyze.py.
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from analyze import place_tokens, plt

PLUS, MINUS, CURVE = "#f1a340", "#a794d0", "#0072b2"  # told apart by colour-blind eyes; black text is readable on them
SHADES = LinearSegmentedColormap.from_list("credit", (MINUS, "white", PLUS))
COLUMNS = ("position", "logprob", "entropy", "logit_grad", "advantage", "reward", "success", "value", "value_error",
           "a_star", "a_star_error", "kind", "reachable", "piece")  # of one row a token
OTHERS = ("credits", "methods", "kinds", "prompts", "settings", "complete")
FAINT = 0.05  # less than this share of the scale looks like 0, and is not underlined


def read_truth(file: Path) -> dict[str, np.ndarray]:
    """The file of ground_truth.py: columns (N,), one row a token, credits (M, N), and the names that they refer to."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist; experiments/ground_truth.py makes it")
    try:
        truth = dict(np.load(file))
    except Exception as error:  # no zip, a cut-off one, or objects that only pickle would read
        raise ValueError(f"{file} can't be read as an .npz file: {error}") from None
    missing = [name for name in (*COLUMNS, *OTHERS) if name not in truth]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}: was it written by experiments/ground_truth.py?")
    if not truth["complete"]:
        raise ValueError(f"{file} still lacks rollouts: go on with the command that made it")
    wrong = faults(truth) if truth["position"].size else ["position, which is empty"]
    if wrong:
        raise ValueError(f"{file} has the wrong length, numbers or text in: {', '.join(wrong)}")
    return truth


def faults(truth: dict) -> list[str]:
    """Names of what does not have its shape, is not finite, or does not say what it must."""
    N, M, B = len(truth["position"]), len(truth["methods"]), int((truth["position"] == 0).sum())
    shapes = dict.fromkeys(COLUMNS, (N,)) | {"credits": (M, N), "prompts": (B,)}
    wrong = [name for name, shape in shapes.items() if truth[name].shape != shape]
    for name in (*COLUMNS[:-1], "credits"):
        if truth[name].dtype.kind not in "biuf" or not np.isfinite(truth[name]).all():
            wrong.append(name)
    try:
        settings = "model" in json.loads(str(truth["settings"]))
    except (ValueError, TypeError):  # no JSON, or a bare number
        settings = False
    kinds = 0 <= truth["kind"].min() <= truth["kind"].max() < len(truth["kinds"])
    checks = {"position": truth["position"][0] == 0, "settings": settings, "kinds": kinds}
    return wrong + [name for name, well in checks.items() if not well]


def choose_responses(truth: dict, count: int) -> list[tuple[int, np.ndarray]]:
    """Number and rows of up to `count` responses: largest |A*| of a token first, right and wrong ones in turn."""
    starts = np.flatnonzero(truth["position"] == 0)
    responses = list(enumerate(np.split(np.arange(len(truth["position"])), starts[1:])))
    responses.sort(key=lambda item: -np.abs(truth["a_star"][item[1]]).max())  # stable: the first of equal ones first
    right, wrong = right_and_wrong(truth, responses)
    turns = min(len(right), len(wrong))
    mixed = [item for pair in zip(right, wrong) for item in pair] + right[turns:] + wrong[turns:]
    return mixed[:count]


def right_and_wrong(truth: dict, responses: list[tuple[int, np.ndarray]]) -> tuple[list, list]:
    """The right ones of some responses, and the wrong ones, each in the order they have."""
    right = [item for item in responses if truth["success"][item[1][0]] > 0.5]
    return right, [item for item in responses if not truth["success"][item[1][0]] > 0.5]


def quantities(truth: dict) -> list[tuple[str, str, str, np.ndarray]]:
    """Id, name, meaning and values (N,) of all that tokens can be coloured by: A* first, the entropy last."""
    a_star = ("a_star", "A*", "the change of the probability of success V by this token (Monte Carlo)")
    found = [(*a_star, truth["a_star"])]
    for method, credit in zip(truth["methods"].tolist(), truth["credits"]):
        name = f"credit, {method}" + " (GRPO)" * (method == "none")
        found.append((method, name, f"what train.py --mitigation {method} gives the token", credit))
    A = truth["advantage"]  # GRPO's credit
    contribution = "GRPO's credit · log p, below 0 where the token is made more likely (the original work's measure)"
    return found + [("contribution", "contribution", contribution, A * truth["logprob"]),
                    ("logit_gradient", "logit gradient", "GRPO's credit · ‖onehot − p‖", A * truth["logit_grad"]),
                    ("entropy", "entropy", "of the distribution the token was drawn from, in nats", truth["entropy"])]


def scale_of(values: np.ndarray) -> float:
    """The size that gets the full colour: the 98th percentile of |values|; the largest, or 1, where that is 0."""
    return float(np.percentile(np.abs(values), 98) or np.abs(values).max() or 1)


def curve(truth: dict, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V (L + 1,) before each of L tokens and after the last, and its standard error; the outcome has none."""
    after = truth["value"][rows[-1]] + truth["a_star"][rows[-1]]
    return np.append(truth["value"][rows], after), np.append(truth["value_error"][rows], 0)


def short(values: np.ndarray) -> list[float]:
    """Four significant digits: enough to read, and a small page."""
    return [float(f"{x:.4g}") for x in values.tolist()]


def page_data(truth: dict, shown: list[tuple[int, np.ndarray]]) -> dict:
    """All that the page shows, for JSON; `values` has one list of tokens for each of the quantities."""
    found, everything = quantities(truth), np.concatenate([rows for _, rows in shown])
    responses = []
    for number, rows in shown:
        value, error = curve(truth, rows)
        responses.append({
            "number": number, "prompt": str(truth["prompts"][number]), "right": bool(truth["success"][rows[0]] > 0.5),
            "reward": float(truth["reward"][rows[0]]), "advantage": float(truth["advantage"][rows[0]]),
            "piece": truth["piece"][rows].tolist(), "kind": truth["kind"][rows].tolist(),
            "reachable": truth["reachable"][rows].tolist(), "p": short(np.exp(truth["logprob"][rows])),
            "V": short(value), "V_error": short(error), "a_star_error": short(truth["a_star_error"][rows]),
            "values": [short(values[rows]) for *_, values in found]})
    return {"settings": json.loads(str(truth["settings"])), "kinds": truth["kinds"].tolist(), "faint": FAINT, "of": len(truth["prompts"]),
            "responses": responses,
            "quantities": [{"id": i, "name": name, "meaning": meaning, "scale": scale_of(values[everything]),
                            "signed": i != "entropy"} for i, name, meaning, values in found]}


def page(truth: dict, shown: list[tuple[int, np.ndarray]]) -> str:
    """The whole page; no text of the data can end the script element that holds it, since `<` is escaped."""
    data = json.dumps(page_data(truth, shown), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    colours = TEMPLATE.replace("PLUS", PLUS).replace("MINUS", MINUS).replace("CURVE", CURVE)
    return colours.replace("DATA", data.replace("<", "\\u003c"))


# --------------------------------------------------------------------------------------------------- picture

WIDTH, LEFT, RIGHT, LINE, LETTERS = 12.0, 0.62, 0.12, 0.26, 92  # inches, and letters of text a line


def examples(truth: dict, shown: list[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
    """The first right and the first wrong one of those shown that have some credit of GRPO's, a second attempt, and
    room in a picture."""
    fitting = sorted(shown, key=lambda item: not (40 <= len(item[1]) <= 80 and truth["advantage"][item[1][0]]))  # stable
    right, wrong = right_and_wrong(truth, fitting)
    return [right[0], wrong[0]] if right and wrong else fitting[:2]


def draw(truth: dict, shown: list[tuple[int, np.ndarray]], file: Path) -> None:
    """Two responses: tokens by A* and by GRPO's credit, V below. Placed from the top down, in inches."""
    pair = examples(truth, shown)
    drawn = np.concatenate([rows for _, rows in pair])
    measures = {name: (truth[name], scale_of(truth[name][drawn])) for name in ("a_star", "advantage")}
    blocks = [(number, rows, place_tokens(truth["piece"][rows].tolist(), LETTERS)) for number, rows in pair]
    height = sum(3.65 + 2 * LINE * (layout[-1][1] + 1) for *_, layout in blocks) + 0.75
    figure, y = plt.figure(figsize=(WIDTH, height)), height
    captions = {"a_star": "A*: what each token did to the probability of success",
                "advantage": "GRPO's credit: the same on every token of a response"}
    for number, rows, layout in blocks:
        verdict, tall = "right" if truth["success"][rows[0]] > 0.5 else "wrong", LINE * (layout[-1][1] + 1)
        figure.text(LEFT / WIDTH, (y - 0.3) / height, f"{truth['prompts'][number]}: {verdict}, "
                    f"reward {truth['reward'][rows[0]]:.2f}", fontsize=14, weight="bold", parse_math=False)
        y -= 0.45
        for name, (values, scale) in measures.items():
            figure.text(LEFT / WIDTH, (y - 0.22) / height, captions[name], fontsize=12)
            draw_tokens(place(figure, y - 0.3 - tall, tall), layout, values[rows] / scale)
            y -= tall + 0.42
        draw_curve(place(figure, y - 1.65, 1.5), truth, rows)
        y -= 2.36
    draw_scales(figure, {"A*": measures["a_star"][1], "GRPO's credit": measures["advantage"][1]})
    figure.savefig(file, dpi=120, facecolor="white")
    plt.close(figure)


def place(figure: plt.Figure, bottom: float, tall: float, left: float = LEFT, wide: float = 0) -> plt.Axes:
    """Axes at that place, in inches from the lower left corner; as wide as the text if nothing is said."""
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, bottom / height, (wide or width - LEFT - RIGHT) / width, tall / height))


def draw_tokens(axis: plt.Axes, layout: list[tuple[int, int, str]], share: np.ndarray) -> None:
    """Tokens coloured by their share (L,) of the scale, underlined where it is below 0."""
    axis.set(xlim=(0, LETTERS), ylim=(layout[-1][1] + 1, 0))
    axis.axis("off")
    font = (WIDTH - LEFT - RIGHT) * 72 / LETTERS / 0.602  # points: a letter is 0.602 wide, and fills its column
    for (x, y, text), value in zip(layout, share):
        axis.add_patch(plt.Rectangle((x + 0.06, y + 0.05), len(text) - 0.12, 0.9, color=SHADES(0.5 + value / 2), lw=0))
        axis.text(x, y + 0.5, text, va="center_baseline", family="monospace", fontsize=font, parse_math=False)
        if value < -FAINT:
            axis.plot([x + 0.12, x + len(text) - 0.12], [y + 0.87] * 2, color="black", lw=1.2, solid_capstyle="butt")


def draw_curve(axis: plt.Axes, truth: dict, rows: np.ndarray) -> None:
    """V after each number of tokens, its 95% interval, and the text of the tokens that changed it most."""
    value, error = curve(truth, rows)  # (L + 1,), (L + 1,)
    at = np.arange(len(value))
    axis.fill_between(at, np.maximum(value - 1.96 * error, 0), np.minimum(value + 1.96 * error, 1), step="mid",
                      color=CURVE, alpha=0.25, lw=0)
    axis.step(at, value, where="mid", color=CURVE, lw=1.8)
    axis.set(xlim=(-0.5, len(rows) + 0.5), ylim=(-0.03, 1.03), yticks=(0, 0.5, 1))
    axis.set_xlabel("tokens written (shaded: 95% interval of V)", fontsize=12)
    axis.set_ylabel("P(success) V", fontsize=12)
    axis.tick_params(labelsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    for t in landmarks(truth["a_star"][rows]):
        text = f"“{truth['piece'][rows[t]].strip() or '↵'}” {truth['a_star'][rows[t]]:+.2f}".replace("-", "−")
        here, late = slice(t, t + len(rows) // 7), t > 0.85 * len(rows)  # below the text; too near to the right edge
        beside = abs(value[t + 1] - value[t]) > 0.3  # of the jump; above the curve if it is a small one
        y = value[t : t + 2].mean() if beside else (value + 1.96 * error)[here].max() + 0.08
        axis.text(t + (0.1 if late else 0.9), y, text, fontsize=11, va="center", ha="right" if late else "left",
                  parse_math=False)


def landmarks(a_star: np.ndarray) -> list[int]:
    """Up to four tokens of large |A*| (L,), far enough from each other to be named in the picture."""
    found = []
    for t in np.argsort(-np.abs(a_star), kind="stable"):
        if len(found) < 4 and abs(a_star[t]) >= 0.1 and all(abs(t - other) > len(a_star) / 7 for other in found):
            found.append(t)
    return found


def draw_scales(figure: plt.Figure, scales: dict[str, float]) -> None:
    """A colour bar for each measure, at the lower edge."""
    for i, (name, scale) in enumerate(scales.items()):
        wide = (WIDTH - LEFT - RIGHT) / 2 - 0.6
        axis = place(figure, 0.55, 0.14, LEFT + i * (wide + 1.2), wide)
        bar = figure.colorbar(plt.cm.ScalarMappable(plt.Normalize(-scale, scale), SHADES), cax=axis,
                              orientation="horizontal", extend="both")
        bar.set_label(f"{name} (below 0 underlined; ↵ line break, ■ end token)" if not i else name, fontsize=11)
        bar.ax.tick_params(labelsize=11)


# ------------------------------------------------------------------------------------------------------ page

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>Credit of every token</title>
<style>
/* Text has a contrast of at least 4.5 on all shades between paper and the full colours, in both schemes. */
:root { color-scheme: light; --paper: #ffffff; --ink: #1a1a1a; --quiet: #595959; --line: #cccccc;
  --plus: PLUS; --minus: MINUS; --plain: #3dbb96; --curve: CURVE; }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --paper: #15171b; --ink: #f2f2f2; --quiet: #b3b3b3; --line: #4a4d55;
    --plus: #96540b; --minus: #6250a3; --plain: #00694d; --curve: #56b4e9; }
}
* { box-sizing: border-box; }
html { scroll-padding: 8rem 0 15rem; }  /* what is focused is covered neither by the bar nor by the panel */
body { margin: 0 auto; max-width: 84rem; padding: 1rem 1rem 14rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.45 system-ui, sans-serif; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
h1, h2, p, dl, dd { margin: 0; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; }
.intro { max-width: 50rem; margin-block: .4rem; }
.quiet, dt { color: var(--quiet); font-size: .875rem; }
.bar { position: sticky; top: 0; z-index: 1; background: var(--paper); border-bottom: 1px solid var(--line);
  display: flex; flex-wrap: wrap; gap: .3rem 1.5rem; align-items: center; padding: .5rem 0; }
select { font: inherit; max-width: 100%; }
.legend { display: grid; grid-template-columns: repeat(3, 1fr); width: 12rem; font-size: .8rem; }
.legend :nth-child(3) { text-align: center; } .legend :nth-child(4) { text-align: right; }
.ramp { grid-column: 1 / 4; height: .8rem; border: 1px solid var(--line);
  background: linear-gradient(to right, var(--minus), var(--paper), var(--plus)); }
.ramp.plain { background: linear-gradient(to right, var(--paper), var(--plain)); }
article { display: grid; grid-template: auto auto 1fr / minmax(0, 1fr) 22rem; gap: 0 1.5rem; padding-block: 1rem;
  border-bottom: 1px solid var(--line); break-inside: avoid; }
.tokens { font: 1rem/1.75 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin-top: .5rem; }
.tokens span { color: var(--ink); background: color-mix(in srgb, var(--hue) var(--size), var(--paper));
  padding-block: .15em; border-right: 1px solid var(--paper); cursor: pointer; forced-color-adjust: none; }
.plus { --hue: var(--plus); } .minus { --hue: var(--minus); } .plain { --hue: var(--plain); }
.minus:not(.faint) { text-decoration: underline 2px; text-underline-offset: .2em; }
[data-shown] { outline: 2px solid var(--ink); }
.tokens span:focus { outline: 3px solid var(--ink); }
svg { grid-area: 1 / 2 / 4; width: 100%; max-width: 26rem; cursor: pointer; fill: var(--quiet); font-size: 11px; }
.grid { stroke: var(--line); } .band { fill: var(--curve); opacity: .25; }
.step { fill: none; stroke: var(--curve); stroke-width: 2; }
.mark { fill: var(--ink); stroke: var(--ink); stroke-width: 2.5; }
.readout { position: fixed; inset: auto 0 0; z-index: 1; background: var(--paper); border-top: 2px solid var(--ink);
  padding: .4rem max(1rem, 50% - 41rem); max-height: 14rem; overflow-y: auto; }
dl { display: flex; flex-wrap: wrap; gap: 0 1.3rem; }
dl div { display: flex; gap: .4rem; align-items: baseline; white-space: nowrap; }
dd { font-weight: 600; font-variant-numeric: tabular-nums; white-space: pre; }
#credits dd { font-size: .875rem; font-weight: 400; }
@media (max-width: 40rem) {
  article { display: block; }
  svg { margin-top: .5rem; }
  #credits { flex-wrap: nowrap; overflow-x: auto; }
}
@media print {
  .controls, .readout, .mark { display: none; }
  .bar { position: static; }
  html { font-size: 12px; }
  body { padding: 0; }
  article { grid-template-columns: minmax(0, 1fr) 20rem; }
  [data-shown], .tokens span:focus { outline: none; }
}
</style>
</head>
<body>
<header>
<h1>Credit of every token</h1>
<p class="intro" id="intro"></p>
<p class="intro quiet" id="choice"></p>
<p class="intro quiet controls">Point at a token, or at a curve, for its numbers, below. Keys: Tab goes from response to
response, at first to the token of largest |A*|; ← → Home End move along the tokens, ↑ ↓ to the response above or below,
[ ] change the quantity. The address holds the view. ↵ is a line break, ■ the end token, ± one standard error.</p>
</header>
<div class="bar">
<label class="controls">Colour by <select id="quantity"></select></label>
<div class="legend" id="legend"><span class="ramp" id="ramp"></span><span></span><span></span><span></span></div>
<p class="quiet" id="signs"><u>underlined</u>: below 0</p>
</div>
<p class="intro" id="meaning" aria-live="polite"></p>
<main id="responses"></main>
<section class="readout" aria-label="The token's numbers">
<dl id="token" aria-live="polite" aria-atomic="true"></dl>
<dl id="credits"></dl>
</section>
<footer><p class="quiet" id="settings"></p></footer>
<noscript><p>This page draws its data by JavaScript, which is switched off.</p></noscript>
<script type="application/json" id="data">DATA</script>
<script>
"use strict";
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent), Q = data.quantities.length, SVG = "http://www.w3.org/2000/svg";
const LEFT = 44, WIDE = 282;  // where the curves lie in their pictures, which are 340 wide
const spans = [], marks = [];  // of each response: its tokens' elements; the function that marks one in its curve
const stops = data.responses.map(({values}) => {  // of each response, the token that Tab goes to
  const sizes = values[0].map(Math.abs);
  return sizes.indexOf(Math.max(...sizes));
});
let quantity = 0, chosen = 0;  // what the colours show; the response whose stop is chosen

// A new element in a parent. Text goes in as text, never as HTML: the tags among the tokens are only letters.
function add(parent, name, attributes = {}, text = "") {
  const svg = name === "svg" || parent.namespaceURI === SVG;
  const element = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return parent.appendChild(element);
}

// A number with as many places as its scale deserves, and a sign where the quantity has one.
function number(x, scale, signed) {
  const places = Math.min(8, Math.max(0, 2 - Math.floor(Math.log10(scale))));
  const text = Math.abs(x).toFixed(places), sign = x < 0 ? "−" : signed ? "+" : "";
  return Number(text) === 0 ? "0" : sign + text;
}

// A response: puzzle, outcome, tokens and curve.
function article(response, r) {
  const {piece, prompt, right, reward, advantage} = response;
  const part = add($("responses"), "article", {"aria-labelledby": `title${r}`});
  add(part, "h2", {id: `title${r}`}, prompt);
  add(part, "p", {class: "quiet"}, `${right ? "✓ right" : "✗ wrong"}, reward ${reward.toFixed(2)}, GRPO's credit `
    + `${number(advantage, 1, true)}, ${piece.length} tokens, response ${response.number}`);
  const list = add(part, "div", {class: "tokens", role: "listbox", "aria-label": `tokens of ${prompt}`,
    "aria-orientation": "horizontal"});
  spans.push(piece.map((text, t) => {
    if (text.startsWith(" ")) add(list, "wbr");  // lines are broken in front of a space, never behind it
    return add(list, "span", {role: "option", tabindex: -1, "data-at": `${r} ${t}`}, visible(text));
  }));
  marks.push(curve(add(part, "svg", {viewBox: "0 0 340 170", role: "img", "data-at": r}), response));
}

// The text of a token as it is shown; its spaces hold it together at the end of a line.
function visible(text) {
  return text.replaceAll(" ", "\\u00a0").replaceAll("\\n", "↵\\n") || "■";
}

// Draws V as steps: token t makes the jump at X(t + 0.5), from V[t] to V[t + 1]. Returns the function that marks one.
function curve(svg, {V, V_error}) {
  const n = V.length - 1, X = s => LEFT + WIDE * (s + 0.5) / (n + 1), Y = v => 128 - 120 * Math.min(1, Math.max(0, v));
  const path = y => y.map((v, s) => `${s ? "V" : `M${X(-0.5)} `}${Y(v)}H${X(s + 0.5).toFixed(1)}`).join("");
  const back = V.map((v, s) => `V${Y(v - 1.96 * V_error[s])}H${X(s - 0.5).toFixed(1)}`).reverse().join("");
  const label = (x, y, text, more = {}) => add(svg, "text", {x, y, "text-anchor": "middle", ...more}, text);
  svg.setAttribute("aria-label", `Probability of success V, from ${V[0].toFixed(2)} to ${V[n].toFixed(2)}`);
  for (const v of [0, 0.5, 1]) {
    add(svg, "path", {class: "grid", d: `M${LEFT} ${Y(v)}h${WIDE}`});
    label(LEFT - 6, Y(v) + 4, v, {"text-anchor": "end"});
  }
  for (const s of [0, Math.round(n / 2), n]) label(X(s), 143, s);
  label(LEFT + WIDE / 2, 162, "tokens written");
  label(0, 0, "V, with 95% interval", {transform: "translate(12 68) rotate(-90)"});
  add(svg, "path", {class: "band", d: path(V.map((v, s) => v + 1.96 * V_error[s])) + back + "Z"});
  add(svg, "path", {class: "step", d: path(V)});
  const line = add(svg, "path", {class: "mark"}), dot = add(svg, "circle", {class: "mark", r: 3.5});
  return t => {
    line.style.display = dot.style.display = t < 0 ? "none" : "";
    if (t < 0) return;
    line.setAttribute("d", `M${X(t + 0.5)} ${Y(V[t])}V${Y(V[t + 1])}`);
    dot.setAttribute("cx", X(t + 0.5));
    dot.setAttribute("cy", Y(V[t + 1]));
  };
}

// Colours all tokens by a quantity, on one scale for all responses.
function select(q) {
  quantity = (q + Q) % Q;
  const {name, meaning, scale, signed} = data.quantities[quantity];
  $("quantity").selectedIndex = quantity;
  $("meaning").textContent = `Coloured by ${name}: ${meaning}.`;
  $("signs").hidden = !signed;
  $("ramp").className = signed ? "ramp" : "ramp plain";
  [signed ? -scale : 0, signed ? 0 : scale / 2, scale].forEach((x, i) => {
    const beyond = x === scale ? "≥ " : x < 0 ? "≤ " : "";
    $("legend").children[i + 1].textContent = beyond + number(x, scale, signed);
  });
  spans.forEach((row, r) => row.forEach((span, t) => {
    const x = data.responses[r].values[quantity][t] / scale, size = Math.min(1, Math.abs(x));
    span.className = (signed ? (x < 0 ? "minus" : "plus") : "plain") + (size < data.faint ? " faint" : "");
    span.style.setProperty("--size", `${(100 * size).toFixed(1)}%`);
  }));
  show(chosen, stops[chosen]);
}

// The numbers of a token, in the panel below and in the curve.
function show(r, t) {
  const response = data.responses[r], {V, V_error} = response, value = q => response.values[q][t];
  const text = q => number(value(q), data.quantities[q].scale, data.quantities[q].signed);
  const reach = ["out of reach", "within reach"][response.reachable[t]];
  const p = response.p[t], names = data.quantities.map(({name}) => name);
  const first = [["token", visible(response.piece[t]).replaceAll("\\n", "")], ["kind", data.kinds[response.kind[t]]],
    ["A*", `${number(value(0), 0.1, true)} ± ${response.a_star_error[t].toFixed(3)}`],
    ["V", `${V[t].toFixed(3)} → ${V[t + 1].toFixed(3)}`],
    ["p", p < 0.001 ? p.toExponential(1) : p.toFixed(3)], ["entropy", `${value(Q - 1).toFixed(3)} nats`]];
  if (reach) first.splice(2, 0, ["target", reach]);
  if (quantity > 0 && quantity < Q - 1) first.splice(2, 0, [names[quantity], text(quantity)]);
  fill($("token"), first);
  fill($("credits"), names.slice(1, -1).map((name, i) => [name.replace("credit, ", ""), text(i + 1)]));
  document.querySelector("[data-shown]")?.removeAttribute("data-shown");
  spans[r][t].setAttribute("data-shown", "");
  marks.forEach((mark, i) => mark(i === r ? t : -1));
}

// A description list of names and values.
function fill(list, pairs) {
  list.replaceChildren();
  for (const [name, value] of pairs) {
    const pair = add(list, "div");
    add(pair, "dt", {}, name);
    add(pair, "dd", {}, value);
  }
}

// Makes a token the chosen one: the only tab stop of its response, and shown.
function choose(r, t) {
  for (const i of [stops[r], t]) {
    spans[r][i].tabIndex = i === t ? 0 : -1;
    spans[r][i].setAttribute("aria-selected", i === t);
  }
  [chosen, stops[r]] = [r, t];
  show(r, t);
}

// Names the view in the address.
function remember() {
  const {number} = data.responses[chosen];
  history.replaceState(null, "", `#by=${data.quantities[quantity].id}&response=${number}&token=${stops[chosen]}`);
}

// Shows the view that the address names, or the first quantity; a response that is not here is left alone.
function restore() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const r = data.responses.findIndex(({number}) => String(number) === hash.get("response"));
  select(Math.max(0, data.quantities.findIndex(({id}) => id === hash.get("by"))));
  spans[r]?.[Number(hash.get("token"))]?.focus();
}

const at = target => target.closest?.("span[data-at]")?.dataset.at.split(" ").map(Number);  // [response, token]

// Moves along the tokens and through the quantities.
function key(event) {
  if (event.metaKey) return;
  if (event.key === "[" || event.key === "]") {
    select(quantity + (event.key === "]" ? 1 : -1));
    return remember();
  }
  const place = at(event.target);
  if (!place || event.ctrlKey || event.altKey) return;
  const [r, t] = place, to = {ArrowLeft: [r, t - 1], ArrowRight: [r, t + 1], ArrowUp: [r - 1, t],
    ArrowDown: [r + 1, t], Home: [r, 0], End: [r, Infinity]}[event.key];
  const row = to && spans[to[0]];
  if (!row) return;
  event.preventDefault();  // no scrolling
  row[Math.max(0, Math.min(row.length - 1, to[1]))].focus();
}

// The token whose jump is nearest to the pointer in a curve; otherwise the token under the pointer.
function pointed(event) {
  const svg = event.target.closest("svg");
  if (!svg) return at(event.target);
  const box = svg.getBoundingClientRect(), r = Number(svg.dataset.at), n = spans[r].length;
  const t = Math.round(((event.clientX - box.left) / box.width * 340 - LEFT) / WIDE * (n + 1) - 1);
  return [r, Math.max(0, Math.min(n - 1, t))];
}

// Builds the page.
function start() {
  $("intro").textContent = `Responses of ${data.settings.model} to Countdown puzzles: what each token did to the `
    + "probability of success, A*, and the credit that each method gives it.";
  $("choice").textContent = `${data.responses.length} of ${data.of} responses, chosen: those where the |A*| of some `
    + "token is largest, right and wrong ones in turn.";
  $("settings").textContent = Object.entries(data.settings).map(([k, v]) => `${k} ${JSON.stringify(v)}`).join(", ");
  data.quantities.forEach(({name}) => add($("quantity"), "option", {}, name));
  data.responses.forEach(article);
  stops.map((t, r) => [r, t]).reverse().forEach(place => choose(...place));  // the first response's last of all
  $("quantity").addEventListener("change", event => { select(event.target.selectedIndex); remember(); });
  const main = $("responses");
  main.addEventListener("mousemove", event => { const place = pointed(event); if (place) show(...place); });
  main.addEventListener("mouseleave", () => show(chosen, stops[chosen]));
  main.addEventListener("click", event => { const [r, t] = pointed(event) ?? []; spans[r]?.[t].focus(); });
  main.addEventListener("focusin", event => { choose(...at(event.target)); remember(); });
  document.addEventListener("keydown", key);
  addEventListener("hashchange", restore);
  restore();
}
start();
</script>
</body>
</html>
"""


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(description="A page and a picture of the credit of every token.")
    parser.add_argument("truth", type=Path, help="what experiments/ground_truth.py wrote, an .npz file")
    parser.add_argument("--out", type=Path, help="folder for credit.html and credit.png (default: that of the file)")
    parser.add_argument("--responses", type=int, default=16, help="how many responses the page shows (default 16)")
    args = parser.parse_args()
    try:
        if args.responses < 1:
            raise ValueError("--responses must be at least 1")
        truth = read_truth(args.truth)
        shown, out = choose_responses(truth, args.responses), args.out or args.truth.parent
        out.mkdir(parents=True, exist_ok=True)
        (out / "credit.html").write_text(page(truth, shown), encoding="utf-8")
        draw(truth, shown, out / "credit.png")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {out / 'credit.html'} and credit.png beside it")


if __name__ == "__main__":
    main()
