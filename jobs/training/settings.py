"""Arguments of a job: every value with the place it came from."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from training import files
from training.errors import JobError, near_miss

SECRETS = ("token", "key", "password", "secret")
NO_SECRETS = ("eos_token", "pad_token", "tokens_per", "average_tokens", "input_tokens", "token_type", "tokenizer")
DEFAULT = "library default"


@dataclass
class Settings:
    """Values by name, and their sources by name: command line, config FILE, demo default, script, library default."""

    values: dict[str, Any]
    sources: dict[str, str]
    script: str = ""  # whose they are
    words: tuple[str, ...] = ()  # the command line that gave them

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def given(self, name: str) -> bool:
        """True where the user, not a default, has said it."""
        return self.sources.get(name, DEFAULT).startswith(("command line", "config", "variable"))

    def derive(self, name: str, value: Any, source: str) -> None:
        """Set what follows from other values."""
        self.values[name] = value
        self.sources[name] = source

    def default(self, values: Mapping[str, Any], source: str) -> None:
        """Set values that the user has not given and that this version of the library knows."""
        for name, value in values.items():
            if name in self.values and not self.given(name):
                self.derive(name, value, source)

    def build(self, dataclass_type: type) -> Any:
        """Return the dataclass made of its fields among the values."""
        names = {field.name for field in dataclasses.fields(dataclass_type) if field.init}
        return dataclass_type(**{name: self.values[name] for name in names if name in self.values})


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Settings:
    """Return the settings of a command line and its `--config FILE` (YAML). Raises JobError, never exits with usage."""
    _raise_instead_of_exit(parser)
    words, config_path = _without_config(list(argv))
    config = _read_config(config_path, parser) if config_path else {}
    for action in parser._actions:
        if action.dest in config:
            action.default, action.required = config[action.dest], False
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        word = unknown[0].split("=")[0]
        hint = near_miss(word, known) if word.startswith("-") else ""
        raise JobError(
            f"unknown argument {unknown[0]!r}{hint}",
            "neither the script nor its libraries take it",
            "`--help` lists all arguments; a list takes its values after one name",
        )
    values = vars(namespace)
    words_given = {word.split("=")[0] for word in words if word.startswith("-")}
    given = {action.dest for action in parser._actions if words_given.intersection(action.option_strings)}
    sources = {name: DEFAULT for name in values}
    sources.update({name: f"config {config_path}" for name in config if name in values})
    sources.update({name: "command line" for name in given if name in values})
    return Settings(values, sources)


def show(settings: Settings, path: Path) -> list[str]:
    """Return one line per value that is no library default, and write all of them to `path`."""
    table = {
        name: {"value": _printable(name, value), "source": settings.sources.get(name, DEFAULT)}
        for name, value in sorted(settings.values.items())
    }
    files.write_json(path, table)
    chosen = [name for name in table if table[name]["source"] != DEFAULT]
    width = max((len(name) for name in chosen), default=0)
    values = {name: str(table[name]["value"]) for name in chosen}
    value_width = min(40, max((len(value) for value in values.values()), default=0))
    lines = [f"  {name:<{width}}  {values[name]:<{value_width}}  {table[name]['source']}" for name in chosen]
    return [*lines, f"  and {len(table) - len(chosen)} at the library's defaults: {path}"]


def _raise_instead_of_exit(parser: argparse.ArgumentParser) -> None:
    def error(message: str) -> NoReturn:
        raise JobError(
            f"the arguments cannot be read: {message}", "argparse refuses them", "`--help` lists all arguments"
        )

    parser.error = error  # type: ignore[method-assign]


def _without_config(words: list[str]) -> tuple[list[str], str | None]:
    """Return the words without `--config FILE`, and FILE."""
    for index, word in enumerate(words):
        if word == "--config":
            if index + 1 == len(words):
                raise JobError("--config names no file", "a YAML file follows it", "--config FILE.yaml")
            return words[:index] + words[index + 2 :], words[index + 1]
        if word.startswith("--config="):
            return words[:index] + words[index + 1 :], word.partition("=")[2]
    return words, None


def _read_config(name: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    import os

    import yaml

    try:
        config = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(
            f"cannot read the config {name!r}", str(error.strerror), "give its path as the container sees it"
        ) from error
    except yaml.YAMLError as error:
        raise JobError(f"{name} is not YAML", " ".join(str(error).split()), "mend the line that is named") from error
    if not isinstance(config, dict):
        raise JobError(f"{name} holds no mapping", "a config is lines of `name: value`", "write one argument per line")
    for variable, value in (config.pop("env", None) or {}).items():
        os.environ[str(variable)] = str(value)
    _refuse_unknown(name, config, {action.dest for action in parser._actions})
    return config


def _refuse_unknown(path: str, names: Iterable[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise JobError(
                f"{path}: unknown argument {name!r}{near_miss(str(name), sorted(known))}",
                "neither the script nor its libraries have one of that name",
                "mend the name or take the line out",
            )


def _printable(name: str, value: Any) -> Any:
    """Return a value that JSON can hold; a secret is hidden."""
    lowered = name.lower()
    if value and any(word in lowered for word in SECRETS) and not any(word in lowered for word in NO_SECRETS):
        return "(hidden)"
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(getattr(value, "value", value))
