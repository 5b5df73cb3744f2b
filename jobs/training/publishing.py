"""The final model onto the hub, once, when it is whole."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import JobError


@dataclass(frozen=True)
class Publication:
    repository: str  # ORGANISATION/NAME
    private: bool


def take_over(config: Any) -> Publication | None:
    """Return what --push_to_hub asks for, and take it from transformers; None where it is not asked for.

    transformers would ask the hub at the start, and send the output folder at each checkpoint. Raises JobError.
    """
    if not config.push_to_hub:
        return None
    config.push_to_hub = False
    if not config.hub_model_id:
        raise JobError(
            "--push_to_hub without --hub_model_id", "where to is not said", "--hub_model_id ORGANISATION/NAME"
        )
    if config.hub_token:
        os.environ["HF_TOKEN"] = config.hub_token
    return Publication(config.hub_model_id, bool(config.hub_private_repo))


def publish(publication: Publication, final: Path) -> str | None:
    """Return the address of the pushed model; where the hub cannot be had, say how to push it later."""
    from training.converting import hub

    try:
        return hub.push(final, publication.repository, private=publication.private, branch=None, message=final.name)
    except JobError as error:
        private = " --private" if publication.private else ""
        print(f"not pushed to {publication.repository}: {error.what}, since {error.why}")
        print(f"later, where the hub is reached: python jobs/push.py {final} --repo {publication.repository}{private}")
        return None
