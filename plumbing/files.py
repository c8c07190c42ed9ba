"""Writes files whole or not at all, and says in one sentence what is wrong with a broken one."""
import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Callable, Iterable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

TYPES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", dict: "an object"}


def require(condition: bool | Tensor, message: str) -> None:
    """ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, then rename it, so that no reader and no interruption ever sees half of it."""
    part = file.with_name(file.name + ".part")  # a folder, because safetensors puts a second file beside its output
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed here
    part.mkdir()
    try:
        write(part / file.name)
    except (RuntimeError, SafetensorError) as error:  # what torch and safetensors raise where a disk is full
        raise OSError(f"{file} can't be written, is the disk full? ({str(error).splitlines()[0]})") from None
    (part / file.name).replace(file)
    part.rmdir()


def write_json(file: Path, content: dict) -> None:
    """Write a JSON file that people can read, too; null for NaN and infinity, which JSON does not have."""
    plain = json.loads(json.dumps(content), parse_constant=lambda _: None)
    replace_file(file, lambda part: part.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8"))


def read_json(file: Path, missing: dict | None = None) -> dict:
    """A JSON object, `missing` where there is no such file; ValueError, with its name, for anything else."""
    if missing is not None and not file.is_file():
        return missing
    try:
        parsed = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    require(isinstance(parsed, dict), f"{file} does not hold a JSON object")
    return parsed


def check_fields(fields: dict, types: dict[str, type], file: str | Path) -> None:
    """ValueError unless a JSON object has the named fields, each of its type. A float may be written as an integer."""
    for name, kind in types.items():
        require(name in fields, f"{file} has no {name}")
        value = fields[name]
        right = type(value) is kind or kind is float and type(value) is int
        require(right and (kind is not float or abs(value) <= sys.float_info.max),  # NaN is JSON to Python
                f"{file}: {name} must be {TYPES[kind]}, not {value!r:.50}")


def checksum(file: Path) -> int:
    """The CRC-32 of a file."""
    return zlib.crc32(np.memmap(file, mode="r")) if file.stat().st_size else 0  # an empty file can't be mapped


def read_arrays(file: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; ValueError where it is missing or damaged, or has no array of one of the names."""
    try:
        with np.load(file) as archive:
            arrays = dict(archive)
    except Exception as error:  # numpy and zipfile report a damaged file in many ways
        raise ValueError(f"{file} is not a complete .npz file: {str(error) or type(error).__name__}") from None
    missing = [name for name in names if name not in arrays]
    require(not missing, f"{file} has no {', '.join(missing)}: is it from another program or version?")
    return arrays


def read_tensors(file: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All tensors of a safetensors file; ValueError for a truncated file, another format, and integer weights."""
    try:
        found = load_file(file)  # maps the file, on the CPU: a bad device is not its fault
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error}); download it again, with "
                         "`git lfs pull` where it was cloned") from None
    for name, tensor in found.items():
        require(tensor.is_floating_point() and tensor.itemsize > 1,  # others are quantized, and their scales elsewhere
                f"{name} in {file} is {tensor.dtype}; only floating-point weights of 16 bits and more are supported: load it "
                "with transformers, which applies the scales, and save_pretrained it in bfloat16")
    return {name: tensor.to(device, dtype) for name, tensor in found.items()}


def check_tensors(owner: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """ValueError, with the name of a tensor, unless names, shapes and types are as expected. owner: who has them."""
    form = lambda tensor: (tensor.shape, tensor.dtype)
    changed = {name for name in expected.keys() & found.keys() if form(found[name]) != form(expected[name])}
    for problem, names in {"lacks": expected.keys() - found.keys(), "has unknown": found.keys() - expected.keys(),
                           "has the wrong shape or type for": changed}.items():
        if names:
            raise ValueError(f"{owner} {problem} {len(names)} tensor(s), such as {min(names)}")
