// What runs beside the page, so that nothing there waits: the model, its responses, and training.
//
// The page sends {do: name of an action, method: {advantage, rule, amount, line}, ...}; answers are posted as
// {of: what, ...}. Long work is done in parts, and looks for messages in between.
"use strict";

const GROUPS = 4, LIMIT = 140, TEST_EVERY = 10, TESTED = 8, ROUNDS = 32;

/** Lets messages in. */
const pause = () => new Promise(go => setTimeout(go, 0));

/** The bytes of base64 text as a typed array. */
function unpack(text, Type) {
  return new Type(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);
}

/** bfloat16 numbers as float32. */
function unpackWeights(text) {
  return new Float32Array(Uint32Array.from(unpack(text, Uint16Array), half => half << 16).buffer);
}

class Playground {
  /** data: what pack.py packed; post: takes each answer. */
  constructor(data, post) {
    Object.assign(this, {data, post, start: unpackWeights(data.weights), job: 0, rows: []});
    this.model = new Model(data.config, this.start.slice());
    this.recorded = this.unpackTruth(data.truth);
    this.reset({seed: 0});
  }

  /** The recorded responses as rows, with A* of each token. */
  unpackTruth({columns, recorded, lengths, answers, puzzles}) {
    const found = Object.fromEntries(Object.entries(columns).map(([name, text]) => [name, unpack(text, Float32Array)]));
    const credits = Object.entries(recorded).map(([name, text]) => [name, unpack(text, Float32Array)]);
    let offset = 0;
    return lengths.map((length, r) => {
      const at = Array.from({length}, (_, t) => offset + t);
      offset += length;
      const puzzle = Math.floor(r / answers), facts = at.map(i => ({
        ...Object.fromEntries(Object.entries(found).map(([name, column]) => [name, column[i]])),
        p: Math.exp(found.logprob[i])}));
      const row = this.makeRow(puzzles[puzzle], facts);
      const own = Object.fromEntries(credits.map(([name, all]) => [name, at.map(i => all[i])]));
      return {...row, puzzle, recorded: own};
    });
  }

  /** A response with text, grade, and what each of its tokens is; facts: {token, p, entropy, ...} of each. */
  makeRow({numbers, target}, facts) {
    const {text, spans} = decode(this.data.pieces, facts.map(fact => fact.token)), told = roles(text, spans);
    const tokens = facts.map((fact, t) => ({...fact, ...told[t], text: text.slice(...spans[t])}));
    return {prompt: promptTokens(this.data.prompt, numbers, target), text, tokens, grade: grade(text, numbers, target)};
  }

  // ---------------------------------------------------------------------------------------------------- GRPO

  /** New responses to a puzzle; grown(rows) is called after each token. */
  sampleGroup(puzzle, uniform, grown) {
    const prompt = promptTokens(this.data.prompt, puzzle.numbers, puzzle.target);
    return sample(this.model, [prompt], this.data.truth.answers, {limit: LIMIT, ends: this.data.ends, uniform, grown})
      .map(row => this.makeRow(puzzle, row.facts));
  }

  /** The credit of rows, those to a puzzle together, which also get their advantage: a list for each row. */
  creditOf(rows, {advantage, rule, amount, line}) {
    const {answers} = this.data.truth;
    for (let first = 0; first < rows.length; first += answers) {
      const group = rows.slice(first, first + answers);
      advantages(group.map(row => row.grade.reward), advantage).forEach((a, i) => { group[i].advantage = a; });
    }
    if (rows.some(row => row.recorded?.[rule])) return rows.map(row => row.recorded[rule]);
    if (rule !== "own" && !RULES[rule]) throw new Error(`${rule} is recorded, for the listed puzzles only`);
    const own = rule === "own" && parseRule(line);
    return rows.map(({tokens, advantage: a}) =>
      unitMean(own ? ruleWeights(own, tokens, a) : RULES[rule](tokens, amount)).map(weight => weight * a));
  }

  /** One AdamW step on rows with their credit; returns the norm of the gradient. */
  takeStep(rows, credits) {
    addGradient(this.model, rows.map(({prompt, tokens}, i) =>
      ({prompt, tokens: tokens.map(t => t.token), credit: credits[i]})));
    this.steps++;
    return this.adam.step();
  }

  /** How many of TESTED puzzles from `first` on a response each solves, always with the same random numbers. */
  solved(first, model = this.model, puzzles = this.data.heldout) {
    const asked = puzzles.slice(first, first + TESTED);
    const prompts = asked.map(({numbers, target}) => promptTokens(this.data.prompt, numbers, target));
    const rows = sample(model, prompts, 1, {limit: LIMIT, ends: this.data.ends, uniform: generator(1 + first)});
    return rows.filter((row, i) => this.solves(asked[i], row.tokens)).length;
  }

  /** The share of held-out puzzles that a response each solves. */
  success(puzzles = this.data.heldout) {
    let solved = 0;
    for (let first = 0; first < puzzles.length; first += TESTED) solved += this.solved(first, this.model, puzzles);
    return solved / puzzles.length;
  }

  solves({numbers, target}, tokens) {
    return grade(decode(this.data.pieces, tokens).text, numbers, target).answer;
  }

  /** One step of training, on GROUPS puzzles that follow those of the step before. */
  trainStep(method) {
    const {training} = this.data, uniform = generator(1000003 * (this.seed + 1) + this.steps);
    const first = (64 * this.seed + this.steps) * GROUPS;
    const asked = Array.from({length: GROUPS}, (_, i) => training[(first + i) % training.length]);
    const rows = asked.flatMap(puzzle => this.sampleGroup(puzzle, uniform));
    const norm = this.takeStep(rows, this.creditOf(rows, method));
    const success = rows.filter(row => row.grade.answer).length / rows.length;
    const heldOut = this.steps % TEST_EVERY ? null : this.success();
    this.post({of: "step", steps: this.steps, norm, success, heldOut});
  }

  // ------------------------------------------------------------------------------------------------- actions

  /** Does part() again and again, and looks for messages in between, until it returns false or another job begins. */
  async keepOn(part) {
    const job = ++this.job;
    while (job === this.job && part()) await pause();
  }

  /** Posts the rows on display, if there are some, with their credit. */
  show(method, more = {}) {
    if (!this.rows.length) return;
    const credits = this.creditOf(this.rows, method);
    const rows = this.rows.map(({tokens, grade, advantage}, i) => ({tokens, grade, advantage, credit: credits[i]}));
    this.post({of: "responses", rows, steps: this.steps, ...more});
  }

  reset({seed}) {
    this.model.weights.set(this.start);
    this.model.gradient.fill(0);
    Object.assign(this, {adam: new Adam(this.model), seed, steps: 0, sampled: 0, job: this.job + 1});
  }

  /** Solves the held-out puzzles with the model as it was at the start, some at a time. */
  async test() {
    const {heldout, config} = this.data, model = new Model(config, this.start);
    let solved = 0;
    for (let first = 0; first < heldout.length; first += TESTED) {
      solved += this.solved(first, model);
      await pause();
    }
    this.post({of: "tested", heldOut: solved / heldout.length});
  }

  /** Shows the recorded responses to one of the bundled puzzles. */
  choose({index, method}) {
    const all = this.recorded.filter(row => row.puzzle === index);
    const pair = [1, 0].map(answer => all.find(row => row.grade.answer === answer)).filter(row => row);
    const rows = [...pair, ...all.filter(row => !pair.includes(row))];  // a right and a wrong one first
    Object.assign(this, {puzzle: this.data.truth.puzzles[index], rows, madeAt: 0});
    this.show(method, {fresh: true});
  }

  sample({numbers, target, method}) {
    this.puzzle = readPuzzle(numbers, target);
    const grown = rows => this.post({of: "growing", texts: rows.map(row => this.data.pieces[row.tokens.at(-1)]),
                                     lengths: rows.map(row => row.tokens.length)});
    const uniform = generator(7919 * (this.seed + 1) + this.sampled++);
    [this.rows, this.madeAt] = [this.sampleGroup(this.puzzle, uniform, grown), this.steps];
    this.show(method);
  }

  credit({method}) {
    this.show(method);
  }

  /** Scores the chosen credit and that of other rules, by name, on all recorded responses; "A*" is the truth itself. */
  score({method, others}) {
    const credits = rule => rule === "A*" ? this.recorded.map(row => row.tokens.map(t => t.aStar))
      : this.creditOf(this.recorded, {...method, rule});
    const scores = [...others, method.rule].map(rule => [rule, scoreCredit(this.recorded, credits(rule))]);
    this.post({of: "scores", scores});
  }

  /** One step on the rows on display; then the probability of each of their tokens is read again. */
  update({method}) {
    if (this.madeAt !== this.steps) throw new Error("the model has changed since these responses: sample new ones");
    const norm = this.takeStep(this.rows, this.creditOf(this.rows, method));
    for (const {prompt, tokens} of this.rows) {
      const pass = this.model.read([...prompt, ...tokens.slice(0, -1).map(t => t.token)]), {D, V} = this.model;
      const logs = this.model.logProbs(pass.hidden.subarray((prompt.length - 1) * D), tokens.length);
      tokens.forEach((t, i) => { t.after = Math.exp(logs[i * V + t.token]); });
    }
    this.show(method, {norm});
  }

  /** Trains until stopped, or until so many steps were taken. */
  train({method, until}) {
    this.creditOf([], method);
    return this.keepOn(() => {
      this.trainStep(method);
      if (this.steps === until) this.post({of: "arrived"});
      return this.steps !== until;
    });
  }

  stop() {
    this.job++;
  }

  /** Log-probs (V) of what may follow the first t tokens of row i. */
  following(i, t) {
    const {prompt, tokens} = this.rows[i], pass = this.model.read([...prompt, ...tokens.slice(0, t).map(x => x.token)]);
    return this.model.logProbs(pass.hidden.subarray((pass.S - 1) * this.model.D), 1);
  }

  alternatives({i, t}) {
    const logs = this.following(i, t), best = [...logs.keys()].sort((a, b) => logs[b] - logs[a]).slice(0, 5);
    this.post({of: "alternatives", i, t, best: best.map(v => ({text: this.data.pieces[v], p: Math.exp(logs[v])}))});
  }

  /** The estimate of A* of token t of row i, which grows with each `add`. */
  liveTruth(i, t, uniform) {
    const {puzzle, model, data: {ends}} = this, {prompt, tokens, grade} = this.rows[i], {token} = tokens[t];
    const solved = (kept, excludedFirst) => {
      const options = {limit: LIMIT - kept.length, ends, uniform, excludedFirst};
      const found = sample(model, [[...prompt, ...kept]], AT_ONCE, options);
      return found.filter(row => this.solves(puzzle, [...kept, ...row.tokens])).length;
    };
    return new LiveTruth({tokens: tokens.slice(0, t).map(x => x.token), token, p: Math.exp(this.following(i, t)[token]),
                          outcome: t === tokens.length - 1 ? grade.answer : null, solved});
  }

  measure({i, t}) {
    const live = this.liveTruth(i, t, generator(104729 + this.sampled)), rows = this.rows;
    let rounds = 0;
    return this.keepOn(() => {
      live.add();
      if (rows === this.rows) this.post({of: "truth", i, t, ...live.estimate()});
      return ++rounds < ROUNDS && rows === this.rows;
    });
  }
}

if (typeof importScripts !== "undefined") {
  let playground;
  onmessage = async ({data: message}) => {
    try {
      playground ??= new Playground(JSON.parse(message.data), answer => postMessage(answer));
      await playground[message.do](message);
    } catch (error) {
      postMessage({of: "error", text: error.message, from: message.do});
    }
  };
}
