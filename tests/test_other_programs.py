"""Programs of others generate with strategies, and get what plain generate gives."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import drafting
from tiny_checkpoint import make_model, make_tokenizer, plain_text, save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec
from hf_spec.tools.cli import serve

QUESTIONS = ["ab ab ab ", "xyz xyz ", "one two one ", "0 1 0 1 0 ", "a"]

#: A task of lm-eval with the data of a file beside it.
TASK = """
task: local_questions
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["UNTIL", "zzzz"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def test_lm_eval(tmp_path):
    """A batch ends when each of its rows has had the text of ``until``."""
    pytest.importorskip("lm_eval", reason="needs lm-eval, see CONTRIBUTING.md")
    checkpoint = save_checkpoint(tmp_path / "model")
    model, tokenizer = make_model(), make_tokenizer()
    expected = {one: plain_text(model, tokenizer, one, max_new_tokens=16) for one in QUESTIONS}
    until = expected[QUESTIONS[0]][2]
    expected = {question: text.split(until)[0] for question, text in expected.items()}
    assert len({len(text) for text in expected.values()}) > 2
    rows = [{"question": question, "answer": "c"} for question in QUESTIONS]
    data = write_prompts(tmp_path / "data.jsonl", rows)
    task = TASK.replace("DATA", str(data)).replace('"UNTIL"', json.dumps(until))
    (tmp_path / "task.yaml").write_text(task)
    done = subprocess.run(
        [
            sys.executable, "-P", "-c", serve.START, *serve.find("lm_eval"), "--model", "hf",
            "--model_args", f"pretrained={checkpoint},dtype=float32", "--tasks", "local_questions",
            "--gen_kwargs", "assistant_strategy=prompt_lookup", "--batch_size", "4",
            "--device", "cpu", "--include_path", str(tmp_path), "--output_path",
            str(tmp_path / "out"), "--log_samples",
        ],
        capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    found = {
        sample["doc"]["question"]: sample["resps"][0][0]
        for sample in map(json.loads, samples.read_text().splitlines())
    }
    assert found == expected
    [results] = (tmp_path / "out").rglob("results_*.json")
    settings = json.loads(results.read_text())["config"]["gen_kwargs"]
    assert settings["assistant_strategy"] == "prompt_lookup"


#: A record whose shape a grammar prescribes, and the same as a regular expression.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["name", "tags"],
}
REGEX = r"(def|class) [a-z]{3,9}(\(self, [a-z]{2,5}\)|\(\)):( [a-z_]{1,8}){2,6}!"
DEMO = Path(hf_spec.__file__).parent / "tools" / "demo"
CODE = ["import os\n", "def add(a, b):\n    return", "x = {"]
GUIDED = {
    "prompt_lookup": drafting("prompt_lookup"),
    "token_recycling": drafting("token_recycling"),
    "layer_skip": drafting("layer_skip", skip_attention=[1], skip_mlp=[0]),
    "medusa": drafting("medusa"),
}


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    model.load_adapter(str(DEMO / "adapters" / "medusa"), adapter_name="heads")
    return model, tokenizer


@pytest.mark.parametrize("batch", [1, 3])
def test_xgrammar(demo, batch):
    """Its matchers, one per row, must accept each row's own tokens, once and in order."""
    xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar, see CONTRIBUTING.md")
    model, tokenizer = demo
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    inputs = tokenizer(CODE[:batch], return_tensors="pt", padding=True)
    width = inputs["input_ids"].shape[1]

    def generate(**options: Any) -> Any:
        processor = xgrammar.contrib.hf.LogitsProcessor(grammar)  # good for one call
        return model.generate(**inputs, max_new_tokens=48, logits_processor=[processor], **options)

    expected = generate(do_sample=False)
    for spec in GUIDED.values():
        assert generate(do_sample=False, **spec).tolist() == expected.tolist()
        samples = generate(do_sample=True, num_return_sequences=3, **spec)
        for text in tokenizer.batch_decode(samples[:, width:], skip_special_tokens=True):
            matcher = xgrammar.GrammarMatcher(grammar)
            assert matcher.accept_string(text)


@pytest.mark.parametrize("backend", ["outlines_core", "xgrammar", "llguidance"])
def test_outlines(demo, backend):
    """Through its own generator, which passes the strategy on."""
    outlines = pytest.importorskip("outlines", reason="needs outlines, see CONTRIBUTING.md")
    pytest.importorskip(backend, reason=f"needs {backend}, see CONTRIBUTING.md")
    model = outlines.from_transformers(*demo)
    generator = outlines.Generator(model, outlines.regex(REGEX), backend=backend)
    options = {"max_new_tokens": 40, "do_sample": False}
    one, several = generator(CODE[0], **options), generator.batch(CODE, **options)
    samples = {"max_new_tokens": 60, "do_sample": True, "num_return_sequences": 3}
    for spec in GUIDED.values():
        assert generator(CODE[0], **options, **spec) == one
        assert generator.batch(CODE, **options, **spec) == several
        texts = generator(CODE[0], **samples, **spec)
        assert all(re.fullmatch(REGEX, text) for text in texts if text.endswith("!"))


def processors_of(library: str, model: Any, tokenizer: Any) -> Callable[[], Any]:
    """Makes processors for JSON of the schema by a library, each good for one call."""
    module = {"outlines": "outlines_core"}.get(library, library)
    pytest.importorskip(module, reason=f"needs {module}, see CONTRIBUTING.md")
    schema = json.dumps(SCHEMA)
    if library == "xgrammar":
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=model.config.vocab_size
        )
        grammar = xgrammar.GrammarCompiler(info).compile_json_schema(schema, any_whitespace=False)
        return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)
    outlines = pytest.importorskip("outlines", reason="needs outlines, see CONTRIBUTING.md")
    backend = {"outlines": "outlines_core"}.get(library, library)
    make = outlines.backends.get_json_schema_logits_processor
    processor = make(backend, outlines.from_transformers(model, tokenizer), schema)

    def again() -> Any:
        processor.reset()
        return processor

    return again


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("library", ["xgrammar", "llguidance", "outlines"])
def test_what_grammars_force_is_drafted(demo: Any, library: str, batch: int) -> None:
    """In fewer steps, with the same output."""
    model, tokenizer = demo
    make = processors_of(library, model, tokenizer)
    inputs = tokenizer(CODE[:batch], return_tensors="pt", padding=True)
    steps: dict[str, int] = {}
    forced_off = drafting("plain", forced=False)

    def generate(**options: Any) -> Any:
        torch.manual_seed(1)
        given = {**inputs, "max_new_tokens": 24, "logits_processor": [make()], **options}
        return model.generate(**given).tolist()

    expected = generate(do_sample=False)
    assert generate(do_sample=False, **forced_off) == expected
    for name, spec in {"plain": drafting("plain"), "medusa": GUIDED["medusa"]}.items():
        assert generate(do_sample=False, **spec) == expected
        stats = hf_spec.last_stats(model)
        assert stats is not None
        steps[name] = stats.num_steps
    assert steps["plain"] < 24
    # Several rows are sampled with other random numbers than in plain generation.
    expected = generate(do_sample=True, **forced_off if batch > 1 else {})
    assert generate(do_sample=True, **drafting("plain")) == expected


def compared(model: Any) -> tuple[list[torch.Tensor], list[int]]:
    """Compare each call of ``generate`` with a plain one; gives the head's weights and the numbers
    of drafted tokens at each."""
    generate, rollouts, drafted = model.generate, [], []

    def both(*args: Any, **kwargs: Any) -> Any:
        ours = generate(*args, **kwargs)
        stats = hf_spec.last_stats(model)
        assert stats is not None
        drafted.append(stats.num_drafted_tokens)
        settings = kwargs["generation_config"]
        name, settings.assistant_strategy = settings.assistant_strategy, None
        assert torch.equal(generate(*args, **kwargs), ours)
        settings.assistant_strategy = name
        rollouts.append(model.lm_head.weight.detach().clone())
        return ours

    model.generate = both
    return rollouts, drafted


def trainer_of(kind: str, model: Any, folder: Path, **settings: Any) -> Any:
    """A trainer of TRL, whose rollouts come from the model's ``generate``."""
    trl = pytest.importorskip("trl", reason="needs trl, see CONTRIBUTING.md")
    from datasets import Dataset

    if kind == "OnlineDPO":
        online_dpo = importlib.import_module("trl.experimental.online_dpo")
        make, config = online_dpo.OnlineDPOTrainer, online_dpo.OnlineDPOConfig
        settings |= {"max_new_tokens": 12}
    else:
        make, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
        settings |= {"max_completion_length": 12, "num_generations": 2}
    return make(
        model=model,
        processing_class=make_tokenizer(),
        reward_funcs=lambda completions, **_: [float(i) for i, _ in enumerate(completions)],
        train_dataset=Dataset.from_list([{"prompt": question} for question in QUESTIONS]),
        args=config(
            output_dir=str(folder), per_device_train_batch_size=2, max_steps=3, use_cpu=True,
            report_to="none", disable_tqdm=True, **settings,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", GUIDED)
def test_rollouts_of_trl(name, tmp_path):
    """Each rollout is what plain generate gives with the weights of that moment."""
    model = make_model()
    if name == "medusa":
        config = hf_spec.MedusaConfig(num_heads=2, markov_rank=4, draft_vocab_size=64)
        model.add_adapter(config)
        model.requires_grad_(True)  # the base learns, under an adapter that drafts
    rollouts, drafted = compared(model)
    spec = {"do_sample": False, **GUIDED[name]}
    trainer_of(
        "GRPO", model, tmp_path, learning_rate=0.05, bf16=False, beta=0.0,
        gradient_checkpointing=False, generation_kwargs=spec, save_strategy="no",
    ).train()  # fmt: skip
    assert len(rollouts) == 3 and sum(drafted) > 0
    assert not torch.equal(rollouts[0], rollouts[1]) and not torch.equal(rollouts[1], rollouts[2])


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "OnlineDPO"])
def test_trl_trains_and_saves_the_policy(kind: str, attached: bool, tmp_path: Path) -> None:
    """By its defaults, in full, beside an adapter that is attached for drafting or named."""
    from hf_spec.integrations import TRLCallback

    trained = make_model()
    trained.add_adapter(hf_spec.MedusaConfig(num_heads=2))
    trained.save_pretrained(tmp_path / "heads")
    path = save_checkpoint(tmp_path / "model")  # RLOO loads its reference by name
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = {name: one.clone() for name, one in model.named_parameters()}
    spec, heads = drafting("medusa"), str(tmp_path / "heads")
    if attached:
        model.load_adapter(heads)
    else:
        spec["assistant_kwargs"]["adapter"] = heads
    trainer = trainer_of(
        kind, model, tmp_path / "out", learning_rate=1e-3, save_steps=3, logging_steps=1,
        generation_kwargs=spec,
    )  # fmt: skip
    trainer.add_callback(TRLCallback(trainer))
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 3
    assert all(entry["rollouts/tau"] >= 1 and 0 < entry["rollouts/time"] < 1 for entry in entries)
    stats = hf_spec.last_stats(model)
    assert stats is not None and stats.num_drafted_tokens
    now = {name: one for name, one in model.named_parameters() if "spec_modules" not in name}
    assert now.keys() == before.keys()
    assert not any(torch.equal(one, before[name]) for name, one in now.items())
    trainer.save_model(tmp_path / "saved")
    for folder in (tmp_path / "saved", tmp_path / "out" / "checkpoint-3"):
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        stored = dict(again.named_parameters())
        assert stored.keys() == now.keys()
        assert all(torch.equal(one, now[name]) for name, one in stored.items())


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "OnlineDPO"])
def test_trl_with_a_drafter_that_learns(kind: str, tmp_path: Path) -> None:
    """The policy becomes what it becomes without."""
    from hf_spec.integrations import TRLCallback

    path, trained = save_checkpoint(tmp_path / "model"), make_model()
    trained.add_adapter(hf_spec.MedusaConfig(num_heads=2, markov_rank=4, draft_vocab_size=64))
    trained.save_pretrained(tmp_path / "heads")
    policies, updates = [], []
    for share in (None, 1.0):
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        spec = drafting("medusa", adapter=str(tmp_path / "heads"))
        trainer = trainer_of(
            kind, model, tmp_path / str(share), learning_rate=1e-3, save_steps=3, logging_steps=1,
            generation_kwargs=spec, gradient_accumulation_steps=2,
        )  # fmt: skip
        more = {} if share is None else {"train_drafter": True, "drafter_share": share}
        trainer.add_callback(TRLCallback(trainer, **more))
        trainer.train()
        policies.append([one.detach().clone() for one in model.parameters()])
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        updates.append(sum(entry.get("drafter/updates", 0) for entry in entries))
        assert (tmp_path / str(share) / "checkpoint-3" / "hf_spec").is_dir() == (share is not None)
    assert updates[0] == 0 < updates[1]
    assert all(map(torch.equal, *policies))


@pytest.mark.parametrize("name", ["plain", "token_recycling"])
def test_trl_with_the_answers_of_an_epoch_before(tmp_path: Path, name: str) -> None:
    """These draft what plain generation can't; the table also drafts in the first epoch."""
    from hf_spec.integrations import TRLCallback

    spec = drafting(name) if name != "plain" else {"assistant_strategy": name}
    trainer = trainer_of(
        "GRPO", make_model(), tmp_path, save_strategy="no", logging_steps=1,
        generation_kwargs=spec,
    )  # fmt: skip
    trainer.args.max_steps = 2 * len(QUESTIONS)
    trainer.add_callback(TRLCallback(trainer, history=hf_spec.RolloutHistory()))
    trainer.train()
    taus = [entry["rollouts/tau"] for entry in trainer.state.log_history if "loss" in entry]
    first, second = taus[: len(QUESTIONS)], taus[len(QUESTIONS) :]
    assert first == [1.0] * len(QUESTIONS) if name == "plain" else max(first) > 1
    assert min(second) > 2


def test_trl_without_the_callback(tmp_path: Path) -> None:
    """Online DPO's default is refused, and the message's remedy works."""
    refused = "use_cache=False .*generation_kwargs={'use_cache': True"
    settings = {"save_strategy": "no", "gradient_checkpointing": True}
    spec: dict[str, Any] = {"assistant_strategy": "prompt_lookup"}
    trainer = trainer_of("OnlineDPO", make_model(), tmp_path, generation_kwargs=spec, **settings)
    with pytest.raises(ValueError, match=refused):
        trainer.train()
    spec["use_cache"] = True
    trainer_of("OnlineDPO", make_model(), tmp_path, generation_kwargs=spec, **settings).train()
