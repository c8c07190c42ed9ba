"""Files that are there whole or not at all, and one clear sentence for those that are broken."""
import json
import shutil
from pathlib import Path
from typing import Callable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, then rename it, so that no reader and no interruption ever sees half of it."""
    part = file.with_name(file.name + ".part")  # a folder, because safetensors puts a second file beside its output
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    write(part / file.name)
    (part / file.name).replace(file)
    part.rmdir()


def write_json(file: Path, content: dict) -> None:
    """Write a JSON file that people can read, too."""
    replace_file(file, lambda part: part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


def read_json(file: Path) -> dict:
    """Parse a JSON object; ValueError, with the file's name, for anything else."""
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return parsed


def read_rows(file: Path, columns: list[str]) -> list[dict] | list[str]:
    """The rows of a .parquet file, or the lines of any other; FileNotFoundError or ValueError if that can't be done."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no data file {file}")
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet  # optional, so not in requirements.txt
            return parquet.read_table(file, columns=columns).to_pylist()
        with file.open(encoding="utf-8") as lines:
            return list(lines)
    except ImportError:
        raise ValueError(f"reading {file} needs `pip install pyarrow`; or convert it to .jsonl") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a text file in UTF-8") from None


def read_tensors(file: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All tensors of a safetensors file; ValueError when the file is truncated or in another format."""
    try:
        with safe_open(file, framework="pt") as tensors:  # on the CPU: a bad device is not the file's fault
            return {name: tensors.get_tensor(name).to(device, dtype) for name in tensors.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error}); download it again") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: model.safetensors, or the shards that its index names."""
    index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{index} has no weight_map from tensor names to files")
        names = set(shards.values())
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing")
    return [folder / name for name in sorted(names)]
