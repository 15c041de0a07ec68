"""``hf-spec export``."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

from hf_spec.cli import options as opt
from hf_spec.cli.common import check_writable
from hf_spec.model.loading import load_model


def export(
    folder: opt.AdapterFolder,
    form: Annotated[str, Option("--format", help="speculators (for vLLM) or sglang.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder to write.")],
    model: Annotated[str | None, Option(help="Base model.  [default: that of the adapter]")] = None,
    dtype: opt.Dtype = "bfloat16",
    device: Annotated[str, Option(help="Where the base is loaded.")] = "cpu",
) -> None:
    """Write an adapter as another program reads it.

    'eagle3', 'dflash' and 'dspark' as 'speculators', which vLLM reads, too; 'eagle3' as 'sglang'.

    'sglang', for 'space' trained with --masks noise: the LoRA of SGLang's UNO, 0.5.23. It has not
    been run there.

    \b
    Examples:
      hf-spec export ./eagle3 --format speculators --output ./drafter
      hf-spec export ./space --format sglang --output ./uno-lora
    """
    from hf_spec.files import read_json
    from hf_spec.hub import transfer as work
    from hf_spec.hub.folder import CONFIG

    work.exporter(folder, form)
    name = model or read_json(folder / CONFIG).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{str(folder)!r} does not name its base model: give --model")
    check_writable(output)
    base, _ = load_model(name, dtype, device, pack=False)
    echo(f"written: {work.export_adapter(folder, form, base, output)}")
