"""``hf-spec import``."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from hf_spec.cli import options as opt
from hf_spec.cli.common import check_writable


def import_(
    file: Annotated[
        str,
        Argument(
            help="A published checkpoint, .safetensors or .pt; a folder or a repository on the Hub "
            "with one."
        ),
    ],
    model: Annotated[
        str, Option(help="Base model it was made for: a folder, or a repository on the Hub.")
    ],
    output: Annotated[Path, Option("--output", "-o", help="Adapter folder.")],
    kind: Annotated[
        str | None, Option("--type", help="What it holds, such as medusa.  [default: by its files]")
    ] = None,
    strategy_kwargs: opt.StoredKwargs = None,
) -> None:
    """Turn a published checkpoint into an adapter.

    No code in the file is run: only tensors are read from files of torch.save, and the output is
    safetensors. Of the base, the config is read, and the embeddings if the checkpoint has some. For
    a checkpoint in several files give its .index.json. Layouts of 'eagle3': those of SafeAILab,
    AngelSlim, SpecForge, ModelOpt and speculators, with their config.json. Of 'medusa': heads with
    their own projections or a shared one, alone or among the weights of a model; those of vLLM,
    TensorRT-LLM, ModelOpt and LMDeploy.

    \b
    Examples:
      hf-spec import RedHatAI/Qwen3-8B-speculator.eagle3 --model Qwen/Qwen3-8B --output ./eagle3
      hf-spec import FasterDecoding/medusa-vicuna-7b-v1.3 --type medusa \\
          --model lmsys/vicuna-7b-v1.3 --output ./medusa
      hf-spec import ./published/medusa_lm_head.pt --type medusa --model lmsys/vicuna-7b-v1.3 \\
          --output ./medusa
      hf-spec import ./model/pytorch_model.bin.index.json --type medusa --model ./model \\
          --output ./medusa
    """
    from hf_spec.hub import transfer as work

    options = opt.json_object("--strategy-kwargs", strategy_kwargs)
    if kind is None:
        kind, path = work.recognized(file)
        chosen, _ = work.importable(kind)
    else:
        chosen, reader = work.importable(kind)
        path = work.find_published(file, reader.wants)
    chosen.parse_options(options)
    _, tensors = work.convert(path, kind)
    check_writable(output)
    base = work.base_outline(model, tensors)
    echo(f"adapter: {work.import_adapter(path, kind, base, output, options)}")
