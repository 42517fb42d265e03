"""A repository of the Hugging Face Hub as a folder in the Hub client's own cache, which other programs share."""

from __future__ import annotations

from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.progress import Progress

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
EXCLUDED = ["original/*"]


def download_repository(name: str, revision: str | None, progress: Progress, offline: bool) -> Path:
    # Imported here: the client takes most of a second to import, and most starts do not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is its HTTP library's
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    asked = f"{name}@{revision}" if revision else name
    stage = f"{'looking for' if offline else 'downloading'} {asked}"
    progress(stage, 0, 1)
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=PATTERNS,
            ignore_patterns=EXCLUDED,
            local_files_only=offline,
        )
    except GatedRepoError as error:
        raise ModelFilesError(
            f"{asked} is given only to those who accepted its terms: accept them on its page and log in with "
            "`hf auth login`, or download it elsewhere and pass the folder as MODEL"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ModelFilesError(
            f"there is neither a folder nor a repository {asked} (a private one needs `hf auth login`)"
        ) from error
    except (EntryNotFoundError, HTTPError, OSError) as error:
        tried = "Stoker was told to stay offline" if offline else f"the download failed ({type(error).__name__})"
        raise ModelFilesError(
            f"{asked} is not in the Hub client's cache, and {tried}. Check the network, or download the repository "
            "on another machine (`hf download`) and pass its folder as MODEL"
        ) from error
    progress(stage, 1, 1)
    return Path(folder)
