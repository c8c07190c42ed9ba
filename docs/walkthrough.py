"""GRPO in plain numpy: one training step, from the prompt to new weights, then a second update on
the same responses.

    python docs/walkthrough.py

GRPO lets a model write several responses to a puzzle, grades them, and makes the tokens of the
better ones more probable, those of the worse ones less. Here the puzzle is "make 3 from 1 and 2",
the vocabulary has nine tokens, and the model is a Qwen2 so small that its forward pass fits on half
a page. Read from top to bottom, then run it: every number is printed with a sentence that says what
it is and why. The order is that of any GRPO step:

    prompt -> tokens, log-probs -> rewards -> advantage -> credit -> ratio, clip, loss -> gradient
    -> new weights

It needs numpy alone. docs/algorithm.md derives the formulas, grpo.py applies them to real models,
and tests/test_walkthrough.py compares every number with those of grpo.py and the files around it.

Alphabet: B = 2 responses, T = 7 tokens of the longer one, V vocabulary, D hidden size, S tokens of
a text. Column t of a (B, T) array is the t-th token of a response; mask (B, T) is False on padding,
behind the end of a response. w are the weights by name, and pi is the policy, RL's word for the
model: the probabilities that it gives the next token.
"""
import re
import textwrap

import numpy as np

VOCABULARY = ["", "1", "2", "3", "+", "-", "</think>", "\n<answer>", "</answer>"]  # 0 is the end
PROMPT = [1, 2, 3]  # the numbers and the target; this vocabulary has no words
# The random numbers behind the tokens of each response, chosen so that the first one is right and
# the second wrong. Drawn before sampling: a response that ends early leaves some unused.
UNIFORMS = np.array([[0.65, 0.85, 0.15, 0.50, 0.30, 0.95, 0.05, 0.55],
                     [0.65, 0.85, 0.30, 0.95, 0.05, 0.35, 0.70, 0.10]])
SEED = 0  # of the random weights
V, D, WIDTH = 9, 4, 6  # vocabulary, hidden and MLP size
# Of the weights: one layer with one attention head; the output matrix is the embedding.
SHAPES = {"embedding": (V, D), "norm": (D,), "norm_1": (D,), "norm_2": (D,),
          "q": (D, D), "k": (D, D), "v": (D, D), "q_bias": (D,), "k_bias": (D,), "v_bias": (D,),
          "o": (D, D), "gate": (WIDTH, D), "up": (WIDTH, D), "down": (D, WIDTH)}
CLIP = 0.2  # the ratio is clipped to 0.8 ... 1.2
LR = 0.05  # the learning rate: large, so that the second update reaches the clip

# ---------------------------------------------------------------------------------------- the model


def softmax(x):
    """Probabilities from logits, along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x, weight):
    """Each row of x (S, D) divided by its root mean square; then each column has its weight."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def rope(x):
    """Turn two pairs of each row of x (S, D): (x0, x2) by its position, (x1, x3) by a hundredth of
    that. A query times a key then depends on how far apart the tokens are, not on where they stand.
    """
    frequency = np.array([1, 0.01])  # theta^(-2 j / D) of pair j, for theta = 10,000
    angle = np.arange(len(x))[:, None] * frequency  # (S, 2)
    a, b = x[:, :2], x[:, 2:]
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle),
                           b * np.cos(angle) + a * np.sin(angle)), axis=1)


def forward(w, tokens):
    """Logits (S, V) of the token that follows each of S tokens, from the weights by name."""
    x = w["embedding"][tokens]  # (S, D)
    h = rms_norm(x, w["norm_1"])
    q, k, v = (h @ w[name].T + w[f"{name}_bias"] for name in "qkv")  # (S, D) each
    scores = rope(q) @ rope(k).T / np.sqrt(D)  # (S, S)
    scores[np.triu_indices(len(x), 1)] = -np.inf  # no token sees a later one
    x = x + softmax(scores) @ v @ w["o"].T
    h = rms_norm(x, w["norm_2"])
    gate, up = h @ w["gate"].T, h @ w["up"].T  # (S, WIDTH) each
    silu = gate / (1 + np.exp(-gate))
    x = x + (silu * up) @ w["down"].T
    return rms_norm(x, w["norm"]) @ w["embedding"].T


def response_logits(w, tokens):
    """Logits (B, T, V) from which the tokens (B, T) are drawn: the first ones follow the prompt."""
    return np.stack([forward(w, [*PROMPT, *response])[len(PROMPT) - 1 : -1] for response in tokens])


def response_logprobs(w, tokens, mask):
    """log pi (B, T) of tokens (B, T), 0 on padding, and the probabilities (B, T, V) behind it."""
    p = softmax(response_logits(w, tokens))
    return np.log(np.take_along_axis(p, tokens[:, :, None], axis=2)[:, :, 0]) * mask, p


# ----------------------------------------------------------------------------- responses and credit


def sample(w, uniforms):
    """A response, one random number a token: the next token is the first whose cumulative
    probability exceeds it."""
    response = []
    for uniform in uniforms:
        p = softmax(forward(w, PROMPT + response)[-1])  # (V,)
        response.append(int(np.searchsorted(p.cumsum(), uniform, side="right")))
        if response[-1] == 0:  # the end
            break
    return response


def grade(text):
    """The reward: 0.1 for the format, and 1 for an answer that makes 3 from 1 and 2, once each."""
    found = re.fullmatch("</think>\n<answer>(.*)</answer>", text)
    if found is None:
        return 0.0
    return 1.1 if found[1] in ("1+2", "2+1") else 0.1


def walk():
    """Yield (name, what it is and why, value) of every number, in order."""
    rng = np.random.default_rng(SEED)
    w = {name: rng.normal(0, 0.5, shape) for name, shape in SHAPES.items()}
    yield "weights", """They are random here, where a real run would start from a pretrained
        model.""", w
    yield "prompt", "The model continues these tokens: the puzzle's numbers and its target.", PROMPT
    p = softmax(forward(w, PROMPT)[-1])  # (V,)
    yield "first token: p", """After the prompt the model gives each of the nine tokens a
        probability.""", p
    yield "first token: cumulative p", """Added up, they divide 0 ... 1 into an interval per token,
        as long as its probability, so a uniform random number falls into it with that
        probability.""", p.cumsum()
    yield "random numbers", "There is one for each token that may be sampled.", UNIFORMS
    responses = [sample(w, row) for row in UNIFORMS]
    T = max(map(len, responses))
    tokens = np.array([response + [0] * (T - len(response)) for response in responses])  # (B, T)
    mask = np.array([[t < len(response) for t in range(T)] for response in responses])  # (B, T)
    yield "tokens", """Each is the token whose interval its random number falls into; 0 ends a
        response, and then pads the shorter one.""", tokens
    old = response_logprobs(w, tokens, mask)[0]  # (B, T)
    yield "logprob", """log pi of each token is kept, because updates ask how far the model has
        moved since.""", old
    text = ["".join(VOCABULARY[token] for token in response) for response in responses]
    yield "text", """Each response ends the thinking that a real prompt would begin with <think>,
        and answers.""", text
    reward = np.array([grade(response) for response in text])  # (B,)
    yield "reward", """Both have the format, worth 0.1, and the first is right, worth 1; the second
        answers 3, but does not make it from 1 and 2.""", reward
    advantage = (reward - reward.mean()) / (reward.std() + 1e-4)  # (B,)
    yield "advantage", """How much better a response is than its group, the responses to the same
        puzzle, in standard deviations; 0.0001 is added to these
        because they may be 0.""", advantage
    credit = advantage[:, None] * mask  # (B, T)
    yield "credit", """GRPO can't tell which tokens helped, so each one gets the advantage of its
        response.""", credit
    answer = (tokens == VOCABULARY.index("\n<answer>")).cumsum(1) > 0  # (B, T) from <answer> on
    weight = np.where(answer, 1, 0.5) * mask  # (B, T)
    weight = weight * mask.sum(1, keepdims=True) / weight.sum(1, keepdims=True)  # averages 1
    yield "credit by outcome_conditional", """Another credit function differs in these numbers and
        nowhere else: this one gives half to what comes before <answer>, rescaled to the same mean
        in each response.""", advantage[:, None] * weight
    yield from updates(w, tokens, mask, old, credit)


# --------------------------------------------------------------------------------------- the update


def gradient_of(w, tokens, d_logits):
    """d loss / d weight by name, from d_logits (B, T, V), which is d loss / d logit: the sum over
    all logits of d_logits * d logit / d weight.

    PyTorch finds all of it in one pass backward through `forward`. Here each weight is nudged up
    and down a little; the sum of d_logits * logits, in which d_logits stays fixed, changes by the
    nudges times the gradient.
    """
    gradient = {name: np.zeros_like(x) for name, x in w.items()}
    for name, x in w.items():
        for i in np.ndindex(x.shape):
            kept, sums = x[i], []
            for nudge in (1e-5, -1e-5):
                x[i] = kept + nudge
                sums.append((d_logits * response_logits(w, tokens)).sum())
            gradient[name][i] = (sums[0] - sums[1]) / 2e-5
            x[i] = kept
    return gradient


def updates(w, tokens, mask, old, credit):
    """Two updates on a batch: yields as `walk` does. old (B, T): log pi of tokens when sampled."""
    share = mask / mask.sum()  # (B, T)
    yield "share", """The loss is a mean over all 12 tokens, so each of them counts 1/12, and
        padding 0.""", share
    m, v = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
    times_as_probable = []  # (B,) each
    for k in (1, 2):
        logprob, p = response_logprobs(w, tokens, mask)  # (B, T), (B, T, V)
        ratio = np.exp(logprob - old)  # (B, T)
        yield f"update {k}: ratio", """A token's probability now, over that when it was sampled, is
            1 until the weights change; then it changes most where the responses part: at the
            symbols 1 and 3, in the third column.""", ratio
        clipped = ratio.clip(1 - CLIP, 1 + CLIP)  # (B, T)
        gain = np.minimum(ratio * credit, clipped * credit)  # (B, T)
        stopped = ratio * credit > clipped * credit  # (B, T)
        yield f"update {k}: clipped", """True for a ratio above 1.2 with positive credit, or below
            0.8 with negative: the token has moved far enough for one batch, and its gain is a
            constant, without gradient.""", stopped
        loss = -(gain * share).sum()
        yield f"update {k}: loss", """Minus the mean of min(ratio * credit, clip(ratio) * credit),
            because optimizers minimize; its gradient matters, not its value.""", loss
        slope = -share * credit * ratio * ~stopped  # (B, T)
        yield f"update {k}: d loss / d log pi", """-share * credit * ratio, since d ratio / d log pi
            = ratio, and 0 where clipped; the responses begin alike, so there one pulls up what the
            other pulls down.""", slope
        direction = np.eye(V)[tokens] - p  # (B, T, V)
        yield f"update {k}: d log pi / d logits, first token", """onehot - p: raise the token's own
            logit, and lower those of the others by their probability.""", direction[0, 0]
        gradient = gradient_of(w, tokens, slope[:, :, None] * direction)
        yield f"update {k}: gradient", """By the chain rule, d loss / d weight for every
            weight.""", gradient
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        yield f"update {k}: gradient norm", """The length of all that as one vector; a run would
            shorten one of more than 1 (--max_grad_norm).""", norm
        # AdamW, without weight decay. In both means the latest gradient weighs most. They start at
        # 0; dividing by 1 - 0.9**k and 1 - 0.999**k makes up for that.
        m = {name: 0.9 * m[name] + 0.1 * g for name, g in gradient.items()}  # mean gradient
        v = {name: 0.999 * v[name] + 0.001 * g**2 for name, g in gradient.items()}  # mean square
        change = {name: m[name] / (1 - 0.9**k) / (np.sqrt(v[name] / (1 - 0.999**k)) + 1e-8)
                  for name in w}
        w = {name: x - LR * change[name] for name, x in w.items()}
        yield f"update {k}: new weights", """AdamW moves each weight against its mean gradient, over
            the root of the mean squared one: at first by about the learning rate, unless its
            gradient is as small as 1e-8.""", w
        times_as_probable.append(np.exp((response_logprobs(w, tokens, mask)[0] - old).sum(1)))
    yield "times as probable", """After one update, and after two, the right response is this many
        times as probable as before: more than 1,
        and the wrong one less.""", np.array(times_as_probable)


def show(name, sentence, value):
    """Print one or several numbers, under their name and sentence."""
    print(f"\n{name}\n" + textwrap.indent(textwrap.fill(" ".join(sentence.split()), 100), "    "))
    for label, x in value.items() if isinstance(value, dict) else [("", np.asarray(value))]:
        start = f"    {label:<10}"  # the name of a weight, or nothing
        print(start + np.array2string(x.ravel() if label else x, max_line_width=120, prefix=start))


if __name__ == "__main__":
    np.set_printoptions(formatter={"float": lambda x: f"{x + 0.0:10.4g}"})  # + 0.0 makes -0 0
    for number in walk():
        show(*number)
