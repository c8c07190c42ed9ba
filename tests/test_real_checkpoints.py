"""What only Qwen's own folders show: random checkpoints of their shape, with all 151,936 rows and their config.json,
written by transformers, and a tokenizer built like theirs. The oracles are transformers and hand computations.

Run it:  python -m pytest tests/test_real_checkpoints.py
"""
import csv
import functools
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM

import grpo
import qwen2_model
import train
from countdown_task import SYSTEM, USER, Codec, Problem, generate_problems
from qwen2_model import Answers, Prompts, generate, load_model, save_model

V = 151_936  # rows of the embedding, of which the tokenizers use fewer
REAL = {"qwen2": 151_665, "qwen3": 151_669}
KINDS = pytest.mark.parametrize("kind", REAL)
HF = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
PUBLISHED = dict(attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645, hidden_act="silu", vocab_size=V,
                 initializer_range=0.02, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000.0,
                 tie_word_embeddings=True, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False)
CONFIG = {
    "qwen2": PUBLISHED | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=32768,
                              max_window_layers=70, transformers_version="4.43.1"),
    "qwen3": PUBLISHED | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False,
                              sliding_window=None, max_window_layers=28, rope_scaling=None,
                              head_dim=32, transformers_version="4.51.0")}
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
QWEN25_3B = dict(hidden_size=2048, intermediate_size=11008, num_attention_heads=16, num_key_value_heads=2)
GENERATION = dict(bos_token_id=151643, pad_token_id=151643, do_sample=True, eos_token_id=[151645, 151643],
                  repetition_penalty=1.1, temperature=0.7, top_p=0.8, top_k=20, transformers_version="4.37.0")
PROBLEMS = functools.cache(generate_problems)  # every run asks for the same

# ------------------------------------------------------------------------------------------- a tokenizer like theirs

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
           "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]
WORDS = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
         "<|repo_name|>", "<|file_sep|>"]  # added, and not special
ADDED = {"qwen2": SPECIAL + WORDS}  # from 151,643 on
ADDED["qwen3"] = [*ADDED["qwen2"], "<tool_response>", "</tool_response>", "<think>", "</think>"]
# So that `<think>` is <th ink >, as in Qwen2.5, and `think` one token: these come before the merges that are learned.
MERGES = ["t h", "i n", "< th", "in k", "th ink", "< /", "> Ċ", ") </", "a n", "an s", "ans w", "answ e", "answe r"]
ATTEMPTS = " Maybe {2} - {0} = 2, 4 * 2 = 8. That is not {1}. How about {0} + {1} = 9? That works!\n"
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # what Qwen's comes to without tools


@functools.cache
def learned_merges() -> tuple[str, ...]:
    """Merges learned from Countdown prompts and attempts, whose tags are taken apart."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    text = f"system\n{SYSTEM}\nuser\n{USER}\nassistant\nLet me solve this step by step.\n".replace("<", "< ") + ATTEMPTS
    corpus = [text.format(*p.numbers, numbers=list(p.numbers), target=p.target) for p in generate_problems(50, "train")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2000, min_frequency=2, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tuple(" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"])


@functools.cache
def byte_pairs() -> dict:
    """Merges, and their tokens with others of random bytes, 151,643 in all."""
    letters, chance = sorted(pre_tokenizers.ByteLevel.alphabet()), random.Random(0)
    merges = list(dict.fromkeys([*MERGES, *learned_merges()]))
    vocab = {name: i for i, name in enumerate(dict.fromkeys(letters + [m.replace(" ", "") for m in merges]))}
    while len(vocab) < 151_643:
        vocab.setdefault("".join(chance.choices(letters, k=chance.randint(3, 6))), len(vocab))
    return dict(vocab=vocab, merges=merges)


def write_tokenizer(folder: Path, kind: str) -> None:
    """tokenizer.json and tokenizer_config.json laid out as Qwen's."""
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    added = [dict(id=151_643 + i, content=name, special=name in SPECIAL, **plain) for i, name in enumerate(ADDED[kind])]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern={"Regex": PATTERN}, behavior="Isolated", invert=False)
    bpe = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="",
               fuse_unk=False, byte_fallback=False, **byte_pairs())
    (folder / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=dict(type="NFC"),
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]), post_processor=byte_level,
        decoder=byte_level, model=bpe)))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="Qwen2Tokenizer", add_bos_token=False, add_prefix_space=False, bos_token=None, unk_token=None,
        eos_token="<|im_end|>", pad_token="<|endoftext|>", errors="replace", model_max_length=131072,
        split_special_tokens=False, chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
        additional_special_tokens=SPECIAL[1:],
        added_tokens_decoder={str(a["id"]): {k: v for k, v in a.items() if k != "id"} for a in added})))


# ---------------------------------------------------------------------------------- checkpoints, and what they can say

START = [*zip([" ", "5", " -", " ", "3", " =", " ", "2", "\n"], "FRRFRRFRF")]  # tokens and their roles
CLOSE = {"three": [*zip(["</", "think", ">\n"], "SSS")], "one": [("</think>", "S"), ("\n", "F")]}
ANSWER = [*zip(["<", "answer", ">", "4", " *", " (", "5", " -", " ", "3", ")</", "answer", ">"], "SSSRRRRRFRRSS")]
TEXT, PROBLEM = " 5 - 3 = 2\n</think>\n<answer>4 * (5 - 3)</answer>", Problem((3, 4, 5), 8)


def make(folder: Path, kind: str, dtype: torch.dtype, change=lambda hf: None, std: float = 1.0, **sizes) -> None:
    """A random checkpoint, written by transformers, with a config.json as Qwen writes it."""
    make_config, make_model = HF[kind]
    config = CONFIG[kind] | SMALL | sizes | {"torch_dtype": str(dtype).removeprefix("torch.")}
    torch.manual_seed(0)
    hf = make_model(make_config.from_dict(config))
    with torch.no_grad():
        for name, p in hf.named_parameters():
            size = (2 * std if "embed" in name else std) / p.shape[-1] ** 0.5
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(std=size)
        change(hf)
    hf.to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def plant(hf: torch.nn.Module, real: int, spoken: list[int]) -> None:
    """Let it say `spoken` only, in an order that depends on what it read; or a padded row, if that were allowed.

    Every token adds 3, and those 12, to the first channel of the residual stream, which is a logit's largest part.
    """
    rows = hf.get_input_embeddings().weight
    rows[:, 0], rows[spoken, 0], rows[real:, 0] = 3, 12, 1000
    hf.model.norm.weight[0] = 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders like Qwen2.5-0.5B-Instruct and Qwen3-0.6B, small but for the vocabulary."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in REAL}
    for kind, folder in made.items():
        write_tokenizer(folder, kind)
        pieces = [piece for piece, _ in START + CLOSE["three"] + ANSWER] + [*ADDED[kind], "</think>", "."]
        encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(pieces)
        spoken = list({i for e in encoded for i in e.ids})
        make(folder, kind, torch.bfloat16, lambda hf: plant(hf, REAL[kind], spoken), std=0.3)
        (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    yield made
    for folder in made.values():
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def codecs(folders):
    """Their codecs."""
    return {kind: Codec(folder) for kind, folder in folders.items()}


def reference(folder: Path, dtype=torch.float32) -> torch.nn.Module:
    """The same folder in transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def real_logits(hf: torch.nn.Module, prompt: list[int], answer: list[int], real: int) -> Tensor:
    """transformers' logits (len(answer), real) in fp64 before each token of the answer, of real tokens only."""
    return hf(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1, :real].double()


def ids_of(codec: Codec, pieces: list[tuple[str, str]]) -> list[int]:
    """The token of each piece."""
    encoded = [codec.tokenizer.encode(piece, add_special_tokens=False).ids for piece, _ in pieces]
    assert all(len(ids) == 1 for ids in encoded)
    return [ids[0] for ids in encoded]


# ------------------------------------------------------------------------------------------- 1. tokenizer and prompt


@KINDS
def test_the_tokenizer_is_laid_out_as_qwens(kind, codecs):
    """Guards against these tests losing their point: ids, tags of three tokens, and rows that no token has."""
    codec, name = codecs[kind], codecs[kind].tokenizer.id_to_token
    assert codec.size == REAL[kind] < V and codec.chat and codec.end_tokens == [151645, 151643]
    tags = [[name(i) for i in codec.tokenizer.encode(tag).ids] for tag in ("<think>", "</think>\n", "<answer>")]
    one = [["<think>"], ["</think>", "Ċ"]], ["<th", "ink", ">"], ["</", "think", ">Ċ"]
    assert tags == [*(one[0] if kind == "qwen3" else one[1:]), ["<", "answer", ">"]]
    if kind == "qwen3":
        assert codec.tokenizer.encode("<think></think>").ids == [151667, 151668]


@KINDS
def test_prompt_equals_transformers(kind, folders, codecs):
    """Guards against another split of ChatML than transformers', whose tokenizer, template and text are independent."""
    fast, lengths, frames = PreTrainedTokenizerFast(tokenizer_file=str(folders[kind] / "tokenizer.json")), [], set()
    for p in [PROBLEM, Problem((44, 19, 35), 98), Problem((2, 3, 5, 7), 100), *generate_problems(20, "heldout")]:
        user = USER.format(numbers=list(p.numbers), target=p.target)
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        text = fast.apply_chat_template(chat, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
        ids = codecs[kind].prompt(p)
        assert ids == fast(text + "Let me solve this step by step.\n<think>", add_special_tokens=False).input_ids
        frames.add(fast.decode(ids).replace(str(list(p.numbers)), "NUMBERS").replace(f"equals {p.target}.", "TARGET"))
        lengths.append(len(ids))
    assert len(frames) == 1 and frames.pop().count("NUMBERS") == 1
    assert 120 < min(lengths) and max(lengths) < 160
    assert ids[-1] == 151667 if kind == "qwen3" else codecs[kind].tokenizer.decode(ids[-3:]) == "<think>"


@KINDS
def test_text_of_tokens_from_the_whole_vocabulary(kind, codecs):
    """Guards against a token of the large vocabulary, added or half a character, with other text than the library's."""
    codec, chance = codecs[kind], random.Random(0)
    for _ in range(50):
        ids = [chance.randrange(codec.size) for _ in range(30)] + chance.sample(range(151_646, codec.size), 4)
        text, spans = codec.decode([*ids, 151643])
        assert text == codec.tokenizer.decode(ids, skip_special_tokens=False) and spans[-1] == (len(text),) * 2


# ----------------------------------------------------------------------------------------------- 2. sampled responses


@KINDS
def test_right_responses_from_model_to_reward(kind, folders, codecs):
    """Guards against an end token that does not end, is text or filler, and tags that only count as three tokens (or as
    one): responses planted by their random numbers go through sampler, decoder, roles and reward."""
    codec, hf = codecs[kind], reference(folders[kind])
    written = {close: START + CLOSE[close] + ANSWER for close in (CLOSE if kind == "qwen3" else ["three"])}
    ids = {close: ids_of(codec, pieces) for close, pieces in written.items()}
    assert codec.tokenizer.encode(TEXT).ids == ids["one" if kind == "qwen3" else "three"]
    ended = [(close, end) for close in written for end in codec.end_tokens]
    scripts = [ids[close] + [end] for close, end in ended]
    scripts += [ids["three"] + ids_of(codec, START[:1]), [151645], [151643]]  # cut off by the limit; empty
    prompt, chance = codec.prompt(PROBLEM), torch.full((len(scripts), len(ids["three"]) + 1), 0.5, dtype=torch.float64)
    for i, script in enumerate(scripts):
        with torch.no_grad():
            p = real_logits(hf, prompt, script, REAL[kind]).softmax(-1)  # (L, real)
        taken = p[range(len(script)), script]
        assert taken.min() > 1e-4  # so that rounding can't tip a neighbour over
        chance[i, : len(script)] = p.cumsum(-1)[range(len(script)), script] - taken / 2
    model = load_model(folders[kind])
    model.real_vocab, n = codec.size, len(ended)
    batch = grpo.rollout(model, codec, [PROBLEM], chance)
    assert [row[m].tolist() for row, m in zip(batch.tokens, batch.mask)] == scripts
    assert batch.text == [TEXT] * n + [TEXT + " ", "", ""] and batch.ended.tolist() == [True] * n + [False, True, True]
    torch.testing.assert_close(batch.reward, torch.tensor([1.1] * n + [1.06, 0.0, 0.0]))
    for i, (close, _) in enumerate(ended):
        letters = "".join(letter for _, letter in written[close]) + "S"
        assert "".join("FRS"[role] for role in batch.role[i][batch.mask[i]]) == letters
        answer = [t >= len(letters) - 1 - len(ANSWER) for t in range(len(letters))]
        assert batch.in_answer[i][batch.mask[i]].tolist() == answer
        assert [TEXT[slice(*span)] for span in batch.spans[i]] == [piece for piece, _ in written[close]] + [""]
    assert batch.role[-2:, 0].tolist() == [2, 2] and not batch.in_answer[-2:].any()


@KINDS
def test_generation_config_is_ignored(kind, folders, codecs):
    """Guards against top-k, temperature, top-p or a repetition penalty: they would make the recorded log-probs wrong.

    n evenly spaced random numbers give every token n p, +- 1.
    """
    n, model, hf = 300, load_model(folders[kind]), reference(folders[kind])
    model.real_vocab, prompt = codecs[kind].size, codecs[kind].prompt(PROBLEM)
    grid = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    tokens = generate(model, [prompt], grid, codecs[kind].end_tokens).tokens[:, 0]
    with torch.no_grad():
        p = real_logits(hf, prompt, [0], REAL[kind])[0].softmax(-1)
    counts = torch.bincount(tokens, minlength=REAL[kind])
    assert ((counts - n * p).abs() <= 1.001).all()
    assert (counts > 0).sum() > 20 and p.max() < 0.5 and len(set(prompt) & set(tokens.tolist())) > 5


# ---------------------------------------------------------------------------------- 3. rows that no token stands for


@KINDS
def test_padded_rows_are_neither_sampled_nor_scored(kind, folders, codecs, monkeypatch):
    """Guards against a share of the probability, or of the gradient, for rows 151,665 to 151,935: here they have nearly
    all of it. The responses have more tokens than the logits of one piece."""
    codec, real = codecs[kind], REAL[kind]
    model, hf = load_model(folders[kind]), reference(folders[kind])
    model.real_vocab, prompts, G, T = codec.size, [codec.prompt(p) for p in generate_problems(2, "train")], 2, 6
    monkeypatch.setattr(qwen2_model, "LOGITS_AT_ONCE", 2**20)  # six tokens
    chance = torch.rand(2 * G, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples, greedy = generate(model, prompts, chance, []), generate(model, prompts, chance[:, :2], [], temperature=0.0)
    assert max(samples.tokens.max(), greedy.tokens.max()) < real
    assert samples.mask.all() and samples.tokens.unique().numel() > 6
    credit = torch.randn(2 * G, T, generator=torch.Generator().manual_seed(1))
    got = grpo.response_logprobs(model, Answers(Prompts(model, prompts), torch.arange(2).repeat_interleave(G)),
                                 samples.tokens, samples.mask)
    (got * credit).sum().backward()
    for prompt, rows in zip(prompts, torch.arange(2 * G).split(G)):
        answers = samples.tokens[rows]  # (G, T)
        whole = torch.cat((torch.tensor([prompt] * G), answers), 1)
        logits = hf(whole, logits_to_keep=T + 1).logits[:, :-1]
        assert logits.argmax(-1).min() >= real  # it would say nothing else
        log_p = logits[..., :real].double().log_softmax(-1)
        taken = log_p.gather(-1, answers[..., None])[..., 0]
        (taken * credit[rows]).sum().backward()
        log_p = log_p.detach()
        for mine, theirs in ((samples.logprob, taken), (got, taken), (samples.entropy, -(log_p.exp() * log_p).sum(-1))):
            torch.testing.assert_close(mine[rows].double(), theirs, atol=2e-4, rtol=0)
    ours, theirs = model.output_weight.grad, hf.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.abs().max().item(), rtol=0)
    assert not ours[real:].any() and ours[:real].any()


# ---------------------------------------------------------------------------------------- 4. files of the large models


@pytest.mark.parametrize("tied, sizes", [(True, QWEN25_3B), (False, {})], ids=["3B, one layer", "untied"])
def test_a_sharded_checkpoint_is_read_whole(tied, sizes, tmp_path):
    """Guards against a shard, a tensor or an untied output matrix that is lost, and against unclear words for a shard
    that was never fetched."""
    config = CONFIG["qwen2"] | SMALL | sizes | {"tie_word_embeddings": tied, "num_hidden_layers": 1 + (not tied)}
    try:
        with torch.device("meta"):
            hf = Qwen2ForCausalLM(Qwen2Config.from_dict(config)).to(torch.bfloat16)
        hf = hf.to_empty(device="cpu")
        hf.tie_weights()
        for i, p in enumerate(hf.parameters()):
            p.data.view(-1)[:] = torch.randn(1009, generator=torch.Generator().manual_seed(i)).bfloat16().repeat(
                p.numel() // 1009 + 1)[: p.numel()]
        hf.save_pretrained(tmp_path / "theirs", max_shard_size="100MB" if tied else "1MB")
        del hf
        (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
        shards = sorted((tmp_path / "theirs").glob("*.safetensors"))
        save_model(load_model(tmp_path / "theirs", dtype=torch.bfloat16), tmp_path / "ours")
        with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as ours:
            left = set(ours.keys())
            for shard in shards:
                with safe_open(shard, "pt") as theirs:
                    assert all(torch.equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in theirs.keys())
                    left -= set(theirs.keys())
            assert len(shards) > 2 and not left and ("lm_head.weight" in ours.keys()) != tied
        shards[1].unlink()
        with pytest.raises(FileNotFoundError, match=f"^[^\n]*{shards[1].name} is missing$"):
            load_model(tmp_path / "theirs")
    finally:
        shutil.rmtree(tmp_path)


@KINDS
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sixteen_bit_files(kind, stored, tmp_path):
    """Guards against bits lost on the way to float32, and a bfloat16 model further from the truth than transformers':
    both are compared with float32, where rounding may go either way."""
    try:
        make(tmp_path, kind, stored, hidden_size=128, num_hidden_layers=4, intermediate_size=256)
        tokens = torch.randint(REAL[kind], (1, 24), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            exact, ours = reference(tmp_path)(tokens).logits, load_model(tmp_path)(tokens)
            torch.testing.assert_close(ours, exact, atol=1e-4, rtol=0)
            rounded = load_model(tmp_path, dtype=torch.bfloat16)
            assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16} and exact.std() > 1
            logits = rounded(tokens), reference(tmp_path, torch.bfloat16)(tokens).logits
            ours, theirs = (x.float() - exact for x in logits)
        assert ours.square().mean() < 1.5**2 * theirs.square().mean() and ours.abs().max() < 1.5 * theirs.abs().max()
    finally:
        shutil.rmtree(tmp_path)


# ------------------------------------------------------------------------------------------------ 5. a step of train.py


@pytest.fixture(scope="module", params=[(k, d) for k in REAL for d in ("float32", "bfloat16")], ids="-".join)
def finished(request, folders, tmp_path_factory):
    """A step of train.py on each of the folders: kind, dtype, the run folder, and what `update` was called with."""
    (kind, dtype), folder, calls, update = request.param, tmp_path_factory.mktemp("runs") / "run", [], grpo.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "generate_problems", PROBLEMS)
        patch.setattr(grpo, "update", lambda *args, **options: calls.append(args) or update(*args, **options))
        # a random model earns nothing, and would learn nothing
        patch.setattr(grpo, "reward", lambda text, *_: {"reward": len(text) % 7 / 6, "format": 0.0, "answer": 0.0})
        patch.setattr(sys, "argv", ["train.py", *(
            f"--model {folders[kind]} --out {folder} --dtype {dtype} --steps 1 --questions 2 --answers 2 --lr 0.01 "
            f"--max_new_tokens {6 if dtype == 'float32' else 3} --eval_problems 2").split()])
        train.main()
    yield kind, dtype, folder, calls[0]
    shutil.rmtree(folder)


def test_a_step_scores_real_tokens_only(finished, folders):
    """Guards against a train.py that does not tell the model how many tokens there are."""
    kind, dtype, run, (_, _, prompts, batch, credit) = finished
    log, hf = np.load(run / "credit" / "step-000001.npz"), reference(folders[kind], getattr(torch, dtype))
    assert log["token"].max() < REAL[kind] and credit.any()
    with torch.no_grad():
        rows = [real_logits(hf, prompts[i // 2], batch.tokens[i][batch.mask[i]].tolist(), REAL[kind]) for i in range(4)]
    log_p = torch.cat(rows).log_softmax(-1)  # (N, real)
    expected = log_p[range(len(log_p)), log["token"]], -(log_p.exp() * log_p).sum(-1)
    for name, facts in zip(("logprob", "entropy"), expected):
        np.testing.assert_allclose(log[name], facts, atol=2e-4 if dtype == "float32" else 1.0, rtol=0)
    row = list(csv.DictReader((run / "metrics.csv").open()))[1]
    assert float(row["ratio_error"]) < (1e-4 if dtype == "float32" else 0.5) and float(row["grad_norm"]) > 0


def test_a_step_leaves_the_padded_rows_alone(finished, folders):
    """Guards against a gradient, or an optimizer, that moves rows which no token has."""
    kind, dtype, run, _ = finished
    both = folders[kind], run / "checkpoint"
    before, after = (load_model(folder, dtype=getattr(torch, dtype)).output_weight for folder in both)
    assert torch.equal(before[REAL[kind] :], after[REAL[kind] :])
    assert (before[: REAL[kind]] != after[: REAL[kind]]).any()


def test_transformers_reads_the_checkpoint(finished, folders):
    """Guards against a checkpoint that is not the trained model to transformers, or lost its tokenizer, or its
    generation_config.json, on the way."""
    kind, dtype, run, _ = finished
    folder, ids = run / "checkpoint", Codec(folders[kind]).prompt(PROBLEM)
    hf, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert str(hf.dtype) == f"torch.{dtype}" and type(hf) is HF[kind][1]
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((folder / "generation_config.json").read_text()) == GENERATION
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids and len(tokenizer) == REAL[kind]
    with torch.no_grad():
        exact, theirs = (m(torch.tensor([ids])).logits[..., : REAL[kind]].float() for m in (reference(folder), hf))
        ours = load_model(folder, dtype=hf.dtype)(torch.tensor([ids]))[..., : REAL[kind]].float()
    ours, theirs = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert ours < (1e-5 if dtype == "float32" else 1.5 * theirs) and exact.std() > 1
