"""Adapter folders as repositories: written, checked, described by a card, uploaded to the Hub."""

import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
)
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Template, TemplateError
from peft import PeftModel, get_peft_model

import hf_spec
from hf_spec.adapters.checkpoint import CONFIG, WEIGHTS, read_weights
from hf_spec.adapters.config import (
    CARD,
    GENERATION,
    MEASURED,
    SHIM,
    replacing_adapter,
    says_the_same,
    shim_text,
)
from hf_spec.core.checks import INSTALL, explained, first_line, names_its_files
from hf_spec.decoding.call import check_stored
from hf_spec.draft.options import ACCEPTANCE_RULES, CHAIN
from hf_spec.files import is_path, read_json, write_atomically
from hf_spec.methods.registry import Method, get_method
from hf_spec.tools.data import ALL

# -- Adapter folders: every file is written atomically ---------------------------------------------


REQUIRED = (CONFIG, WEIGHTS, GENERATION, CARD)
#: What was measured of the adapter.
SEARCH, TRAINING, RESULTS = MEASURED
#: Files that are uploaded if they exist; the shim is always written anew.
OPTIONAL = (*MEASURED, "*.png", "*.svg", "LICENSE")
#: The folders of a path of this machine, in a text.
FOLDERS = re.compile(r"""(?:^|(?<=[\s"'=]))(?:~[^/\s]*|\.{1,2})?/(?=[^\s/])(?:[^/"'=]*/)*""")
#: Weights in formats that run code when they are loaded.
UNSAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


def save_adapter(
    model: Any, folder: Path, strategy: str, options: dict[str, Any],
    state: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write the adapter ``default`` of a ``PeftModel`` with its ``SpecConfig``: all of a folder but
    the card. ``state`` is the model's state dict, where its own tensors are sharded."""
    with replacing_adapter(folder, get_method(strategy).peft_type) as temporary:
        model.save_pretrained(temporary, state_dict=state, save_embedding_layers=False)
    save_spec_config(folder, strategy, options)


@contextmanager
def attached(
    model: Any, adapter_config: Any, in_float32: bool = False, on_meta: bool = False,
    trained: Path | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Give a ``PeftModel`` with an adapter; ``model`` is restored after the block.

    Args:
        adapter_config: the adapter's config; None for that of ``trained``.
        in_float32: whether an adapter of a 16-bit model is kept in float32, as PEFT does for
            training.
        on_meta: whether the adapter has no weights yet.
        trained: folder of a trained adapter whose weights it gets; None for a new one.
    """
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from PEFT's call of Transformers
        options = {"autocast_adapter_dtype": in_float32, "low_cpu_mem_usage": on_meta}
        if trained is None:
            peft_model = get_peft_model(model, adapter_config, **options)
        else:
            peft_model = PeftModel.from_pretrained(
                model, str(trained), config=adapter_config, is_trainable=True, **options
            )
    try:
        yield peft_model
    finally:
        peft_model.unload()
        for parameter, before in zip(model.parameters(), trainable):
            parameter.requires_grad_(before)


def save_spec_config(folder: Path, strategy: str, options: dict[str, Any]) -> None:
    """Write ``generation_config.json``, and the shim with the same strategy and options; a
    ValueError if they name a file (:func:`check_stored`)."""
    check_stored(options, f"the configuration of {str(folder)!r}")
    config = hf_spec.SpecConfig(assistant_strategy=strategy, assistant_kwargs=options)
    write_atomically(folder / GENERATION, config.to_json_string())
    write_shim(folder)


def write_shim(folder: Path) -> None:
    """Write ``custom_generate/generate.py`` with the strategy and options of the folder."""
    method, options = read_spec_config(folder)
    write_atomically(folder / SHIM, shim_text(method.name, options, method.peft_type))


@names_its_files
def read_spec_config(folder: Path) -> tuple[Method, dict[str, Any]]:
    """The strategy and options in ``generation_config.json``."""
    data = read_json(folder / GENERATION)
    strategy, options = data.get("assistant_strategy"), data.get("assistant_kwargs") or {}
    if not strategy:
        raise ValueError(f"{str(folder / GENERATION)!r} names no assistant_strategy")
    method = get_method(strategy)
    method.parse_options(options)
    check_stored(options, f"the configuration of {str(folder)!r}")
    return method, options


@names_its_files
def check_complete(folder: Path) -> None:
    """Check that a folder is a complete adapter repository whose files fit together."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if missing:
        remedy = f"; 'hf-spec card {folder}' writes {CARD}" if CARD in missing else ""
        raise ValueError(f"{str(folder)!r} is no complete adapter: no {', '.join(missing)}{remedy}")
    unsafe = sorted(path.name for kind in UNSAFE for path in folder.glob(kind))
    if unsafe:
        raise ValueError(
            f"{str(folder)!r} holds weights that can run code when loaded ({', '.join(unsafe)}): "
            f"weights belong into {WEIGHTS}; remove them"
        )
    method, options = read_spec_config(folder)
    peft_type = read_json(folder / CONFIG).get("peft_type")
    if peft_type != method.peft_type:
        raise ValueError(
            f"{CONFIG} is of type {peft_type!r}, but {GENERATION} names strategy {method.name!r}, "
            f"whose adapters are of type {method.peft_type!r}"
        )
    if not read_weights(folder / WEIGHTS):
        raise ValueError(f"{str(folder / WEIGHTS)!r} holds no tensors; PEFT would not load it")
    shim = folder / SHIM
    if shim.is_file() and not says_the_same(
        shim.read_text(encoding="utf-8"), method.name, options, peft_type
    ):
        raise ValueError(
            f"{SHIM} does not say what {GENERATION} says; 'hf-spec card {folder}' writes it anew"
        )


def is_repository(name: str | None) -> bool:
    """Whether a name is a repository on the Hub (``name``, ``owner/name``) and no local folder."""
    return not (not name or is_path(name) or Path(name).is_dir())


# -- Model cards, rendered from an adapter folder's configs and results; and uploads to the Hub ----
#
# The template is `hub_cards/adapter_card.md`. Each method adds a section, `Method.card`, with the
# variables `adapter` (the adapter's config), `options` and `search` (`search.json`, or None).
# `hub_cards/training.md` adds a section for trained adapters. A card depends on the folder alone.


#: Templates of cards; those of methods are theirs.
TEMPLATES = files("hf_spec.hub_cards")
#: Ends a card of ours, with a hash of its text: that of an edited card is another.
MARK = "<!-- Written by hf_spec, {}. A card that was edited since is kept. -->"
METADATA = re.compile(r"\A\s*---\n.*?\n---\s*\n", re.DOTALL)
#: Files of an earlier adapter in a repository that would be mistaken for a new one's.
STALE = (*MEASURED, *UNSAFE)
#: What PEFT appends to each card when it saves an adapter.
PEFT_VERSION = re.compile(r"(### Framework versions\s+)?^- PEFT \S+$", re.MULTILINE)


@names_its_files
def render_card(
    folder: Path, repository: str | None = None, base_model: str | None = None, **metadata: Any
) -> str:
    """The text of a card, with the adapter's name on the Hub and that of its base model; by default
    the folder's name, and what ``adapter_config.json`` says. ``metadata`` are fields that nothing
    in the folder says, such as ``license`` and ``language``."""
    method, options = read_spec_config(folder)
    adapter = read_json(folder / CONFIG)
    base_model = base_model or adapter.get("base_model_name_or_path") or "the base model"
    public = is_repository(base_model) and base_model != "the base model"
    search = read_json(folder / SEARCH, optional=True)
    training = read_json(folder / TRAINING, optional=True)
    repository = repository or folder.resolve().name
    facts: dict[str, Any] = {"adapter": adapter, "options": options}
    section = trained = ""
    acceptance, figures = method.parse_options(options).acceptance, _figures(folder, method, search)
    data = _metadata(
        repository, base_model if public else None, method, figures, training, metadata
    )
    with explained("what was recorded of the adapter does not fit its card", TemplateError):
        if method.card.is_file():  # the method's own section
            section = _render(method.card, **facts, search=search or None)
        if training:
            best = training.get("best") or {}
            distances = itertools.takewhile(lambda i: f"eval_top1_{i}" in best, itertools.count(1))
            trained = _render(TEMPLATES / "training.md", training=training, distances=[*distances])
        card = ModelCard.from_template(
            data, template_str=(TEMPLATES / "adapter_card.md").read_text(encoding="utf-8"),
            install=INSTALL, title=repository.rpartition("/")[2], repository=repository,
            base_model=base_model, base_is_repository=public, method=method, **facts,
            lossless=ACCEPTANCE_RULES[acceptance], acceptance=acceptance,
            figures=figures, section=section, training=trained,
        )  # fmt: skip
    return f"{str(card).rstrip()}\n\n{_mark(card.text)}\n"


def _render(source: Traversable, **values: Any) -> str:
    return Template(source.read_text(encoding="utf-8")).render(**values).strip()


def _metadata(
    repository: str, base_model: str | None, method: Method, figures: dict[str, Any] | None,
    training: dict[str, Any], metadata: dict[str, Any],
) -> ModelCardData:  # fmt: skip
    """What the Hub shows beside a card, and finds an adapter by. The library is hf_spec, since the
    Hub would show code of PEFT's, which does not know these adapters by itself."""
    results = _eval_results(figures) if figures else []
    named: dict[str, Any] = {"model_name": repository.rpartition("/")[2], "eval_results": results}
    related: dict[str, Any] = {} if base_model is None else {"base_model_relation": "adapter"}
    return ModelCardData(
        base_model=base_model, library_name="hf_spec", pipeline_tag="text-generation",
        tags=["hf_spec", "speculative-decoding", method.name],
        datasets=_datasets(training), **(named if results else {}), **related,
        **{name: value for name, value in metadata.items() if value},
    )  # fmt: skip


def _datasets(training: dict[str, Any]) -> list[str] | None:
    """Datasets of the Hub that an adapter was trained on, or whose prompts its base answered."""
    data = training.get("data") or {}
    asked = (data.get("provenance") or {}).get("prompts")
    # Names of files have no slash; of a dataset, split and column follow, as may a configuration.
    names = [data.get("dataset"), *(asked.values() if isinstance(asked, dict) else ())]
    named = [name.partition(":")[0].split("/") for name in names if name and "/" in name]
    found = {"/".join(parts[:2]) for parts in named}
    return sorted(found) or None


def _eval_results(figures: dict[str, Any]) -> list[EvalResult]:
    """Tau and speed over all prompts; of a suite tau for each size of trees, without the prefill
    and with it."""
    row, where = figures["rows"][-1], figures["environment"]
    name = where.get("dataset") or (where.get("prompts") or "prompts").rpartition("/")[2]
    device = where["device_name"]
    if figures["protocol"]:
        name = figures["protocol"]["suite"]
        values = [
            (kind, one[kind], f"{one['trees']}, {figures['said']}")
            for one in figures["rows"] if one["task"] == ALL
            for kind in ("tau_without_prefill", "tau")
        ]  # fmt: skip
    else:
        values = [
            ("tau", row["tau"], "tokens per forward pass"),
            ("speedup", row["speedup"], f"beside plain generate, {device}"),
            ("tokens_per_second", row["tokens_per_second"], f"{device}, {where['dtype']}"),
        ]
    return [
        EvalResult(
            task_type="text-generation", dataset_type=name, dataset_name=name,
            metric_type=kind, metric_value=round(value, 3), metric_name=f"{kind}, {said}",
        )
        for kind, value, said in values
    ]  # fmt: skip


def said_of(where: dict[str, Any], groups: set[str]) -> str:
    """The protocol of a suite in words, from an environment in ``results.json`` and the groups that
    were measured."""
    settings, count = where["settings"], len(groups)
    how = f"temperature {settings.get('temperature') or 'of the model'}"
    return (
        f"mean of {count} group{'s' * (count != 1)}, at most {settings['max_new_tokens']} new "
        f"tokens, {how if settings.get('do_sample') else 'greedy'}, {where['dtype']}"
    )


def renewed_card(
    folder: Path, repository: str, base_model: str | None = None, **metadata: Any
) -> str:
    """The text of a folder's card, rendered anew with other names unless a person has written or
    edited it; metadata that hf_spec and PEFT don't set, such as a license, stays."""
    text = (folder / CARD).read_text(encoding="utf-8")
    body = PEFT_VERSION.sub("", METADATA.sub("", text))
    of_peft = ModelCard.from_template(ModelCardData()).text
    before, _, last = body.rstrip().rpartition("\n")
    if last != _mark(before) and body.split() != of_peft.split():
        if given := [name for name, value in metadata.items() if value]:
            raise ValueError(
                f"{str(folder / CARD)!r} was edited by hand and is uploaded as it is: write the "
                f"{' and the '.join(given)} into it, or let 'hf-spec card' write it anew"
            )
        return text
    return _completed(render_card(folder, repository, base_model, **metadata), text)


def _completed(card: str, old: str) -> str:
    """A card with the metadata of an old one that it lacks itself, but for what was measured."""
    new, before = ModelCard(card), ModelCard(old, ignore_metadata_errors=True).data.to_dict()
    for key, value in before.items():
        if key != "model-index" and new.data.get(key) is None:
            new.data[key] = value
    return str(new)


def _mark(text: str) -> str:
    """The last line of a card of ours with this text, whose line breaks and spaces don't count."""
    return MARK.format(hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16])


def write_card(
    folder: Path, repository: str | None = None, base_model: str | None = None, **metadata: Any
) -> Path:
    """Write ``README.md`` (:func:`render_card`), whose path is returned, and
    ``custom_generate/generate.py`` to an adapter folder. Of a card that is there, metadata which
    nothing else says stays."""
    if repository is not None:
        validate_repo_id(repository)
    text = render_card(folder, repository, base_model, **metadata)
    if (folder / CARD).is_file():
        text = _completed(text, (folder / CARD).read_text(encoding="utf-8"))
    write_shim(folder)
    write_atomically(folder / CARD, text)
    return folder / CARD


def _figures(folder: Path, method: Method, search: dict[str, Any]) -> dict[str, Any] | None:
    """The strategy's figures in the folder's ``results.json``; None if there is no such file."""
    if not (folder / RESULTS).is_file():
        return None
    data = read_json(folder / RESULTS)
    try:
        environment, size = data["environment"], data["runs"][0]["batch_size"]
        runs = [row for row in data["runs"] if row["batch_size"] == size]
        speeds = {(row["strategy"], row["task"]): row["tokens_per_second"] for row in runs}
        protocol = environment["settings"].get("protocol")
        names = [name for name, _ in speeds if re.split("[:@]", name)[0] == method.name]
        strategies = set(names) if protocol else {names[0]}
        own = [
            {**row, "plain": speeds[row["baseline"], row["task"]], "trees": _trees(row["strategy"])}
            for row in runs if row["strategy"] in strategies
        ]  # fmt: skip
        by_task = len({row["task"] for row in own}) > 2  # a single one has the figures of "all"
        asked = environment.get("prompts_sha256")
        searched = bool(search) and search["environment"].get("prompts_sha256") == asked
        return {
            "rows": own if by_task else [row for row in own if row["task"] == ALL],
            "by_task": by_task, "batch_size": size, "protocol": protocol,
            "said": said_of(environment, {row["task"] for row in own} - {ALL}) if protocol else "",
            "development": searched and not environment.get("held_out"),
            "environment": environment,
        }  # fmt: skip
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{str(folder / RESULTS)!r} is not what hf-spec bench writes for {method.name!r}: "
            f"{error!r}"
        ) from error


def _trees(name: str) -> str:
    """What a contender of a suite drafts in a step, in words."""
    label = name.partition("@")[0].partition(":")[2]
    if label.startswith(CHAIN):
        return f"chains of {label.removeprefix(CHAIN)}"
    return f"trees of {label}" if label.isdecimal() else label or "as it is"


def push(
    folder: Path, repository: str, *, private: bool = False, revision: str | None = None,
    base_model: str | None = None, **metadata: Any,
) -> str:  # fmt: skip
    """Upload a complete adapter folder, and return the URL of the commit. ``metadata`` are fields
    of the card that nothing in the folder says, such as ``license``.

    Other files in the folder, such as the study and logs, are not uploaded. A card that hf_spec or
    PEFT wrote is rendered anew, with the repository's name, unless it was edited since. The upload
    is a single commit, so whoever loads the adapter during the upload, or after an interrupted one,
    gets the earlier adapter as a whole. That one's measurements, figures and pickled weights are
    removed. Repository and branch are created if they do not exist.
    """
    # The HTTP library differs between releases of huggingface_hub.
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    files, api = files_to_upload(folder, repository, base_model, **metadata), HfApi()
    try:
        # None leaves the choice to the organization's settings.
        api.create_repo(repository, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        remote = api.list_repo_files(repository, revision=revision)
        stale = [name for name in remote if any(fnmatch(name, kind) for kind in STALE)]
        added = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
        deleted = [CommitOperationDelete(name) for name in stale if name not in files]
        commit = api.create_commit(  # not upload_folder, which may make several commits
            repository, operations=[*added, *deleted], revision=revision,
            commit_message="Upload adapter with hf_spec",
        )  # fmt: skip
    # Failed uploads of single files end in a RuntimeError.
    except (transport, OSError, RuntimeError) as error:
        message = getattr(error, "server_message", None)
        reason = first_line(Exception(message) if message else error.__cause__ or error)
        response = getattr(error, "response", None)
        if getattr(response, "status_code", None) in (401, 403):
            reason += " (is your token valid, and may it write there? 'hf auth login')"
        raise ValueError(f"cannot upload to {repository!r}: {reason}") from error
    return str(commit.commit_url)


def files_to_upload(
    folder: Path, repository: str, base_model: str | None = None, **metadata: Any
) -> dict[str, str | bytes]:
    """Paths of the files to upload, by their names there; or contents, in which the names of
    repository and base model are set, and the card's ``metadata``, and paths of this machine have
    lost their folders. Needs no network; a ValueError says what is missing or wrong."""
    if repository.count("/") != 1:
        raise ValueError(f"{repository!r} is no repository: give owner/name")
    validate_repo_id(repository)
    check_complete(folder)
    found: dict[str, str | bytes] = {
        path.relative_to(folder).as_posix(): str(path)
        for pattern in (*REQUIRED, *OPTIONAL)
        for path in folder.glob(pattern)
    }
    config = read_json(folder / CONFIG)
    named = config.get("base_model_name_or_path")
    if not is_repository(base_model or named):
        raise ValueError(
            f"the base model of this adapter is {base_model or named!r}, which nobody else has: "
            "name its repository on the Hub with --base-model owner/name"
        )
    if base_model is not None and base_model != named:
        # Only the name is replaced, as the file may have fields of a newer release.
        config["base_model_name_or_path"] = base_model
        found[CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode()
    for name in found.keys() & set(MEASURED):
        record = _without_folders(read_json(folder / name), named, base_model or named)
        found[name] = json.dumps(record, indent=1).encode()
    method, options = read_spec_config(folder)
    found[SHIM] = shim_text(method.name, options, method.peft_type, repository).encode()
    found[CARD] = renewed_card(folder, repository, base_model, **metadata).encode()
    return found


def _without_folders(value: Any, base: str | None, public: str | None) -> Any:
    """What JSON holds, with the base model's public name, and without folders of this machine."""
    if isinstance(value, dict):
        return {name: _without_folders(one, base, public) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one, base, public) for one in value]
    if not isinstance(value, str):
        return value
    return public if base and value == base else FOLDERS.sub("", value)
