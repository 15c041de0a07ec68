"""What commands say of bad input: one line, before a model is loaded or a file is written."""

import shlex
from pathlib import Path

import pytest
from tiny_checkpoint import write_prompts

import hf_spec
from hf_spec.tools import cli

#: Options of each command, which a row's own follow.
GIVEN = {
    "bench": "--model /nowhere --prompts a.jsonl --output out --device cpu --dtype float32",
    "distill": "--model m --prompts a.jsonl --output out --device cpu --dtype float32",
    "train": "--model /none --data /none --output out",
    "search": "--model /nowhere --prompts a.jsonl --output out --dtype float32 --device cpu",
    "import": "--model /nowhere --output out",
    "doctor": "--model /nowhere",
    "card": "",
    "push": "",
    "export": "--output out",
}
#: Words of a command, those of ``train`` and ``import`` with their argument, and what it says.
MESSAGES = [
    # names
    ("bench --strategies fastest", "strategy='fastest': choose one of"),
    ("bench --strategies medsa", "strategy='medsa' (did you mean 'medusa'?): choose"),
    ("bench --strategies ''", "no strategy is named; leave the option out"),
    ("distill --strategy fastest", "strategy='fastest': choose one of none, "),
    ("train prompt_lookup", "nothing to train; choose one of bita, dflash"),
    ("train bitta", "no method 'bitta' to train (did you mean 'bita'?); choose one of bita, dfl"),
    ("import a.jsonl --type prompt_lookup", "type='prompt_lookup': choose one of "),
    ("import a.jsonl --type medusas", "type='medusas' (did you mean 'medusa'"),
    # options
    ("bench --frobnicate", "No such option: --frobnicate"),
    ("bench --modle m", "No such option: --modle (did you mean '--model'?)"),
    ("train bita --lr 0.1", "has no option '--lr' (did you mean '--learning-rate'?)"),
    ("bench --dtype bfloat", "--dtype='bfloat' (did you mean 'bfloat16'?): choose one of"),
    ("bench --dtype int3", "--dtype='int3': choose one of native, auto, bfloat16"),
    ("search --dtype int3", "--dtype='int3'"),
    ("bench --batch-size 0", "--batch-size '0': must be numbers from 1"),
    ("bench --limit 0", "--limit"),
    (f"bench --do-sample --seed {10**24}", "'--seed': Input should be less than or equal to 42949"),
    ("card skip --repository ../../etc", "Repo id must"),
    ("card skip --license 'mit\nx: y'", "--license 'mit\\nx: y': give a name of the Hub's"),
    ("card skip --language 'en, a b'", "--language 'a b': give a name of the Hub's, such as mit"),
    ("bench --temperature 0.7", "--temperature needs --do-sample"),
    ("distill --temperature 0.7", "--temperature needs --do-sample"),
    ("distill --do-sample --temperature 0", "--temperature=0.0: must be a number in (0.0"),
    ("bench --do-sample --top-p 1.5", "--top-p=1.5: must be a number in (0.0, 1.0]"),
    ("bench --backend eager", "--backend needs --compile"),
    ("search --held-out 2 --limit 2", "--held-out 2: of 3 prompts 2 are searched on, which lea"),
    ("train bita --num-mask-token 3", "'--num-mask-token' (did you mean '--num-mask-tokens'?)"),
    ("train bita --num-mask-tokens", "num-mask-tokens: expected one argument"),
    ("train bita --num-mask-tokens none", "num_mask_tokens='none'"),
    ("train bita --prompt-depth=medium", "prompt_depth='medium'"),
    ("train bita --max-steps many", "'hf-spec train bita': argument --max_steps"),
    ("train bita --held-out 0", "held_out=0: must be a whole number of at least 1"),
    ("train bita --max-steps 0", "max_steps=0: must be a whole number of at least 1"),
    ("train bita --max-minutes 0", "max_minutes=0.0: must be a number in (0"),
    ("train bita --max-minutes 5 --warmup-steps 9", "a share of the training"),
    ("train bita --output-dir d", "output_dir='d': checkpoints lie in the adapter's folder. Give"),
    ("train bita --resume-from-checkpoint d", "goes on from its last checkpoint. Give --resume"),
    ("train bita --push-to-hub", "push_to_hub=True: 'hf-spec push' uploads an adapter"),
    ("train bita --hub-model-id a/b", "hub_model_id='a/b': 'hf-spec push' uploads an adapter"),
    ("train bita --eval-strategy no", "eval_strategy='no': a training evaluates and saves, as"),
    ("train bita --save-strategy no", "save_strategy='no': a training evaluates and saves, as"),
    ("train bita --report-to clearml", "report_to: ClearMLCallback requires"),
    ("train bita --model=", "'hf-spec train bita' needs --model"),
    ("train bita --device cuda:1", "--device cuda:1: a training takes the first GPU that it sees"),
    ("doctor --no-measure --prompts a.jsonl", "--prompts with --no-measure: nothing is decoded"),
    ("train space --update none --p-ar 1.0", "p_ar=1.0: nothing is trained"),
    # options of strategies
    ("bench --strategy-kwargs prompt_lookup", "must be NAME=JSON"),
    ("bench --strategy-kwargs layer_skip={}", "a NAME that takes part"),
    ("bench --strategy-kwargs token_recycling={", "not JSON"),
    ("bench --strategy-kwargs 'token_recycling={\"table_size\": 0}'", "table_size"),
    ("bench --strategy-kwargs 'token_recycling={\"color\": 1}'", "color"),
    ("distill --strategy-kwargs '{\"color\": 1}'", "has no option 'color'"),
    ("distill --strategy-kwargs '{\"acceptance\": \"typical\"}'", "changes the answers"),
    ("bench --strategy-kwargs '{\"color\": 1}'", "has no option 'color'"),
    ("bench --strategy plain,auto --strategy-kwargs {}", "must be NAME=JSON with a NAME"),
    ("distill --strategies layer_skip --strategy-kwargs 'layer_skip={\"a\": 1}'", "no option 'a'"),
    ("distill --strategy-kwargs 'medusa={}'", "takes part: prompt_lookup"),
    ("train bita --strategy-kwargs 'bita={\"top\": 1}'", "no option 'top'"),
    ("distill --strategy none --strategy-kwargs {}", "--strategy-kwargs needs the name of"),
    ("train bita --strategy-kwargs {", "--strategy-kwargs: not JSON"),
    ("train bita --strategy-kwargs '{\"top\": 1}'", "no option 'top'"),
    ("train bita --strategy-kwargs '{\"lookup_history\": \"f\"}'", "gs: its lookup_history='f' is"),
    # assistants and adapters
    ("bench --strategies transformers:assisted", "needs another model that drafts"),
    ("bench --strategies draft_model", "'draft_model' needs another model that drafts"),
    ("bench --strategies bita", "'bita' needs a trained adapter: give its folder"),
    ("bench --assistant /no --strategies prompt_lookup", "no strategy here needs the"),
    ("bench --adapter /nowhere", "cannot read adapter '/nowhere': there is no such folder"),
    ("distill --strategy none --adapter /a", "cannot read adapter '/a'"),
    ("distill --adapter skip --strategy prompt_lookup", "is for strategy 'layer_skip'"),
    ("distill --adapter skip --strategy none", "--adapter needs the name of a strategy"),
    ("distill --adapter tuned", "changes the answers, which are to be the model's own"),
    ("distill --strategy medusa", "strategy 'medusa' needs a trained adapter: give --adapter"),
    ("train bita --adapter /none", "cannot read adapter '/none': there is no such folder"),
    ("train bita --adapter .", "cannot read adapter '.': the folder has no adapter_config.json"),
    ("bench --adapter broken", "adapter_config.json' must hold a JSON object"),
    ("bench --adapter model", "has no adapter_config.json; it is a model's: give an adapter's"),
    ("card /none", "cannot read adapter '/none': there is no such folder"),
    ("push . org/name", "cannot read adapter '.': the folder has no adapter_config.json"),
    ("export skip --format sglang", "adapters of 'layer_skip' cannot be exported to other"),
    ("train space --adapter broken", "cannot read adapter 'broken': "),
    ("bench --adapter broken", "cannot read adapter 'broken': "),
    # files
    ("bench --prompts none.jsonl", "none.jsonl': No such file"),
    ("bench --prompts bad.jsonl", "bad.jsonl, line 2: needs one of the fields"),
    ("bench --output a.jsonl", "cannot write into the folder --output"),
    ("bench", "cannot load model '/nowhere': there is no such folder"),
    ("distill --prompts /nowhere.jsonl", "cannot read '/nowhere.jsonl': No such file"),
    ("distill --prompts a.jsonl", "a.jsonl' are given twice"),
    ("distill --output /dev/null", "cannot write into the folder --output"),
    ("train bita --output a.jsonl", "cannot write into the folder --output"),
    ("import a.jsonl --type medusa --output a.jsonl", "cannot write into the folder --output"),
    ("train bita --output skip", "'skip' holds an adapter of type LAYER_SKIP, in whose place one"),
    ("import a.jsonl --type medusa --output skip", "would be written. Choose another folder."),
    ("search --output tuned --dtype float32", "'tuned' holds an adapter of type SPACE, in whose"),
    ("train bita --output model", "'model' holds a model, in whose place one of type BITA"),
    ("export eagle --format sglang --model /none --output skip", "'skip' is an adapter's folder"),
    ("import a.jsonl --type medusa --config '{\"a\": 1}'", "--config: the adapter of 'medusa'"),
    ("import a.jsonl --type medusa --config '{\"peft_type\": 1}'", "has no option 'peft_type'"),
    ("import absent.pt --type medusa", "there is no file"),
    ("import a.jsonl --type medusa --strategy-kwargs '{\"a\": 1}'", "no option 'a'"),
    ("import a.jsonl --type medusa --strategy-kwargs '{\"lookup_history\": \"f\"}'", "is a file"),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, good and bad ones, and configs of two adapters."""
    folder = tmp_path_factory.mktemp("messages")
    write_prompts(folder / "a.jsonl", [{"prompt": text} for text in "abc"])
    write_prompts(folder / "bad.jsonl", [{"prompt": "x"}, {"promt": "y"}])
    hf_spec.LayerSkipConfig(skip_attention=[1]).save_pretrained(folder / "skip")
    hf_spec.SpecConfig("layer_skip").save_pretrained(folder / "skip")
    hf_spec.SpaceConfig(update="lora").save_pretrained(folder / "tuned")
    hf_spec.SpecConfig("space").save_pretrained(folder / "tuned")
    hf_spec.SpecConfig("space").save_pretrained(folder / "broken")
    hf_spec.Eagle3Config().save_pretrained(folder / "eagle")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "broken" / "adapter_config.json").write_text("[1]")
    return folder


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("words", "message"), MESSAGES)
def test_bad_input_ends_in_one_line(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(made)
    command, *more = shlex.split(words)
    first = {"train": 1, "import": 1, "card": 1, "push": 2, "export": 1}.get(command, 0)
    given = shlex.split(GIVEN[command])
    assert cli.main([command, *more[:first], *given, *more[first:]]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("hf-spec: ") and error.count("\n") == 1
    assert not Path("out").exists() or not [*Path("out").iterdir()]
