"""Adapters against PEFT on small random models, and as a whole run writes and reads them."""
import json
from copy import deepcopy
import shutil
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import countdown_task
import start
import train
from extras.lora import add_adapters, load_adapters, merged, peft_tensors, save_adapters
from grpo import update
from methods.queries import Queries
from models import talk
from plumbing.model_folder import is_base
from plumbing.optimizer import Optimizer
from plumbing.runs import read_metrics
from qwen2_model import load_model, save_model
from rollout import rollout
from settings import Settings
from tests.fixtures import BUNDLED
from tests.random_checkpoints import FAMILIES, assert_close, hf_model, random_tokens
from tests.test_train import puzzles_once, run  # noqa: F401  a fixture

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 3, 5.0
TINY = "--questions 2 --responses 3 --max_new_tokens 12 --eval_problems 2 --pass_at 0 --lr 1e-3 --lora_rank 4".split()


def of_peft(family, folder, targets=TARGETS, trained="lora_B", tied=False, **options):
    """A small random model in `folder`/base, and a PEFT model on it with an adapter, in `folder`/adapter."""
    hf = hf_model(family, tie_word_embeddings=tied)
    hf.save_pretrained(folder / "base")
    torch.manual_seed(1)
    peft = get_peft_model(hf, LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, "target_modules": targets,
                                            "task_type": "CAUSAL_LM"} | options))
    peft.save_pretrained(folder / "begun")
    for name, p in peft.named_parameters():
        if trained in name:
            torch.nn.init.normal_(p, std=0.2 if "lora_B" in name else 0.1)
    peft.save_pretrained(folder / "adapter")
    return peft


def ours(folder, dtype=torch.float32, adapter="adapter", rank=RANK, alpha=ALPHA):
    """Our model of `folder`/base with adapters, those of `folder`/adapter or, without one, new."""
    model = load_model(folder / "base", dtype=dtype)
    add_adapters(model, rank, alpha, 0)
    if adapter:
        load_adapters(model, folder / adapter, rank, alpha, folder / "base")
    return model


@FAMILIES
def test_logits_and_gradients_are_those_of_peft(family, tmp_path):
    """Guards against rows in another order, a part that takes another's A, and a scale or gradient that is off."""
    peft, model = of_peft(family, tmp_path).double(), ours(tmp_path, torch.float64)
    tokens, weight = random_tokens(2, 9), torch.randn(2, 9, 23).double()
    plain = load_model(tmp_path / "base", dtype=torch.float64)(tokens)
    sgd = [torch.optim.SGD(weights, 1e-3) for weights in (
        Optimizer(model, 0.01).weights.values(), [p for p in peft.parameters() if p.requires_grad])]
    for model.checkpoint_activations in (True, False):
        before = {name: x.clone() for name, x in peft_tensors(model).items()}
        mine, theirs = model(tokens), peft(tokens).logits
        assert (theirs - plain).std() > 0.5
        assert_close(mine, theirs, 1e-5)  # transformers computes norms and angles in float32
        for optimizer, logits in zip(sgd, (mine, theirs)):
            optimizer.zero_grad()
            (logits * weight).sum().backward()
            optimizer.step()
        expected = get_peft_model_state_dict(peft)
        assert before.keys() == expected.keys() and len(before) == 2 * 7 * 2
        for name, x in peft_tensors(model).items():
            assert_close(x, expected[name], 1e-6)
            assert (x - before[name]).abs().max() > 5e-3
    assert all((p.grad is None) == ("_adapter." not in name) for name, p in model.named_parameters())


@FAMILIES
def test_a_new_adapter_changes_nothing_and_has_the_distribution_of_peft(family, tmp_path):
    """Guards against a B that is not 0, an A of another size, and numbers that depend on the state of torch."""
    peft, model = of_peft(family, tmp_path, trained="none"), ours(tmp_path, adapter=None)
    tokens, again = random_tokens(2, 9), ours(tmp_path, adapter=None)
    assert torch.equal(model(tokens), load_model(tmp_path / "base")(tokens))
    for name, x in get_peft_model_state_dict(peft).items():
        mine, bound = peft_tensors(model)[name], x.shape[1] ** -0.5 * ("lora_A" in name)
        assert mine.shape == x.shape and mine.dtype == x.dtype and torch.equal(mine, peft_tensors(again)[name])
        assert all(0.9 * bound <= numbers.abs().max() <= bound for numbers in (mine, x))


@pytest.mark.slow
@pytest.mark.parametrize("family, tied, init", [
    ("qwen2", True, True), ("qwen3", False, "gaussian"), ("llama", True, "orthogonal"), ("qwen2", False, "eva"),
    ("qwen3", True, False)])
def test_transformers_and_peft_read_what_we_write(family, tied, init, tmp_path):
    """Both folders have our logits, but for the rounding of merged weights, so all compute in float64; what PEFT writes
    comes back to the bit, however it drew A and B."""
    peft = of_peft(family, tmp_path, trained="lora_", tied=tied, init_lora_weights=init, r=4)
    model, tokens = ours(tmp_path, rank=4), random_tokens(2, 20)
    save_model(merged(model), tmp_path / "checkpoint")
    save_adapters(model, tmp_path / "again", tmp_path / "base")
    read = lambda name: AutoModelForCausalLM.from_pretrained(tmp_path / name)
    exact = deepcopy(model).double()
    for hf in (peft, PeftModel.from_pretrained(read("base"), tmp_path / "again"), read("again"), read("checkpoint")):
        with torch.no_grad():
            assert_close(exact(tokens), hf.double()(tokens).logits, 1e-5)
    assert torch.equal(ours(tmp_path, adapter="again", rank=4)(tokens), model(tokens))
    mine, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("again", "adapter"))
    assert mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())


@torch.no_grad()
@pytest.mark.parametrize("options, said", [
    (dict(use_rslora=True), "sets use_rslora to a value that is not supported: merge the adapter"),
    (dict(use_dora=True, tied=True), "sets use_dora .*: merge the adapter"), (dict(bias="all"), "sets bias to"),
    (dict(modules_to_save=["lm_head"]), "sets modules_to_save to"), (dict(rank_pattern={"q_proj": 4}), "rank_pattern"),
    (dict(lora_alpha=6), "another rank or alpha: pass --lora_rank 3 --lora_alpha 6"),
    (dict(targets=["q_proj", "v_proj"], tied=True),
     "the adapter in .* lacks 20 tensor.s., such as base_model.*lora_A.weight: merge"),
    (dict(targets=[*TARGETS, "lm_head"]), "has unknown 3 tensor.s., such as base_model.model.lm_head.*: merge"),
    *((dict(targets=[*TARGETS, name], tied=True), f"{name}.*: give its model") for name in ("lm_head", "embed_tokens")),
    *((dict(init_lora_weights=name, tied=tied), "sets init_lora_weights to .* before you save it, .* with path_initial")
      for name, tied in (("pissa", False), ("pissa_niter_4", False), ("olora", True)))], ids=str)
def test_another_adapter_is_refused_and_what_is_advised_instead_is_the_same_model(options, said, tmp_path):
    """Guards against another function without a word, and against advice that leads to one: merging into a matrix that
    is the embedding, too, or what peft, on loading, finds another start for."""
    peft, tokens = of_peft("llama", tmp_path, trained="lora_", **options), random_tokens(2, 20)
    with pytest.raises(ValueError, match=said):
        ours(tmp_path)
    right, base = peft(tokens).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if "give" in said:
        base.lm_head.weight, base.config.tie_word_embeddings = torch.nn.Parameter(base.lm_head.weight.clone()), False
    if "before" in said:
        peft.save_pretrained(tmp_path / "again", path_initial_model_for_weight_conversion=str(tmp_path / "begun"))
        assert_close(ours(tmp_path, adapter="again", rank=2 * RANK, alpha=2 * ALPHA)(tokens), right, 1e-4)
    else:
        peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
    peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_close(load_model(tmp_path / "merged")(tokens), right, 1e-4)


def test_an_adapter_belongs_to_the_base_that_it_names(tmp_path):
    """Guards against another function without a word, and against a refusal of the same weights in another folder."""
    of_peft("llama", tmp_path)
    for copy in ("copy", "other"):
        shutil.copytree(tmp_path / "base", tmp_path / copy)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    save_file({name: x * 1.01 for name, x in tensors.items()}, tmp_path / "other" / "model.safetensors")
    file = tmp_path / "adapter" / "adapter_config.json"
    for named, taken in ((tmp_path / "base", True), (tmp_path / "copy", True), (tmp_path / "other", False),
                         ("/gone/base", False), ("Owner/Base", True), ("Owner/Model", False)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(named)}))
        refused = pytest.raises(ValueError, match=f"is an adapter of {named}, not of {tmp_path / 'base'}: pass that")
        with nullcontext() if taken else refused:
            ours(tmp_path)


def test_a_name_of_the_hub_is_that_of_the_model_s_folder(tmp_path):
    """Or of a link to it, or the hub's cache. Guards against another function, because a folder above has the name."""
    taken = ["Tiny", "a/tiny", "Owner--Tiny", "links/Tiny", "models--Owner--Tiny/snapshots/0a1b"]
    others = ["Other--Tiny", "NotTiny", "Tiny-Base", "Tiny/checkpoint", "Tiny/snapshots/0a1b",
              "models--Owner--Tiny/checkpoint", "models--Other--Tiny/snapshots/0a1b"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "Tiny").symlink_to(tmp_path / "NotTiny")
    for place in taken + others:
        (tmp_path / place).resolve().mkdir(parents=True, exist_ok=True)
        assert is_base("Owner/Tiny", tmp_path / place) == (place in taken), place


def test_adapters_in_other_formats_are_told_from_broken_ones(tmp_path):
    """And pickled weights, written again as advised, load to the bit."""
    of_peft("llama", tmp_path).save_pretrained(tmp_path / "pickled", safe_serialization=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    PeftModel.from_pretrained(base, tmp_path / "pickled").save_pretrained(tmp_path / "again")
    again, right = (peft_tensors(ours(tmp_path, adapter=name)) for name in ("again", "adapter"))
    assert all(torch.equal(x, right[name]) for name, x in again.items())
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "adapters.safetensors").touch()
    for folder, said in (("pickled", "holds pickled weights: load it with PeftModel.from_pretrained"),
                         ("mlx", "an adapter of mlx-lm: put it"), (".", "adapters in folders of their own")):
        with pytest.raises(ValueError, match=said):
            ours(tmp_path, adapter=folder)


# ------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_trains_adapters_alone_and_is_resumed_to_the_byte(dtype, tmp_path):
    """Guards against a state with the frozen weights, a base that moves, and a run that goes on from new adapters."""
    flags = [*TINY, "--dtype", dtype, "--mitigation", "ppo", "--kl", 0.1, "--updates_per_batch", 2,
             "--reward", "random"]
    run(*flags, "--steps", 4, "--out", tmp_path / "whole")
    run(*flags, "--steps", 2, "--out", tmp_path / "part")
    run("--resume", tmp_path / "part", "--steps", 4)
    whole, part = ({f.relative_to(tmp_path / name): f.read_bytes() for f in (tmp_path / name).rglob("*")
                    if f.suffix in (".safetensors", ".npz", ".txt")} for name in ("whole", "part"))
    assert len(whole) == 2 + 1 + 4 + 1  # weights of the model, the critic and the adapter, credit, samples
    assert [file for file, content in whole.items() if part[file] != content] == []
    state = torch.load(tmp_path / "part" / "state.pt", weights_only=True)["learners"]["optimizer"]
    metrics, start = read_metrics(tmp_path / "whole"), load_model(BUNDLED)
    assert len(state["weights"]) == 4 * 4 * 2 and {name.split(".")[-1] for name in state["weights"]} == {"A", "B"}
    assert metrics["ratio_error"][1:].max() < (1e-5 if dtype == "float32" else 0.05)
    assert metrics["kl"][1] > 0 and metrics["grad_norm"][1:].min() > 0
    trained = load_model(tmp_path / "whole" / "checkpoint", dtype=getattr(torch, dtype))
    for name, w in start.to(getattr(torch, dtype)).named_parameters():
        assert torch.equal(w, trained.get_parameter(name)) != (name.startswith("layers.") and w.dim() == 2), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that trained an adapter."""
    folder = tmp_path_factory.mktemp("trained") / "r"
    run(*TINY, "--reward", "random", "--steps", 2, "--out", folder)
    return folder / "checkpoint"


@pytest.mark.slow
def test_the_reference_shares_the_base_and_keeps_the_adapters_it_began_with(trained):
    """Guards against a second copy of the base, and a reference that learns, or lacks the adapters it was given."""
    s = Settings(kl=0.1, lora_rank=4, max_new_tokens=12, questions=2, responses=3, reward="random", lr=0.01,
                 adapter=str(trained / "adapter"))
    policy, puzzles = start.load_policy(s), countdown_task.load("train", 2)
    optimizer = Optimizer(policy.model, s.lr)
    before = rollout(policy, puzzles, s, 1)
    before.ask = Queries(policy, before, s, 1)
    update(policy, optimizer, before, before.mask.float(), s)
    after = rollout(policy, puzzles, s, 1)
    after.ask = Queries(policy, after, s, 1)
    assert not torch.equal(before.logprob[:, 0], after.logprob[:, 0])
    assert_close(before.ask.reference_logprob, before.logprob, 1e-5)
    for name, w in policy.reference.named_parameters():
        assert not w.requires_grad and (w is policy.model.get_parameter(name)) == ("_adapter." not in name)
    assert policy.reference.layers[0].qkv_adapter.B.any()
    assert_close(load_model(trained)(before.tokens), policy.reference(before.tokens), 1e-4)


@pytest.mark.slow
def test_the_command_line_takes_an_adapter_of_its_rank_alone(trained, tmp_path, refusal):
    """Guards against a traceback, and a run that resumes with another adapter."""
    folder = shutil.copytree(trained, tmp_path / "first") / "adapter"
    for flags, said in ((["--lora_rank", 0], "another rank or alpha: pass --lora_rank 4 --lora_alpha 32.0"),
                        (["--lora_alpha", 8], "another rank or alpha"),
                        (["--adapter", tmp_path], "adapter_config.json"),
                        (["--lora_rank", -1], "--lora_rank must be at least 0"), (["--lora_alpha", 0], "--lora_alpha"),
                        (["--model", folder], "pass it to --adapter, and its model to --model")):
        assert said in refusal(train, *TINY, "--adapter", folder, *flags, "--out", tmp_path / "x")
    for program in (train, talk):
        said = refusal(program, *TINY, "--adapter", folder, "--model", folder.parent)  # the merged one
        assert f"is an adapter of {BUNDLED}, not of {folder.parent}" in said
    run(*TINY, "--steps", 1, "--adapter", folder, "--out", tmp_path / "second")
    save_file({name: x + 1 for name, x in load_file(folder / "adapter_model.safetensors").items()},
              folder / "adapter_model.safetensors")
    assert "is not what" in refusal(train, "--resume", tmp_path / "second", "--steps", 2)
