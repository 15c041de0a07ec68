"""``hf-spec check``: drafters whose config says something else than they were trained with."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import make_model, make_tokenizer, save_checkpoint, write_prompts
from trained import SETTINGS

import hf_spec
from hf_spec.adapters.config import VOCABULARY
from hf_spec.adapters.loading import find_active
from hf_spec.core.tree import Tree
from hf_spec.tools.bench import checking
from hf_spec.tools.bench.checking import Expected, check, expected_of
from hf_spec.tools.bench.contenders import Contender
from hf_spec.tools.bench.prompts import Prompt, encode
from hf_spec.tools.bench.results import BenchResult, Measurement
from hf_spec.tools.cli import main
from hf_spec.tools.loading import Adapter, load_adapters, read_adapters

TEXTS = [a + b for a in ("ab", "cde", "xyz") for b in ("12", "q")]
NEW = 40
LAYERS = 4
DEMO = Path(hf_spec.__file__).parent / "tools" / "demo"


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    """The folder of an EAGLE-3 drafter that knows a tiny model's answers to a few prompts."""
    from datasets import Dataset

    from hf_spec.tools.training.train import train

    model, tokenizer = make_model(layers=LAYERS), make_tokenizer()
    rows = []
    for text in TEXTS:
        ids = encode(tokenizer, text)
        made = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
        rows.append({"prompt_ids": ids, "answer_ids": made[0, len(ids) :].tolist()})
    settings = {"max_steps": 120, "eval_steps": 120, "per_device_train_batch_size": 8}
    settings |= {"num_anchors": 16, "served_tokens": 16}
    config = {"ttt_steps": 3, "draft_vocab_size": 0, "layers": [1, 2]}
    config["norm_before_residual"] = True
    folder = tmp_path_factory.mktemp("check") / "eagle3"
    train(model, Dataset.from_list(rows * 4), "eagle3", folder, config, SETTINGS | settings)
    return folder


def changed(folder: Path, target: Path, **fields) -> Path:
    """A copy of an adapter whose config says something else."""
    shutil.copytree(folder, target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    return target


def checked(folder: Path, tokenizer=None, name: str = "") -> checking.Check:
    model = make_model(layers=LAYERS)
    model.name_or_path = name
    (adapter,) = read_adapters([str(folder)])
    load_adapters(model, [adapter])
    before = find_active(model, "EAGLE3").config.to_dict()
    prompts = [Prompt(text) for text in TEXTS[:4]]
    found = check(model, tokenizer or make_tokenizer(), prompts, adapter, NEW)
    assert find_active(model, "EAGLE3").config.to_dict() == before
    return found


def test_a_drafter_as_it_was_trained(drafter):
    found = checked(drafter)
    assert found.findings == []
    assert found.expected.endswith("with trees of 8, by the held-out prompts of its training "
                                   "(training.json)")  # fmt: skip
    assert {*found.tried} == {
        '{"norm_before_residual": false}', '{"norm_output": true}', '{"fc_norm": false}',
        '{"layers": [2, 3]}', '{"layers": [0, 1]}',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"layers": [2, 3]}, '{"layers": [1, 2]}'),
        ({"norm_before_residual": False}, '{"norm_before_residual": true}'),
    ],
    ids=["layers", "norm"],
)
def test_what_a_config_says_wrongly_is_found(drafter, tmp_path, fields, right):
    found = checked(changed(drafter, tmp_path / "wrong", **fields))
    assert found.findings[0].startswith(f"Drafts are accepted more often with {right}: tau ")
    assert f"--config '{right}'" in found.findings[0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("field", ["causal", "sample_from_anchor"])
def test_flags_of_block_drafters_are_tried(monkeypatch, tmp_path, field, causal):
    """Of one that drafts well with the other value only."""
    model, tokenizer = make_model(), make_tokenizer()
    config = hf_spec.DFlashConfig(num_layers=1, layers=[1], **{field: causal})
    model.add_adapter(config, "adapter_0")

    def propose(self, state):
        (text,), network = state.tokens, self.predictor.network
        after = model(torch.tensor([text])).logits[0, -1].argmax()
        right = getattr(network.config, field) != causal
        return Tree.chain(torch.stack([state.root[0], after if right else after ^ 1])[None])

    monkeypatch.setattr(hf_spec.Drafter, "propose", propose)
    adapter = Adapter(str(tmp_path), "adapter_0", "dflash", {})
    found = check(model, tokenizer, [Prompt("def add(a, b):")], adapter, 16)
    word = f'{{"{field}": {json.dumps(not causal)}}}'
    assert found.measured["tau"].startswith("1.00")
    assert found.tried[word] == "tau 1.88"
    assert found.findings[0].startswith(f"Drafts are accepted more often with {word}: tau 1.88")
    assert getattr(find_active(model, "DFLASH").config, field) is causal


def test_what_else_looks_wrong(drafter, tmp_path):
    """The base's name, the chat template, and a draft vocabulary of other tokens."""
    folder = changed(drafter, tmp_path / "other", base_model_name_or_path="org/other")
    found = checked(folder, make_tokenizer(chat=False), "org/this")
    assert any("names 'org/other' as its base, and this is 'org/th" in x for x in found.notes)
    assert any("no chat template" in text for text in found.findings)
    assert checked(folder, name="/models/other").notes == []


def test_what_a_draft_vocabulary_lacks_is_counted(monkeypatch):
    """Of the model's own tokens, not of those that are drafted."""
    lineup = [Contender("generate", stock=True), Contender("medusa:8")]
    rows = [Measurement(one.name, 1, [0], "qa", 1.0, [[5, 6, 7, 8]], 4) for one in lineup]
    rows[1].rows = [[0] * 4]
    made = BenchResult([Prompt("a")], lineup, {}, rows)
    layer = SimpleNamespace(tensors=lambda: {VOCABULARY: torch.tensor([1, 5, 6, 8])})
    assert checking._coverage(made, layer) == 0.75
    assert checking._coverage(made, SimpleNamespace(tensors=dict)) is None


def test_what_is_expected_is_found_beside_the_adapter(tmp_path):
    published = expected_of("org/name", "eagle3")
    assert (published.chains, published.low, published.high) == (7, 2.8, 3.9)
    assert expected_of("org/name", "bita") is None
    (tmp_path / "training.json").write_text(json.dumps({"best": {"eval_tau": 2.3}}))
    trained = expected_of(str(tmp_path), "eagle3")
    assert trained == Expected(2.3 / 1.15, 2.3 * 1.15, trained.source, prefill=True)
    (tmp_path / "README.md").write_text(
        "---\nmodel-index:\n- name: m\n  results:\n  - task: {type: text-generation}\n"
        "    dataset: {name: mt-bench, type: mt-bench}\n    metrics:\n"
        "    - {type: tau_without_prefill, value: 2.0, name: 'tau_without_prefill, chains of 3, "
        "mean of 8 groups'}\n---\n"
    )
    card = expected_of(str(tmp_path), "eagle3")
    assert (card.low, card.trees, card.chains) == (pytest.approx(2.0 / 1.15), 0, 3)
    runs = [{"strategy": "eagle3:60@x", "task": "all", "tau_without_prefill": 3.0}]
    (tmp_path / "results.json").write_text(json.dumps({"runs": runs}))
    measured = expected_of(str(tmp_path), "eagle3")
    assert (measured.high, measured.trees, measured.source) == (3.0 * 1.15, 60, "results.json")


def test_the_command(capsys, tmp_path):
    """An adapter that drafts as it should, and one that does not."""
    model, adapter = DEMO / "model", DEMO / "adapters" / "medusa"
    asked = write_prompts(tmp_path / "p.jsonl", [{"prompt": "def forward(self, x):\n"}] * 2)
    command = ["check", str(adapter), "--model", str(model), "--prompts", str(asked)]
    assert main([*command, "--max-new-tokens", "24", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "training.json" in found["expected"] and found["tried"] == {}
    assert float(found["measured"]["tau"].split(",")[0]) > 1
    assert any("no chat template" in text for text in found["findings"])
    other = save_checkpoint(tmp_path / "m")
    assert main(["check", str(adapter), "--model", str(other)]) == 2
    assert "was made for a model with hidden_size=256" in capsys.readouterr().err
