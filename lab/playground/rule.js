// A rule for weights as one line, such as `H * (p < 0.9)` or `max(1 - p, 0.1)`: a language of its own, never eval'd.
//
// Names: p probability of the token, H entropy before it (nats), A the response's advantage, L its length, position
// from 0, role (0 filler, 1 reasoning, 2 structure), and filler, reasoning, structure: 1 where it is that, else 0.
// Operators + - * / ^, < <= > >= ==, parentheses, and FUNCTIONS.
"use strict";

const FUNCTIONS = {abs: Math.abs, exp: Math.exp, log: Math.log, sqrt: Math.sqrt, min: Math.min, max: Math.max,
                   if: (condition, yes, no) => condition ? yes : no};
const ARGUMENTS = {abs: 1, exp: 1, log: 1, sqrt: 1, min: 2, max: 2, if: 3};
const NAMES = ["p", "H", "A", "L", "position", "role", "filler", "reasoning", "structure"];
const LEVELS = [{"<": (a, b) => +(a < b), "<=": (a, b) => +(a <= b), ">": (a, b) => +(a > b),
                 ">=": (a, b) => +(a >= b), "==": (a, b) => +(a === b)},
                {"+": (a, b) => a + b, "-": (a, b) => a - b}, {"*": (a, b) => a * b, "/": (a, b) => a / b}];
const LONGEST = 200, DEEPEST = 30;

/** Reads a line from left to right, a method for each kind of part; they return functions of {p, H, A, ...}. */
class Reader {
  constructor(line) {
    if (line.length > LONGEST) throw new Error(`a rule has at most ${LONGEST} characters; this one has ${line.length}`);
    this.parts = line.match(/[0-9]*\.?[0-9]+(?:e-?[0-9]+)?|[A-Za-z]+|<=|>=|==|[^\s]/gu) || [];
    [this.at, this.depth] = [0, 0];
  }

  next() {
    return this.parts[this.at];
  }

  expect(part) {
    if (this.parts[this.at++] !== part) throw new Error(`a ${part} is missing`);
  }

  /** A comparison, sum or product: the operators of LEVELS[i], which bind less than those after them. */
  level(i) {
    if (i === LEVELS.length) return this.unary();
    let left = this.level(i + 1);
    while (Object.hasOwn(LEVELS[i], this.next() ?? "")) {
      const operate = LEVELS[i][this.parts[this.at++]], first = left, second = this.level(i + 1);
      left = facts => operate(first(facts), second(facts));
    }
    return left;
  }

  unary() {
    if (++this.depth > DEEPEST) throw new Error(`parentheses and signs nest at most ${DEEPEST} deep`);
    const negative = this.next() === "-";
    if (negative) this.at++;
    const value = negative ? this.unary() : this.power();
    this.depth--;
    return negative ? facts => -value(facts) : value;
  }

  power() {
    const base = this.atom();
    if (this.next() !== "^") return base;
    this.at++;
    const exponent = this.unary();
    return facts => base(facts) ** exponent(facts);
  }

  atom() {
    const part = this.parts[this.at++];
    if (part === undefined) throw new Error("the rule ends too early");
    if (part === "(") {
      const value = this.level(0);
      this.expect(")");
      return value;
    }
    if (/^[0-9.]/.test(part) && Number.isFinite(Number(part))) return () => Number(part);
    if (Object.hasOwn(FUNCTIONS, part)) return this.call(part);
    if (NAMES.includes(part)) return facts => facts[part];
    const known = `names are ${NAMES.join(", ")}, functions ${Object.keys(FUNCTIONS).join(", ")}`;
    throw new Error(`${part} is not known; ${known}`);
  }

  call(name) {
    const given = [];
    this.expect("(");
    while (given.length < ARGUMENTS[name]) {
      if (given.length) this.expect(",");
      given.push(this.level(0));
    }
    this.expect(")");
    return facts => FUNCTIONS[name](...given.map(value => value(facts)));
  }
}

/** A function of {p, H, A, ...} that computes a line; throws an Error, in one sentence, for a line that is not one. */
function parseRule(line) {
  const reader = new Reader(line), rule = reader.level(0);
  if (reader.next() !== undefined) throw new Error(`${reader.next()} is not expected here`);
  return rule;
}

/** The weights of a response's tokens by a rule; throws an Error where one is negative or not a number. */
function ruleWeights(rule, tokens, advantage) {
  return tokens.map((t, position) => {
    const weight = rule({p: t.p, H: t.entropy, A: advantage, L: tokens.length, position, role: t.role,
                         filler: +(t.role === 0), reasoning: +(t.role === 1), structure: +(t.role === 2)});
    if (!(weight >= 0 && weight < 1e30)) throw new Error(`the weight of token ${position} is ${weight}, not 0 or more`);
    return weight;
  });
}
