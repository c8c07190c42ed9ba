"""A model folder as of Hugging Face: weights in one file or in shards, and what transformers reads beside them."""
import filecmp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plumbing.files import check_fields, read_json, read_tensors, require, write_json

# Tokenizers, chat templates and the defaults of `generate`, but not optimizer states or weights in other formats.
BESIDE = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*",
          "additional_chat_templates/*.jinja", "generation_config.json")
# Where a folder has no generation_config.json, transformers takes these from config.json.
GENERATION = ("eos_token_id", "bos_token_id", "pad_token_id", "do_sample", "temperature", "top_p", "top_k",
              "repetition_penalty")
# Fields of config.json that don't change the logits, or that `rope_parameters` reads.
INERT = {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache",
         "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "rope_parameters",
         "rope_scaling", "rope_theta", "partial_rotary_factor"}
SUPPORTED = {"hidden_act": "silu", "use_sliding_window": False, "is_causal": True, "mlp_bias": False,
             "pretraining_tp": 1, "quantization_config": False}  # what these must be where they are not empty
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of RoPE's type llama3
ROPE_REFUSED = ("config.json sets rope_type, factor or partial_rotary_factor to a value that is not supported: take a "
                "checkpoint with plain RoPE, or that of Llama 3")
# Fields of PEFT's adapter_config.json that may have any value, and what others must be unless they are empty.
ADAPTER_INERT = {"r", "lora_alpha", "task_type", "target_modules", "exclude_modules", "layers_to_transform",
                 "layers_pattern", "base_model_name_or_path", "revision", "auto_mapping", "peft_version",
                 "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size",
                 "eva_config", "loftq_config", "corda_config", "lora_ga_config"}  # these four: for init_lora_weights
# The others, as pissa, change the frozen model, too.
ADAPTER_ONLY = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
MERGE = "merge the adapter into its model with merge_and_unload of peft, and pass that to --model"
# Such initial values changed the frozen model, too, and peft may not find the same again when it loads the adapter.
MERGE_UNSAVED = ("merge the trained model with merge_and_unload of peft before you save it, and pass that to --model, "
                 "or save the adapter with path_initial_model_for_weight_conversion")
UNTIE = "give its model an lm_head.weight of its own, a copy of the embedding, and tie_word_embeddings=False, then "
FOREIGN_ADAPTER = {
    "adapter_model.bin": "pickled weights: load it with PeftModel.from_pretrained of peft, and save_pretrained it",
    "*adapters.safetensors": "an adapter of mlx-lm: put it into its model with `mlx_lm.fuse --dequantize`, and pass "
                             "that to --model",
    "*/adapter_config.json": "adapters in folders of their own: pass one of these to --adapter"}
FOREIGN = {  # what a folder holds instead of a model's weights
    "adapter_config.json": "a LoRA adapter: pass it to --adapter, and its model to --model",
    "*.gguf": "a GGUF file: after `pip install accelerate gguf`, load it with from_pretrained(folder, gguf_file=name, "
              "quantization_config=GgufConfig(dequantize=True)) of transformers, save_pretrained it, and copy the "
              "original model's config.json and tokenizer files",
    "pytorch_model*.bin": "pickled weights: load them with transformers, and write safetensors with save_pretrained"}


def files_beside(folder: Path) -> list[Path]:
    """What a folder holds beside config.json and the weights, and a checkpoint must have, too."""
    return sorted(file for pattern in BESIDE for file in folder.glob(pattern) if file.is_file())


def write_end_tokens(folder: Path, ends: list[int]) -> None:
    """Name all end tokens in generation_config.json, which others generate by, unless it names them; the rest stays."""
    file, config = folder / "generation_config.json", read_json(folder / "config.json")
    content = read_json(file, missing={name: config[name] for name in GENERATION if config.get(name) is not None})
    named = content.get("eos_token_id")
    named = [end for end in (named if isinstance(named, list) else [named]) if end in ends]
    if len({*named}) < len(ends):
        write_json(file, content | {"eos_token_id": list(dict.fromkeys(named + ends))})


def check_folder(folder: Path) -> None:
    """FileNotFoundError or ValueError where there is no model folder, but something that people take for one."""
    if not folder.is_dir() and folder.suffix != ".gguf":
        raise FileNotFoundError(f"there is no folder {folder}: make one with `hf download NAME --local-dir FOLDER`, or "
                                "without the hub as docs/running.md says")
    whole = any(folder.glob("model*.safetensors*"))  # also an index
    for pattern, found in FOREIGN.items():
        here = folder.match(pattern) or any(folder.glob(pattern))
        if here and (pattern == "adapter_config.json" or not whole):  # without its adapter it is another model
            raise ValueError(f"{folder} is {found}" if folder.is_file() else f"{folder} holds {found}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not a model folder: it has no config.json")
    require(not (folder / "metrics.csv").is_file(),
            f"{folder} is a run folder: name the model in it, {folder / 'checkpoint'}")


def check_supported(given: dict, family: Any, known: set[str]) -> None:
    """ValueError where a config.json, without its nulls, asks for something that qwen2_model.py doesn't have. family: a
    Family there. known: the fields that it reads."""
    layers = given.get("layer_types", [])
    unsupported = {name: (given.get(name, right) or False) != right for name, right in SUPPORTED.items()} | {
        "layer_types": type(layers) is not list or any(layer != "full_attention" for layer in layers),
        "attention_bias": not family.qkv_bias and given.get("attention_bias", False)}
    if family.further is not None:  # of a family that somebody adds, another field may matter
        others = given.keys() - {*known, *unsupported, *INERT, *family.further}
        unsupported |= {name: given[name] is not False for name in others}
    if any(unsupported.values()):
        names = ", ".join(name for name, asked in sorted(unsupported.items()) if asked)
        raise ValueError(f"config.json sets {names} to a value that is not supported: take a checkpoint without it")


def config_values(source: dict, families: dict[str, Any], types: dict[str, type]) -> dict:
    """The values of a Config of qwen2_model.py, whose fields have these types, from a parsed config.json. families: see
    ARCHITECTURES there. ValueError: see parse_config there."""
    given = {name: value for name, value in source.items() if value is not None}
    kind = given.get("model_type")
    require(isinstance(kind, str) and kind in families,
            f"model_type {kind!r:.50} is not supported, only {', '.join(families)}")
    family = families[kind]
    check_supported(given, family, set(types))
    check_fields(given, {"hidden_size": int, "num_attention_heads": int}, "config.json")
    D, H = given["hidden_size"], given["num_attention_heads"]
    key_heads = 0 if "num_key_value_heads" in source else family.key_heads  # `given` lacks what is null in `source`
    defaults = {"num_key_value_heads": key_heads or H, "head_dim": family.head_dim or D // max(H, 1),
                "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": family.positions}
    values = defaults | given | {"qkv_bias": family.qkv_bias, "qk_norm": family.qk_norm, "source": source,
                                 "rope": rope_parameters(given)}  # defaults as in transformers
    check_fields(values, types, "config.json")
    for name, field_type in types.items():
        if (field_type is int and not 1 <= values[name] < 2**24) or (field_type is float and values[name] <= 0):
            raise ValueError(f"config.json: {name} can't be {values[name]}")
    require(H % values["num_key_value_heads"] == values["head_dim"] % 2 == 0,
            "config.json: num_attention_heads must be a multiple of num_key_value_heads, head_dim even")
    return {name: values[name] for name in types}


def rope_parameters(config: dict) -> dict:
    """rope_theta, rope_type and, for the type llama3, its numbers, from a config.json without its nulls, wherever
    transformers 4 or 5 puts them. ValueError for another type, and where a number has two values: each version of
    transformers would read its own."""
    own, found = {name: config[name] for name in ("partial_rotary_factor", "rope_theta") if name in config}, {}
    for rope in (config.get("rope_parameters", {}), config.get("rope_scaling", {}), own):  # of version 5, 4 and both
        require(isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()),  # by layer
                ROPE_REFUSED)
        for name, value in rope.items():
            name = "rope_type" if name == "type" else name
            if value is not None and found.setdefault(name, value) != value:
                raise ValueError(f"config.json has two values of {name}, {[found[name], value]!r:.50}: leave only the "
                                 "right one")
    found = {"rope_theta": 10000.0, "rope_type": "default"} | found
    names = {"default": (), "llama3": LLAMA3}.get(found["rope_type"] if isinstance(found["rope_type"], str) else "")
    if names is None or found.get("partial_rotary_factor", 1) != 1 or not names and found.get("factor", 1) != 1:
        raise ValueError(ROPE_REFUSED)
    check_fields(found, dict.fromkeys(("rope_theta", *names), float), "config.json")
    if any(found[name] <= 0 for name in ("rope_theta", *names)) or names and found[LLAMA3[1]] >= found[LLAMA3[2]]:
        raise ValueError(f"config.json: rope_theta can't be {found['rope_theta']}" if not names else
                         f"config.json: the numbers of rope_type llama3 can't be {[found[name] for name in names]}")
    return {name: found[name] for name in ("rope_theta", "rope_type", *names)}


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors of a folder, or the shards that its index names; FileNotFoundError where one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    shards = {file.name: file.name for file in folder.glob("model-*.safetensors")}  # all, without an index
    content = read_json(index, missing={"weight_map": shards})
    check_fields(content, {"weight_map": dict}, index)
    files = [folder / name for name in sorted(set(content["weight_map"].values()))] or [single]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing")
    return files


def written_config(source: dict, rope: dict, dtype: torch.dtype) -> dict:
    """The content of a config.json with the fields of transformers 5, and of transformers 4 and mlx-lm 0.32."""
    name = str(dtype).removeprefix("torch.")
    scaling = {field: x for field, x in rope.items() if field != "rope_theta"}
    return source | {"rope_parameters": rope, "dtype": name, "rope_theta": rope["rope_theta"], "torch_dtype": name} | (
        {"rope_scaling": scaling} if rope["rope_type"] != "default" else {})


def read_weights(folder: Path, device: str | torch.device, dtype: torch.dtype, tied: bool,
                 layers: int) -> dict[str, Tensor]:
    """The tensors of a folder, by name. tied, layers: its config says that the output matrix is the embedding, and how
    many layers there are. ValueError where a file or tensor contradicts another, or the configuration."""
    found = {}
    for file in weight_files(folder):
        tensors = read_tensors(file, device, dtype)
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"{min(twice)} is in two of the files of {folder}: remove the one that is left over")
        # Without a constant that old versions of transformers saved.
        found |= {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if tied and "lm_head.weight" in found:  # safetensors' save_model keeps one name of a tensor that has two
        found.setdefault("model.embed_tokens.weight", found["lm_head.weight"])
    embedding = found.get("model.embed_tokens.weight")
    output = found.pop("lm_head.weight", embedding) if tied else found.get("lm_head.weight")
    require(not tied or embedding is None or output is embedding or torch.equal(output, embedding),
            f"{folder} has a lm_head.weight that is not the embedding, but its config.json ties the two: set "
            "tie_word_embeddings to false to use it, or remove the tensor")
    require(tied or output is not None, f"{folder} lacks lm_head.weight: set tie_word_embeddings to true in its "
            "config.json if the output matrix is the embedding, else download it again")
    require(layers <= len(found), f"config.json asks for {layers} layers, the checkpoint in {folder} has fewer")
    return found


def is_base(named: str, model: Path) -> bool:
    """Whether a model folder is the base that an adapter names: a folder, or else a name of the hub, OWNER/NAME. Then
    the model's folder, or the link to it, is named NAME or OWNER--NAME, or lies where the hub's cache has it."""
    base = Path(named)
    if base.is_dir() and not base.samefile(model):
        files, others = weight_files(base), weight_files(model)
        return len(files) == len(others) and all(filecmp.cmp(*pair, shallow=False) for pair in zip(files, others))
    real, hub = model.resolve(), named.lower().replace("/", "--")
    if real.parent.name == "snapshots" and real.parts[-3].lower() == f"models--{hub}":
        return True
    own = {model.absolute().name.lower(), real.name.lower()}
    return base.is_dir() or not base.is_absolute() and not own.isdisjoint({base.name.lower(), hub})


def read_adapter(folder: Path, rank: int, alpha: float, dtype: torch.dtype, model: Path) -> dict[str, Tensor]:
    """The tensors of an adapter that PEFT wrote; ValueError where it is no plain LoRA of this rank and alpha, or is
    made for another model than that in the folder `model`."""
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for pattern, found in FOREIGN_ADAPTER.items():
        require(weights.is_file() or not any(folder.glob(pattern)), f"{folder} holds {found}")
    config = read_json(file)
    check_fields(config, {"peft_type": str, "r": int, "lora_alpha": float}, file)
    allowed = ADAPTER_ONLY | {name: (x,) for name, x in config.items() if name in ADAPTER_INERT or not x}
    if other := [name for name, x in config.items() if x not in allowed.get(name, ())]:
        raise ValueError(f"{file} sets {', '.join(other)} to a value that is not supported: "
                         + (MERGE_UNSAVED if "init_lora_weights" in other else MERGE))
    require((config["r"], config["lora_alpha"]) == (rank, alpha), f"{folder} has another rank or alpha: pass "
            f"--lora_rank {config['r']} --lora_alpha {config['lora_alpha']}")
    named = config.get("base_model_name_or_path") or ""  # PEFT leaves it empty where the model has no name
    require(not named or is_base(named, model), f"{folder} is an adapter of {named}, not of {model}: pass that to "
            f"--model or, if both are one model, write {model} as base_model_name_or_path into {file}")
    return read_tensors(weights, dtype=dtype)
