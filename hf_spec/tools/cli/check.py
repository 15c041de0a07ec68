"""``hf-spec check``."""

import json
from dataclasses import asdict
from typing import Annotated

from typer import Argument, Exit, echo

from hf_spec.tools.cli import common as opt
from hf_spec.tools.loading import NATIVE, load_model, read_adapters

#: Exit code where something looks wrong.
LOOKS_WRONG = 1


def check(
    adapter: Annotated[str, Argument(help="Adapter folder or repository.")],
    model: opt.Model,
    prompts: opt.Prompts = None,
    limit: opt.Limit = 6,
    max_new_tokens: opt.NewTokens = 64,
    dtype: opt.Dtype = NATIVE,
    device: opt.Device = None,
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Check that an adapter drafts as well as it should, as after an import.

    Decodes a few prompts, and compares tau with what the adapter's folder says of it (results.json,
    the card's metadata, training.json), or with what is published of its kind. Then tries other
    values of fields that a checkpoint may say wrongly: flags of norms, the mask of blocks, layers
    that are numbered one off. Looks at the draft vocabulary, the chat template and the base's name,
    too. Exits with 1 if something looks wrong.

    \b
    Examples:
      hf-spec check ./eagle3 --model Qwen/Qwen3-8B
      hf-spec check ./drafter --model M --prompts P.jsonl --limit 20 --max-new-tokens 256
    """
    from hf_spec.tools.bench.checking import check as examined
    from hf_spec.tools.bench.prompts import BUNDLED, read_prompts, spread

    (one,) = read_adapters([adapter])
    chosen = spread(read_prompts(prompts or BUNDLED), limit)
    loaded, tokenizer = load_model(model, dtype, device, adapters=[one])
    found = examined(loaded, tokenizer, chosen, one, max_new_tokens)
    if as_json:
        echo(json.dumps(asdict(found), indent=1))
    else:
        echo(f"expected: {found.expected}")
        for title, value in found.measured.items():
            echo(f"{title}: {value}")
        for values, value in found.tried.items():
            echo(f"with {values}: {value}")
        for text in [*(found.findings or ["nothing looks wrong"]), *found.notes]:
            echo(text)
    if found.findings:
        raise Exit(LOOKS_WRONG)
