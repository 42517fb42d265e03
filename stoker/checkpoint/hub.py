"""Download a model repository from the Hugging Face Hub into the Hub client's own cache, which other programs share.

config.json is downloaded first, and the weights only if the model can be served.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.hf_folder import has_all_files
from stoker.checkpoint.progress import Progress
from stoker.checkpoint.served import check_served

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "tiktoken.model"]
EXCLUDED = ["original/*"]
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def download_repository(name: str, revision: str | None, progress: Progress, offline: bool) -> Path:
    """Return the local folder of a repository. With `offline`, only the Hub client's cache is used."""
    model = f"{name}@{revision}" if revision else name
    stage = f"{'looking for' if offline else 'downloading'} {model}"
    progress(stage, 0, 1)
    folder = _snapshot(name, revision, ["config.json"], offline)
    config = folder / "config.json"
    if not config.is_file():
        raise ModelFilesError(
            f"the repository {model} has no config.json, so that it is not a model in Hugging Face format. If it holds "
            f"GGUF files, download one of them (`hf download {name} FILE.gguf`) and pass its path as MODEL"
        )
    if not has_all_files(folder):
        check_served(config, model)
    folder = _snapshot(name, revision, PATTERNS, offline)
    progress(stage, 1, 1)
    return folder


def _snapshot(name: str, revision: str | None, patterns: list[str], offline: bool) -> Path:
    # Imported here: the Hub client takes most of a second to import, and most starts do not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=EXCLUDED,
                local_files_only=offline,
            )
        )
    except (HTTPError, HFValidationError, OSError) as error:
        model = f"{name}@{revision}" if revision else name
        raise ModelFilesError(explain(error, model, offline)) from error


def explain(error: BaseException, model: str, offline: bool) -> str:
    """Return why a download failed, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    elsewhere = (
        f"or download it on another machine (`hf download {model.partition('@')[0]}`) and pass its folder as MODEL"
    )
    cache = Path(constants.HF_HUB_CACHE)
    causes = list(_causes(error))
    if offline:
        return (
            f"{model} is not in the cache {cache}, and --offline forbids a download: leave --offline out, {elsewhere}"
        )
    for cause in causes:
        match cause:
            case OfflineModeIsEnabled():
                return (
                    f"{model} is not in the cache {cache}, and HF_HUB_OFFLINE=1 forbids a download: unset HF_HUB_OFFLINE, "
                    f"{elsewhere}"
                )
            case GatedRepoError():
                return (
                    f"access to {model} is restricted: accept its terms on {constants.ENDPOINT}/{model.partition('@')[0]}, "
                    "log in with `hf auth login` (or set HF_TOKEN), and start again"
                )
            case RevisionNotFoundError():
                return f"{model}: the repository has no branch, tag or commit of this name"
            case RepositoryNotFoundError() | HFValidationError():
                return (
                    f"{model} is neither a folder here nor a repository on {constants.ENDPOINT}: check the name. "
                    "A private repository needs `hf auth login` (or HF_TOKEN)"
                )
            case HfHubHTTPError() if cause.response.status_code in (401, 403):
                return (
                    f"{constants.ENDPOINT} refused access to {model} (HTTP {cause.response.status_code}): log in with "
                    "`hf auth login` (or set HF_TOKEN) with a token that may read it"
                )
            case HfHubHTTPError():
                status = cause.response.status_code
                return f"{constants.ENDPOINT} answered HTTP {status} for {model}: try again later, {elsewhere}"
            case OSError() if cause.errno in _DISK_FULL:
                existing = next(path for path in (cache, *cache.parents) if path.exists())
                return (
                    f"the disk is full: {model} is downloaded to {cache}, where {shutil.disk_usage(existing).free} bytes are "
                    "free. Free some space, or set HF_HOME to a folder on a larger disk"
                )
    reason = f"{type(causes[-1]).__name__}: {causes[-1]}".removesuffix(": ")
    return f"{model} could not be downloaded from {constants.ENDPOINT} ({reason}): check the network, {elsewhere}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, and the errors that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
