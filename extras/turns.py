"""Several turns: what the environment says between them, and episodes, sampled turn by turn. And
continuations of a response, of one turn or several.

A task with `reply` (tasks/guess_task.py) answers a turn of the policy, which ends with an end
token, until it has nothing more to say. An episode is `generate` of sampler.py called again, from
the text so far with the reply behind it. Its columns are the *sampled* tokens alone, so a function
of (B, T) tensors needs no change, unless it compares what two responses have read: then it compares
their replies, too, as prefix_tree does. Replies stand beside the columns: before[i][t] has the
tokens that response i read before it sampled the token of column t.

How this differs from a usual rollout in turns: nothing is kept between turns. The next one reads
the whole text again, which costs a forward pass over it. So no cache needs to know of replies.

Alphabet: Q puzzles, B responses, T tokens of a response at most, n responses that take a turn, W
tokens of a turn at most.

Run it:  python train.py --task guess
"""
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from extras.prefixes import read_prefixes
from plumbing.compute import interleave
from plumbing.task_file import check_pieces
from qwen2_model import Qwen2
from rollout import Graded, Policy, check_samples
from sampler import Rules, Samples, generate

# ----------------------------------------------------------------------------------- texts in turns


def turn_ends(policy: Policy, tokens: list[int]) -> list[int]:
    """The columns that follow an end token, where a reply may stand."""
    ends = policy.tokenizer.end_tokens
    return [t + 1 for t, token in enumerate(tokens) if token in ends]


def reply_to(policy: Policy, puzzle: Any, tokens: list[int]) -> list[int] | None:
    """What the task says after these tokens of a response, the last of which ended a turn; None
    where it is over.

    It is told the policy's own turns alone, also where these imitate a reply.
    """
    if not hasattr(policy.task, "reply"):
        return None
    _, _, turns = decode(policy, tokens, {})
    text = policy.task.reply(turns, puzzle, policy.tokenizer.chat)
    return None if text is None else policy.tokenizer.encode(*check_pieces(text, "reply"))


class Begun(NamedTuple):
    """What a response begins with, if it is continued."""

    tokens: list[int] = []  # sampled before
    before: dict[int, list[int]] = {}  # the replies among them, as in Samples

    @property
    def text(self) -> list[int]:
        """All tokens that stand behind the prompt."""
        return interleave(self.tokens, self.before)


def begun_with(policy: Policy, puzzle: Any, tokens: list[int]) -> Begun:
    """A response that begins with these tokens and goes on after them, with the replies that the
    task gives."""
    ends = turn_ends(policy, tokens) if hasattr(policy.task, "reply") else []
    return Begun(tokens, {t: reply_to(policy, puzzle, tokens[:t]) for t in ends})


def decode(
    policy: Policy, tokens: list[int], before: dict[int, list[int]]
) -> tuple[str, list[tuple[int, int]], list[str]]:
    """The text of a response with the replies between its turns, the span of each token, and the
    texts of its turns."""
    text, spans, turns = "", [], []
    cuts = sorted({0, *turn_ends(policy, tokens), *before, len(tokens)})
    for a, b in zip(cuts, cuts[1:]):  # tokens[a:b] is a turn, before[a] what was said before it
        text += policy.tokenizer.decode(before.get(a, ()))[0]
        turn, turn_spans = policy.tokenizer.decode(tokens[a:b])
        spans += [(len(text) + start, len(text) + stop) for start, stop in turn_spans]
        text += turn
        turns.append(turn)
    return text, spans, turns


def texts_without(batch: Any, i: int, start: int, stop: int) -> list[str]:
    """The texts of the turns of response i of a TokenBatch without its characters from start to
    stop."""
    spans = batch.spans[i]
    cuts = sorted({0, *batch.before[i], len(spans)})  # columns
    kept = []
    for a, b in zip(cuts, cuts[1:]):
        letters = range(spans[a][0], spans[b - 1][1])  # of the turn of columns a to b
        kept.append("".join(batch.text[i][c] for c in letters if not start <= c < stop))
    return kept


# ----------------------------------------------------------------------------------------- episodes


@dataclass
class Episode:
    """A response in several turns, as it grows."""

    prompt: list[int]
    limit: int  # tokens that it may have, with replies
    tokens: list[int] = field(default_factory=list)  # sampled so far
    before: dict[int, list[int]] = field(default_factory=dict)  # the replies so far, as in Samples
    measures: list[Tensor] = field(default_factory=list)  # (3, W) of each turn: see `measure`
    ended: bool = False

    @property
    def text(self) -> list[int]:
        """All tokens that stand behind the prompt."""
        return interleave(self.tokens, self.before)

    def add_turn(self, turn: Samples, row: int) -> None:
        """Take over a turn of the policy: a row of the samples."""
        mask = turn.mask[row]
        self.tokens += turn.tokens[row, mask].tolist()
        self.measures.append(torch.stack(
            [x[row, mask] for x in (turn.logprob, turn.entropy, turn.logit_grad)]))

    def add_reply(self, reply: list[int] | None) -> bool:
        """Add a reply, None if there is none, and say whether the episode goes on. A reply that
        leaves no room for a further token is not read: that response is cut off."""
        if reply is None:
            self.ended = True
            return False
        if len(self.text) + len(reply) >= self.limit:
            return False
        self.before[len(self.tokens)] = reply
        return True


def play(
    model: Qwen2,
    prompts: list[list[int]],
    uniforms: Tensor,
    end_tokens: list[int],
    rules: Rules,
    reply: Callable[[int, list[int]], list[int] | None],
) -> Samples:
    """Sample an episode for each row of uniforms (B, T), by `generate`, whose arguments these are,
    again and again. A row's k-th sampled token belongs to its k-th random number, whatever was said
    in between. The limit counts what is read, too, and `excluded` acts on the first turn.

    reply(row, tokens): what a row reads after these tokens, the last of which ended a turn; None if
    the episode is over.
    """
    (B, T), G = uniforms.shape, len(uniforms) // len(prompts)
    limits = [T] * B if rules.limits is None else rules.limits.tolist()
    episodes = [Episode(prompts[i // G], limits[i]) for i in range(B)]
    playing = [*range(B)]  # n, which take a turn
    excluded = rules.excluded
    while playing:
        share = len(playing) / B
        watch = lambda t, running, share=share: rules.watch(t, running * share)
        turn_rules = rules._replace(excluded=excluded, watch=watch)
        turn = next_turn(model, [episodes[i] for i in playing], uniforms[playing], end_tokens,
                         turn_rules)
        still_playing = []
        for row, i in enumerate(playing):
            episodes[i].add_turn(turn, row)
            if turn.ended[row] and episodes[i].add_reply(reply(i, episodes[i].tokens)):
                still_playing.append(i)
        playing, excluded = still_playing, None
    return gather(episodes, model.norm.device)


def next_turn(
    model: Qwen2, episodes: list[Episode], uniforms: Tensor, end_tokens: list[int], rules: Rules
) -> Samples:
    """The next turn of each of n episodes, from what it has read, with its own random numbers of
    uniforms (n, T)."""
    left = [episode.limit - len(episode.text) for episode in episodes]  # how many more tokens fit
    used = [len(episode.tokens) for episode in episodes]  # random numbers
    numbers = [row[k : k + room] for row, k, room in zip(uniforms, used, left)]
    numbers = pad_sequence(numbers, batch_first=True)  # (n, W)
    texts = [episode.prompt + episode.text for episode in episodes]
    rules = rules._replace(limits=torch.tensor(left), read_prompts=read_prefixes)
    turn = generate(model, texts, numbers, end_tokens, rules)
    on_cpu = {name: x.cpu() for name, x in turn._asdict().items() if isinstance(x, Tensor)}
    return turn._replace(**on_cpu)


def gather(episodes: list[Episode], device: torch.device) -> Samples:
    """The samples of B episodes."""
    pad = lambda rows: pad_sequence(rows, batch_first=True).to(device)
    tokens = [torch.tensor(episode.tokens) for episode in episodes]
    measures = pad([torch.cat(episode.measures, dim=1).T for episode in episodes])  # (B, T, 3)
    ended = torch.tensor([episode.ended for episode in episodes], device=device)
    mask = pad([torch.ones_like(row, dtype=torch.bool) for row in tokens])
    before = tuple(episode.before for episode in episodes)
    return Samples(pad(tokens), mask, *measures.unbind(2), ended, before)


# ------------------------------------------------------------------------------- graded responses


def respond(
    policy: Policy, puzzles: list, prompts: list[list[int]], uniforms: Tensor,
    rules: Rules = Rules(), begun: list[Begun] | None = None
) -> Graded:
    """What `respond` of rollout.py does, for a task that replies, or for responses that have begun.

    begun: what the responses to each puzzle begin with. It is no part of the samples, but of the
    texts, spans and grades.
    """
    begun = begun or [Begun()] * len(puzzles)
    texts = [prompt + b.text for prompt, b in zip(prompts, begun)]  # Q
    G, end_tokens = len(uniforms) // len(puzzles), policy.tokenizer.end_tokens
    if hasattr(policy.task, "reply"):
        reply = lambda i, new: reply_to(policy, puzzles[i // G], begun[i // G].tokens + new)
        samples = play(policy.model, texts, uniforms, end_tokens, rules, reply)
    else:
        rules = rules._replace(read_prompts=read_prefixes)
        samples = generate(policy.model, texts, uniforms, end_tokens, rules)
    return decode_and_grade(policy, puzzles, samples, begun)


def decode_and_grade(
    policy: Policy, puzzles: list, samples: Samples, begun: list[Begun] | None = None
) -> Graded:
    """What `decode_and_grade` of rollout.py does, for responses in several turns, or that have
    begun: see `respond`."""
    check_samples(samples)
    begun = begun or [Begun()] * len(puzzles)
    G, in_turns = len(samples.tokens) // len(puzzles), hasattr(policy.task, "reply")
    texts, spans, grades = [], [], []
    for i, (tokens, mask, before) in enumerate(zip(samples.tokens, samples.mask, samples.before)):
        first, puzzle = begun[i // G], puzzles[i // G]
        later = {len(first.tokens) + t: reply for t, reply in before.items()}
        text, token_spans, turns = decode(
            policy, first.tokens + tokens[mask].tolist(), first.before | later)
        texts.append(text)
        spans.append(tuple(token_spans))
        told = (turns,) if in_turns else ()
        grades.append(policy.with_reward(policy.task.grade(text, puzzle, *told)))
    return Graded(samples, tuple(texts), tuple(spans), tuple(grades))
