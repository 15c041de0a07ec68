"""Uploads an adapter folder to a repository on the Hub."""

from __future__ import annotations

import json
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from hf_spec.core.checks import first_line
from hf_spec.files import read_json, write_atomically
from hf_spec.hub.card import render_card
from hf_spec.hub.folder import (
    CARD,
    CONFIG,
    OPTIONAL,
    REQUIRED,
    UNSAFE,
    check_complete,
    is_repository,
    write_shim,
)
from hf_spec.policy.saved import LEARNED_FILE

#: Files of an earlier adapter in the repository that would be mistaken for the new one's.
STALE = (LEARNED_FILE, "search.json", "training.json", "results.json", *UNSAFE)


def push(
    folder: Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    base_model: str | None = None,
) -> str:
    """Upload a complete adapter folder; other files in it, such as the study and logs, are not.

    A card is rendered anew with the repository's name, unless it was edited by hand. The folder is
    not changed. The upload is a single commit, so whoever loads the adapter during the upload, or
    after an interrupted one, gets the earlier adapter as a whole. The earlier adapter's
    measurements, figures and pickled weights are removed.

    Args:
        folder: the adapter folder.
        repository: ``owner/name``; created if it does not exist.
        private: whether a new repository is private.
        revision: branch to upload to; created if it does not exist. None for the main one.
        base_model: name of the base model on the Hub; needed if ``adapter_config.json`` names a
            folder.

    Returns:
        URL of the commit.

    Raises:
        ValueError: the folder is incomplete, a name is invalid, or the Hub refuses the upload or
            cannot be reached.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import validate_repo_id

    # The HTTP library differs between releases of huggingface_hub.
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    if repository.count("/") != 1:
        raise ValueError(f"{repository!r} is no repository: give owner/name")
    validate_repo_id(repository)
    check_complete(folder)
    with tempfile.TemporaryDirectory() as name:
        _stage(folder, Path(name), repository, base_model)
        try:
            return _upload(Path(name), repository, private, revision)
        # Failed uploads of single files end in a RuntimeError.
        except (transport, OSError, RuntimeError) as error:
            message = getattr(error, "server_message", None)
            reason = first_line(Exception(message) if message else error.__cause__ or error)
            response = getattr(error, "response", None)
            if getattr(response, "status_code", None) in (401, 403):
                reason += " (is your token valid, and may it write there? 'hf auth login')"
            raise ValueError(f"cannot upload to {repository!r}: {reason}") from error


def _upload(staged: Path, repository: str, private: bool, revision: str | None) -> str:
    """Create the repository and the branch if needed, make one commit, and return its URL."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    # None leaves the choice to the organization's settings.
    api.create_repo(repository, private=private or None, exist_ok=True)
    if revision is not None:
        api.create_branch(repository, branch=revision, exist_ok=True)
    files = {
        path.relative_to(staged).as_posix(): path for path in staged.rglob("*") if path.is_file()
    }
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


def _stage(folder: Path, staged: Path, repository: str, base_model: str | None) -> None:
    """Copy the files to upload, and set the names of repository and base model in them."""
    for pattern in (*REQUIRED, *OPTIONAL):
        for source in folder.glob(pattern):
            target = staged / source.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    named = read_json(folder / CONFIG).get("base_model_name_or_path")
    if not is_repository(base_model or named):
        raise ValueError(
            f"the base model of this adapter is {base_model or named!r}, which nobody else has: "
            "name its repository on the Hub with --base-model owner/name"
        )
    edited = (folder / CARD).read_text(encoding="utf-8").strip() != render_card(folder).strip()
    if base_model is not None and base_model != named:
        # Only the name is replaced, as the file may have fields of a newer release.
        config = {**read_json(folder / CONFIG), "base_model_name_or_path": base_model}
        write_atomically(staged / CONFIG, json.dumps(config, indent=2, sort_keys=True))
    write_shim(staged, repository)
    if not edited:
        write_atomically(staged / CARD, render_card(staged, repository))
