// The transformer of qwen2_model.py in plain JavaScript: forward, backward, and one token at a time for sampling.
//
// A Qwen2 is a list of layers. Each reads a normalized copy of the residual stream x, and adds what attention and then
// an MLP make of it. All weights lie in one Float32Array, `weights`, and all gradients in another, `gradient`, so that
// AdamW is one loop. Matrices are stored by rows, as PyTorch stores them: a weight (out, in), activations (N, in).
//
// Alphabet: S tokens of a sequence, N rows, D hidden size, F width of the MLP, H heads that share one pair of key and
// value (as in the bundled models, or K of them), d head size, V vocabulary.
"use strict";

// ------------------------------------------------------------------------------------------------- matrix products
// Four rows and four outputs at a time: each number that is read takes part in four products.

/** y (N, O) = x (N, I) W' + b, with W (O, I) and b (O) or null. */
function linear(x, W, b, y, N, I, O) {
  for (let n = 0; n < N; n += 4) {
    const rows = Math.min(4, N - n), x0 = n * I;
    const x1 = rows > 1 ? x0 + I : x0, x2 = rows > 2 ? x0 + 2 * I : x0, x3 = rows > 3 ? x0 + 3 * I : x0;
    for (let o = 0; o < O; o++) {
      let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
      for (let i = 0, w = o * I; i < I; i++, w++) {
        const m = W[w];
        s0 += x[x0 + i] * m; s1 += x[x1 + i] * m; s2 += x[x2 + i] * m; s3 += x[x3 + i] * m;
      }
      const bias = b ? b[o] : 0, out = n * O + o;
      y[out] = s0 + bias;
      if (rows > 1) y[out + O] = s1 + bias;
      if (rows > 2) y[out + 2 * O] = s2 + bias;
      if (rows > 3) y[out + 3 * O] = s3 + bias;
    }
  }
}

/** Adds to dx (N, I) dy W, to dW (O, I) dy' x, and to db (O) the sums of dy (N, O). dx, dW and db may be null. */
function linearBackward(x, W, dy, dx, dW, db, N, I, O) {
  for (let n = 0; n < N; n += 4) {
    const rows = Math.min(4, N - n), x0 = n * I;
    const x1 = rows > 1 ? x0 + I : x0, x2 = rows > 2 ? x0 + 2 * I : x0, x3 = rows > 3 ? x0 + 3 * I : x0;
    for (let o = 0; o < O; o++) {
      const at = n * O + o, d0 = dy[at];
      const d1 = rows > 1 ? dy[at + O] : 0, d2 = rows > 2 ? dy[at + 2 * O] : 0, d3 = rows > 3 ? dy[at + 3 * O] : 0;
      if (db) db[o] += d0 + d1 + d2 + d3;
      if (dW) {
        for (let i = 0, w = o * I; i < I; i++, w++) {
          dW[w] += d0 * x[x0 + i] + d1 * x[x1 + i] + d2 * x[x2 + i] + d3 * x[x3 + i];
        }
      }
      if (dx) {
        for (let i = 0, w = o * I; i < I; i++, w++) {
          const m = W[w];
          dx[x0 + i] += d0 * m;
          if (rows > 1) dx[x1 + i] += d1 * m;
          if (rows > 2) dx[x2 + i] += d2 * m;
          if (rows > 3) dx[x3 + i] += d3 * m;
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------ small parts

/** y (N, D) = x / rms(x) * weight; returns 1 / rms of each row (N). */
function rmsNorm(x, weight, y, N, D, eps) {
  const inverse = new Float32Array(N);
  for (let n = 0; n < N; n++) {
    let square = 0;
    for (let i = 0; i < D; i++) square += x[n * D + i] ** 2;
    inverse[n] = 1 / Math.sqrt(square / D + eps);
    for (let i = 0; i < D; i++) y[n * D + i] = x[n * D + i] * inverse[n] * weight[i];
  }
  return inverse;
}

/** Adds to dx (N, D) and dweight (D) the gradients of rmsNorm, from dy (N, D). */
function rmsNormBackward(x, weight, inverse, dy, dx, dweight, N, D) {
  for (let n = 0; n < N; n++) {
    const r = inverse[n];
    let dot = 0;
    for (let i = 0, at = n * D; i < D; i++, at++) {
      dot += dy[at] * weight[i] * x[at];
      dweight[i] += dy[at] * x[at] * r;
    }
    for (let i = 0, at = n * D; i < D; i++, at++) dx[at] += r * (dy[at] * weight[i] - x[at] * dot * r * r / D);
  }
}

/** Turns each head's pairs (i, i + d / 2) in x (N, heads d) by the angles at positions 0, 1, ..., or at
 *  `positions` (N); the sign -1 turns back, which is the backward pass. */
function rotate(x, N, heads, d, angles, sign, positions) {
  const half = d / 2;
  for (let n = 0; n < N; n++) {
    const at = (positions ? positions[n] : n) * half;
    for (let h = 0; h < heads; h++) {
      for (let i = 0, a = (n * heads + h) * d; i < half; i++, a++) {
        const cos = angles.cos[at + i], sin = sign * angles.sin[at + i], u = x[a], v = x[a + half];
        x[a] = u * cos - v * sin;
        x[a + half] = v * cos + u * sin;
      }
    }
  }
}

/** Replaces scores[from .. to) by their softmax. */
function softmax(scores, from, to) {
  let most = -Infinity, sum = 0;
  for (let i = from; i < to; i++) most = Math.max(most, scores[i]);
  for (let i = from; i < to; i++) sum += scores[i] = Math.exp(scores[i] - most);
  for (let i = from; i < to; i++) scores[i] /= sum;
}

// -------------------------------------------------------------------------------------------------------- the model

class Model {
  /** config: config.json of a Qwen2 with tied embeddings; weights: all tensors, one behind the other, in the order of
   *  `shapes`. */
  constructor(config, weights) {
    const H = config.num_attention_heads, D = config.hidden_size;
    Object.assign(this, {D, H, K: config.num_key_value_heads, F: config.intermediate_size, d: D / H,
                         V: config.vocab_size, L: config.num_hidden_layers, eps: config.rms_norm_eps});
    this.weights = weights;
    this.gradient = new Float32Array(weights.length);
    [this.w, this.g] = [this.weights, this.gradient].map(flat => {
      let offset = 0;
      return Object.fromEntries(this.shapes().map(([name, size]) => [name, flat.subarray(offset, offset += size)]));
    });
    this.angles = this.makeAngles(config.rope_theta, config.max_position_embeddings);
  }

  /** Names and sizes of all tensors, in the order in which they are stored. */
  shapes() {
    const {D, H, K, F, d, V} = this, found = [["embed", V * D]];
    for (let l = 0; l < this.L; l++) {
      for (const [name, size] of [["norm1", D], ["q", H * d * D], ["qb", H * d], ["k", K * d * D], ["kb", K * d],
                                  ["v", K * d * D], ["vb", K * d], ["o", D * H * d], ["norm2", D], ["gate", F * D],
                                  ["up", F * D], ["down", D * F]]) found.push([`${name}${l}`, size]);
    }
    return [...found, ["norm", D]];
  }

  /** cos and sin of RoPE's angles, d / 2 for each position. */
  makeAngles(theta, positions) {
    const half = this.d / 2, cos = new Float32Array(positions * half), sin = new Float32Array(positions * half);
    for (let p = 0; p < positions; p++) {
      for (let i = 0; i < half; i++) {
        const angle = Math.fround(p * Math.fround(theta ** (-2 * i / this.d)));  // in float32, as there
        cos[p * half + i] = Math.cos(angle);
        sin[p * half + i] = Math.sin(angle);
      }
    }
    return {cos, sin};
  }

  /** The embeddings (N, D) of tokens. */
  embed(tokens) {
    const {D} = this, x = new Float32Array(tokens.length * D);
    tokens.forEach((token, n) => x.set(this.w.embed.subarray(token * D, token * D + D), n * D));
    return x;
  }

  /** q (N, H d), k and v (N, K d) of normalized states (N, D), before rotation. */
  project(states, l, N) {
    const {D, H, K, d, w} = this;
    const q = new Float32Array(N * H * d), k = new Float32Array(N * K * d), v = new Float32Array(N * K * d);
    linear(states, w["q" + l], w["qb" + l], q, N, D, H * d);
    linear(states, w["k" + l], w["kb" + l], k, N, D, K * d);
    linear(states, w["v" + l], w["vb" + l], v, N, D, K * d);
    return [q, k, v];
  }

  /** Adds to x (N, D) what the MLP of layer l makes of it; returns what its backward pass needs. */
  mlp(x, l, N) {
    const {D, F, w} = this, kept = {input: x.slice(), states: new Float32Array(N * D), gate: new Float32Array(N * F),
                                    up: new Float32Array(N * F), product: new Float32Array(N * F)};
    kept.inverse = rmsNorm(x, w["norm2" + l], kept.states, N, D, this.eps);
    linear(kept.states, w["gate" + l], null, kept.gate, N, D, F);
    linear(kept.states, w["up" + l], null, kept.up, N, D, F);
    for (let i = 0; i < N * F; i++) kept.product[i] = kept.gate[i] / (1 + Math.exp(-kept.gate[i])) * kept.up[i];
    const out = new Float32Array(N * D);
    linear(kept.product, w["down" + l], null, out, N, F, D);
    for (let i = 0; i < N * D; i++) x[i] += out[i];
    return kept;
  }

  /** Reads a sequence of S tokens: {hidden (S, D), layers: what the backward pass needs, keys and values too}. */
  read(tokens) {
    const {D, H, K, d, w} = this, S = tokens.length, x = this.embed(tokens), layers = [];
    for (let l = 0; l < this.L; l++) {
      const kept = {input: x.slice(), states: new Float32Array(S * D), context: new Float32Array(S * H * d)};
      kept.inverse = rmsNorm(x, w["norm1" + l], kept.states, S, D, this.eps);
      [kept.q, kept.k, kept.v] = this.project(kept.states, l, S);
      rotate(kept.q, S, H, d, this.angles, 1);
      rotate(kept.k, S, K, d, this.angles, 1);
      kept.shares = this.attend(kept, S);
      const out = new Float32Array(S * D);
      linear(kept.context, w["o" + l], null, out, S, H * d, D);
      for (let i = 0; i < S * D; i++) x[i] += out[i];
      kept.mlp = this.mlp(x, l, S);
      layers.push(kept);
    }
    const hidden = new Float32Array(S * D), inverse = rmsNorm(x, w.norm, hidden, S, D, this.eps);
    return {tokens, S, layers, x, inverse, hidden};
  }

  /** Fills kept.context (S, H d) by causal attention; returns the attention (H, S, S). */
  attend(kept, S) {
    const {H, K, d} = this, shares = new Float32Array(H * S * S), scale = 1 / Math.sqrt(d);
    for (let h = 0; h < H; h++) {
      const group = Math.floor(h / (H / K));
      for (let s = 0; s < S; s++) {
        const row = (h * S + s) * S, q = (s * H + h) * d;
        for (let c = 0; c <= s; c++) {
          let dot = 0;
          for (let i = 0, k = (c * K + group) * d; i < d; i++, k++) dot += kept.q[q + i] * kept.k[k];
          shares[row + c] = dot * scale;
        }
        softmax(shares, row, row + s + 1);
        for (let c = 0; c <= s; c++) {
          const share = shares[row + c];
          for (let i = 0, v = (c * K + group) * d; i < d; i++, v++) kept.context[q + i] += share * kept.v[v];
        }
      }
    }
    return shares;
  }

  /** Log-probs (N, V) of the token that follows each of N hidden states. */
  logProbs(hidden, N) {
    const {D, V} = this, logits = new Float32Array(N * V);
    linear(hidden, this.w.embed, null, logits, N, D, V);
    for (let n = 0; n < N; n++) {
      let most = -Infinity, sum = 0;
      for (let i = n * V; i < n * V + V; i++) most = Math.max(most, logits[i]);
      for (let i = n * V; i < n * V + V; i++) sum += Math.exp(logits[i] - most);
      const total = most + Math.log(sum);
      for (let i = n * V; i < n * V + V; i++) logits[i] -= total;
    }
    return logits;
  }

  /** Adds to `gradient` that of sum dlogits * logits, for the logits (R, V) of the states from row `from` on. */
  backward(pass, dlogits, from, R) {
    const {D, V, w, g} = this, {S} = pass, dhidden = new Float32Array(S * D);
    const [hidden, dread] = [pass.hidden.subarray(from * D), dhidden.subarray(from * D)];
    linearBackward(hidden, w.embed, dlogits, dread, g.embed, null, R, D, V);
    const dx = new Float32Array(S * D);
    rmsNormBackward(pass.x, w.norm, pass.inverse, dhidden, dx, g.norm, S, D);
    for (let l = this.L - 1; l >= 0; l--) {
      this.mlpBackward(pass.layers[l].mlp, dx, l, S);
      this.attentionBackward(pass.layers[l], dx, l, S);
    }
    pass.tokens.forEach((token, n) => {
      for (let i = 0; i < D; i++) g.embed[token * D + i] += dx[n * D + i];
    });
  }

  /** Turns the gradient dx (N, D) behind an MLP into the one before it. */
  mlpBackward(kept, dx, l, N) {
    const {D, F, w, g} = this, dproduct = new Float32Array(N * F), dstates = new Float32Array(N * D);
    linearBackward(kept.product, w["down" + l], dx, dproduct, g["down" + l], null, N, F, D);
    const dgate = new Float32Array(N * F), dup = new Float32Array(N * F);
    for (let i = 0; i < N * F; i++) {
      const s = 1 / (1 + Math.exp(-kept.gate[i])), silu = kept.gate[i] * s;
      dup[i] = dproduct[i] * silu;
      dgate[i] = dproduct[i] * kept.up[i] * (s + silu * (1 - s));
    }
    linearBackward(kept.states, w["gate" + l], dgate, dstates, g["gate" + l], null, N, D, F);
    linearBackward(kept.states, w["up" + l], dup, dstates, g["up" + l], null, N, D, F);
    rmsNormBackward(kept.input, w["norm2" + l], kept.inverse, dstates, dx, g["norm2" + l], N, D);
  }

  /** Turns the gradient dx (S, D) behind attention into the one before it. */
  attentionBackward(kept, dx, l, S) {
    const {D, H, K, d, w, g} = this, scale = 1 / Math.sqrt(d), dcontext = new Float32Array(S * H * d);
    linearBackward(kept.context, w["o" + l], dx, dcontext, g["o" + l], null, S, H * d, D);
    const dq = new Float32Array(S * H * d), dk = new Float32Array(S * K * d), dv = new Float32Array(S * K * d);
    const dshare = new Float32Array(S);
    for (let h = 0; h < H; h++) {
      const group = Math.floor(h / (H / K));
      for (let s = 0; s < S; s++) {
        const row = (h * S + s) * S, q = (s * H + h) * d;
        let mean = 0;
        for (let c = 0; c <= s; c++) {
          let dot = 0;
          const share = kept.shares[row + c];
          for (let i = 0, v = (c * K + group) * d; i < d; i++, v++) {
            dot += dcontext[q + i] * kept.v[v];
            dv[v] += share * dcontext[q + i];
          }
          dshare[c] = dot;
          mean += share * dot;
        }
        for (let c = 0; c <= s; c++) {
          const dscore = kept.shares[row + c] * (dshare[c] - mean) * scale;
          for (let i = 0, k = (c * K + group) * d; i < d; i++, k++) {
            dq[q + i] += dscore * kept.k[k];
            dk[k] += dscore * kept.q[q + i];
          }
        }
      }
    }
    rotate(dq, S, H, d, this.angles, -1);
    rotate(dk, S, K, d, this.angles, -1);
    const dstates = new Float32Array(S * D);
    linearBackward(kept.states, w["q" + l], dq, dstates, g["q" + l], g["qb" + l], S, D, H * d);
    linearBackward(kept.states, w["k" + l], dk, dstates, g["k" + l], g["kb" + l], S, D, K * d);
    linearBackward(kept.states, w["v" + l], dv, dstates, g["v" + l], g["vb" + l], S, D, K * d);
    rmsNormBackward(kept.input, w["norm1" + l], kept.inverse, dstates, dx, g["norm1" + l], S, D);
  }

  /** One more token for each of N rows. caches: N of {keys, values: per layer (room, K d), length}; returns the hidden
   *  states (N, D) that predict what follows. */
  step(tokens, caches) {
    const {D, H, K, d, w} = this, N = tokens.length, x = this.embed(tokens), states = new Float32Array(N * D);
    const positions = caches.map(cache => cache.length);
    const context = new Float32Array(N * H * d), out = new Float32Array(N * D);
    for (let l = 0; l < this.L; l++) {
      rmsNorm(x, w["norm1" + l], states, N, D, this.eps);
      const [q, k, v] = this.project(states, l, N);
      rotate(q, N, H, d, this.angles, 1, positions);
      rotate(k, N, K, d, this.angles, 1, positions);
      context.fill(0);
      for (let n = 0; n < N; n++) {
        const cache = caches[n];
        cache.keys[l].set(k.subarray(n * K * d, (n + 1) * K * d), cache.length * K * d);
        cache.values[l].set(v.subarray(n * K * d, (n + 1) * K * d), cache.length * K * d);
        this.attendTo(cache.keys[l], cache.values[l], cache.length + 1, q, context, n);
      }
      linear(context, w["o" + l], null, out, N, H * d, D);
      for (let i = 0; i < N * D; i++) x[i] += out[i];
      this.mlp(x, l, N);
    }
    for (const cache of caches) cache.length++;
    rmsNorm(x, w.norm, states, N, D, this.eps);
    return states;
  }

  /** Adds to context (N, H d) what row n's query finds in `length` keys and values. */
  attendTo(keys, values, length, q, context, n) {
    const {H, K, d} = this, scores = new Float32Array(length), scale = 1 / Math.sqrt(d);
    for (let h = 0; h < H; h++) {
      const group = Math.floor(h / (H / K)), at = (n * H + h) * d;
      for (let c = 0; c < length; c++) {
        let dot = 0;
        for (let i = 0, k = (c * K + group) * d; i < d; i++, k++) dot += q[at + i] * keys[k];
        scores[c] = dot * scale;
      }
      softmax(scores, 0, length);
      for (let c = 0; c < length; c++) {
        for (let i = 0, v = (c * K + group) * d; i < d; i++, v++) context[at + i] += scores[c] * values[v];
      }
    }
  }

  /** The cache of a sequence that was read, with room for more tokens. */
  cacheOf(pass, room) {
    const size = this.K * this.d, copy = array => {
      const longer = new Float32Array((pass.S + room) * size);
      longer.set(array);
      return longer;
    };
    return {keys: pass.layers.map(kept => copy(kept.k)), values: pass.layers.map(kept => copy(kept.v)), length: pass.S};
  }
}
