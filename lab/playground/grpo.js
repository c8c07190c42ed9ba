// GRPO as grpo.py has it: responses to a puzzle, advantages, credit, the gradient of the loss, and AdamW.
"use strict";

/** A generator of numbers in [0, 1) from a seed: xorshift128+, 53 bits. */
function generator(seed) {
  let a = BigInt.asUintN(64, BigInt(seed) * 0x9e3779b97f4a7c15n + 1n), b = a ^ 0xbf58476d1ce4e5b9n;
  const next = () => {
    let s = a;
    a = b;
    s = BigInt.asUintN(64, s ^ (s << 23n));
    b = s ^ b ^ (s >> 17n) ^ (b >> 26n);
    return Number(BigInt.asUintN(64, a + b) >> 11n) / 2 ** 53;
  };
  for (let i = 0; i < 20; i++) next();
  return next;
}

/** Token, probability, entropy and logit gradient of each row of log-probs (N, V), by inverse-CDF sampling.
 *  excluded: a token that must not be drawn, or null. */
function draw(logProbs, N, V, uniform, excluded) {
  const found = [], p = new Float64Array(V);
  for (let n = 0; n < N; n++) {
    let total = 0, entropy = 0, square = 0;
    for (let v = 0; v < V; v++) {
      const log = logProbs[n * V + v];
      p[v] = Math.exp(log);
      entropy -= p[v] * log;
      square += p[v] * p[v];
      total += v === excluded ? 0 : p[v];
    }
    const least = uniform() * total;
    let token = -1, sum = 0;
    while (token < V - 1 && sum <= least) {
      token++;
      if (token !== excluded) sum += p[token];
    }
    const own = p[token], others = 1 - own;
    found.push({token, p: own, logprob: logProbs[n * V + token], entropy,
                logitGrad: Math.sqrt(Math.max(0, others * others + square - own * own))});
  }
  return found;
}

/** Continues each of some texts (tokens) `count` times, up to `limit` new tokens each: the rows, those of a text
 *  together. excludedFirst: a token that may not be the first. grown(rows) is called after each token. */
function sample(model, texts, count, {limit, ends, uniform, excludedFirst = null, grown = () => {}}) {
  const rows = [], hiddenOf = [];
  for (const text of texts) {
    const pass = model.read(text), last = pass.hidden.subarray((pass.S - 1) * model.D);
    for (let i = 0; i < count; i++) {
      rows.push({tokens: [], facts: [], cache: model.cacheOf(pass, limit)});
      hiddenOf.push(last);
    }
  }
  let running = rows, hidden = new Float32Array(rows.length * model.D);
  hiddenOf.forEach((last, i) => hidden.set(last, i * model.D));
  for (let t = 0; t < limit && running.length; t++) {
    const excluded = t ? null : excludedFirst;
    const drawn = draw(model.logProbs(hidden, running.length), running.length, model.V, uniform, excluded);
    running.forEach((row, i) => {
      row.tokens.push(drawn[i].token);
      row.facts.push(drawn[i]);
    });
    grown(rows);
    running = running.filter(row => !ends.includes(row.tokens.at(-1)));
    const last = running.map(row => row.tokens.at(-1));
    if (running.length && t < limit - 1) hidden = model.step(last, running.map(row => row.cache));
  }
  for (const row of rows) delete row.cache;
  return rows;
}

/** The advantage of each reward of a group: `grpo` divides by the standard deviation, `rloo` takes the others' mean. */
function advantages(rewards, kind) {
  const G = rewards.length, mean = rewards.reduce((a, b) => a + b) / G;
  if (Math.max(...rewards) === Math.min(...rewards)) return rewards.map(() => 0);
  if (kind === "rloo") return rewards.map(r => (r - mean) * G / (G - 1));
  const std = Math.sqrt(rewards.reduce((sum, r) => sum + (r - mean) ** 2, 0) / G);
  return rewards.map(r => (r - mean) / (std + 1e-4));
}

/** Weights scaled to mean 1; where all are 0 they become 1, which is plain GRPO. */
function unitMean(weights) {
  const mean = weights.reduce((a, b) => a + b, 0) / weights.length;
  return weights.map(w => mean > 0 ? w / mean : 1);
}

// Weights of a response's tokens, each {entropy, role, inAnswer}, by a rule with its one parameter; before unitMean.
const RULES = {
  none: tokens => tokens.map(() => 1),
  outcome_conditional(tokens, thinkDiscount) {
    const answered = tokens.some(t => t.inAnswer);
    return tokens.map(t => answered && !t.inAnswer ? thinkDiscount : 1);
  },
  entropy_ratio: tokens => tokens.map(t => t.entropy),
  token_type: (tokens, filler) => tokens.map(t => t.role === 0 ? filler : 1),
};

/** Adds the gradient of GRPO's loss for responses {prompt, tokens, credit}; returns the loss, -mean of credit log p. */
function addGradient(model, responses) {
  const total = responses.reduce((sum, r) => sum + r.tokens.length, 0), {V} = model;
  let loss = 0;
  for (const {prompt, tokens, credit} of responses) {
    if (!credit.some(c => c)) continue;
    const pass = model.read([...prompt, ...tokens.slice(0, -1)]), R = tokens.length, from = prompt.length - 1;
    const logProbs = model.logProbs(pass.hidden.subarray(from * model.D), R), dlogits = new Float32Array(R * V);
    for (let r = 0; r < R; r++) {
      const share = credit[r] / total;
      for (let v = r * V; v < r * V + V; v++) dlogits[v] = share * Math.exp(logProbs[v]);
      dlogits[r * V + tokens[r]] -= share;
      loss -= credit[r] / total;  // the ratio pi / pi_old is 1, and its gradient is that of log pi
    }
    model.backward(pass, dlogits, from, R);
  }
  return loss;
}

/** AdamW without weight decay, after the gradient's norm was clipped. */
class Adam {
  constructor(model, lr = 2e-4, beta1 = 0.9, beta2 = 0.999) {
    const size = model.weights.length;
    Object.assign(this, {model, lr, beta1, beta2, steps: 0});
    [this.mean, this.square] = [new Float32Array(size), new Float32Array(size)];
  }

  /** Takes a step with the model's gradient and clears it; returns the norm before clipping. */
  step(maxNorm = 1) {
    const {weights, gradient} = this.model, {mean, square, beta1, beta2} = this;
    let sum = 0;
    for (let i = 0; i < gradient.length; i++) sum += gradient[i] ** 2;
    const norm = Math.sqrt(sum), scale = Math.min(1, maxNorm / (norm + 1e-6));
    this.steps++;
    const rate = this.lr / (1 - beta1 ** this.steps), correction = Math.sqrt(1 - beta2 ** this.steps);
    for (let i = 0; i < gradient.length; i++) {
      const g = gradient[i] * scale;
      mean[i] += (1 - beta1) * (g - mean[i]);
      square[i] += (1 - beta2) * (g * g - square[i]);
      weights[i] -= rate * mean[i] / (Math.sqrt(square[i]) / correction + 1e-8);
    }
    gradient.fill(0);
    return norm;
  }
}
