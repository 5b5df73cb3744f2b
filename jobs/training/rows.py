"""The rows of a fine-tuning, checked before the model is loaded: one format, known roles, lengths that fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from training import dataset
from training.errors import JobError, near_miss

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "human", "gpt")
CHECKED = 10_000  # rows that are checked before the model is loaded; all of them if TRL then fails
CONVERSATIONS = ("messages", "conversations", "prompt", "completion")


def kind_of(rows: Any, name: str, text_field: str) -> str:
    """Return messages, prompt-completion, text or tokens. Raises JobError for anything else."""
    first = next((row for _, row in _numbered(rows, name, 1)), None)
    if first is None:
        raise JobError(f"the dataset {name!r} is empty", "it has no rows", "check the file, or use another split")
    columns = list(first)
    if "input_ids" in columns:
        return "tokens"
    if "prompt" in columns and "completion" in columns:
        return "prompt-completion"
    for column in ("messages", "conversations"):
        if column in columns:
            if not _is_conversation(first[column]):
                raise JobError(
                    f"column {column!r} of {name!r} is not a conversation",
                    f"its first row is {first[column]!r:.80}",
                    'write lists of {"role": "user"|"assistant"|"system", "content": TEXT}',
                )
            return "messages"
    if text_field in columns:
        return "text"
    raise JobError(
        f"the dataset {name!r} has no column to train on{near_miss(text_field, columns)}",
        f"it has {', '.join(map(repr, columns))}, but needs 'messages',"
        f" or 'prompt' and 'completion', or {text_field!r}",
        "--dataset_text_field COLUMN, or rename the columns",
    )


def check(rows: Any, name: str, config: Any, count: int | None = CHECKED) -> str:
    """Return the kind of the rows. Raises JobError for the first of `count` rows (None: all) that cannot be used.

    config   the SFTConfig
    """
    text_field, assistant_only = config.dataset_text_field, config.assistant_only_loss
    kind = kind_of(rows, name, text_field)
    found: list[str] = []
    formats: dict[str, str] = {}  # by column, the key of the speaker in the first row
    for number, row in _numbered(rows, name, count):
        if not number:
            found = [column for column in CONVERSATIONS if column in row]
            if assistant_only and not found:
                raise JobError(
                    f"--assistant_only_loss cannot be used: {name!r} has no conversations",
                    f"its columns are {', '.join(row)}",
                    "remove --assistant_only_loss, or write the data as lists of messages",
                )
        if kind == "text" and not isinstance(row[text_field], str):
            raise JobError(
                f"row {number} of {name!r}: column {text_field!r} is not text",
                f"its value is {row[text_field]!r:.60}",
                "remove such rows, or choose another column with --dataset_text_field",
            )
        for column in found if kind != "tokens" else ():
            wrong = _fault(row[column], column, row) or _other_format(row[column], formats, column)
            if wrong:
                raise JobError(
                    f"row {number} of {name!r} cannot be used: column {column!r} {wrong}",
                    f"its value is {row[column]!r:.100}",
                    'use one format: lists of {"role": "user"|"assistant"|"system", "content": TEXT}, or text',
                )
        if assistant_only and not _has_answer(row, found):
            raise JobError(
                f"row {number} of {name!r} has no message from the assistant",
                "--assistant_only_loss learns only from assistant messages",
                "remove such rows, or use --assistant_only_loss false",
            )
    return kind


@contextlib.contextmanager
def explained(rows: Any, name: str, config: Any) -> Iterator[None]:
    """Turn what TRL or a chat template raises into a JobError: of the row at fault if there is one."""
    from jinja2 import TemplateError

    try:
        yield
    except JobError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
        check(rows, name, config, count=None)
        if not isinstance(error, (ValueError, TemplateError)):
            raise
        raise JobError(
            "the chat template rejects a conversation of the dataset"
            if isinstance(error, TemplateError)
            else "TRL rejects these arguments with this data and model",
            " ".join(str(error).split()) or type(error).__name__,
            "change the rows or the chat template"
            if isinstance(error, TemplateError)
            else "change the argument named above",
        ) from error


def check_prepared(trainer: Any, name: str, count: int | None, tokenized: bool = False) -> str:
    """Return a note on rows that were cut, or nothing, once TRL has prepared the rows.

    count       rows before that
    tokenized   the rows were given as tokens, perhaps of another tokenizer
    Raises JobError if tokens do not fit the model, or no label is left to learn from. Those of a stream are checked
    batch by batch.
    """
    import pyarrow.compute as compute

    config = trainer.model.config.get_text_config()
    tokens, vocabulary = len(trainer.processing_class), config.vocab_size
    if tokens > vocabulary or tokenized:  # Gemma 3 has a token that no text contains
        _refuse_beyond(vocabulary, tokens, _largest_token(trainer))
    rows, length = trainer.train_dataset, trainer.args.max_length
    if not hasattr(rows, "__len__"):
        trainer.data_collator = partial(_collate, trainer.data_collator, vocabulary, tokens)
        return ""
    if len(rows) == 0 or not _learns(trainer.data_collator, rows):
        raise JobError(
            f"no row of {name!r} has any tokens to learn from",
            "all answers are empty" + (f", or --max_length {length} cuts off every answer" if length else ""),
            "use a larger --max_length, or check the rows",
        )
    lengths = _lengths(rows)
    positions = getattr(config, "max_position_embeddings", None)
    longest = compute.max(lengths).as_py() if lengths is not None else 0
    if length is None and positions and longest and longest > positions:
        raise JobError(
            f"a row of {name!r} has {longest} tokens",
            f"the model has {positions} positions, and --max_length is not set",
            f"--max_length {positions}",
        )
    return _cut_note(trainer.args, lengths, len(rows), count)


def _collate(collate: Any, vocabulary: int, tokens: int, rows: Any) -> Any:
    """Return the batch of some rows. Raises JobError for a token that the model does not have."""
    batch = collate(rows)
    ids = batch.get("input_ids")
    if ids is not None and ids.numel():
        _refuse_beyond(vocabulary, tokens, int(ids.max()))
    return batch


def _refuse_beyond(vocabulary: int, tokens: int, largest: int) -> None:
    if largest >= vocabulary:
        raise JobError(
            f"the rows have the token {largest}, but the model's vocabulary has {vocabulary} tokens",
            f"the tokenizer has {tokens}; perhaps it, or that of the rows, belongs to another model",
            "tokenize the rows with the model's tokenizer; to add the tokens to the model: --chat_template_path MODEL",
        )


def _largest_token(trainer: Any) -> int:
    """Return the largest token of the rows and of their padding; of rows in a stream, nothing is known."""
    import pyarrow.compute as compute

    found = [trainer.processing_class.pad_token_id or 0]
    given = trainer.eval_dataset
    for rows in (trainer.train_dataset, *(given.values() if isinstance(given, Mapping) else (given,))):
        if "input_ids" in (getattr(rows, "column_names", None) or ()) and hasattr(rows, "data"):
            found.append(compute.max(compute.list_flatten(rows.data.column("input_ids"))).as_py() or 0)
    return max(found)


def _numbered(rows: Any, name: str, count: int | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield number and row of the first `count` rows. Raises JobError for one that is not UTF-8."""
    number = -1
    try:
        for number, row in enumerate(islice(iter(rows), count)):
            yield number, row
    except UnicodeDecodeError as error:
        raise dataset.not_utf8(f"row {number + 1} of {name}", error) from error


def _cut_note(args: Any, lengths: Any, left: int, count: int | None) -> str:
    """Return e.g. `3 of 40 rows reach --max_length 48: they were truncated, or are exactly that long`."""
    if args.max_length is None or (args.packing and args.packing_strategy == "wrapped"):
        return ""
    import pyarrow.compute as compute

    full = compute.sum(compute.greater_equal(lengths, args.max_length)).as_py() if lengths is not None else 0
    notes = []
    if full:
        notes.append(
            f"{full} of {count} rows reach --max_length {args.max_length}: "
            "they were truncated, or are exactly that long"
        )
    if not args.packing and count and left < count:
        notes.append(f"{count - left} of {count} rows were left out, because they contain no token to learn from")
    return "; ".join(notes)


def _lengths(rows: Any) -> Any:
    """Return the tokens of each document as a pyarrow array, or None; those of packed rows are in seq_lengths."""
    import pyarrow.compute as compute

    if "seq_lengths" in rows.column_names:
        return compute.list_flatten(rows.data.column("seq_lengths"))
    return compute.list_value_length(rows.data.column("input_ids")) if "input_ids" in rows.column_names else None


def _learns(collate: Any, rows: Any) -> bool:
    """Return whether any of the first rows has a label that counts: one that follows another token."""
    batches = (collate([dict(row)])["labels"] for row in islice(iter(rows), 200))
    return any(bool((labels[..., 1:] != -100).any()) for labels in batches)


def _is_conversation(messages: Any) -> bool:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return False
    keys = set(messages[0]) if isinstance(messages[0], Mapping) else set()
    return {"role", "content"} <= keys or {"from", "value"} <= keys


def _fault(value: Any, column: str, row: Mapping[str, Any]) -> str:
    """Return what is wrong with a value; nothing for a conversation, or for text in a prompt and its completion."""
    if isinstance(value, str) and column in ("prompt", "completion"):
        other = "completion" if column == "prompt" else "prompt"
        return "" if isinstance(row.get(other), str) else f"is text, but column {other!r} is not"
    if not isinstance(value, list) or not value:
        return "is empty" if not value else "is not a list of messages"
    for message in value:
        if not isinstance(message, Mapping):
            return "has an entry that is not a message"
        role = message.get("role") if message.get("role") is not None else message.get("from")
        if role is None:
            return "has a message without a role"
        if message.get("role") is not None and message.get("from") is not None:
            return "has a message with both 'role' and 'from'"
        if role not in ROLES:
            return f"has the unknown role {role!r}{near_miss(str(role), ROLES)}"
        text = message.get("content") if message.get("role") is not None else message.get("value")
        if text is None and not message.get("tool_calls"):
            return f"has a message of the {role} without content"
    return ""


def _other_format(value: Any, formats: dict[str, str], column: str) -> str:
    """Return what is wrong if the speakers are not under the same key as in the first row."""
    for message in value if isinstance(value, list) else ():
        key = "role" if message.get("role") is not None else "from"
        if formats.setdefault(column, key) != key:
            return f"names the speaker in {key!r}, but earlier rows use {formats[column]!r}"
    return ""


def _has_answer(row: Mapping[str, Any], columns: list[str]) -> bool:
    """Return whether a row has a message of the assistant; text has none."""
    lists = [row[column] for column in columns if isinstance(row[column], list)]
    return any((message.get("role") or message.get("from")) in ("assistant", "gpt") for one in lists for message in one)
