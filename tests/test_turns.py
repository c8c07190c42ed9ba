"""Several turns: what the environment replies is read and never trained on. Against numpy, transformers and loops."""
import copy
import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import analyze
from extras.turns import decode, play, texts_without
from grpo import compare, instrument, shape_reward, update
from methods.registry import CREDIT_FUNCTIONS
from methods.queries import Queries, logprobs_without
from methods.turns import turn_baseline, turn_mean, turn_vine
from plumbing.launch import MODELS
from plumbing.metrics import log_columns, sampling_cost, tokens_reread, turn_of
from plumbing.optimizer import Optimizer
from plumbing.task_file import load_puzzles
from rollout import rollout
from sampler import Rules, logprobs_of, read_responses
from settings import Settings
from start import load_policy
from tasks import guess_task
from tasks.guess_task import GUESSES, Puzzle
from tests.fixtures import make_batch

GUESS = MODELS / "guess-tiny"


def played(games=4, responses=4, length=40, task=guess_task):
    """A policy, and a step of games."""
    s = Settings(task="guess", model=str(GUESS), questions=games, responses=responses, max_new_tokens=length,
                 max_grad_norm=1e9)
    policy = load_policy(s, task)
    batch = rollout(policy, task.load("train", games), s, 1)
    batch.ask = Queries(policy, batch, s, 1)
    batch.advantage = compare(batch)
    return policy, batch, s


def whole(policy, batch, i):
    """The tokens of response i with its prompt and replies, and the places of those that were sampled."""
    text, places = [*policy.prompt(batch.puzzles[batch.group[i]])], []
    for t, token in enumerate(batch.tokens[i][batch.mask[i]].tolist()):
        text += batch.before[i].get(t, [])
        places.append(len(text))
        text.append(token)
    return text, places


# ---------------------------------------------------------------------------------------------- sampled and read


@pytest.fixture(scope="module")
def fifty():
    """Fifty episodes and two, of one to four turns."""
    policy, batch, s = played(13)
    assert len(batch.tokens) == 52 and {1, GUESSES} <= {1 + len(replies) for replies in batch.before}
    return policy, batch, s


@pytest.mark.slow
@torch.no_grad()
def test_episodes_equal_transformers(fifty):
    """Guards against a position, a column or a state that is off by a reply, in sampling and in reading; against spans
    that are off by a reply, an end token that is not empty, a turn that others wrote, and a cost of reading a text
    again for each turn that lacks a prompt, what was sampled, or a reply."""
    policy, batch, _ = fifty
    hf = AutoModelForCausalLM.from_pretrained(GUESS, dtype=torch.float32, attn_implementation="eager").eval()
    again, hidden, attention = batch.ask.read(logprobs_of, policy.model), batch.ask.hidden, batch.ask.attention
    for i, (reply_text, spans) in enumerate(zip(batch.text, batch.spans)):
        text, places = whole(policy, batch, i)
        L, predicts = len(places), [place - 1 for place in places]
        out = hf(torch.tensor([text]), output_hidden_states=True, output_attentions=True)
        logprob = out.logits[0].log_softmax(-1)[predicts, [text[place] for place in places]]  # (L,)
        for found in (batch.logprob, again):
            torch.testing.assert_close(found[i, :L], logprob, atol=1e-5, rtol=0)
        torch.testing.assert_close(hidden[i, :L], out.hidden_states[-1][0, predicts], atol=1e-4, rtol=0)
        paid = out.attentions[-1][0].mean(0)[predicts][:, places].tril(-1)  # (L, L)
        torch.testing.assert_close(attention[i, :L, :L], paid, atol=1e-5, rtol=0)

        assert tokens_reread(batch.prompts[0], batch.before[i]) == sum(places[t] for t in batch.before[i])
        assert guess_task.sentence_starts(reply_text, spans).nonzero()[0].tolist() == [*batch.before[i]]
        puzzle, tokens = batch.puzzles[batch.group[i]], batch.tokens[i][batch.mask[i]].tolist()
        assert policy.tokenizer.decode(text)[0] == guess_task.prompt(puzzle, False) + reply_text
        pieces = [reply_text[start:stop] for start, stop in spans]
        assert pieces == [policy.tokenizer.decode([token])[0] for token in tokens]
        for t, span in enumerate(spans):
            left = [*pieces[:t], "", *pieces[t + 1 :]]
            assert texts_without(batch, i, *span) == ["".join(left[a:b]) for a, b in pairwise([0, *batch.before[i], L])]
        turns = re.sub(r"\n(higher|lower)\n", " ", reply_text).split()
        assert turns == [turn.strip() for turn in decode(policy, tokens, {})[2]]
        assert batch.success[i] == (str(puzzle.secret) in turns)
        assert batch.grades["guesses"][i] == len(turns) == 1 + turn_of(batch)[i].max()


def test_a_reply_cuts_the_text_wherever_it_stands(policy):
    """A tool's result may follow any token, not an end token alone. Guards against a reply that is in no text."""
    tokens, said = policy.tokenizer.encode("12 + 3 = 15"), policy.tokenizer.encode("no!")
    text, spans, turns = decode(policy, tokens, {2: said})
    pieces = [policy.tokenizer.decode(part)[0] for part in (tokens[:2], said, tokens[2:])]
    assert text == "".join(pieces) and turns == pieces[::2] and len(spans) == len(tokens)
    assert "".join(text[a:b] for a, b in spans) == pieces[0] + pieces[2]


@pytest.mark.slow
def test_an_update_on_episodes_equals_plain_autograd(fifty):
    """Each episode is read alone, as one text. Guards against a gradient of what the environment said, replies of
    another episode, and a response that is left out because its first token has no credit."""
    policy, batch, s = fifty
    policy = policy._replace(model=copy.deepcopy(policy.model))
    credit, N = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)) * batch.mask, batch.mask.sum()
    credit[::3] = credit[:, 0] = 0
    used = credit.any(1).nonzero()[:, 0].tolist()
    row = update(policy, Optimizer(policy.model, 0.0), batch, credit, s)
    found, loss, texts = [p.grad.clone() for p in policy.model.parameters()], 0.0, 0
    policy.model.zero_grad()
    for i in used:
        (text, places), own = whole(policy, batch, i), batch.mask[i]
        logprob = policy.model(torch.tensor([text]))[0].log_softmax(-1)[[place - 1 for place in places],
                                                                        batch.tokens[i, own]]  # (L,)
        loss, texts = loss - (credit[i, own] * logprob).sum() / N, texts + len(text) - len(batch.prompts[0])
    loss.backward()
    for gradient, p in zip(found, policy.model.parameters()):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-3, atol=1e-5)
    assert row["loss"] == pytest.approx(-credit.sum().item() / N.item(), abs=1e-5)
    assert row["tokens_updated"] == texts + 13 * len(batch.prompts[0])


def test_replies_count_in_the_punishment_of_long_episodes():
    """By loops. Guards against a length without replies, by which no episode that these fill up to the limit is long;
    and against one cut off unpunished, because the reply that did not fit is not in it."""
    policy, batch, s = played(13, length=14)
    shaped, sampled = shape_reward(batch, replace(s, shaping="overlong", shaping_beta=0.5)), batch.mask.sum(1).tolist()
    for i, (found, reward) in enumerate(zip(shaped.tolist(), batch.reward.tolist())):
        read = len(whole(policy, batch, i)[0]) - len(batch.prompts[0])
        x = max(0, (read - 0.8 * 14) / (0.2 * 14)) if batch.ended[i] else 1
        assert found == pytest.approx(reward - 0.5 * x, abs=1e-12)
    assert any(n <= 11 for n, ended in zip(sampled, batch.ended) if not ended)  # of 14: not long without replies
    assert {0 < reward - found < 0.5 for found, reward in zip(shaped.tolist(), batch.reward.tolist())} == {True, False}


ENDS = [0, 7]
SAID = [[3, 7, 3], [], [5] * 6]  # an end token in a reply ends nothing


def replies_by_hash(row, tokens):
    """A reply by what was sampled; now and then none."""
    return [*SAID, None][(row + sum(tokens)) % 4]


@pytest.mark.slow
@pytest.mark.parametrize("excluding", [False, True])
def test_episodes_equal_a_loop_over_single_responses(excluding, random_model):
    """Guards against a reply in another row's text, random numbers that are skipped, a limit that forgets, and a token
    that is excluded from every turn."""
    model, (B, T) = random_model, (24, 30)
    model.real_vocab = 12
    uniforms, prompts = torch.from_numpy(np.random.default_rng(1).random((B, T))), [[1, 2, 3], [4], [5, 6]]
    limit = torch.arange(B) % 3 * 10 + 10
    excluded = torch.full((B,), 7) if excluding else None
    watched = []
    rules = Rules(limit, excluded, False, lambda *progress: watched.append(progress))
    found = play(model, prompts, uniforms, ENDS, rules, replies_by_hash)
    assert all(0 < columns <= T and 0 <= running <= 1 for columns, running in watched)
    reasons = []
    for row in range(B):
        text, tokens, before, ended = [*prompts[row // 8]], [], {}, False
        while len(text) - len(prompts[row // 8]) < limit[row] and not ended:
            with torch.no_grad():
                p = model(torch.tensor([text]))[0, -1, :12].softmax(-1)
            p[7] *= not excluding or bool(tokens)
            tokens.append(int((p.cumsum(0) <= uniforms[row, len(tokens)] * p.sum()).sum()))
            text.append(tokens[-1])
            if tokens[-1] in ENDS:
                said = replies_by_hash(row, tokens)
                ended = said is None
                if said is not None and len(text) + len(said) - len(prompts[row // 8]) >= limit[row]:
                    reasons.append("no room")
                    break
                if said is not None:
                    before[len(tokens)] = said
                    text += said
        assert found.tokens[row][found.mask[row]].tolist() == tokens
        assert found.before[row] == before and found.ended[row] == ended
        reasons += [f"{len(before)} replies", ended]
    assert {"no room", True, False, "0 replies", "3 replies"} <= {*reasons}
    batch, rows = SimpleNamespace(**found._asdict(), group=torch.arange(B) // 8, prompts=prompts), torch.arange(B)
    logprob = read_responses(model, batch, rows)
    torch.testing.assert_close(logprob, found.logprob, atol=1e-9, rtol=0)
    hide = torch.zeros_like(found.mask)
    hide[:, 0] = True
    without = read_responses(model, batch, rows, logprobs_without, [hide])
    assert (without - logprob)[:, 0].abs().max() < 1e-9 < 1e-3 < (without - logprob)[found.mask].abs().max()


# ------------------------------------------------------------------------------------------------------- the task


def test_games_are_fair_and_demonstrations_follow_the_rules():
    """Guards against a secret that is more frequent, or that a prompt shows, and demonstrations without mistakes."""
    rng, games = np.random.default_rng(0), load_puzzles(guess_task, 512, "")
    for part in games:
        counts = np.bincount([game.secret for game in part])[1:]
        assert len(counts) == 15 and np.ptp(counts) <= 1
        prompt, = {guess_task.prompt(game, False) for game in part}
        assert prompt == "Guess a number from 1 to 15. You have 4 guesses.\n"
    for known, least, most in ((1.0, 1, 1), (0.0, 0.2, 0.5)):
        found = [guess_task.demonstrate(game, rng, known) for game in games[0][:150]]
        for game, turns in zip(games[0], found):
            assert [guess_task.reply(turns[:i], game, False) is None for i in range(1, 1 + len(turns))] == [
                *[False] * (len(turns) - 1), True]
        won = [guess_task.grade("", game, turns)["answer"] for game, turns in zip(games[0], found)]
        assert least <= np.mean(won) <= most
    with pytest.raises(ValueError, match="makes its own games"):
        guess_task.load("all", path="x.csv")


@pytest.mark.parametrize("turns, reply, answer, layout", [
    (["7"], "higher", 0, 1), (["12"], "lower", 0, 1), (["9"], None, 1, 1), (["1", "2", "3"], "higher", 0, 1),
    (["1", "2", "3", "4"], None, 0, 1), (["1", "2", "3", "9"], None, 1, 1), (["7", "16"], None, 0, 0),
    (["0"], None, 0, 0), (["07"], None, 0, 0), ([" 7"], None, 0, 0), (["7\nhigher\n9"], None, 0, 0),
    (["٧"], None, 0, 0), (["9" * 5000], None, 0, 0), ([""], None, 0, 0), (["7\n"], None, 0, 0)])
def test_the_game_by_hand(turns, reply, answer, layout):
    """Guards against a turn that forges a reply, digits of other scripts, and more guesses than there are."""
    puzzle = Puzzle(15, 9, 0)
    assert guess_task.reply(turns, puzzle, False) == (reply and f"\n{reply}\n")
    found = guess_task.grade("", puzzle, turns)
    assert found == {"answer": answer, "format": layout, "guesses": len(turns)}
    chat = guess_task.reply(turns, puzzle, True)
    assert chat is None or chat == f"\n<|im_start|>user\n{reply}<|im_end|>\n<|im_start|>assistant\n"


# ---------------------------------------------------------------------------------------------- credit functions


def hand_made(**fields):
    """Four responses: turns of tokens 1 + 2, 2 + 1 + 1, 3, and 2 + 2."""
    before = ({1: [5]}, {2: [], 3: [5, 5]}, {}, {2: [4]})
    return make_batch([3, 4, 3, 4], [1.0, 2.0, 3.0, 4.0], before=before, **fields)


def test_turns_read_their_own_prompt_again():
    """Two responses to each of two prompts, of 3 tokens and of 1; 14 tokens are sampled."""
    again = (3 + 1 + 1) + (3 + 2) + (3 + 3 + 2) + (1 + 2 + 1)  # what each later turn reads: prompt, tokens and replies
    assert sampling_cost([[1, 2, 3], [4]], hand_made()) == (14, 3 + 1 + again)


def test_the_credit_of_a_turn_is_the_sum_of_its_tokens():
    credit = torch.tensor([[1.0, 2, 4, 0], [1, 2, 4, 8], [1, 2, 6, 0], [0, 1, 2, 3]])
    batch = hand_made(entropy=credit, normalize="none")  # entropy_ratio's weights follow the entropy
    of = CREDIT_FUNCTIONS["entropy_ratio"](batch)
    found = turn_mean(batch)
    for i, bounds in enumerate([(0, 1, 3), (0, 2, 3, 4), (0, 3), (0, 2, 4)]):
        for a, b in pairwise(bounds):
            assert found[i, a:b].tolist() == pytest.approx([of[i, a:b].mean().item()] * (b - a))


def test_turn_vine_cuts_where_a_turn_begins():
    V, asked = torch.tensor([[9, 0.3, 9, 0], [9, 9, 0.5, 0.7], [9, 9, 9, 0], [9, 9, 0.2, 9]]), []
    batch = hand_made(reward=torch.tensor([1.0, 0, 0, 1]),
                      rollout_values=lambda counts: (asked.append(counts), V * (counts > 0))[1])
    third, two = 1 / 3, 2 / 3
    expected = [[0.3 - third, 0.7, 0.7, 0], [0.5 - two, 0.5 - two, 0.2, -0.7], [-two] * 3 + [0],
                [0.2 - third, 0.2 - third, 0.8, 0.8]]
    np.testing.assert_allclose(turn_vine(batch, k=2), expected, rtol=1e-6)
    assert asked[0].tolist() == [[0, 2, 0, 0], [0, 0, 2, 2], [0, 0, 0, 0], [0, 0, 2, 0]]


def test_turn_baseline_by_loops():
    """Guards against a baseline that knows its own response, and, in one turn, anything but RLOO."""
    r, last = [1.0, 0.25, 0.5, 2.0], [1, 2, 0, 1]
    batch = hand_made(reward=torch.tensor(r))
    for to_end in (False, True):
        found = turn_baseline(batch, to_end)
        for i in range(4):
            others = [j for j in range(4) if j != i]
            b = [sum(r[j] for j in others if last[j] == turn) / max(1, sum(last[j] >= turn for j in others))
                 for turn in range(3)]
            for t in range(int(batch.mask[i].sum())):
                turn = sum(column <= t for column in batch.before[i])
                end = 3 if to_end else last[i] + 1
                assert found[i, t].item() == pytest.approx(r[i] - sum(b[turn:end]))
    one = turn_baseline(replace(batch, before=({},) * 4))
    assert one[:, 0].tolist() == pytest.approx([4 / 3 * (x - sum(r) / 4) for x in r])


# -------------------------------------------------------------------------------------------------- continuations


def test_continuations_read_replies_and_get_them(monkeypatch):
    """Guards against a prefix without its replies, a limit that forgets them, turns that are counted anew, and an
    environment that is asked again what it has said, and says something else."""
    policy, batch, s = played()
    calls, graded = [], []
    monkeypatch.setattr("extras.turns.play", lambda model, prompts, uniforms, ends, rules, *others: (
        calls.append((prompts, rules.limits)), play(model, prompts, uniforms, ends, rules, *others))[1])
    grade = lambda text, puzzle, turns: graded.append((text, turns)) or guess_task.grade(text, puzzle, turns)
    batch.ask.policy = policy._replace(task=SimpleNamespace(**vars(guess_task) | {
        "grade": grade, "reply": lambda *asked: guess_task.reply(*asked) and "\nlower\n"}))
    assert batch.ask.rollout_values(batch.mask).isfinite().all()  # before every token
    (prompts, limit), = calls
    expected = []
    for i, t in sorted(batch.mask.nonzero().tolist(), key=lambda pair: pair[1]):  # shortest first, stable
        text, places = whole(policy, batch, i)
        expected.append(text[: places[t]])
    assert prompts == expected
    start = len(policy.prompt(batch.puzzles[0]))
    assert limit.tolist() == [s.max_new_tokens + start - len(text) for text in expected]
    for (text, turns), begun in zip(graded, expected):
        assert text.startswith(decode(policy, begun[start:], {})[0]) and len(turns) <= GUESSES
        assert re.sub(r"\n(higher|lower)\n", " ", text).split() == [turn.strip() for turn in turns]
    assert batch.ask.tokens_read >= sum(map(len, {tuple(x) for x in expected})) / 4


# -------------------------------------------------------------------------------------------- a hostile environment


@pytest.mark.slow
@pytest.mark.parametrize("said", [
    "x" * 10_000, "", "<|im_end|>", "<|endoftext|>" * 3, ("", "<|im_end|><|endoftext|>"), "higher\x00\ud7ff", "￿"])
def test_hostile_replies_are_characters_or_end_the_response(said):
    """Guards against a hang, an index past the last column, a foreign end token that ends a turn, and forged turns."""
    task = SimpleNamespace(**vars(guess_task) | {"reply": lambda turns, puzzle, chat: said})
    policy, batch, s = played(2, 4, 30, task)
    own = "".join((said,) if isinstance(said, str) else said)
    for i, replies in enumerate(batch.before):
        text, places = whole(policy, batch, i)
        assert len(text) - len(policy.prompt(batch.puzzles[0])) <= 30 and not batch.ended[i]
        for words in replies.values():
            ends = sum(token in policy.tokenizer.end_tokens for token in words)
            assert ends == (0 if isinstance(said, tuple) else own.count("<|"))
            if isinstance(said, tuple):
                assert policy.tokenizer.decode(words)[0] == own
    if len(own) > 1000:
        assert not any(batch.before) and (batch.mask.sum(1) <= 30).all()


# ------------------------------------------------------------------------------------------------------------ logs


def test_the_credit_log_has_turns_and_replies(fifty):
    """Guards against a reply at another response or place, and columns in a task of single turns."""
    _, batch, _ = fifty
    log = log_columns(1, batch, instrument(batch, batch.mask.float(), Settings()))
    found = [dict() for _ in batch.before]
    for i, t, token in zip(log["reply_response"], log["reply_position"], log["reply_token"]):
        found[i].setdefault(int(t), []).append(int(token))
    assert found == [{t: said for t, said in replies.items() if said} for replies in batch.before]
    for i, t, turn in zip(log["response"], log["position"], log["turn"]):
        assert turn == sum(column <= t for column in batch.before[i])
    assert [str(log[name].dtype) for name in ("turn", "reply_position", "reply_token")] == ["uint16", "uint16", "int32"]
    without = SimpleNamespace(**{key: value for key, value in vars(guess_task).items() if key != "reply"})
    single = log_columns(1, replace(batch, task=without), instrument(batch, batch.mask.float(), Settings()))
    assert sorted(set(log) - set(single)) == ["reply_position", "reply_response", "reply_token", "turn"]


def test_a_reply_belongs_to_a_response_of_the_whole_run(monkeypatch):
    """Also where that has a number that does not fit into the 16 bits of a step's log."""
    step = {"response": np.array([2**16 - 1], np.uint16), "reply_response": np.array([5], np.uint16)}
    monkeypatch.setattr(analyze, "with_measures", lambda log: log)
    monkeypatch.setattr(analyze, "read_metrics", lambda run: None)
    monkeypatch.setattr(analyze, "read_credit", lambda *_: [dict(step), dict(step)])
    assert analyze.read_log(None)["reply_response"].tolist() == [5, 2**16 + 5]
