"""``hf-spec run``: a program runs as under plain Python, and knows the strategies."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tiny_checkpoint import save_checkpoint

from hf_spec.tools import cli
from hf_spec.tools.cli import run

#: Says all that a program can see of how it was started.
LOOKS = """
import json, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__,
    "spec": getattr(__spec__, "name", None), "meta": len(sys.meta_path),
    "heavy": sorted({"torch", "transformers", "peft"} & set(sys.modules)),
}))
"""


def python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What Python makes of the arguments, in a folder."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}, cwd=cwd,
    )  # fmt: skip


def started(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same under ``hf-spec run``, without the time that its own start takes."""
    program, *rest = arguments
    module = program == "-m"
    if module:
        program, *rest = rest
    return python(
        *run.find(program, module), *rest, cwd=cwd, **{**run.environment(), **environment}
    )


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for transformers, PEFT and hf_spec, which take no time to import."""
    for name, code in {
        "transformers": "print('transformers')",
        "peft": "import transformers; print('peft')",
        "hf_spec": "import transformers, peft; print('hf_spec')",
    }.items():
        (tmp_path / "fakes" / name).mkdir(parents=True)
        (tmp_path / "fakes" / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
    return tmp_path / "fakes"


def test_a_program_sees_what_plain_python_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    monkeypatch.chdir(tmp_path)
    arguments = ["--help", "-m", "--", "x y"]
    for program in (["looks.py"], [str(tmp_path / "looks.py")], ["-m", "looks"]):
        plain, ours = python(*program, *arguments), started(*program, *arguments)
        assert plain.returncode == ours.returncode == 0, ours.stderr
        expected, found = json.loads(plain.stdout), json.loads(ours.stdout)
        assert found.pop("meta") == expected.pop("meta") + 1
        assert found == expected and found["argv"][1:] == arguments and found["heavy"] == []
    monkeypatch.syspath_prepend(tmp_path)
    assert run.find("looks") == ["-m", "looks"]  # a module that is no file here


def test_exit_codes_and_tracebacks(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    for code in (
        "import sys; sys.exit(7)",
        "import sys; sys.exit('why')",
        "1 / 0",
        "import os; os.abort()",
    ):
        script.write_text(code)
        plain, ours = python(str(script)), started(str(script))
        assert ours.returncode == plain.returncode != 0
        assert ours.stderr == plain.stderr


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('done')", "done"),
        ("import transformers; print('done')", "transformers peft hf_spec done"),
        ("import peft, transformers; print('done')", "transformers peft hf_spec done"),
        (
            "from importlib.util import find_spec; assert find_spec('peft'); print('found'); "
            "import peft; print(peft.__spec__.name, find_spec('peft').origin == peft.__file__)",
            "found transformers peft hf_spec peft True",
        ),
        ("import transformers.nothing", "transformers peft hf_spec"),
    ],
)
def test_when_hf_spec_is_imported(fakes: Path, tmp_path: Path, program: str, expected: str) -> None:
    """It imports both itself: never within either of them."""
    (tmp_path / "script.py").write_text(program)
    assert started(str(tmp_path / "script.py")).stdout.split() == expected.split()


def test_another_environments_python_goes_on_without_it(fakes: Path, tmp_path: Path) -> None:
    (fakes / "hf_spec" / "__init__.py").unlink()
    (fakes / "hf_spec").rmdir()
    ours = python("-S", "-c", "import sitecustomize", cwd=tmp_path, **run.environment())
    assert ours.returncode == 0
    assert f"hf_spec is not installed for {sys.executable}" in ours.stderr


def test_children_know_it_too(fakes: Path, tmp_path: Path) -> None:
    script, knows = (
        tmp_path / "parent.py",
        "import sys, peft; print('knows', 'hf_spec' in sys.modules)",
    )
    script.write_text(
        "import multiprocessing, subprocess, sys\n"
        f"def child():\n    {knows}\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork', 'forkserver'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        one = context.Process(target=child)\n"
        "        one.start(); one.join()\n"
        f"    subprocess.run([sys.executable, '-c', {knows!r}])\n"
    )
    ours = started(str(script), cwd=tmp_path, PYTHONUNBUFFERED="1")
    assert ours.stdout.count("knows True") == 4, ours.stderr


def test_an_environments_own_sitecustomize_runs(fakes: Path, tmp_path: Path) -> None:
    (fakes / "sitecustomize.py").write_text("print('own')")
    script = tmp_path / "script.py"
    script.write_text("import sitecustomize, transformers; print(sitecustomize.__file__)")
    assert started(str(script)).stdout.splitlines() == [
        "own", "transformers", "peft", "hf_spec", str(fakes / "sitecustomize.py"),
    ]  # fmt: skip


def test_console_scripts_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.find("torchrun") == [str(Path(sysconfig.get_path("scripts")) / "torchrun")]
    (tmp_path / "torchrun").write_text("")
    assert run.find("torchrun") == ["torchrun"]  # a file comes first
    for name in ("nowhere.py", "no-such-program", "python", "sh"):
        with pytest.raises(ValueError, match=f"PROGRAM '{name}': there is no such file"):
            run.find(name)


@pytest.mark.environment
def test_the_command(tmp_path: Path) -> None:
    """From the shell to a generation, in a process and in its workers."""
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


def test_a_program_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "no-such-program", "--help"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-spec: PROGRAM 'no-such-program'") and error.count("\n") == 1
    assert cli.main(["run"]) == 2
