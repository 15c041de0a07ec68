"""Uploads an adapter folder to a repository on the Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hf_spec.adapters.repo_files import SHIM, shim_text
from hf_spec.core.checks import first_line
from hf_spec.files import read_json
from hf_spec.tools.hub import folder as adapter_folder
from hf_spec.tools.hub.card import renewed_card
from hf_spec.tools.hub.folder import CARD, CONFIG, check_complete, is_repository, read_spec_config

#: Files of an earlier adapter in the repository that would be mistaken for the new one's.
STALE = (*adapter_folder.MEASURED, *adapter_folder.UNSAFE)


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
    from huggingface_hub.errors import HfHubHTTPError

    # The HTTP library differs between releases of huggingface_hub.
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    files = files_to_upload(folder, repository, base_model, **metadata)
    try:
        return _upload(files, repository, private, revision)
    # Failed uploads of single files end in a RuntimeError.
    except (transport, OSError, RuntimeError) as error:
        message = getattr(error, "server_message", None)
        reason = first_line(Exception(message) if message else error.__cause__ or error)
        response = getattr(error, "response", None)
        if getattr(response, "status_code", None) in (401, 403):
            reason += " (is your token valid, and may it write there? 'hf auth login')"
        raise ValueError(f"cannot upload to {repository!r}: {reason}") from error


def _upload(
    files: Mapping[str, str | bytes], repository: str, private: bool, revision: str | None
) -> str:
    """Create the repository and the branch if needed, make one commit, and return its URL."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    # None leaves the choice to the organization's settings.
    api.create_repo(repository, private=private or None, exist_ok=True)
    if revision is not None:
        api.create_branch(repository, branch=revision, exist_ok=True)
    remote = api.list_repo_files(repository, revision=revision)
    stale = [name for name in remote if any(fnmatch(name, kind) for kind in STALE)]
    commit = api.create_commit(
        repository,
        # Not upload_folder, which may make several commits.
        operations=[
            *(CommitOperationAdd(name, path) for name, path in sorted(files.items())),
            *(CommitOperationDelete(name) for name in stale if name not in files),
        ],
        revision=revision,
        commit_message="Upload adapter with hf_spec",
    )
    return str(commit.commit_url)


def files_to_upload(
    folder: Path, repository: str, base_model: str | None = None, **metadata: Any
) -> dict[str, str | bytes]:
    """Paths of the files to upload, by their names there; or contents, in which the names of
    repository and base model are set, and the card's ``metadata``. Needs no network; a ValueError
    says what is missing or wrong."""
    from huggingface_hub.utils import validate_repo_id

    if repository.count("/") != 1:
        raise ValueError(f"{repository!r} is no repository: give owner/name")
    validate_repo_id(repository)
    check_complete(folder)
    found: dict[str, str | bytes] = {
        path.relative_to(folder).as_posix(): str(path)
        for pattern in (*adapter_folder.REQUIRED, *adapter_folder.OPTIONAL)
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
    method, options = read_spec_config(folder)
    found[SHIM] = shim_text(method.name, options, method.peft_type, repository).encode()
    found[CARD] = renewed_card(folder, repository, base_model, **metadata).encode()
    return found
