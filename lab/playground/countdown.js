// Countdown as countdown_task.py has it: puzzles, prompts as tokens, the text of a response, its grade, its roles.
"use strict";

const FILLER = 0, REASONING = 1, STRUCTURE = 2;
const TAGS = ["<think>", "</think>", "<answer>", "</answer>"];

/** The tokens of a puzzle's prompt. packed: pieces of it, and a token for each number with and without a space. */
function promptTokens(packed, numbers, target) {
  const spaced = n => packed.numbers[` ${n}`], first = packed.numbers[numbers[0]];
  const rest = numbers.slice(1).flatMap(n => [...packed.comma, spaced(n)]);
  return [...packed.before, first, ...rest, ...packed.between, spaced(target), ...packed.after];
}

/** A puzzle as typed; throws an Error, in one sentence, where it is none that the model knows. */
function readPuzzle(numbersText, targetText) {
  const numbers = numbersText.split(/[\s,;[\]]+/).filter(part => part).map(Number), target = Number(targetText);
  const inside = (n, most) => Number.isInteger(n) && n >= 1 && n <= most;
  const {length} = numbers;
  if (length < 2 || length > 4) throw new Error(`a puzzle has 2 to 4 numbers; this one has ${length}`);
  if (!numbers.every(n => inside(n, 20)) || !inside(target, 100)) {
    throw new Error("the numbers are whole ones from 1 to 20, the target one from 1 to 100");
  }
  return {numbers, target};
}

/** The text of tokens, and where each of them starts and stops in it. */
function decode(pieces, tokens) {
  let text = "";
  const spans = tokens.map(token => {
    const start = text.length;
    text += pieces[token];
    return [start, text.length];
  });
  return {text, spans};
}

// ---------------------------------------------------------------------------------------------------------- the grade

/** {reward, format, answer} of a response, which begins inside <think>. */
function grade(response, numbers, target) {
  const format = formatReward(response), answer = isCorrect(gradedAnswer(response), numbers, target) ? 1 : 0;
  return {reward: 0.1 * format + answer, format, answer};
}

const count = (text, part) => text.split(part).length - 1;

/** How much of the layout a response has: see format_reward of tasks/text.py. */
function formatReward(response) {
  if (count(response, "<answer>") > 1) return 0;
  const match = /^([^]*)<\/think>\n<answer>([^]*)<\/answer>$/.exec(response);
  if (match && !TAGS.some(tag => match[1].includes(tag) || match[2].includes(tag))) return 1;
  const opened = response.indexOf("<answer>");
  const closed = opened >= 0 && response.slice(opened + 8).includes("</answer>");
  return 0.1 * response.includes("</think>") + 0.5 * closed;
}

/** The text of the last <answer>; empty if there is none or it is not closed. */
function gradedAnswer(response) {
  const opened = response.lastIndexOf("<answer>");
  if (opened < 0) return "";
  const rest = response.slice(opened + 8), closed = rest.indexOf("</answer>");
  return closed < 0 ? "" : rest.slice(0, closed);
}

/** Whether an expression uses every number exactly once and equals the target. */
function isCorrect(text, numbers, target) {
  const value = text.length <= 256 ? expressionValue(text.replace(/\s+/g, " ").replace(/^ |[ .]+$/g, "")) : null;
  if (!value || value[0] !== BigInt(target) * value[1]) return false;
  const written = (text.match(/[0-9]+/g) || []).map(Number).sort((a, b) => a - b);
  const given = [...numbers].sort((a, b) => a - b);
  return written.length === given.length && written.every((n, i) => n === given[i]);
}

/** The exact value of an expression as [numerator, denominator > 0]; null for any text that is not one. */
function expressionValue(text) {
  if (text.length > 256 || !/^[0-9+\-*/() ]+$/.test(text) || /(^|[^0-9])0[0-9]/.test(text)) return null;
  let depth = 0;
  for (const c of text) {
    depth += (c === "(") - (c === ")");
    if (depth > 32) return null;
  }
  const parts = text.match(/[0-9]+|[^ ]/g) || [];
  let at = 0;
  const sum = () => {
    let value = product();
    while (value && (parts[at] === "+" || parts[at] === "-")) value = combine(value, parts[at++], product());
    return value;
  };
  const product = () => {
    let value = atom();
    while (value && (parts[at] === "*" || parts[at] === "/")) value = combine(value, parts[at++], atom());
    return value;
  };
  const atom = () => {
    const part = parts[at++];
    if (part === "+" || part === "-") return combine([0n, 1n], part, atom());
    if (part === "(") {
      const value = sum();
      return parts[at++] === ")" ? value : null;
    }
    return part !== undefined && /^[0-9]+$/.test(part) ? [BigInt(part), 1n] : null;
  };
  const value = sum();
  return at === parts.length ? value : null;
}

/** a operator b of two fractions; null where b is, or where it divides by 0. */
function combine([a, b], operator, other) {
  if (!other) return null;
  const [c, d] = other;
  if (operator === "+") return [a * d + c * b, b * d];
  if (operator === "-") return [a * d - c * b, b * d];
  if (operator === "*") return [a * c, b * d];
  if (c === 0n) return null;
  return c < 0n ? [-a * d, -b * c] : [a * d, b * c];
}

// ---------------------------------------------------------------------------------------------------- what a token is

/** The role of each token, and whether it is in the answer: see roles of tasks/text.py. */
function roles(text, spans) {
  const found = [...text].map(c => "0123456789+-*/=()".includes(c) ? REASONING : FILLER).concat(STRUCTURE);
  for (const tag of TAGS) {
    for (let i = text.indexOf(tag); i >= 0; i = text.indexOf(tag, i + 1)) found.fill(STRUCTURE, i, i + tag.length);
  }
  const answer = text.lastIndexOf("<answer>");
  const deciding = spans.map(([start, stop]) => {
    for (let i = start; i < stop; i++) if (!/\s/.test(text[i])) return i;
    return start;
  });
  return deciding.map(i => ({role: found[i], inAnswer: answer >= 0 && i >= answer}));
}
