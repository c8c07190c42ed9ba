// How close a credit is to A*, and A* of one token by continuations: see lab/truth/README.md.
"use strict";

const RESAMPLES = 2000, AT_ONCE = 16;
const PARTS = {choices: [0, 1], results: [2], words: [4, 5, 8], tags: [6]};  // lab/truth/solver.py

/** Ranks of values as shares of their number, from 1 on; equal values share their mean rank. */
function ranks(values) {
  const order = values.map((_, i) => i).sort((a, b) => values[a] - values[b]), found = new Array(values.length);
  for (let i = 0, j = 0; i < order.length; i = j) {
    while (j < order.length && values[order[j]] === values[order[i]]) j++;
    for (let k = i; k < j; k++) found[order[k]] = (i + j + 1) / 2 / values.length;
  }
  return found;
}

/** Ranks minus their mean; 0 where all values are the same. */
function centredRanks(values) {
  const least = Math.min(...values), most = Math.max(...values), mean = (1 + 1 / values.length) / 2;
  if (!(most - least > 1e-6 * Math.max(-least, most))) return values.map(() => 0);
  return ranks(values).map(rank => rank - mean);
}

/** Pearson's r from the sums of 1, x, y, x^2, y^2 and xy; NaN where x or y does not vary. */
function correlation([n, x, y, xx, yy, xy]) {
  const squared = (n * xx - x * x) * (n * yy - y * y);
  return squared > 1e-9 * n * n * xx * yy ? (n * xy - x * y) / Math.sqrt(squared) : NaN;
}

/** [low, high], the 95% interval of the correlation over resampled puzzles, from the sums of each. */
function interval(sums) {
  const uniform = generator(0), found = [];
  for (let r = 0; r < RESAMPLES; r++) {
    const total = new Float64Array(6);
    for (let q = 0; q < sums.length; q++) {
      const drawn = sums[Math.floor(uniform() * sums.length)];
      for (let i = 0; i < 6; i++) total[i] += drawn[i];
    }
    const value = correlation(total);
    if (Number.isFinite(value)) found.push(value);
  }
  found.sort((a, b) => a - b);
  return [0.025, 0.975].map(share => found[Math.round(share * (found.length - 1))]);
}

/** The score of a credit (a list over tokens for each row) on recorded rows. {value, low, high}: its rank correlation
 *  with A* within responses, over tokens that had rollouts. lies: its mean size in a part over that in all tokens. */
function scoreCredit(rows, credits) {
  const sums = [], sizes = new Float64Array(9), counts = new Float64Array(9);
  rows.forEach((row, r) => {
    const tried = row.tokens.map((_, t) => t).filter(t => row.tokens[t].tried);
    const x = centredRanks(tried.map(t => credits[r][t])), y = centredRanks(tried.map(t => row.tokens[t].aStar));
    const total = sums[row.puzzle] ??= new Float64Array(6);
    x.forEach((a, i) => [1, a, y[i], a * a, y[i] * y[i], a * y[i]].forEach((term, s) => { total[s] += term; }));
    row.tokens.forEach(({kind}, t) => {
      sizes[kind] += Math.abs(credits[r][t]);
      counts[kind]++;
    });
  });
  const sum = (array, kinds) => kinds.reduce((all, kind) => all + array[kind], 0), all = [...sizes.keys()];
  const mean = sum(sizes, all) / sum(counts, all);
  const share = kinds => sum(sizes, kinds) / sum(counts, kinds) / mean;
  const value = correlation(sums.reduce((a, b) => a.map((term, i) => term + b[i])));
  const [low, high] = Number.isFinite(value) ? interval(sums) : [NaN, NaN];
  const lies = Object.entries(PARTS).map(([name, kinds]) => [name, share(kinds)]);
  return {value, low, high, lies};
}

/** Estimates A* of a token by continuations, AT_ONCE with it and as many with any other in its place in each `add`. */
class LiveTruth {
  /** tokens: those before it; p, token: its probability and itself; outcome: 0 or 1 where it is the last, else null;
   *  solved(kept, excluded): how many of AT_ONCE continuations of `kept` succeed. */
  constructor({tokens, p, token, outcome, solved}) {
    Object.assign(this, {tokens, p, token, outcome, solved, kept: 0, changed: 0, n: 0});
  }

  add() {
    this.kept += this.outcome === null ? this.solved([...this.tokens, this.token], null) : AT_ONCE * this.outcome;
    this.changed += this.solved(this.tokens, this.token);
    this.n += AT_ONCE;
  }

  /** {value, error, before, after, n}: A*, its standard error, and the probability of success before and after. */
  estimate() {
    const {n, p} = this, kept = this.kept / n, changed = this.changed / n;
    const variance = successes => {  // with a success and a failure more, so that 0 of n is not certain
      const share = (successes + 1) / (n + 2);
      return share * (1 - share) / n;
    };
    const error = (1 - p) * Math.sqrt((this.outcome === null ? variance(this.kept) : 0) + variance(this.changed));
    return {value: (1 - p) * (kept - changed), error, before: p * kept + (1 - p) * changed, after: kept, n};
  }
}
