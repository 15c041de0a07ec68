"""Fine-tuned layers for multi-token prediction: the loss, what is learned, kept and refused."""

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import batch_of
from datasets import Dataset
from peft import get_peft_model
from running import drafting
from safetensors.torch import load_file
from test_mtp import model_of
from torch import Tensor, nn
from torch.nn import functional
from trained import SETTINGS, history, record, same
from transformers import DynamicCache, Trainer, TrainerCallback

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.decoding.call import choose
from hf_spec.methods import mtp
from hf_spec.methods.mtp import MtpConfig, loss, mtp_layers
from hf_spec.predict.losses import LIKELIEST
from hf_spec.tools.training.train import train
from hf_spec.tools.training.trainer import EvalDecoding

pytestmark = pytest.mark.usefixtures("mtp_as_shipped")

PLAIN: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
LEARN = {**SETTINGS, "max_steps": 30, "eval_steps": 30, "logging_steps": 10}
WEIGHTS = "adapter_model.safetensors"


@cache
def answers(name: str) -> Any:
    """The model's own answers to short prompts."""
    prompts = torch.arange(3, 35).view(8, 4)
    found = model_of(name).generate(prompts, max_new_tokens=24, do_sample=False)
    return Dataset.from_list(
        [{"prompt_ids": row[:4].tolist(), "answer_ids": row[4:].tolist()} for row in found]
    )


def fresh(name: str) -> Any:
    return copy.deepcopy(model_of(name))


def naive_weights(losses: Tensor, decay: float | None) -> list[float]:
    """Of a chain's steps: powers, or what each adds to the expected number of accepted tokens."""
    if decay is not None:
        return [decay**step for step in range(len(losses))]
    chances = [(1 + math.exp(-one)) / 2 for one in losses.tolist()]
    reached = [math.prod(chances[: step + 1]) for step in range(len(chances))]
    return [sum(reached[step:]) for step in range(len(chances))]


def naive_logits(model: Any, adapter: Any, ids: Tensor, anchor: int, steps: int) -> Tensor:
    """``(steps, vocab)`` of one chain, each row of which all rows are computed for anew."""
    made = adapter.placed()
    final = model.model(ids[None]).last_hidden_state[0]
    tokens = model.get_input_embeddings()(ids)

    def run(layer: int, rows: Tensor, inputs: Tensor, first: int) -> Tensor:
        """Of rows behind each other, the first of which is that of this position."""
        count = len(rows)
        positions = first + torch.arange(count)[None]
        mask = torch.ones(count, count).tril().bool()
        if (size := made.window(layer)) is not None:
            mask = mask.triu(1 - size)
        cache = DynamicCache()
        return made.run(layer, rows[None], inputs[None], positions, mask[None, None], cache)[0]

    # A row of position t has token t + 1.
    first, last = 0, len(made.layers) - 1
    inputs, found = final[: anchor + 1], list[Tensor]()
    outputs = inputs
    for step in range(steps):
        layer = min(step, last)
        if 0 < step <= last:  # a further layer: it takes the outputs of the one before
            first, inputs = first + 1, outputs
        elif step:
            inputs = torch.cat([inputs, outputs[-1:]])
        rows = tokens[first + 1 : anchor + 2 + step]
        outputs = run(layer, rows, inputs, first)
        found.append(model.lm_head(outputs[-1]))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("name", "kind", "decay"),
    [
        ("qwen3", "distillation", None), ("glm4_moe_2", "hard", 0.7),
        ("mellum", "distillation", 0.7), ("qwen3_next", "hard", None),
        ("nemotron_h", "distillation", None),
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_chains_run_one_by_one(
    name: str, kind: str, decay: float | None
) -> None:
    """Of two sequences, the shorter one padded; chains that leave the text are cut off."""
    base, steps = fresh(name).train(), 3
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    config = MtpConfig(ttt_steps=steps, decay=decay, loss=kind)
    get_peft_model(base, config)
    adapter: Any = find_active(base, "MTP")
    one, two = (tuple(answers(name)[row].values()) for row in (0, 1))
    batch: Any = batch_of([one, (two[0], two[1][:14])], 4)
    batch["anchors"][1] = torch.tensor([4, 9, 14, 15])
    own = loss(base, adapter, TrainingBatch(**batch))["loss"]
    trained = [one for one in adapter.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(own, trained, allow_unused=True)

    total = torch.zeros(())
    for row in range(2):
        length = int(batch["attention_mask"][row].sum())
        ids, labels = batch["input_ids"][row, :length], batch["labels"][row, :length]
        with torch.no_grad():
            of_base = base.eval()(ids[None]).logits[0]
        base.train()
        sums, counts = torch.zeros(steps), torch.zeros(steps)
        for anchor in batch["anchors"][row].tolist():
            most = min(steps, length - 2 - anchor)
            log = naive_logits(base.eval(), adapter, ids, anchor, most).log_softmax(-1)
            if kind == "distillation":
                chances, tokens = of_base[anchor + 1 :][:most].softmax(-1).topk(LIKELIEST)
                losses = (chances * (chances.log() - log.gather(1, tokens))).sum(1)
            else:
                losses = -log.gather(1, labels[anchor + 2 :][:most, None])[:, 0]
            parts = torch.tensor(naive_weights(losses, decay)) * losses
            sums = sums + functional.pad(parts, (0, steps - most))
            counts[:most] += 1
        total = total + (sums / counts.clamp(min=1)).sum() / 2
    torch.testing.assert_close(own, total, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(total, trained, allow_unused=True)
    seen = 0
    for one, two in zip(gradients, expected):
        if one is not None and two is not None:
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)  # sums in other orders
            seen += bool(two.any())
        else:
            assert not any(each is not None and each.any() for each in (one, two))
    assert seen > 5


@pytest.fixture(scope="module")
def learned(tmp_path_factory: Any) -> tuple[str, Path]:
    """Two layers, which a short training changes."""
    name, folder = "glm4_moe_2", tmp_path_factory.mktemp("mtp") / "adapter"
    model, before = fresh(name), model_of(name).state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "_read", getattr(mtp._read, "__wrapped__", mtp._read))
        settings = {**LEARN, "learning_rate": 2e-2}
        train(
            model, answers(name), "mtp", folder, {"ttt_steps": 3, "loss": "distillation"}, settings
        )
    assert same(model.state_dict(), before)
    return name, folder


def tau(model: Any, name: str) -> float:
    """On the training's own prompts."""
    prompts = [row["prompt_ids"] for row in answers(name)][:4]
    stats = EvalDecoding(prompts, "mtp", {"tree": "chain", "max_depth": 3}, 20).measure(model)
    return stats.mean_accepted_tokens


def test_the_layers_learn_and_the_output_stays(learned: tuple[str, Path]) -> None:
    name, folder = learned
    losses = history(folder, "loss")
    assert losses[-1] < 0.85 * losses[0]
    model = fresh(name)
    before = tau(model, name)
    model.load_adapter(folder)
    assert tau(model, name) > before + 0.2
    choice = choose(model)
    assert choice.strategy == "mtp" and "adapter" in choice.reason
    ids = torch.tensor([answers(name)[row]["prompt_ids"] for row in range(3)])
    plain = model_of(name).generate(ids, **PLAIN).tolist()
    assert model.generate(ids, **PLAIN, **drafting("mtp")).tolist() == plain
    assert hf_spec.last_stats(model).num_drafted_tokens > 0
    model.disable_adapters()
    assert abs(tau(model, name) - before) < 1e-6


def test_the_adapter_is_whole_and_no_larger(learned: tuple[str, Path]) -> None:
    """It needs nothing of the checkpoint's own layers, and repeats nothing of the model's."""
    name, folder = learned
    model = fresh(name)
    model.config.name_or_path = model.name_or_path = str(folder / "nowhere")
    model.load_adapter(folder)
    ids = torch.tensor([answers(name)[0]["prompt_ids"]])
    model.generate(ids, **PLAIN, **drafting("mtp"))
    assert hf_spec.last_stats(model).num_drafted_tokens > 0
    layers = mtp_layers(model_of(name)).layers.state_dict()
    stored = load_file(folder / WEIGHTS)
    sizes = [sum(one.numel() for one in some.values()) for some in (stored, layers)]
    assert sizes[0] == sizes[1]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == model_of(name).name_or_path
    assert config["num_layers"] == len(mtp_layers(model_of(name)).layers)
    assert record(folder)["config"] == {"ttt_steps": 3, "decay": None, "loss": "distillation"}


def test_every_tensor_is_trained_matrices_by_muon(tmp_path: Path) -> None:
    name, groups = "qwen3_5_text", list[dict[str, Any]]()

    class Groups(TrainerCallback):
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            groups.extend(optimizer.param_groups)

    train(fresh(name), answers(name), "mtp", tmp_path, {}, SETTINGS, callbacks=[Groups()])
    by_muon = [one.shape for each in groups if "ns_steps" in each for one in each["params"]]
    before = mtp_layers(model_of(name)).layers.state_dict()
    assert sorted(by_muon) == sorted(one.shape for one in before.values() if one.ndim == 2)
    assert sum(len(each["params"]) for each in groups) == len(before)
    after = load_file(tmp_path / WEIGHTS)
    for own, tensor in before.items():
        (now,) = (one for key, one in after.items() if key.endswith(f"layers.{own}"))
        assert not torch.equal(now, tensor), own


def test_shards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Trainer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.is_deepspeed_enabled = True

    monkeypatch.setattr(Trainer, "__init__", __init__)
    with pytest.raises(ValueError, match="'hf-spec train mtp' does not run under FSDP or DeepSp"):
        train(fresh("qwen3"), answers("qwen3"), "mtp", tmp_path, {}, SETTINGS)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="ttt_steps=1: the checkpoint has 2 layers.*Take 2 or"):
        fresh("glm4_moe_2").add_adapter(MtpConfig(ttt_steps=1))
    model = fresh("qwen3")
    model.config.name_or_path = model.name_or_path = ""
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        model.add_adapter(MtpConfig())
