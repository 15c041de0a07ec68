"""``hf-spec run``: a program runs as under plain Python, and knows the strategies."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import save_checkpoint

from hf_spec.tools import cli
from hf_spec.tools.cli import serve

#: Says all that a program can see of how it was started.
LOOKS = """
import json, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
    "spec": getattr(__spec__, "name", None),
}))
"""


def python(*arguments: str, cwd: Path | None = None, **environment: str) -> Any:
    """What Python makes of the arguments, in a folder."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}, cwd=cwd,
    )  # fmt: skip


def started(*arguments: str, **how: Any) -> Any:
    """The same under ``hf-spec run``, without the time that its own start takes."""
    module = arguments[0] == "-m"
    program, *rest = arguments[module:]
    return python("-P", "-c", serve.START, *serve.find(program, module), *rest, **how)


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for hf_spec, which takes no time to import."""
    (tmp_path / "fake" / "hf_spec").mkdir(parents=True)
    (tmp_path / "fake" / "hf_spec" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))


def test_a_program_sees_what_plain_python_shows_it(tmp_path, monkeypatch):
    (tmp_path / "looks.py").write_text(LOOKS)
    monkeypatch.chdir(tmp_path)
    arguments = ["--help", "-m", "--", "x y"]
    for program in (["looks.py"], [str(tmp_path / "looks.py")], ["-m", "looks"]):
        plain, ours = python(*program, *arguments), started(*program, *arguments)
        assert plain.returncode == ours.returncode == 0, ours.stderr
        expected, found = json.loads(plain.stdout), json.loads(ours.stdout)
        found["file"] = str(tmp_path / found["file"])
        assert found == expected and found["argv"][1:] == arguments
    monkeypatch.syspath_prepend(tmp_path)
    assert serve.find("looks") == ["-m", "looks"]  # a module that is no file here


def test_exit_codes_and_tracebacks(tmp_path):
    script = tmp_path / "fails.py"
    codes = ("raise SystemExit(7)", "raise SystemExit('why')", "1 / 0", "import os; os.abort()")
    for code in codes:
        script.write_text(code)
        plain, ours = python(str(script)), started(str(script))
        assert ours.returncode == plain.returncode != 0
        assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_hf_spec_is_imported_first(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('hf_spec' in sys.modules)")
    assert started(str(script)).stdout == "True\n"


def test_children_of_a_script(tmp_path):
    """Those of multiprocessing import the script, as under plain Python."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing\n"
        "def child():\n    print('ran')\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork', 'forkserver'):\n"
        "        one = multiprocessing.get_context(method).Process(target=child)\n"
        "        one.start(); one.join()\n"
    )
    ours = started(str(script), cwd=tmp_path, PYTHONUNBUFFERED="1")
    assert ours.stdout.count("ran") == 3, ours.stderr


def test_console_scripts_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert serve.find("torchrun") == [str(Path(sysconfig.get_path("scripts")) / "torchrun")]
    (tmp_path / "torchrun").write_text("")
    assert serve.find("torchrun") == ["torchrun"]  # a file comes first
    for name in ("nowhere.py", "no-such-program", "python", "sh"):
        with pytest.raises(ValueError, match=f"PROGRAM '{name}': there is no such file"):
            serve.find(name)


@pytest.mark.environment
def test_the_command(tmp_path, monkeypatch):
    """From the shell to a generation."""
    monkeypatch.undo()
    checkpoint = save_checkpoint(tmp_path / "model")
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = torch.tensor([[9, 8, 9, 8]])\n"
        "options = {'max_new_tokens': 8, 'do_sample': False}\n"
        "plain = model.generate(ids, **options)\n"
        "ours = model.generate(ids, assistant_strategy='prompt_lookup', **options)\n"
        "assert torch.equal(plain, ours)\n"
        "sys.exit(3)\n"
    )
    ours = python("-m", "hf_spec.tools.cli", "run", str(script), str(checkpoint))
    assert ours.returncode == 3, ours.stderr


def test_a_program_that_is_not_there(capsys):
    assert cli.main(["run", "no-such-program", "--help"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-spec: PROGRAM 'no-such-program'") and error.count("\n") == 1
    assert cli.main(["run"]) == 2
