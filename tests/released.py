"""Checkpoints as other programs release them, changed in one place; imported, exported, refused."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_spec.tools.transfer import export_adapter, import_adapter, recognized

#: What config.json holds, and tensors by name.
Files = tuple[dict[str, Any], dict[str, Tensor]]
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def read(folder: Path) -> Files:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def write(folder: Path, files: Files, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(files[0]))
    (torch.save if file.endswith(".bin") else save_file)(files[1], folder / file)
    return folder / file


def changed(part: str | None = None, /, **fields: Any) -> Change:
    """Fields of a config, or of a part of it."""
    return lambda config, _: (config[part] if part else config).update(fields)


def without(name: str) -> Change:
    return lambda *parts: [part.pop(name, None) for part in parts]


def put(name: str, value: Any) -> Change:
    """A tensor, or what makes one of that which is there."""
    return lambda _, tensors: tensors.update(
        {name: value(tensors[name]) if callable(value) else value}
    )


def imported(folder: Path, kind: str, files: Files, base: Any) -> Any:
    """A copy of a base with the checkpoint's adapter; the checkpoint is recognized by its files."""
    path, model = write(folder / "released", files), copy.deepcopy(base)
    assert recognized(str(path.parent)) == (kind, path)
    import_adapter(path, kind, model, folder / "adapter")
    model.load_adapter(str(folder / "adapter"))
    return model


def exported(folder: Path, base: Any, form: str = "speculators") -> Files:
    """What the adapter in a folder becomes for another program."""
    return read(export_adapter(folder / "adapter", form, copy.deepcopy(base), folder / "exported"))


def check_refused(folder: Path, kind: str, files: Files, base: Any, message: str) -> None:
    """In one line, and nothing is left behind."""
    path, model = write(folder / "released", files), copy.deepcopy(base)
    with pytest.raises(ValueError, match=message) as error:
        import_adapter(path, kind, model, folder / "adapter")
    assert "\n" not in str(error.value) and not (folder / "adapter").exists()
    assert not getattr(model, "peft_config", None)
    assert hasattr(base, "spec_modules") or not hasattr(model, "spec_modules")
