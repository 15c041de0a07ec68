"""Muon beside AdamW: each steps its own parameters as it would alone, also after a resumption."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import make_model
from torch import nn
from torch.optim import AdamW, Muon
from trained import SETTINGS, TRAININGS, answers
from transformers import Trainer

from hf_spec.tools.training.train import train
from hf_spec.tools.training.trainer import WithMuon, layer_matrices


def test_each_steps_its_own_parameters() -> None:
    def model() -> Any:
        torch.manual_seed(0)
        made = nn.ModuleDict({"inner": nn.Linear(6, 4), "lm_head": nn.Linear(4, 3)})
        made["inner"].extra = nn.Linear(2, 2).requires_grad_(False)
        return made

    both, apart = model(), model()
    rates: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
    matrices = layer_matrices(both)
    assert [one.shape for one in matrices] == [(4, 6)]
    together = WithMuon(AdamW(both.parameters(), **rates), matrices)
    faster = {**rates, "lr": 4 * rates["lr"]}
    muon = Muon([apart["inner"].weight], **faster, adjust_lr_fn="match_rms_adamw")
    rest = [one for one in apart.parameters() if one is not apart["inner"].weight]
    adamw = AdamW(rest, **rates)
    for step in range(4):
        if step == 2:  # as a training that is resumed
            state = together.state_dict()
            together = WithMuon(AdamW(both.parameters(), **rates), matrices)
            together.load_state_dict(state)
        for each, optimizers in ((both, [together]), (apart, [muon, adamw])):
            each["lm_head"](each["inner"](torch.arange(6.0))).square().sum().backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        for one, other in zip(both.parameters(), apart.parameters()):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_without_matrices_it_is_refused(tmp_path: Path) -> None:
    settings = {**SETTINGS, "optim": "muon"}
    with pytest.raises(ValueError, match="'muon': an adapter of bita has no matrices of layers"):
        train(make_model(), answers(), "bita", tmp_path, TRAININGS["bita"][1], settings)


def test_shards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Trainer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.is_deepspeed_enabled = True

    monkeypatch.setattr(Trainer, "__init__", __init__)
    arguments = (answers(), "dflash", tmp_path, TRAININGS["dflash"][1])
    with pytest.raises(ValueError, match="'muon' does not run under FSDP or DeepSpeed.*adamw_torc"):
        train(make_model(), *arguments, SETTINGS)
