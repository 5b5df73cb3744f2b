"""The rows of a fine-tuning, looked at before anything slow: one format in all, known roles, lengths that fit.

The columns are looked at as Arrow holds them, so that a million rows take less than a second; of a stream, only the
first rows can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from training.errors import JobError, near_miss

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "human", "gpt")
LOOKED_AT = 1000  # rows of a stream, or of columns that Arrow cannot look into
KEYS = (("role", "content"), ("from", "value"))


def check(rows: Any, name: str, assistant_only: bool) -> None:
    """Raise JobError for the first row whose conversation cannot be one, with its number."""
    columns = rows.column_names or list(next(iter(rows)))
    found = [column for column in ("messages", "conversations", "prompt", "completion") if column in columns]
    ways: dict[str, str] = {}  # of writing a conversation: the key of the speaker in the first row, by column
    for number, row in _suspects(rows, found):
        for column in found:
            wrong = _wrong(row[column], column, row) or _other_way(row[column], ways, column)
            if wrong:
                raise JobError(
                    f"row {number} of {name!r} does not fit the others: column {column!r} {wrong}",
                    f"it is {row[column]!r:.100}",
                    'one format in all rows: lists of {"role": "user"|"assistant"|"system", "content": TEXT}, or texts',
                )
        if assistant_only and found and not _answers(row, found):
            raise JobError(
                f"row {number} of {name!r} has no message of the assistant",
                "--assistant_only_loss takes a loss from nothing else",
                "leave such rows out, or --assistant_only_loss false",
            )
    if assistant_only and not found:
        raise JobError(
            f"--assistant_only_loss, but {name!r} holds no conversations",
            f"its columns are {', '.join(columns)}",
            "leave the option out, or write lists of messages",
        )


def _suspects(rows: Any, columns: list[str]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Yield number and row of those to be looked at: all of them where that is cheap, else the first thousand."""
    table = getattr(rows, "data", None)
    if table is None or getattr(rows, "_indices", None) is not None or len(rows) <= LOOKED_AT:
        yield from enumerate(islice(iter(rows), LOOKED_AT))
        return
    numbers = set(range(LOOKED_AT // 10))
    for column in columns:
        numbers |= _odd(table.column(column))
    for number in sorted(numbers):
        yield number, rows[number]


def _odd(column: Any) -> set[int]:
    """Return the first rows that are null or empty, or whose messages lack a key, have a null, or an unknown role."""
    import pyarrow
    import pyarrow.compute as compute

    odd: set[int] = set()
    start = 0
    for chunk in column.chunks:
        flags = [compute.is_null(chunk)]
        if pyarrow.types.is_list(chunk.type) or pyarrow.types.is_large_list(chunk.type):
            flags.append(compute.equal(compute.list_value_length(chunk), 0))
            odd |= {start + int(row) for row in _rows_of_odd_messages(chunk)[:LOOKED_AT]}
        for flag in flags:
            odd |= {start + int(row) for row in compute.indices_nonzero(flag.fill_null(True)).slice(0, 10).to_pylist()}
        start += len(chunk)
    return odd


def _rows_of_odd_messages(chunk: Any) -> list[int]:
    """Return rows with a message without role or content, or with a role that nobody knows."""
    import pyarrow
    import pyarrow.compute as compute

    messages, parents = compute.list_flatten(chunk), compute.list_parent_indices(chunk)
    if not pyarrow.types.is_struct(messages.type):
        return []
    names = {messages.type.field(index).name for index in range(messages.type.num_fields)}
    present = [keys for keys in KEYS if set(keys) <= names]
    good = None
    for role, content in present:
        roles = messages.field(names_index(messages.type, role))
        texts = messages.field(names_index(messages.type, content))
        if not pyarrow.types.is_string(roles.type) and not pyarrow.types.is_large_string(roles.type):
            return []
        known = compute.is_in(roles, value_set=pyarrow.array(ROLES, type=roles.type))
        fits = compute.and_(known, compute.is_valid(texts))
        good = fits if good is None else compute.or_(good, fits)
    if good is None:
        return []
    rows: list[int] = compute.unique(parents.filter(compute.invert(good.fill_null(False)))).slice(0, 10).to_pylist()
    if len(present) > 1:  # both ways of writing a conversation: a row with the rarer one is odd
        theirs = messages.field(names_index(messages.type, "from"))
        rows += compute.unique(parents.filter(compute.is_valid(theirs))).slice(0, 1).to_pylist()
    return rows


def names_index(kind: Any, name: str) -> int:
    """Return the place of a field in a struct type."""
    index: int = kind.get_field_index(name)
    return index


def _wrong(value: Any, column: str, row: Mapping[str, Any]) -> str:
    """Return what is wrong with one row's value; nothing where it is a conversation, or a text where one may be."""
    if isinstance(value, str) and column in ("prompt", "completion"):
        other = row.get("completion" if column == "prompt" else "prompt")
        return "" if isinstance(other, str) else "is a text, and the other one of the two is not"
    if not isinstance(value, list) or not value:
        return "holds nothing" if not value else "holds no list of messages"
    for message in value:
        if not isinstance(message, Mapping):
            return "holds something that is no message"
        role = message.get("role") if message.get("role") is not None else message.get("from")
        if role is None:
            return "has a message without a role"
        if message.get("role") is not None and message.get("from") is not None:
            return "has messages in two ways of writing"
        if role not in ROLES:
            return f"has the role {role!r}, which nobody knows{near_miss(str(role), list(ROLES))}"
        text = message.get("content") if message.get("role") is not None else message.get("value")
        if text is None and not message.get("tool_calls"):
            return f"has a message of the {role} without content"
    return ""


def _other_way(value: Any, ways: dict[str, str], column: str) -> str:
    """Return what is wrong where messages are not written as those of the first row are: role and content, or from."""
    for message in value if isinstance(value, list) else ():
        way = "role" if message.get("role") is not None else "from"
        if ways.setdefault(column, way) != way:
            return f"names its speakers by {way!r}, the rows before by {ways[column]!r}"
    return ""


def _answers(row: Mapping[str, Any], columns: list[str]) -> bool:
    """Whether a row has a message of the assistant; texts have none."""
    lists = [row[column] for column in columns if isinstance(row[column], list)]
    return any((message.get("role") or message.get("from")) in ("assistant", "gpt") for one in lists for message in one)


def check_prepared(trainer: Any, model: Any, name: str) -> None:
    """Raise JobError where tokens do not fit the model, or where nothing is left to learn from.

    Called once TRL has prepared the rows.
    """
    config = model.config.get_text_config()
    tokens, vocabulary = len(trainer.processing_class), config.vocab_size
    if tokens > vocabulary:
        raise JobError(
            f"the tokenizer has {tokens} tokens, the model's vocabulary {vocabulary}",
            "a token beyond it has no embedding: the tokenizer is another model's, or tokens were added",
            "the tokenizer of the model, or --chat_template_path with a model whose tokens may grow",
        )
    rows = trainer.train_dataset
    if not hasattr(rows, "__len__"):
        return
    # TRL 1 leaves rows without a label out; older ones train on them, and learn nothing.
    if len(rows) == 0 or not _learns(trainer.data_collator, rows):
        raise JobError(
            f"no row of {name!r} has a token left to learn from",
            f"--max_length {trainer.args.max_length} cuts every answer off, or all of them are empty",
            "a larger --max_length, or --truncation_mode keep_end",
        )
    positions = getattr(config, "max_position_embeddings", None)
    longest = _longest(rows) if trainer.args.max_length is None and "input_ids" in rows.column_names else 0
    if positions and longest > positions:
        raise JobError(
            f"a row of {name!r} has {longest} tokens",
            f"the model has {positions} positions, and --max_length is not set",
            f"--max_length {positions}",
        )


def _learns(collate: Any, rows: Any) -> bool:
    """Whether any of the first rows has a label that counts: one that follows another token."""
    batches = (collate([dict(row)])["labels"] for row in islice(iter(rows), LOOKED_AT // 5))
    return any(bool((labels[..., 1:] != -100).any()) for labels in batches)


def _longest(rows: Any) -> int:
    import pyarrow.compute as compute

    found = compute.max(compute.list_value_length(rows.data.column("input_ids"))).as_py()
    return int(found or 0)
