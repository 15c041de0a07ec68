"""Small trainings on a tiny model, each done once per session and shared by all workers."""

import json
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tiny_checkpoint import make_model
from transformers import TrainerCallback

import hf_spec

SETTINGS: dict[str, Any] = {
    "max_steps": 6, "eval_steps": 3, "held_out": 4, "served_prompts": 2, "served_tokens": 8,
    "per_device_train_batch_size": 4, "num_anchors": 4, "learning_rate": 1e-2,
}  # fmt: skip
_SPACE = {"num_mask_tokens": 2, "rank": 2, "markov_rank": 0}
#: Method and config by name.
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bita": ("bita", {"num_mask_tokens": 2, "num_prompt_tokens": 4, "markov_rank": 0}),
    "ppd": ("ppd", {"num_prompt_tokens": 2, "head": "residual", "markov_rank": 0}),
    "medusa": ("medusa", {"num_heads": 2, "markov_rank": 0}),
    "dflash": ("dflash", {"num_layers": 1, "block_size": 3}),
    "dspark": ("dspark", {"num_layers": 1, "block_size": 2, "markov_rank": 4}),
    "propd": ("propd", {"num_heads": 2, "markov_rank": 0}),
    "space": ("space", _SPACE),
    "lora": ("space", {**_SPACE, "update": "lora"}),
    "none": ("space", {**_SPACE, "update": "none"}),
    "full": ("space", {**_SPACE, "update": "full", "draft_vocab_size": 0}),
    "eagle3": ("eagle3", {"ttt_steps": 3, "draft_vocab_size": 40}),
    "peagle": ("eagle3", {"ttt_steps": 3, "draft_vocab_size": 40, "mask_token_id": 3}),
    "layer_skip": ("layer_skip", {"skip_mlp": [0], "draft_rank": 2}),
}


class Stop(TrainerCallback):
    """Breaks off after a checkpoint, as a crash would."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def as_options(model: Path, data: Path, **settings: Any) -> list[str]:
    """Options of ``hf-spec train``, on the CPU and in float32."""
    given = [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items()]
    where = ["--model", str(model), "--data", str(data), "--dtype", "float32", "--device", "cpu"]
    return [*where, *given]


def answers(count: int = 24, length: int = 24) -> Any:
    """Counting in a circle of four: a few tokens, whose shares probes learn at once."""
    from datasets import Dataset

    rows = []
    for index in range(count):
        tokens = [4 + (index + step) % 4 for step in range(8 + length)]
        rows.append({"prompt_ids": tokens[:8], "answer_ids": tokens[8:]})
    return Dataset.from_list(rows)


def trained_in(root: Path, name: str) -> Path:
    """The adapter folder of a training below ``root``, which workers share."""
    from hf_spec.tools.training.train import train

    folder, (method, config) = root / name, TRAININGS[name]
    with FileLock(root / f"{name}.lock"):
        if not (folder / "training.json").is_file():
            model, before = make_model(), make_model().state_dict()
            train(model, answers(), method, folder, config, SETTINGS)
            assert same(model.state_dict(), before) == (name != "full"), "only its base changes"
            assert all(parameter.requires_grad for parameter in model.parameters())
    return folder


def decodes_exactly(folder: Path) -> bool:
    """Whether the tiny model's output with an adapter folder is that of plain generation."""
    model = make_model()
    model.load_adapter(str(folder))
    ids = torch.tensor([answers()[0]["prompt_ids"]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    config = hf_spec.SpecConfig.from_pretrained(folder)
    ours = model.generate(ids, generation_config=config, max_new_tokens=12, do_sample=False)
    return bool(ours.tolist() == plain.tolist())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names that its method gives them."""
    from safetensors.torch import load_file

    found = load_file(folder / "adapter_model.safetensors")
    return {name.rpartition(".")[2].partition("_")[2]: value for name, value in found.items()}


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return found


def history(folder: Path, key: str) -> list[float]:
    return [row[key] for row in record(folder)["history"] if key in row]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
