"""The base's states are computed once for each sequence: the same losses, fewer forwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec.target.sequences import token_hidden, token_states
from hf_spec.tools.training.train import KEEPER, KeptStates, train


class Forwards:
    """Counts the sequences that a model runs."""

    def __init__(self, model: Any):
        self.count = 0
        model.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.count += len(kwargs["input_ids"]) if "input_ids" in kwargs else 0


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two batches that share a sequence, with padding on different sides and of other widths."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (length,), generator=generator) for length in (7, 4, 5)]

    def padded(chosen: list[int], width: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(chosen):
            at = slice(width - len(rows[row]), None) if left else slice(len(rows[row]))
            ids[place, at], mask[place, at] = rows[row], 1
        return ids, mask

    return [padded([0, 1], 7, False), padded([1, 2], 9, True), padded([2, 0], 8, False)]


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    token = KEEPER.set(KeptStates(folder, 10**6, "base"))
    try:
        yield
    finally:
        KEEPER.reset(token)


@pytest.mark.parametrize("layers", [(), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_a_forward(fresh, tmp_path, batches, layers, dtype):
    model = fresh("llama").to(dtype)
    plain = [token_hidden(model, ids, mask, layers) for ids, mask in batches]
    # A row in another batch rounds differently.
    close = {"rtol": 0.0, "atol": 1e-5 if dtype == torch.float32 else 0.1}
    for count, part in ((3, "first"), (0, "resumed")):
        forwards = Forwards(model)
        with keeping(tmp_path / "states"):
            for (ids, mask), expected in zip(batches, plain):
                found, real = token_hidden(model, ids, mask, layers), mask.bool()
                torch.testing.assert_close(found[real], expected[real], **close)
                assert found.isfinite().all() and found.dtype == dtype
        assert forwards.count == count, part


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_the_likeliest_tokens_are_those_of_the_model(fresh, tmp_path, batches, layers):
    """Beside the same states, from one forward; also those that are kept."""
    model = fresh("llama")
    forwards = Forwards(model)
    with keeping(tmp_path / "states"):
        for ids, mask in (*batches, *batches):
            states, chances, tokens = token_states(model, ids, mask, layers, likeliest=5)
            real = mask.bool()
            expected = token_states(model, ids, mask, layers)
            torch.testing.assert_close(states[real], expected[0][real], rtol=0.0, atol=1e-5)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(ids, attention_mask=mask, position_ids=positions).logits.softmax(-1)
            best = logits.topk(5)
            torch.testing.assert_close(chances[real], best.values[real], rtol=0.0, atol=1e-5)
            assert torch.equal(tokens[real].long(), best.indices[real])
    assert forwards.count == 3 + 3, "each sequence once of each kind"


@pytest.mark.parametrize("method", ["medusa", "dflash"])
def test_training(fresh, tmp_path, method):
    """The losses of two epochs are those without, the base runs once, and no file stays."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    data = Dataset.from_list([
        {"prompt_ids": row[:4].tolist(), "answer_ids": row[4:].tolist()}
        for row in torch.randint(3, 60, (16, 12), generator=generator)
    ])  # fmt: skip
    losses, forwards = [], []
    for gigabytes in (1.0, 0.0):
        arguments = {
            "num_train_epochs": 3, "kept_states": gigabytes, "logging_steps": 1, "held_out": 4,
            "per_device_train_batch_size": 4, "eval_strategy": "no", "save_strategy": "no",
            "load_best_model_at_end": False,
        }  # fmt: skip
        out = tmp_path / str(gigabytes)
        config = {"num_layers": 1} if method == "dflash" else {"num_heads": 2}
        model = fresh("llama")
        forwards.append(Forwards(model))
        if gigabytes:  # of a process that a resumed training has no more
            (out / "checkpoints" / "states-7").mkdir(parents=True)
        record = train(model, data, method, out, config, arguments)
        losses.append([entry["loss"] for entry in record["history"] if "loss" in entry])
        assert not list(out.rglob("states*"))
    assert [one.count for one in forwards] == [12, 3 * 12] and len(losses[0]) == 9
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=0)
