"""Files are written in one step; a full disk is told in one line."""

import resource

import pytest
import torch
from safetensors.torch import save_file

from hf_spec import files
from hf_spec.files import staging, write_atomically, writing
from hf_spec.tools.training.distill import AnswerFolder


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_atomically(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_atomically(folder / "a.json", "x" * 100_000),
        lambda folder: save_file({"x": torch.zeros(100_000)}, folder / "a.safetensors"),
        lambda folder: torch.save({"x": torch.zeros(100_000)}, folder / "a.pt"),
        lambda folder: AnswerFolder(folder).add([{"x": "x" * 1000}] * 100),
    ],
    ids=["text", "safetensors", "torch", "answers"],
)
def test_where_there_is_no_room(tmp_path, write):
    """Whoever writes: the error is one line with the folder, and nothing is left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # refuses as a full disk does
    try:
        with pytest.raises(OSError, match="File too large|to its end") as caught:  # noqa: SIM117
            with staging(tmp_path) as folder:
                write(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = str(caught.value)
    assert f"cannot write to '{tmp_path}" in said and said.count("\n") == 0
    assert "make room there, or choose another folder" in said
    assert list(tmp_path.iterdir()) == []


def test_other_errors_within_a_block_that_writes(tmp_path):
    for error in (ConnectionRefusedError(111, "refused"), RuntimeError("x"), FileNotFoundError()):
        with pytest.raises(type(error)) as caught, writing(tmp_path):
            raise error
        assert caught.value is error
