// How responses, a token's numbers, scores and the curve of success look.
"use strict";

const $ = id => document.getElementById(id);
const FULL_TRUTH = 0.4;  // |A*| that gets the full colour
const FULL_SHARE = 0.97;  // this share of the tokens has less credit than the full colour shows
const FAINT = 0.05;  // a smaller share of the full colour looks like 0, and is not underlined
const BANDS = {nothing: () => 0, credit: (row, t) => row.credit[t],
               gradient: (row, t) => row.credit[t] * row.tokens[t].logitGrad,
               change: (row, t) => (row.tokens[t].after ?? row.tokens[t].p) - row.tokens[t].p};

const fixed = (x, digits = 2) => Math.abs(x).toFixed(digits);
const signed = (x, digits = 2) => (Number(fixed(x, digits)) === 0 ? "" : x > 0 ? "+" : "−") + fixed(x, digits);
const percent = p => `${Number((100 * p).toFixed(p > 0.995 || p < 0.005 ? 1 : 0))}%`;
const visible = text => text.replaceAll("\n", "↵") || "■";

/** A new element of a parent; text is set as text, never as HTML. */
function add(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return parent.appendChild(element);
}

/** Gives an element the colour of x, full at `scale`; where x is undefined, none. */
function paint(element, x, scale) {
  const share = x === undefined || !(scale > 0) ? 0 : Math.max(-1, Math.min(1, x / scale));
  element.classList.toggle("minus", share < 0);
  element.classList.toggle("below", share < -FAINT);
  element.style.setProperty("--size", `${Math.round(100 * Math.abs(share))}%`);
}

/** The responses on display. Each token is a button: its background is A*, the band under it the chosen credit. */
class Responses {
  /** element: where they are shown; chosen(i, t): what to do when a token is. */
  constructor(element, chosen) {
    Object.assign(this, {element, chosen, rows: [], buttons: [], at: null});
  }

  /** Empty boxes, one for each response that begins. */
  begin(count) {
    this.element.replaceChildren();
    [this.rows, this.at] = [[], null];
    this.buttons = Array.from({length: count}, () => []);
    this.boxes = this.buttons.map((_, i) => {
      const box = add(this.element, "article"), head = add(box, "h3", "", `response ${i + 1}`);
      return {box, head, tokens: add(box, "p", "tokens")};
    });
  }

  /** Appends a token to response i. */
  append(i, text) {
    const {tokens} = this.boxes[i], t = this.buttons[i].length, last = tokens.lastChild;
    const word = last && last.className === "word" && !/^[ <]/.test(text) ? last : add(tokens, "span", "word");
    const button = add(word, "button", "token");
    add(button, "b", "", visible(text));
    add(button, "i");
    button.tabIndex = t ? -1 : 0;
    button.onclick = () => this.chosen(i, t);
    button.onkeydown = event => this.move(event, i, t);
    this.buttons[i].push(button);
    if (text.includes("\n")) add(tokens, "br");
  }

  /** What the arrow keys do: left and right by tokens, up and down by responses. */
  move(event, i, t) {
    const next = {ArrowRight: this.buttons[i][t + 1], ArrowLeft: this.buttons[i][t - 1],
                  ArrowDown: this.buttons[i + 1]?.[0], ArrowUp: this.buttons[i - 1]?.[0]}[event.key];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  /** Shows rows with their credit, coloured by a band of BANDS; unless fresh, their tokens are there already. */
  show(rows, band, fresh) {
    if (fresh) {
      this.begin(rows.length);
      rows.forEach((row, i) => row.tokens.forEach(token => this.append(i, token.text)));
    }
    this.rows = rows;
    this.colour(band);
  }

  colour(band) {
    const value = BANDS[band], sizes = this.rows.map(row => row.tokens.map((_, t) => value(row, t)));
    const ordered = sizes.flat().map(Math.abs).sort((a, b) => a - b);
    this.scale = Math.max(ordered[Math.floor(FULL_SHARE * (ordered.length - 1))] || ordered.at(-1), 1e-9);
    this.rows.forEach((row, i) => {
      const {head, box} = this.boxes[i], {answer, reward} = row.grade;
      head.textContent = `${answer ? "✓ right" : "✗ wrong"}: reward ${fixed(reward)}, ` +
        `advantage ${signed(row.advantage)}`;
      box.classList.toggle("extra", !this.first(i));
      row.tokens.forEach((token, t) => this.colourToken(i, t, sizes[i][t]));
    });
    $("scale").textContent = this.scale > 1e-9 ? `±${fixed(this.scale, this.scale < 0.1 ? 3 : 2)}` : "";
  }

  colourToken(i, t, x) {
    const button = this.buttons[i][t], [text, band] = button.children, {aStar} = this.rows[i].tokens[t];
    paint(text, aStar, FULL_TRUTH);
    paint(band, x, this.scale);
    const truth = aStar === undefined ? "" : `, A* ${signed(aStar)}`;
    button.setAttribute("aria-label", `${text.textContent}${truth}${x ? `, ${signed(x)}` : ""}`);
  }

  /** Whether response i is the first right or the first wrong one, which a small screen shows at first. */
  first(i) {
    return this.rows.findIndex(row => row.grade.answer === this.rows[i].grade.answer) === i;
  }

  choose(i, t) {
    if (this.at) this.buttons[this.at[0]][this.at[1]].removeAttribute("aria-current");
    this.at = [i, t];
    this.buttons[i][t].setAttribute("aria-current", "true");
  }

  /** [i, t] of the token with the largest |A*| among the responses that a small screen shows. */
  decisive() {
    let best = [0, 0], most = -1;
    this.rows.forEach((row, i) => row.tokens.forEach(({aStar}, t) => {
      if (this.first(i) && Math.abs(aStar) > most) [best, most] = [[i, t], Math.abs(aStar)];
    }));
    return best;
  }
}

/** Fills a list with pairs of a name and what it is. */
function fillFacts(list, pairs) {
  list.replaceChildren();
  for (const [name, value] of pairs) {
    const pair = add(list, "div");
    add(pair, "dt", "", name);
    add(pair, "dd", "", value);
  }
}

/** The table of scores: a row for each [name, score]. */
function showScores(scores, names) {
  const head = ["", "rank", ...scores[0][1].lies.map(([name]) => name)], table = $("scores");
  table.replaceChildren();
  const top = add(add(table, "thead"), "tr"), body = add(table, "tbody");
  for (const text of head) add(top, "th", "", text).scope = "col";
  for (const [rule, {value, low, high, lies}] of scores) {
    const row = add(body, "tr", rule === scores.at(-1)[0] ? "own" : "");
    add(row, "th", "", names[rule] ?? rule).scope = "row";
    const rank = rule === "A*" ? "1" : value === null || Number.isNaN(value) ? "—" : signed(value);
    const cell = add(row, "td", "", rank);
    if (rank !== "1" && rank !== "—") add(cell, "small", "", `${signed(low)} to ${signed(high)}`);
    for (const [, size] of lies) add(row, "td", "", fixed(size, 1));
  }
}

/** The curve of success on held-out puzzles: points of {steps, heldOut}. */
function drawCurve(points) {
  const tested = points.filter(point => point.heldOut !== null);
  const most = Math.max(20, ...points.map(point => point.steps));
  const shares = tested.map(point => point.heldOut), low = Math.max(0, Math.floor(10 * Math.min(...shares) - 0.5) / 10);
  const high = Math.min(1, Math.max(low + 0.2, Math.ceil(10 * Math.max(...shares) + 0.5) / 10));
  const x = steps => 300 * steps / most, y = share => 60 - 60 * (share - low) / (high - low);
  $("path").setAttribute("d", "M" + tested.map(({steps, heldOut}) => `${x(steps)} ${y(heldOut)}`).join("L"));
  [$("high").textContent, $("low").textContent, $("last").textContent] = [percent(high), percent(low), `${most} steps`];
  const text = tested.map(({steps, heldOut}) => `${percent(heldOut)} at step ${steps}`).join(", ");
  $("curve").setAttribute("aria-label", `Solved of ${about.heldout} held-out puzzles: ${text}`);
}
