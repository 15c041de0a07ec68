"""``hf-spec card``, ``push``, ``import`` and ``export``: adapter folders, and their other forms."""

import re
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Argument, Option, echo

from hf_spec.core.checks import check_names
from hf_spec.tools.cli import common as opt
from hf_spec.tools.cli.common import check_writable
from hf_spec.tools.loading import load_model

Folder = Annotated[Path, Argument(help="Adapter folder.")]
BaseName = Annotated[
    str | None, Option(help="Name of the base model on the Hub.  [default: that of the adapter]")
]
License = Annotated[
    str | None,
    Option(help="Of the adapter, as the Hub names it: apache-2.0.  [default: the card's]"),
]
Language = Annotated[str | None, Option(help="Of its data: en, or en,de.  [default: the card's]")]


def card(
    folder: Folder,
    repository: Annotated[
        str | None, Option(help="Name on the Hub.  [default: the folder's name]")
    ] = None,
    base_model: BaseName = None,
    license: License = None,
    language: Language = None,
) -> None:
    """Write the card of an adapter folder.

    Renders README.md from the adapter's configs, search.json, and results.json of 'hf-spec bench',
    and renews custom_generate/generate.py. The license and the language of a card that is there
    stay.

    \b
    Examples:
      hf-spec card ./skip
      hf-spec bench --model M --adapter ./skip --prompts P.jsonl --output ./skip
      hf-spec card ./skip --repository org/name --license apache-2.0 --language en
    """
    from hf_spec.tools.hub import write_card

    said = _said(license, language)
    echo(f"card: {write_card(folder, repository, base_model, **said)}")


def _said(license: str | None, language: str | None) -> dict[str, Any]:
    """Metadata of a card that a person gives."""
    languages = [one.strip() for one in (language or "").split(",") if one.strip()]
    for option, words in (("--license", [license or ""]), ("--language", languages)):
        for word in words:
            if not re.fullmatch(r"[\w.+-]*", word):
                raise ValueError(f"{option} {word!r}: give a name of the Hub's, such as mit or en")
    return {"license": license, "language": languages[0] if len(languages) == 1 else languages}


def push(
    folder: Folder,
    repository: Annotated[str, Argument(help="owner/name on the Hub.")],
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, Option(help="Branch; created if it does not exist.")] = None,
    base_model: BaseName = None,
    license: License = None,
    language: Language = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show the card and the files; upload nothing.")
    ] = False,
) -> None:
    """Upload an adapter folder to the Hub.

    The folder must be complete, as 'hf-spec train' or 'hf-spec search' writes it. Its card gets the
    repository's name; one that was edited by hand is uploaded unchanged. The study of a search is
    not uploaded. Log in first with 'hf auth login'.

    \b
    Examples:
      hf-spec push ./skip org/qwen3-0.6b-layer-skip --license apache-2.0 --dry-run
      hf-spec push ./skip org/qwen3-0.6b-layer-skip
      hf-spec push ./skip org/name --private --revision v2
    """
    from hf_spec.tools.hub import CARD, files_to_upload
    from hf_spec.tools.hub import push as upload

    said = _said(license, language)
    if dry_run:
        files = files_to_upload(folder, repository, base_model, **said)
        contents = {
            name: found if isinstance(found, bytes) else Path(found).read_bytes()
            for name, found in sorted(files.items())
        }
        echo(contents[CARD].decode().rstrip())
        branch = "" if revision is None else f", branch {revision}"
        echo(f"\n--- files of one commit to {repository}{branch} ---")
        for name, content in contents.items():
            echo(f"{len(content):12,} bytes  {name}")
        echo("nothing was uploaded")
        return
    address = upload(
        folder, repository, private=private, revision=revision, base_model=base_model, **said
    )
    echo(f"uploaded: {address}")


def import_(
    file: Annotated[
        str,
        Argument(
            help="A published checkpoint, .safetensors or .pt; a folder or a repository on the Hub "
            "with one."
        ),
    ],
    model: opt.Model,
    output: opt.Output,
    kind: Annotated[
        str | None, Option("--type", help="What it holds, such as medusa.  [default: by its files]")
    ] = None,
    config: Annotated[
        str | None,
        Option(
            help="Fields of the adapter's config, a JSON object; they replace what the files say."
        ),
    ] = None,
    strategy_kwargs: opt.StoredKwargs = None,
) -> None:
    """Turn a published checkpoint into an adapter.

    No code in the file is run: only tensors are read from files of torch.save, and the output is
    safetensors. Of the base, the config is read, and the embeddings if the checkpoint has some. For
    a checkpoint in several files give its .index.json. Layouts of 'eagle3': those of SafeAILab,
    AngelSlim, SpecForge, ModelOpt, speculators and DeepSpec, with their config.json. Of 'medusa':
    heads with their own projections or a shared one, alone or among the weights of a model; those
    of vLLM, TensorRT-LLM and ModelOpt. Of 'dflash' and 'dspark': DFlash, DFlash 2, JetSpec, Domino,
    DSpine, xPress and DSpark, as z-lab, SpecForge, DeepSpec and speculators write them. Of 'mtp':
    layers that speculators has trained.

    \b
    Examples:
      hf-spec import RedHatAI/Qwen3-8B-speculator.eagle3 --model Qwen/Qwen3-8B --output ./eagle3
      hf-spec import FasterDecoding/medusa-vicuna-7b-v1.3 --type medusa \\
          --model lmsys/vicuna-7b-v1.3 --output ./medusa
      hf-spec import ./drafter --config '{"causal": true}' --model Qwen/Qwen3-8B --output ./jetspec
      hf-spec import ./model/pytorch_model.bin.index.json --type medusa --model ./model \\
          --output ./medusa
    """
    from hf_spec.adapters.config import SpecPeftConfig
    from hf_spec.tools import transfer as work
    from hf_spec.tools.training.arguments import added_fields

    given = opt.json_object("--config", config)
    if kind is None:
        kind, path = work.recognized(file)
    else:
        path = work.find_published(file, work.importable(kind)[1].wants)
    method, _ = work.importable(kind)
    fields = added_fields(method.adapter_config, SpecPeftConfig)
    check_names(f"--config: the adapter of {kind!r}", given, fields)
    options = opt.stored_kwargs_of(kind, strategy_kwargs)
    if output.exists():  # else nothing is made before the checkpoint has been read
        check_writable(output, method.peft_type)
    echo(f"adapter: {work.import_adapter(path, kind, model, output, options, given)}")
    named, folder = quote(model), quote(str(output))
    echo(f"check it: hf-spec check {folder} --model {named}")
    echo(f"measure it: hf-spec bench --model {named} --adapter {folder} --suite mt-bench")


def export(
    folder: Folder,
    form: Annotated[str, Option("--format", help="speculators (for vLLM) or sglang.")],
    output: opt.Output,
    model: Annotated[str | None, Option(help="Base model.  [default: that of the adapter]")] = None,
    dtype: opt.Dtype = "bfloat16",
    device: Annotated[str, Option(help="Where the base is loaded.")] = "cpu",
) -> None:
    """Write an adapter as another program reads it.

    Adapters of 'eagle3', 'dflash' and 'dspark' become files as speculators writes them, which vLLM
    reads, too, or files in SpecForge's layout, which SGLang reads. Neither layout has every head of
    a block drafter.

    \b
    Examples:
      hf-spec export ./eagle3 --format speculators --output ./drafter
      hf-spec export ./eagle3 --format sglang --output ./drafter
    """
    from hf_spec.files import read_json
    from hf_spec.tools import transfer as work
    from hf_spec.tools.hub import CONFIG

    work.exporter(folder, form)
    name = model or read_json(folder / CONFIG).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{str(folder)!r} does not name its base model: give --model")
    if (output / CONFIG).is_file():
        raise ValueError(f"--output {str(output)!r} is an adapter's folder: give another one")
    check_writable(output)
    base, _ = load_model(name, dtype, device, pack=False)
    echo(f"written: {work.export_adapter(folder, form, base, output)}")
