"""The program ``hf-spec`` says at once that it is loading."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

import hf_spec_command
from hf_spec import cli
from hf_spec_command import CLEAR, COMPLETING, LOADING

#: Ends the process where hf_spec would be imported.
STOPPED = """
import sys, hf_spec_command

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "hf_spec":
            sys.exit("importing hf_spec")

sys.meta_path.insert(0, Stop())
sys.argv = ["hf-spec", "demo"]
hf_spec_command.main()
"""


def test_the_message_comes_before_hf_spec_is_imported() -> None:
    command = [sys.executable, "-c", STOPPED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == f"{LOADING}\nimporting hf_spec\n" and done.returncode == 1


@pytest.mark.parametrize(
    ("terminal", "completing", "command", "shown"),
    [
        (True, False, "strategies", LOADING + CLEAR),
        (True, False, "demo", LOADING + CLEAR),
        (False, False, "demo", LOADING + "\n"),
        (False, False, "strategies", ""),
        (True, True, "strategies", ""),
    ],
)
def test_it_disappears_from_terminals_and_stays_out_of_logs(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, completing: bool, command: str, shown: str
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "argv", ["hf-spec", command])
    monkeypatch.setattr(cli, "main", lambda: 3)
    monkeypatch.delenv(COMPLETING, raising=False)
    if completing:
        monkeypatch.setenv(COMPLETING, "complete_bash")
    assert hf_spec_command.main() == 3
    assert stderr.getvalue() == shown
