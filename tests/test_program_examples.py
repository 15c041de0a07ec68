"""The programs of docs/examples run on a tiny model, and write what plain generate writes."""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from scripts import DOCS, load_script
from tiny_checkpoint import plain_text
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec

EXAMPLES = DOCS / "examples"
QUESTION = "ab ab ab ab"


@pytest.fixture
def checkpoint(checkpoint: Path) -> str:
    return str(checkpoint)


def plain_answer(checkpoint: str, turns: list[str], max_new_tokens: int) -> str:
    """Of plain generation to a chat, whose turns alternate."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tok = AutoTokenizer.from_pretrained(checkpoint)
    roles = ("user", "assistant")
    chat = [{"role": roles[order % 2], "content": text} for order, text in enumerate(turns)]
    text = tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return plain_text(model, tok, text, max_new_tokens=max_new_tokens)


def test_colors_of_the_chat_are_taken_away_again() -> None:
    pytest.importorskip("gradio", reason="needs gradio, see CONTRIBUTING.md")
    chat = load_script("chat", EXAMPLES)
    texts = ["a <b>\n\n", "", "& c"]
    shown = chat.colored(texts)
    assert "\n" not in shown and shown.count("<span") == 3
    assert chat.plain(f"{shown}\n\n1.0 tokens per second") == "".join(texts)


@pytest.mark.environment
def test_chat(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over its server, in two turns, the second of which sees the first."""
    pytest.importorskip("gradio", reason="needs gradio, see CONTRIBUTING.md")
    from gradio_client import Client

    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    chat = load_script("chat", EXAMPLES)
    app = chat.chat(checkpoint, max_new_tokens=12)
    _, address, _ = app.launch(prevent_thread_lock=True, quiet=True)
    try:
        client = Client(address, verbose=False)
        turns = [QUESTION]
        for question in ("xy xy", None):
            answer = client.predict(turns[-1], api_name="/chat")
            assert "tokens per second" in answer and "(tau)" in answer
            expected = plain_answer(checkpoint, turns, 12)
            assert chat.plain(answer) == expected
            turns += [expected, question]
    finally:
        app.close()


@pytest.mark.environment
def test_grpo(checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl, see CONTRIBUTING.md")
    settings = {"max_steps": 2, "max_completion_length": 12, "report_to": "none", "use_cpu": True}
    trainer = load_script("grpo", EXAMPLES).train(checkpoint, str(tmp_path / "out"), **settings)
    assert trainer.state.global_step == 2
    assert hf_spec.last_stats(trainer.model) is not None  # there is none after plain rollouts


@pytest.mark.environment
def test_evaluate(checkpoint: str, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval, see CONTRIBUTING.md")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"question": "{text}"}}\n' for text in (QUESTION, "0 1 0 1", "x")))
    task = {
        "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": str(data)},
        "test_split": "train", "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "c", "generation_kwargs": {"until": ["zzzz"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    example = load_script("evaluate", EXAMPLES)
    found = example.evaluate(checkpoint, task, device="cpu", bootstrap_iters=0)
    assert list(found) == ["none", "prompt_lookup"]
    assert found["none"]["answers"] == found["prompt_lookup"]["answers"]
    assert found["none"]["scores"] == found["prompt_lookup"]["scores"]
    assert len(found["none"]["answers"]) == 3 and any(found["none"]["answers"])


@pytest.mark.environment
def test_client(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="needs openai, which hf_spec[serve] brings along")
    from test_serve import Server

    client = load_script("client", EXAMPLES)
    server = Server(checkpoint, "--strategy", "prompt_lookup")
    try:
        text = "".join(client.stream(server.client(), checkpoint, QUESTION, max_tokens=16))
        unfinished = "\ufffd"  # a character that the last token leaves open is not streamed
        expected = plain_answer(checkpoint, [QUESTION], 16).rstrip(unfinished)
        assert text.rstrip(unfinished) == expected
        assert client.main(checkpoint, f"{server.address}/v1") in capsys.readouterr().out
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.environment
def test_notebook(checkpoint: str, tmp_path: Path) -> None:
    """All of it but the installation, with a short training."""
    notebook = nbformat.read(EXAMPLES / "smollm2.ipynb", as_version=4)
    notebook.cells = [c for c in notebook.cells if "install" not in c.metadata.get("tags", ())]
    for cell in notebook.cells:
        assert not cell.get("outputs")
        cell.source = cell.source.replace("HuggingFaceTB/SmolLM2-135M-Instruct", checkpoint)
        cell.source = cell.source.replace("96, 120", "8, 2")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env={**os.environ, "PATH": path})
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert printed.count("4 of 4 answers are identical") == 2
    assert (tmp_path / "medusa" / "adapter_model.safetensors").is_file()
