"""The base's states are computed once for each sequence: the same losses, fewer forwards."""

import pytest
import torch

from hf_spec.tools.training.kept_states import KeptStates
from hf_spec.tools.training.train import train


@pytest.mark.parametrize("method", ["medusa", "dflash"])
def test_training(fresh, tmp_path, monkeypatch, method):
    """The losses of two epochs are those without, the base runs once, and no file stays."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    data = Dataset.from_list([
        {"prompt_ids": row[:4].tolist(), "answer_ids": row[4 : 9 + place % 4].tolist()}
        for place, row in enumerate(torch.randint(3, 60, (16, 12), generator=generator))
    ])  # fmt: skip
    seen: list[int] = []
    compute = KeptStates.__call__

    def counted(self, run, ids, mask, layers):
        def counting(ids, mask):
            seen.append(len(ids))
            return run(ids, mask)

        return compute(self, counting, ids, mask, layers)

    monkeypatch.setattr(KeptStates, "__call__", counted)
    losses = []
    for gigabytes in (1.0, 0.0):
        arguments = {
            "num_train_epochs": 3, "kept_states": gigabytes, "logging_steps": 1, "held_out": 4,
            "per_device_train_batch_size": 4, "eval_strategy": "no", "save_strategy": "no",
            "load_best_model_at_end": False,
        }  # fmt: skip
        out = tmp_path / str(gigabytes)
        config = {"num_layers": 1} if method == "dflash" else {"num_heads": 2}
        record = train(fresh("llama"), data, method, out, config, arguments)
        losses.append([entry["loss"] for entry in record["history"] if "loss" in entry])
        assert not list(out.rglob("states*"))
    assert sum(seen) == 12 and len(losses[0]) == 9
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=0)
