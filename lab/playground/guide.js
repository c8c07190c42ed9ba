// The first minute: five presses, each of which does something and says what is seen.
"use strict";

const lines = (...parts) => () => parts.join(" ");

const GUIDE = [
  {press: "see GRPO's credit", text: lines(
    "A small language model, in this page, wrote these responses. A right answer earns a reward of 1, a proper layout 0.1.",
    "Which tokens deserve it? Five presses show how well that is answered.")},
  {press: "where the gradient falls", act: () => set({rule: "none", band: "credit"}), text: lines(
    "The band under each token is GRPO's credit: the same for all tokens of a response, its advantage.",
    "Orange says more of this; purple, underlined, says less. A word, a number and a tag get the same.")},
  {press: "the token that decided", act: () => set({band: "gradient"}), text: lines(
    "The band is now the credit times the size of the token's gradient at the logits. Where the model was sure, nothing",
    "moves: the update falls on the few tokens where it had a choice, deserved or not.")},
  {press: "compare two rules", act() {
    set({band: "nothing"});
    choose(...responses.decisive());
  }, text() {
    const [i, t] = responses.at, {text, value, aStar} = responses.rows[i].tokens[t];
    return "The colour behind each token is the truth, A*, measured by continuing from it: how much it changed the " +
      `probability of success. “${visible(text).trim()}” took it from ${percent(value)} to ${percent(value + aStar)}. ` +
      "Tap any other token.";
  }},
  {press: "write your own", at: "b", act() {
    $("panel").hidden = true;
    set({rule: "entropy_ratio", band: "credit"});
    set({rule: "token_type"});
  }, text: lines(
    "Two rules that put more on some tokens: by entropy, where the model was unsure; and less on words. The table compares",
    "both with A* on all recorded responses. Rank 1 would be perfect; GRPO has none, because it tells no tokens apart.")},
  {press: "finish", at: "b", act: () => set({rule: "own"}), text: lines(
    "Now yours: one line, coloured and scored while you type. The best in the table, ppo, reads a critic that was fitted",
    "to 9,600 responses. Can you beat it? Then press train: the model learns with your rule, here.")},
];
let guideAt = 0;

/** Shows step n of the guide after doing it; past the last one it goes away. */
function guide(n) {
  guideAt = n;
  $("guide").hidden = n >= GUIDE.length;
  document.body.classList.toggle("guided", n > 0 && n < GUIDE.length);
  document.body.classList.toggle("no-band", n < 1);
  document.body.classList.toggle("no-truth", n < 3);
  if (n >= GUIDE.length) return;
  GUIDE[n].act?.();
  $("told").textContent = GUIDE[n].text();
  if (n && innerWidth < 960) $(GUIDE[n].at ?? "d").scrollIntoView();
  if (n === 3) document.querySelector("[aria-current]").scrollIntoView({block: "center"});
  $("next").textContent = n + 1 < GUIDE.length ? `${n + 1} of ${GUIDE.length - 1}: ${GUIDE[n].press}` : GUIDE[n].press;
}
