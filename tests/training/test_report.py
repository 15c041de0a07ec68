"""What a training says while it runs and when it is over."""

import json

from tiny_checkpoint import save_checkpoint
from trained import SETTINGS, answers, as_options

from hf_spec.tools import cli

#: What is held out is decoded at the end, too.
SHORT = {**SETTINGS, "held_out": 1, "served_prompts": 1}


def test_the_command_says_what_came_out_and_what_is_next(tmp_path, capsys):
    checkpoint, data, output = save_checkpoint(tmp_path / "m"), tmp_path / "d", tmp_path / "out"
    data.mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in answers())
    (data / "answers.jsonl").write_text(rows)
    command = ["train", "medusa", *as_options(checkpoint, data, **SHORT, num_heads=2)]
    command += ["--output", str(output)]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line.split(":")[0] for line in lines[:2]]
    assert told == ["step 3 of 6", "step 6 of 6"] and "{" not in "".join(lines)
    assert lines[-2] == f"adapter: {output}"
    assert lines[-1] == f"try: hf-spec bench --model {checkpoint} --adapter {output} --by-task"
