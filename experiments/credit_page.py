"""A page and a picture of what every token did, and of the credit that each method gave it. It only reads a file.

    python -m experiments.credit_page runs/truth/ground_truth.npz      writes credit.html and credit.png beside it

experiments/ground_truth.py writes that file. The page is one HTML file that needs no network: responses whose tokens
are coloured by a quantity of the reader's choice, the probability of success V beside them, and the numbers of the
token at the pointer. Orange is above 0; purple and underlined is below 0.
"""
import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plumbing.progress import fail
from plumbing.report import LETTERS, MINUS, PALETTE, PLUS, SHADES, WIDTH, draw_tokens, place_tokens, plt, save_figure

CURVE = PALETTE[0]
FULL = 99  # percentile of the sizes that gets the full colour
FAINT = 0.05  # a smaller share of the scale looks like 0, and is not underlined
NUMBERS = ("position", "logprob", "entropy", "logit_grad", "advantage", "reward", "success", "value", "value_error",
           "a_star", "a_star_error", "kind", "reachable")  # columns of the file, one row per token
OTHERS = ("piece", "credits", "methods", "kinds", "prompts", "settings", "complete")


def read_truth(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a ground_truth.npz: columns (N,) with one row per token, credits (M, N), and names.

    ValueError in one sentence when the file is missing, unfinished, or not one of those.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist; experiments/ground_truth.py writes it")
    try:
        truth = dict(np.load(file))
    except Exception as error:  # not a zip file, a truncated one, or objects that would need pickle
        raise ValueError(f"{file} is not a readable .npz file: {error}") from None
    if missing := [name for name in (*NUMBERS, *OTHERS) if name not in truth]:
        raise ValueError(f"{file} lacks {', '.join(missing)}: did experiments/ground_truth.py write it?")
    if not truth["complete"]:
        raise ValueError(f"{file} lacks some rollouts: run the command that started it again")
    if wrong := faults(truth):
        raise ValueError(f"{file} has the wrong shape or values in {', '.join(wrong)}: was it changed by hand?")
    return truth


def faults(truth: dict) -> list[str]:
    """Names of the arrays that have the wrong shape, are not finite numbers, or make no sense."""
    N, M, B = len(truth["position"]), len(truth["methods"]), int((truth["position"] == 0).sum())
    shapes = dict.fromkeys((*NUMBERS, "piece"), (N,)) | {"credits": (M, N), "prompts": (B,)}
    wrong = [name for name, shape in shapes.items() if truth[name].shape != shape]
    wrong += [name for name in (*NUMBERS, "credits")
              if truth[name].dtype.kind not in "biuf" or not np.isfinite(truth[name]).all()]
    try:
        settings = json.loads(str(truth["settings"]))
    except ValueError:
        settings = None
    sensible = {"position": truth["position"][:1].tolist() == [0],  # not empty, either
                "kind": np.isin(truth["kind"], np.arange(len(truth["kinds"]))).all(),
                "settings": isinstance(settings, dict) and "model" in settings}
    return wrong + [name for name, fine in sensible.items() if not fine]


class Response(NamedTuple):
    """One response of the file."""

    number: int  # among all responses of the file
    rows: np.ndarray  # (L,) where its tokens are in the columns
    right: bool


def choose_responses(truth: dict, count: int) -> list[Response]:
    """Up to `count` responses, right and wrong ones alternating, each kind by its token of largest |A*|."""
    starts = np.flatnonzero(truth["position"] == 0)
    responses = [Response(number, rows, bool(truth["success"][rows[0]] > 0.5))
                 for number, rows in enumerate(np.split(np.arange(len(truth["position"])), starts[1:]))]
    responses.sort(key=lambda response: -np.abs(truth["a_star"][response.rows]).max())  # stable
    right, wrong = ([response for response in responses if response.right is verdict] for verdict in (True, False))
    pairs = min(len(right), len(wrong))
    alternating = [response for pair in zip(right, wrong) for response in pair]
    return (alternating + right[pairs:] + wrong[pairs:])[:count]


def quantities(truth: dict) -> list[tuple[str, str, str, np.ndarray]]:
    """Id, name, meaning and values (N,) of everything that tokens can be coloured by: A* first, entropy last."""
    found = [("a_star", "A*", "how the token changed the probability of success V (Monte Carlo)", truth["a_star"])]
    for method, credit in zip(truth["methods"].tolist(), truth["credits"]):
        name = f"credit, {method}" + " (GRPO)" * (method == "none")
        found.append((method, name, f"what train.py --mitigation {method} gives the token", credit))
    A = truth["advantage"]  # (N,) GRPO's credit
    contribution = "GRPO's credit · log p, the original work's measure; below 0 where training makes the token likelier"
    return found + [("contribution", "contribution", contribution, A * truth["logprob"]),
                    ("logit_gradient", "logit gradient", "GRPO's credit · ‖onehot − p‖", A * truth["logit_grad"]),
                    ("entropy", "entropy", "of the distribution the token was sampled from, in nats", truth["entropy"])]


def scale_of(values: np.ndarray) -> float:
    """The size that gets the full colour: a percentile of |values|; their maximum, or 1, where that is 0."""
    return float(np.percentile(np.abs(values), FULL) or np.abs(values).max() or 1)


def curve(truth: dict, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V (L + 1,) before each of L tokens and after the last, and its standard error; the outcome's is 0."""
    outcome = truth["value"][rows[-1]] + truth["a_star"][rows[-1]]
    return np.append(truth["value"][rows], outcome), np.append(truth["value_error"][rows], 0)


def short(values: np.ndarray) -> list[float]:
    """Four significant digits, which keep the page small."""
    return [float(f"{x:.4g}") for x in values.tolist()]


def page_data(truth: dict, shown: list[Response]) -> dict:
    """All that the page shows, ready for JSON; `values` holds one list over tokens per quantity."""
    found, all_rows = quantities(truth), np.concatenate([response.rows for response in shown])
    responses = []
    for number, rows, right in shown:
        V, V_error = curve(truth, rows)  # (L + 1,), (L + 1,)
        responses.append({
            "number": number, "right": right, "prompt": str(truth["prompts"][number]),
            "reward": float(truth["reward"][rows[0]]), "advantage": float(truth["advantage"][rows[0]]),
            "piece": truth["piece"][rows].tolist(), "kind": truth["kind"][rows].tolist(),
            "reachable": truth["reachable"][rows].tolist(), "p": short(np.exp(truth["logprob"][rows])),
            "V": short(V), "V_error": short(V_error), "a_star_error": short(truth["a_star_error"][rows]),
            "values": [short(values[rows]) for *_, values in found]})
    return {"settings": json.loads(str(truth["settings"])), "kinds": truth["kinds"].tolist(), "faint": FAINT,
            "total": len(truth["prompts"]), "responses": responses,
            "quantities": [{"id": id, "name": name, "meaning": meaning, "scale": scale_of(values[all_rows]),
                            "signed": id != "entropy"} for id, name, meaning, values in found]}


def page(truth: dict, shown: list[Response]) -> str:
    """The whole page. `<` is escaped in its data, so that no token can close the script element they are in."""
    data = json.dumps(page_data(truth, shown), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    coloured = TEMPLATE.replace("PLUS", PLUS).replace("MINUS", MINUS).replace("CURVE", CURVE)
    return coloured.replace("DATA", data.replace("<", "\\u003c"))


# --------------------------------------------------------------------------------------------------- picture

LINE = 0.2  # inches, height of a line of text
CAPTIONS = {"a_star": "A*: how the token changed the probability of success", "advantage": "GRPO's credit"}


def examples(truth: dict, shown: list[Response]) -> list[Response]:
    """The first right and the first wrong response with some credit and a length that suits a picture."""
    ordered = sorted(shown, key=lambda response: not (  # stable, and False comes first
        40 <= len(response.rows) <= 80 and truth["advantage"][response.rows[0]]))
    pair = [next((response for response in ordered if response.right is verdict), None) for verdict in (True, False)]
    return pair if all(pair) else ordered[:2]


def draw(truth: dict, shown: list[Response], file: Path) -> None:
    """Two responses, each with its tokens coloured by A*, the same by GRPO's credit, and V."""
    pair = examples(truth, shown)
    drawn = np.concatenate([response.rows for response in pair])
    scales = {name: scale_of(truth[name][drawn]) for name in CAPTIONS}
    pieces = [truth["piece"][response.rows].tolist() for response in pair]
    lines = [place_tokens(texts, LETTERS)[-1][1] + 1 for texts in pieces]
    heights = [height for count in lines for height in (LINE * count, LINE * count, 1.2)]  # 3 per response
    figure, axes = plt.subplots(len(heights), figsize=(WIDTH, sum(heights) + 0.45 * len(heights) + 1.1),
                                height_ratios=heights)
    for (number, rows, right), texts, count, (*blocks, bottom) in zip(pair, pieces, lines, axes.reshape(-1, 3)):
        head = f"{truth['prompts'][number]}: {'right' if right else 'wrong'}, reward {truth['reward'][rows[0]]:.2f}"
        heads = (f"{head}. {CAPTIONS['a_star']}".replace("->", "→"), CAPTIONS["advantage"])
        for axis, name, title in zip(blocks, CAPTIONS, heads):
            axis.set(xlim=(0, LETTERS), ylim=(count, 0))
            axis.axis("off")
            axis.set_title(title, loc="left", fontsize=10, parse_math=False)
            draw_tokens(axis, texts, truth[name][rows] / scales[name])
        draw_curve(bottom, truth, rows)
    labels = {"advantage": "GRPO's credit (↵ line break, ■ end token)", "a_star": "A*"}  # from the bottom up
    for name, label in labels.items():
        colours = plt.cm.ScalarMappable(plt.Normalize(-scales[name], scales[name]), SHADES)
        figure.colorbar(colours, ax=axes, location="bottom", extend="both", aspect=90, pad=0.01,
                        label=f"{label}; full colour at ±{scales[name]:.2f}, the {FULL}th percentile of these tokens")
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
        y = V[t : t + 2].mean() if large else high[t : t + len(rows) // 7].max() + 0.08
        axes.text(t + (0.1 if late else 0.9), y, text, va="center", ha="right" if late else "left",
                  parse_math=False)


def landmarks(a_star: np.ndarray) -> list[int]:
    """Up to four tokens of large |A*| (L,), far enough apart for their texts."""
    found = []
    for t in np.argsort(-np.abs(a_star), kind="stable"):
        if len(found) < 4 and abs(a_star[t]) >= 0.1 and all(abs(t - other) > len(a_star) / 7 for other in found):
            found.append(int(t))
    return found


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
/* Text has a contrast of at least 4.5 on every shade between paper and the full colours, in both schemes. */
:root { color-scheme: light; --paper: #ffffff; --ink: #1a1a1a; --quiet: #595959; --line: #cccccc;
  --plus: PLUS; --minus: MINUS; --plain: #3dbb96; --curve: CURVE; }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --paper: #15171b; --ink: #f2f2f2; --quiet: #b3b3b3; --line: #4a4d55;
    --plus: #96540b; --minus: #6250a3; --plain: #00694d; --curve: #56b4e9; }
}
* { box-sizing: border-box; }
html { scroll-padding: 8rem 0 15rem; }  /* neither the bar nor the panel covers what has the focus */
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
[data-shown] { outline: 2px solid var(--ink); } .tokens span:focus { outline: 3px solid var(--ink); }
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
  article { display: block; } svg { margin-top: .5rem; }
  #credits { flex-wrap: nowrap; overflow-x: auto; }
}
@media print {
  .controls, .readout, .mark { display: none; } .bar { position: static; }
  html { font-size: 12px; } body { padding: 0; }
  article { grid-template-columns: minmax(0, 1fr) 20rem; }
  [data-shown], .tokens span:focus { outline: none; }
}
</style>
</head>
<body>
<h1>Credit of every token</h1>
<p class="intro" id="intro"></p>
<p class="intro quiet" id="choice"></p>
<p class="intro quiet controls">Point at a token or a curve to see the numbers below. Keys: Tab moves between responses,
at first to the token with the largest |A*|; ← → Home End move along the tokens, ↑ ↓ to the response above or below,
[ ] change the quantity. The address links to the view. ↵ is a line break, ■ the end token, ± one standard error.</p>
<div class="bar">
<label class="controls">Colour by <select id="quantity"></select></label>
<div class="legend" id="legend"><span class="ramp" id="ramp"></span><span></span><span></span><span></span></div>
<p class="quiet" id="signs"><u>underlined</u>: below 0</p>
</div>
<p class="intro" id="meaning" aria-live="polite"></p>
<main id="responses"></main>
<section class="readout" aria-label="Numbers of the token">
<dl id="token" aria-live="polite" aria-atomic="true"></dl>
<dl id="credits"></dl>
</section>
<footer class="quiet" id="settings"></footer>
<noscript><p>This page needs JavaScript, which is switched off.</p></noscript>
<script type="application/json" id="data">DATA</script>
<script>
"use strict";
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent), Q = data.quantities.length, SVG = "http://www.w3.org/2000/svg";
const LEFT = 44, WIDE = 282;  // the curve's place in its picture, which is 340 wide
const spans = [], marks = [];  // per response: the elements of its tokens; a function that marks a token in its curve
const stops = data.responses.map(({values}) => {  // per response: the token that Tab goes to
  const sizes = values[0].map(Math.abs);
  return sizes.indexOf(Math.max(...sizes));
});
let quantity = 0, chosen = 0;  // index of the quantity shown in colour; of the response that was focused last

// Appends a new element. Text is set as text, never as HTML: tags in a token are only characters.
function add(parent, name, attributes = {}, text = "") {
  const svg = name === "svg" || parent.namespaceURI === SVG;
  const element = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return parent.appendChild(element);
}

// A number with as many decimals as its scale needs, and with its sign where the quantity has one.
function number(x, scale, signed) {
  const text = Math.abs(x).toFixed(Math.min(8, Math.max(0, 2 - Math.floor(Math.log10(scale)))));
  return Number(text) === 0 ? "0" : (x < 0 ? "−" : signed ? "+" : "") + text;
}

// The visible text of a token. Its no-break spaces keep it in one piece.
function visible(text) {
  return text.replaceAll(" ", "\\u00a0").replaceAll("\\n", "↵\\n") || "■";
}

// Adds a response: puzzle, outcome, tokens and curve.
function article(response, r) {
  const {piece, prompt, right, reward, advantage} = response;
  const part = add($("responses"), "article", {"aria-labelledby": `title${r}`});
  add(part, "h2", {id: `title${r}`}, prompt);
  add(part, "p", {class: "quiet"}, `${right ? "✓ right" : "✗ wrong"}, reward ${reward.toFixed(2)}, GRPO's credit `
    + `${number(advantage, 1, true)}, ${piece.length} tokens, response ${response.number}`);
  const list = add(part, "div", {class: "tokens", role: "listbox", "aria-label": `tokens of ${prompt}`,
    "aria-orientation": "horizontal"});
  spans.push(piece.map((text, t) => {
    if (text.startsWith(" ")) add(list, "wbr");  // a line may break before a space
    return add(list, "span", {role: "option", tabindex: -1, "data-at": `${r} ${t}`}, visible(text));
  }));
  marks.push(curve(add(part, "svg", {viewBox: "0 0 340 170", role: "img", "data-at": r}), response));
}

// Draws V in steps: at x(t + 0.5), token t moves it from V[t] to V[t + 1]. Returns the function that marks a token.
function curve(svg, {V, V_error}) {
  const n = V.length - 1, x = s => LEFT + WIDE * (s + 0.5) / (n + 1), y = v => 128 - 120 * Math.min(1, Math.max(0, v));
  const path = values => values.map((v, s) => `${s ? "V" : `M${x(-0.5)} `}${y(v)}H${x(s + 0.5).toFixed(1)}`).join("");
  const back = V.map((v, s) => `V${y(v - 1.96 * V_error[s])}H${x(s - 0.5).toFixed(1)}`).reverse().join("");
  const label = (text, at, more) => add(svg, "text", {"text-anchor": "middle", ...at, ...more}, text);
  svg.setAttribute("aria-label", `Probability of success V, from ${V[0].toFixed(2)} to ${V[n].toFixed(2)}`);
  for (const v of [0, 0.5, 1]) {
    add(svg, "path", {class: "grid", d: `M${LEFT} ${y(v)}h${WIDE}`});
    label(v, {x: LEFT - 6, y: y(v) + 4, "text-anchor": "end"});
  }
  for (const s of [0, Math.round(n / 2), n]) label(s, {x: x(s), y: 143});
  label("tokens written", {x: LEFT + WIDE / 2, y: 162});
  label("V, with 95% interval", {transform: "translate(12 68) rotate(-90)"});
  add(svg, "path", {class: "band", d: path(V.map((v, s) => v + 1.96 * V_error[s])) + back + "Z"});
  add(svg, "path", {class: "step", d: path(V)});
  const line = add(svg, "path", {class: "mark"}), dot = add(svg, "circle", {class: "mark", r: 3.5});
  return t => {
    line.style.display = dot.style.display = t < 0 ? "none" : "";
    if (t < 0) return;
    line.setAttribute("d", `M${x(t + 0.5)} ${y(V[t])}V${y(V[t + 1])}`);
    dot.setAttribute("cx", x(t + 0.5));
    dot.setAttribute("cy", y(V[t + 1]));
  };
}

// Colours all tokens by a quantity, on the same scale in all responses.
function select(q) {
  quantity = (q + Q) % Q;
  const {name, meaning, scale, signed} = data.quantities[quantity];
  $("quantity").selectedIndex = quantity;
  $("meaning").textContent = `Coloured by ${name}: ${meaning}.`;
  $("signs").hidden = !signed;
  $("ramp").className = signed ? "ramp" : "ramp plain";
  const ticks = signed ? ["≤ " + number(-scale, scale, true), "0"] : ["0", number(scale / 2, scale)];
  [...ticks, "≥ " + number(scale, scale, signed)].forEach((text, i) => $("legend").children[i + 1].textContent = text);
  spans.forEach((row, r) => row.forEach((span, t) => {
    const x = data.responses[r].values[quantity][t] / scale, size = Math.min(1, Math.abs(x));
    span.className = (signed ? (x < 0 ? "minus" : "plus") : "plain") + (size < data.faint ? " faint" : "");
    span.style.setProperty("--size", `${(100 * size).toFixed(1)}%`);
  }));
  show(chosen, stops[chosen]);
}

// Shows the numbers of a token in the panel, and marks it in the text and in the curve.
function show(r, t) {
  const {values, V, p, piece, kind, reachable, a_star_error} = data.responses[r];
  const text = q => number(values[q][t], data.quantities[q].scale, data.quantities[q].signed);
  const names = data.quantities.map(({name}) => name), target = ["out of reach", "within reach"][reachable[t]];
  const first = [["token", visible(piece[t]).replaceAll("\\n", "")], ["kind", data.kinds[kind[t]]],
    ...(quantity > 0 && quantity < Q - 1 ? [[names[quantity], text(quantity)]] : []),
    ...(target ? [["target", target]] : []),
    ["A*", `${number(values[0][t], 0.1, true)} ± ${a_star_error[t].toFixed(3)}`],
    ["V", `${V[t].toFixed(3)} → ${V[t + 1].toFixed(3)}`],
    ["p", p[t] < 0.001 ? p[t].toExponential(1) : p[t].toFixed(3)], ["entropy", `${values[Q - 1][t].toFixed(3)} nats`]];
  const credits = names.slice(1, -1).map((name, i) => [name.replace("credit, ", ""), text(i + 1)]);
  for (const [id, pairs] of [["token", first], ["credits", credits]]) {
    $(id).replaceChildren();
    for (const [name, value] of pairs) {
      const pair = add($(id), "div");
      add(pair, "dt", {}, name);
      add(pair, "dd", {}, value);
    }
  }
  document.querySelector("[data-shown]")?.removeAttribute("data-shown");
  spans[r][t].setAttribute("data-shown", "");
  marks.forEach((mark, i) => mark(i === r ? t : -1));
}

// Makes a token the one tab stop of its response, and shows it.
function choose(r, t) {
  for (const i of [stops[r], t]) {
    spans[r][i].tabIndex = i === t ? 0 : -1;
    spans[r][i].setAttribute("aria-selected", i === t);
  }
  [chosen, stops[r]] = [r, t];
  show(r, t);
}

// Writes the view into the address.
function remember() {
  const response = data.responses[chosen].number, by = data.quantities[quantity].id;
  history.replaceState(null, "", `#by=${by}&response=${response}&token=${stops[chosen]}`);
}

// Shows the view in the address; what the address does not name, or names wrongly, stays at its start.
function restore() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const r = data.responses.findIndex(({number}) => String(number) === hash.get("response"));
  select(Math.max(0, data.quantities.findIndex(({id}) => id === hash.get("by"))));
  spans[r]?.[Number(hash.get("token"))]?.focus();
}

// [response, token] at an element: the token it shows, or in a curve the token whose jump is nearest to the pointer.
function place({target, clientX}) {
  const svg = target.closest?.("svg");
  if (!svg) return target.closest?.("span[data-at]")?.dataset.at.split(" ").map(Number);
  const box = svg.getBoundingClientRect(), r = Number(svg.dataset.at), n = spans[r].length;
  const t = Math.round(((clientX - box.left) / box.width * 340 - LEFT) / WIDE * (n + 1) - 1);
  return [r, Math.max(0, Math.min(n - 1, t))];
}

// Moves through the quantities, or from the focused token to another.
function press(event) {
  if (event.metaKey) return;
  if ("[]".includes(event.key)) {
    select(quantity + (event.key === "]" ? 1 : -1));
    return remember();
  }
  const [r, t] = place(event) ?? [];
  const target = {ArrowLeft: [r, t - 1], ArrowRight: [r, t + 1], ArrowUp: [r - 1, t], ArrowDown: [r + 1, t],
    Home: [r, 0], End: [r, Infinity]}[event.key];
  const row = target && spans[target[0]];
  if (!row || event.ctrlKey || event.altKey) return;
  event.preventDefault();  // no scrolling
  row[Math.max(0, Math.min(row.length - 1, target[1]))].focus();
}

$("intro").textContent = `Responses of ${data.settings.model} to Countdown puzzles: how each token changed the `
  + "probability of success, A*, and the credit that each method gave it.";
$("choice").textContent = `${data.responses.length} of ${data.total} responses, those with the largest |A*| of any `
  + "token, right and wrong ones alternating.";
$("settings").textContent = Object.entries(data.settings).map(([k, v]) => `${k} ${JSON.stringify(v)}`).join(", ");
data.quantities.forEach(({name}) => add($("quantity"), "option", {}, name));
data.responses.forEach(article);
stops.map((t, r) => [r, t]).reverse().forEach(([r, t]) => choose(r, t));  // the first response last, so it is shown
$("quantity").addEventListener("change", event => { select(event.target.selectedIndex); remember(); });
$("responses").addEventListener("mousemove", event => { if (place(event)) show(...place(event)); });
$("responses").addEventListener("mouseleave", () => show(chosen, stops[chosen]));
$("responses").addEventListener("click", event => { const [r, t] = place(event) ?? []; spans[r]?.[t].focus(); });
$("responses").addEventListener("focusin", event => { choose(...place(event)); remember(); });
document.addEventListener("keydown", press);
addEventListener("hashchange", restore);
restore();
</script>
</body>
</html>
"""


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(description="Write a page and a picture of the credit of every token.")
    parser.add_argument("truth", type=Path, help="the .npz file that experiments/ground_truth.py wrote")
    parser.add_argument("--out", type=Path, help="folder for credit.html and credit.png (default: beside the file)")
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
        fail(str(error))
    print(f"wrote {out / 'credit.html'} and credit.png beside it")


if __name__ == "__main__":
    main()
