"""Several turns: what the environment says between them, and episodes, sampled turn by turn.

A task with `reply` (tasks/guess_task.py) answers a turn of the policy, which ends with an end
token, until it has nothing more to say. An episode is `generate` of sampler.py called again, from
the text so far with the reply behind it. Its columns are the *sampled* tokens alone, so a function
of (B, T) tensors needs no change, unless it asks whether two responses have read the same: then it
compares their replies, too, as prefix_tree does. Replies stand beside the columns: before[i][t] has
the tokens that response i read before it sampled the token of column t.

How this differs from a usual rollout in turns: nothing is kept between turns. The next one reads
the whole text again, which costs a forward pass over it. So no cache needs to know of replies.

Alphabet: Q puzzles, B responses, T tokens of a response at most, n responses that take a turn, W
tokens of a turn at most. `policy` is the Policy of rollout.py.

Run it:  python train.py --task guess
"""
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from plumbing.task_file import check_pieces
from qwen2_model import Qwen2
from sampler import Replies, Rules, Samples, generate

# ----------------------------------------------------------------------------------- texts in turns


def turn_ends(policy: Any, tokens: list[int]) -> list[int]:
    """The columns that follow an end token, where a reply may stand."""
    return [t for t, token in enumerate(tokens, 1) if token in policy.tokenizer.end_tokens]


def reply(policy: Any, puzzle: Any, tokens: list[int]) -> list[int] | None:
    """What the task says after these tokens of a response, the last of which ended a turn; None
    where it is over.

    It is told the policy's own turns alone, not what the policy pretends that it was told.
    """
    _, _, turns = decode(policy, tokens, {})
    said = policy.task.reply(turns, puzzle, policy.tokenizer.chat)
    return None if said is None else policy.tokenizer.encode(*check_pieces(said, "reply"))


def replies(policy: Any, puzzle: Any, tokens: list[int]) -> dict[int, list[int]]:
    """The replies, by column, in a response that begins with these tokens and goes on after them;
    {} if the task has none."""
    ends = turn_ends(policy, tokens) if hasattr(policy.task, "reply") else []
    return {t: reply(policy, puzzle, tokens[:t]) for t in ends}


def interleave(tokens: list, before: dict[int, list]) -> list:
    """The tokens of a response with the replies before each, and behind the last."""
    if not before:
        return tokens
    return [x for t in range(len(tokens) + 1) for x in (*before.get(t, ()), *tokens[t : t + 1])]


def with_replies(tokens: Tensor, mask: Tensor, before: Replies) -> tuple[Tensor, Tensor]:
    """Responses (m, T) with the replies that were read between their tokens: all tokens (m, S), and
    which of these were sampled (m, S). S is at least T. mask (m, T): False on padding."""
    if not any(before):
        return tokens, mask
    texts, sampled = [], []  # m each
    for row, real, said in zip(tokens.tolist(), mask.tolist(), before):
        not_sampled = {t: [False] * len(words) for t, words in said.items()}
        texts.append(torch.tensor(interleave(row, said)))
        sampled.append(torch.tensor(interleave(real, not_sampled)))
    return tuple(pad_sequence(x, batch_first=True).to(mask.device) for x in (texts, sampled))


def decode(
    policy: Any, tokens: list[int], before: dict[int, list[int]]
) -> tuple[str, list[tuple[int, int]], list[str]]:
    """The text of a response with the replies between its turns, the span of each token, and the
    texts of its turns."""
    text, spans, turns = "", [], []
    cuts = sorted({0, *turn_ends(policy, tokens), *before, len(tokens)})
    for a, b in zip(cuts, cuts[1:]):  # tokens[a:b] is a turn, before[a] what was said before it
        text += policy.tokenizer.decode(before.get(a, ()))[0]
        turn, places = policy.tokenizer.decode(tokens[a:b])
        spans += [(len(text) + start, len(text) + stop) for start, stop in places]
        text += turn
        turns.append(turn)
    return text, spans, turns


def texts_without(batch: Any, i: int, start: int, stop: int) -> list[str]:
    """The texts of the turns of response i of a TokenBatch without its characters from start to
    stop."""
    spans = batch.spans[i]
    cuts = [0, *batch.before[i], len(spans)]  # columns
    kept = []
    for a, b in zip(cuts, cuts[1:]):
        own = range(spans[a][0], spans[b - 1][1])  # the characters of this turn
        kept.append("".join(batch.text[i][c] for c in own if not start <= c < stop))
    return kept


# ----------------------------------------------------------------------------------------- episodes


@dataclass
class Episode:
    """A response in several turns, as it grows."""

    prompt: list[int]
    limit: int  # tokens that it may have, with replies
    tokens: list[int] = field(default_factory=list)  # sampled so far
    before: dict[int, list[int]] = field(default_factory=dict)  # the replies so far, as in Samples
    facts: list[Tensor] = field(default_factory=list)  # (3, W) of each turn, see `describe`
    ended: bool = False

    @property
    def read(self) -> list[int]:
        """All that stands behind the prompt."""
        return interleave(self.tokens, self.before)

    def say(self, turn: Samples, row: int) -> None:
        """Take over a turn: a row of the samples."""
        own = turn.mask[row]
        self.tokens += turn.tokens[row, own].tolist()
        self.facts.append(torch.stack((turn.logprob, turn.entropy, turn.logit_grad))[:, row, own])

    def hear(self, said: list[int] | None) -> bool:
        """Read a reply, None if there is none, and say whether the episode goes on. A reply that
        leaves no room for a further token is not read: that response is cut off."""
        self.ended = said is None
        goes_on = said is not None and len(self.read) + len(said) < self.limit
        if goes_on:
            self.before[len(self.tokens)] = said
        return goes_on


def play(
    model: Qwen2,
    prompts: list[list[int]],
    uniforms: Tensor,
    end_tokens: list[int],
    rules: Rules,
    reply: Callable[[int, list[int]], list[int] | None],
) -> Samples:
    """Sample an episode for each row of uniforms (B, T), by `generate`, whose arguments these are,
    again and again. A row's n-th sampled token belongs to its n-th random number, whatever was said
    in between. The limit counts what is read, too, and `excluded` acts on the first turn.

    reply(row, tokens): what a row reads after these tokens, the last of which ended a turn; None if
    the episode is over.
    """
    (B, T), G = uniforms.shape, len(uniforms) // len(prompts)
    limits = [T] * B if rules.limit is None else rules.limit.tolist()
    episodes = [Episode(prompts[i // G], limits[i]) for i in range(B)]
    playing = [*range(B)]  # n, which take a turn
    watch = lambda t, running: rules.watch(t, running * len(playing) / B)
    turn_rules = rules._replace(watch=watch)
    while playing:
        some = [episodes[i] for i in playing]
        turn = next_turn(model, some, uniforms[playing], end_tokens, turn_rules)
        going = []
        for row, i in enumerate(playing):
            episodes[i].say(turn, row)
            if turn.ended[row] and episodes[i].hear(reply(i, episodes[i].tokens)):
                going.append(i)
        playing, turn_rules = going, turn_rules._replace(excluded=None)
    return gather(episodes, model.norm.device)


def next_turn(
    model: Qwen2, episodes: list[Episode], uniforms: Tensor, end_tokens: list[int], rules: Rules
) -> Samples:
    """The next turn of each of n episodes, from what it has read, with its own random numbers of
    uniforms (n, T)."""
    left = [episode.limit - len(episode.read) for episode in episodes]  # how many more tokens fit
    numbers = [row[len(episode.tokens) :][:room]
               for row, episode, room in zip(uniforms, episodes, left)]
    texts = [episode.prompt + episode.read for episode in episodes]
    rules = rules._replace(limit=torch.tensor(left))
    numbers = pad_sequence(numbers, batch_first=True)  # (n, W)
    turn = generate(model, texts, numbers, end_tokens, rules)
    on_cpu = {name: x.cpu() for name, x in turn._asdict().items() if isinstance(x, Tensor)}
    return turn._replace(**on_cpu)


def gather(episodes: list[Episode], device: torch.device) -> Samples:
    """The samples of B episodes."""
    pad = lambda rows: pad_sequence(rows, batch_first=True).to(device)
    tokens = [torch.tensor(episode.tokens) for episode in episodes]
    facts = pad([torch.cat(episode.facts, dim=1).T for episode in episodes])  # (B, T, 3)
    ended = torch.tensor([episode.ended for episode in episodes], device=device)
    mask = pad([torch.ones_like(row, dtype=torch.bool) for row in tokens])
    return Samples(pad(tokens), mask, *facts.unbind(2), ended, tuple(x.before for x in episodes))


# -------------------------------------------------------------------------- for a task that replies


def respond(
    policy: Any,
    puzzles: list,
    texts: list[list[int]],
    uniforms: Tensor,
    rules: Rules,
    begun: list,
) -> Samples:
    """The samples of B episodes, which go on after Q texts, prompts with what was begun: see
    `respond` of rollout.py."""
    G = len(uniforms) // len(puzzles)
    answer = lambda i, new: reply(policy, puzzles[i // G], begun[i // G].tokens + new)
    return play(policy.model, texts, uniforms, policy.tokenizer.end_tokens, rules, answer)


def decode_on(
    policy: Any, begun: Any, tokens: list[int], before: dict[int, list[int]]
) -> tuple[str, list[tuple[int, int]], list[str]]:
    """What `decode` finds of a response that was begun (see Begun of rollout.py) and goes on with
    tokens; before: the replies among these."""
    later = {len(begun.tokens) + t: said for t, said in before.items()}
    return decode(policy, begun.tokens + tokens, begun.before | later)
