"""The arguments of `sft`: TRL's own names, a few of ours, and the demo's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from training import course_arguments
from training.batch import Batch
from training.course_arguments import PYTHON_DOCS, TINY_MODEL
from training.errors import JobError
from training.processes import Processes
from training.run import RunFolder
from training.settings import Settings

LOSS_PATHS = ("auto", "pieces", "plain", "trl")


@dataclass
class OurArguments(course_arguments.OurArguments):
    """Arguments that TRL does not have."""

    loss_path: str = field(
        default="auto",
        metadata={
            "help": "pieces: the same loss by the least work: no padding, attention by document, head and loss in "
            "pieces; plain: the model's own loss; trl: TRL's, with entropy and accuracy of every micro batch; auto: "
            "pieces where the model is known, else plain while the logits are small, else trl.",
            "choices": list(LOSS_PATHS),
        },
    )


DEMO = {
    **course_arguments.DEMO,
    "max_length": 128,
    "packing": True,
    "packing_strategy": "wrapped",
    "activation_checkpointing": False,
    "gradient_checkpointing": False,
}


def read(argv: Sequence[str], run: RunFolder, peers: Processes) -> tuple[Settings, Batch]:
    """Return the settings and the batch. Raises JobError for what can be known before any process group exists."""
    from trl import ModelConfig, ScriptArguments, SFTConfig

    settings = course_arguments.read("sft", (ScriptArguments, SFTConfig, ModelConfig, OurArguments), argv)
    course_arguments.fit_machine(settings, run)
    _choose_model_and_data(settings)
    batch = course_arguments.plan_batch(settings, peers, settings["max_length"])
    course_arguments.plan_deepspeed(settings, batch)
    return settings, batch


def _choose_model_and_data(settings: Settings) -> None:
    """Fill in the demo where nothing is named; refuse half of it, since a tiny model would be trained unasked."""
    model, dataset = settings.get("model_name_or_path"), settings.get("dataset_name")
    if not model and not dataset:
        settings.default({"model_name_or_path": TINY_MODEL, "dataset_name": PYTHON_DOCS, **DEMO}, "demo default")
    elif not dataset:
        raise JobError(
            "no dataset is named", f"the model is {model!r}", f"--dataset_name NAME|FOLDER|FILE, or {PYTHON_DOCS}"
        )
    elif not model:
        raise JobError(
            "no model is named", f"the dataset is {dataset!r}", f"--model_name_or_path NAME|FOLDER, or {TINY_MODEL}"
        )
