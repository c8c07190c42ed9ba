// The controls: what they ask of the worker, what its answers change, and the link that holds their state.
"use strict";

const about = JSON.parse($("about").textContent);  // the rest is for the worker, which reads it itself
const worker = new Worker(URL.createObjectURL(new Blob([$("engine").textContent], {type: "text/javascript"})));
const responses = new Responses($("responses"), (i, t) => choose(i, t));
const compared = new Set(["A*", "none", "random", "ppo"]);  // rules beside the chosen one in the table: it stays there
const PARAMETER = {outcome_conditional: "think_discount", token_type: "filler"};
const FORMULAS = {
  none: "credit = A (function none, mitigations.py)", entropy_ratio: "credit = A · H / mean H (function entropy_ratio)",
  outcome_conditional: "credit ∝ A · think_discount before <answer>, A in it (function outcome_conditional)",
  token_type: "credit ∝ A · filler on words, A elsewhere (function token_type)",
  own: "credit ∝ A · your line. Names: p probability, H entropy, A advantage, L length of the response, position, role; " +
    "filler, reasoning, structure are 1 or 0",
};
const SHOWN = {none: "GRPO", outcome_conditional: "less before answer", entropy_ratio: "by entropy",
               token_type: "less on words", own: "yours"};
const FIELDS = ["advantage", "rule", "amount", "line", "band", "seed"];
let curve = [], training = false, recorded = 0, wanted = null;

/** The method as the controls say. */
function method() {
  const [advantage, rule, amount, line] = ["advantage", "rule", "amount", "line"].map(id => $(id).value);
  return {advantage, rule, amount: Number(amount), line};
}

const seed = () => Math.abs(Math.trunc(Number($("seed").value))) % 1000 || 0;
const isChosen = (i, t) => responses.at?.[0] === i && responses.at[1] === t;
const ask = (action, more = {}) => worker.postMessage({do: action, method: method(), ...more});

function say(text) {
  $("status").textContent = text;
}

function complain(text) {
  $("error").textContent = text;
}

/** Sets controls, as if by hand. */
function set(values) {
  for (const [id, value] of Object.entries(values)) $(id).value = value;
  changed();
}

/** After a control was changed: the formula, the colours, the score and the link follow. */
function changed() {
  const {rule} = method();
  complain("");
  $("slider").hidden = !(rule in PARAMETER);
  $("parameter").textContent = PARAMETER[rule] ?? "";
  $("shown").textContent = $("amount").value;
  $("own").hidden = rule !== "own";
  $("formula").textContent = FORMULAS[rule] ?? `${rule} of this repository, recorded`;
  if (!training) ask("credit");
  if (!training) ask("score", {others: [...compared].filter(other => other !== rule)});
  if (rule !== "own") compared.add(rule);
  writeLink();
}

// ------------------------------------------------------------------------------------------------------------ the link

/** Puts the state into the address: puzzle, method, sliders, rule, seed and number of steps. */
function writeLink() {
  const state = Object.fromEntries([...FIELDS, "numbers", "target"].map(id => [id, $(id).value]));
  history.replaceState(null, "", "#" + new URLSearchParams({...state, steps: curve.at(-1)?.steps ?? 0}));
}

/** Sets the controls from the address; what is not there, or is no choice, stays. */
function readLink() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const id of [...FIELDS, "numbers", "target"]) {
    const value = state.get(id), options = $(id).options;
    if (value !== null && (!options || [...options].some(option => option.value === value))) $(id).value = value;
  }
  const steps = Number(state.get("steps"));
  wanted = Number.isInteger(steps) && steps > 0 && steps <= 1000 ? steps : null;
  return state.has("numbers");
}

/** The index of the typed puzzle among the recorded ones, or -1. */
function recordedPuzzle() {
  const typed = `${$("numbers").value.match(/\d+/g)} ${$("target").value}`;
  return about.puzzles.findIndex(({numbers, target}) => typed === `${numbers} ${target}`);
}

// ------------------------------------------------------------------------------------------------------------ a token

/** Selects a token: its numbers, and what else the model could have written. */
function choose(i, t) {
  responses.choose(i, t);
  $("panel").hidden = false;
  showToken([]);
  ask("alternatives", {i, t});
}

function showToken(best) {
  const [i, t] = responses.at, row = responses.rows[i];
  const {text, p, entropy, after, aStar, error, value, n} = row.tokens[t];
  $("name").textContent = `“${visible(text).trim() || "space"}”, token ${t + 1} of ${row.tokens.length}`;
  $("measure").textContent = aStar === undefined ? "measure A*" : "measure live";
  const truth = aStar === undefined ? "not measured" : `${signed(aStar)} ± ${fixed(1.96 * error)}` +
    (n ? `, ${2 * n} continuations` : "");
  const success = value === undefined ? [] : [["success", `${percent(value)} → ${percent(value + aStar)}`]];
  fillFacts($("facts"), [["A*", truth], ...success, ["credit", signed(row.credit[t])],
    ["p", percent(p) + (after === undefined ? "" : ` → ${percent(after)}`)], ["entropy", fixed(entropy)]]);
  const others = best.map(b => `${visible(b.text)} ${percent(b.p)}`).join(" · ");
  if (others) $("others").textContent = `could be: ${others}`;
}

// ---------------------------------------------------------------------------------------------------------- the worker

const ANSWERS = {
  tested({heldOut}) {
    curve = [{steps: 0, heldOut}];
    for (const id of ["train", "update"]) $(id).disabled = false;
    drawCurve(curve);
    const plan = wanted ? `; the link was at step ${wanted}: press train to go there` : "";
    say(`solves ${percent(heldOut)} of ${about.heldout} held-out puzzles${plan}`);
  },
  responses({rows, steps, norm, fresh}) {
    responses.show(rows, $("band").value, fresh);
    if (responses.at) showToken([]);
    else $("panel").hidden = true;
    if (norm !== undefined) {
      curve.push({steps, heldOut: null});
      drawCurve(curve);
      say(`step ${steps} taken, gradient norm ${norm.toFixed(3)}: see “change of p”`);
    }
  },
  growing({texts, lengths}) {
    if (lengths.every(length => length === 1)) {
      responses.begin(lengths.length);
      $("panel").hidden = true;
    }
    lengths.forEach((length, i) => {
      if (length > responses.buttons[i].length) responses.append(i, texts[i]);
    });
  },
  scores({scores}) {
    showScores(scores, SHOWN);
  },
  step(point) {
    curve.push(point);
    drawCurve(curve);
    writeLink();
    const tested = curve.findLast(({heldOut}) => heldOut !== null);
    say(`step ${point.steps}: ${percent(point.success)} of its responses right; held out ${percent(tested.heldOut)}`);
  },
  arrived() {
    wanted = null;
    setTraining(false);
  },
  alternatives({i, t, best}) {
    if (isChosen(i, t)) showToken(best);
  },
  truth({i, t, value, error, before, n}) {
    Object.assign(responses.rows[i].tokens[t], {aStar: value, error, value: before, n});
    responses.colourToken(i, t, BANDS[$("band").value](responses.rows[i], t));
    if (isChosen(i, t)) showToken([]);
  },
  error({text, from}) {
    complain(text);
    if (from === "train") setTraining(false);
  },
};

function setTraining(on) {
  training = on;
  $("train").textContent = on ? "stop" : "train";
  for (const id of ["sample", "update", "reset", "measure"]) $(id).disabled = on;
}

// -------------------------------------------------------------------------------------------------------- the controls

worker.onmessage = ({data: answer}) => ANSWERS[answer.of](answer);
worker.onerror = event => complain(`the model stopped: ${event.message}`);
$("next").onclick = () => guide(guideAt + 1);
$("skip").onclick = () => guide(GUIDE.length);
$("sample").onclick = () => {
  complain("");
  ask("sample", {numbers: $("numbers").value, target: $("target").value});
  writeLink();
};
$("update").onclick = () => {
  complain("");
  $("band").value = "change";
  ask("update");
};
$("train").onclick = () => {
  setTraining(!training);
  complain("");
  ask(training ? "train" : "stop", {until: wanted});
};
$("reset").onclick = () => {
  ask("reset", {seed: seed()});
  showPuzzle(recorded);
  startCurve();
};
$("measure").onclick = () => ask("measure", {i: responses.at[0], t: responses.at[1]});
$("all").onclick = () => document.body.classList.add("all");
$("close").onclick = () => { $("panel").hidden = true; };
for (const id of ["advantage", "rule", "amount", "line"]) $(id).oninput = changed;
$("band").oninput = () => {
  responses.colour($("band").value);
  writeLink();
};
$("puzzles").onchange = () => showPuzzle(Number($("puzzles").value));

/** Shows the recorded responses to a puzzle of the list. */
function showPuzzle(index) {
  const {numbers, target} = about.puzzles[index];
  recorded = index;
  [$("numbers").value, $("target").value, $("puzzles").value] = [numbers.join(", "), target, index];
  ask("choose", {index});
  writeLink();
}

for (const name of about.recorded) $("rule").add(new Option(`${name} (recorded)`, name));
about.puzzles.forEach(({numbers, target}, i) =>
  $("puzzles").add(new Option(`${numbers.join(", ")} → ${target}`, i)));
$("puzzles").value = about.shown;
const typed = readLink(), index = recordedPuzzle();
ask("reset", {data: $("data").textContent, seed: seed()});
if (!typed) showPuzzle(about.shown);
else if (index >= 0) showPuzzle(index);
else $("sample").onclick();
changed();
startCurve();
guide(typed ? GUIDE.length : 0);

/** Measures held-out success: until it is known nothing trains, so that the curve begins with it. */
function startCurve() {
  for (const id of ["train", "update"]) $(id).disabled = true;
  ask("test");
}
