"""From `model.path` to a folder on this machine: a local folder, the bundled demo, or a Hugging Face hub id."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from di_jax.checkpoint.errors import CheckpointError

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The repository's subfolders hold a second, different config.json (checkpoint 1) and nothing that is loaded.
_WANTED, _UNWANTED = ["*.safetensors", "*.json"], ["*/*"]

logger = logging.getLogger(__name__)


def resolve_checkpoint(path: str | Path, revision: str | None = None) -> Path:
    """The checkpoint folder that `model.path` names; `model.revision` picks a hub id's branch, tag or commit.

    A hub id is fetched into (or found in) the Hugging Face cache; its offline mode is honoured. Raises
    CheckpointError naming model.path when it is none of the three.
    """
    text = str(path)
    if text == DEMO:
        from di_jax.checkpoint.demo import demo_checkpoint

        return demo_checkpoint()
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        if revision is not None:
            logger.warning("model.revision %r is ignored: model.path %s is a local folder", revision, folder)
        return folder
    if folder.exists():
        raise CheckpointError(f"model.path: {folder} is a file; name the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(text):
        raise CheckpointError(
            f"model.path: {text!r} is neither an existing folder nor a hub id (owner/name) nor {DEMO!r}"
        )
    return _from_hub(text, revision)


def _from_hub(repository: str, revision: str | None) -> Path:
    import huggingface_hub  # 0.3 s to import: only who names a hub id pays
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"model.path: {repository!r} is no existing folder, and the hub copy is not in the local cache while the "
            "hub is off or out of reach; download it on a connected machine or give a folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError, RuntimeError) as error:
        detail = str(error).strip().splitlines()
        raise CheckpointError(
            f"model.path: {repository!r} is no existing folder, and fetching it from the hub "
            f"(revision {revision or 'default'}) failed: {detail[0] if detail else type(error).__name__}"
        ) from error
    return Path(folder)
