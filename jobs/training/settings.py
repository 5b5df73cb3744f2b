"""The arguments of a job, each value with its source."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from training import files
from training.errors import JobError, near_miss

Dataclass = TypeVar("Dataclass")
SECRETS = ("token", "key", "password", "secret")
NO_SECRETS = ("eos_token", "pad_token", "tokens_per", "average_tokens", "input_tokens", "token_type", "tokenizer")
DEFAULT = "library default"


@dataclass
class Settings:
    """Values and sources by name. Sources: command line, config FILE, variable, script, library default.

    script, words   the script that was started, and its command line
    """

    values: dict[str, Any]
    sources: dict[str, str]
    script: str = ""
    words: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def given(self, name: str) -> bool:
        """True if the user has set it, on the command line or in a file."""
        return self.sources.get(name, DEFAULT).startswith(("command line", "config", "variable", "DeepSpeed file"))

    def overrides(self, name: str, other: str) -> bool:
        """True if the command line or a variable sets `name`, and only a config sets `other`, which excludes it."""
        strong = self.sources.get(name, DEFAULT).startswith(("command line", "variable"))
        return strong and self.sources.get(other, DEFAULT).startswith("config")

    def derive(self, name: str, value: Any, source: str) -> None:
        """Set a value that follows from others."""
        self.values[name] = value
        self.sources[name] = source

    def default(self, values: Mapping[str, Any], source: str) -> None:
        """Set values that the user has not set and that this version of the library has."""
        for name, value in values.items():
            if name in self.values and not self.given(name):
                self.derive(name, value, source)

    def build(self, dataclass_type: type[Dataclass]) -> Dataclass:
        """Return the dataclass, made of its fields among the values."""
        kind: Any = dataclass_type  # mypy has no bound for "any dataclass"
        names = {field.name for field in dataclasses.fields(kind) if field.init}
        return dataclass_type(**{name: self.values[name] for name in names if name in self.values})

    def write(self, path: Path) -> None:
        """Write all values and sources as JSON, without secrets."""
        table = {
            name: {"value": _printable(name, value), "source": self.sources.get(name, DEFAULT)}
            for name, value in sorted(self.values.items())
        }
        files.write_json(path, table)


def read(script: str, types: Sequence[type], argv: Sequence[str]) -> Settings:
    """Return the settings of a command line whose arguments are the fields of `types`.

    Variables named by `--variables` win over the command line, so that `sbatch --export` has the last word.
    """
    from transformers import HfArgumentParser
    from transformers.hf_argparser import string_to_bool

    parser = HfArgumentParser(tuple(types), prog=f"{script}.py", allow_abbrev=False)
    for action in parser._actions:
        if action.type is string_to_bool and action.nargs is None:  # let `--bf16` alone mean true
            action.nargs, action.const = "?", True
    # gradient_checkpointing is activation_checkpointing from transformers 5.23 on: let older ones take both names
    options = parser._option_string_actions
    if "--gradient_checkpointing" in options and "--activation_checkpointing" not in options:
        options["--activation_checkpointing"] = options["--gradient_checkpointing"]
        options["--gradient_checkpointing"].option_strings.append("--activation_checkpointing")
    settings = parse(parser, argv)
    values = from_variables(settings["variables"], os.environ)
    if values:
        settings = parse(parser, [*argv, *(f"--{name}={value}" for name, (_, value) in values.items())])
        settings.sources.update({name: f"variable {variable}" for name, (variable, _) in values.items()})
    settings.script, settings.words = script, tuple(argv)
    return settings


def from_variables(pairs: Sequence[str], environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return (variable, value) by argument for each `VARIABLE=argument` whose variable is set and not empty."""
    for pair in pairs:
        if not re.fullmatch(r"\w+=\w+", pair):
            raise JobError(
                f"--variables: cannot read {pair!r}",
                "the form must be VARIABLE=argument",
                "--variables EPOCHS=num_train_epochs",
            )
    split = (pair.partition("=") for pair in pairs)
    return {name: (variable, environment[variable]) for variable, _, name in split if environment.get(variable)}


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Settings:
    """Return the settings of a command line and its `--config FILE` (YAML). Raises JobError instead of exiting."""

    def error(message: str) -> NoReturn:
        raise JobError(
            f"cannot read the arguments: {message}", "the parser does not accept them", "`--help` lists all arguments"
        )

    parser.error = error  # type: ignore[method-assign]
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.error = error  # type: ignore[method-assign]
    before.add_argument("--config")
    found, words = before.parse_known_args(argv)
    config_path = found.config
    config = _read_config(config_path, parser) if config_path else {}
    for action in parser._actions:
        if action.dest in config:
            action.default, action.required = _value_of(config[action.dest], action, config_path), False
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        word = unknown[0].split("=")[0]
        hint = near_miss(word, known) if word.startswith("-") else ""
        raise JobError(
            f"unknown argument {unknown[0]!r}{hint}",
            "neither the script nor its libraries accept this argument",
            "`--help` lists all arguments; write an argument with several values once: --name A B",
        )
    values = vars(namespace)
    words_given = {word.split("=")[0] for word in words if word.startswith("-")}
    given = {action.dest for action in parser._actions if words_given.intersection(action.option_strings)}
    sources = {name: DEFAULT for name in values}
    sources.update({name: f"config {config_path}" for name in config if name in values})
    sources.update({name: "command line" for name in given if name in values})
    return Settings(values, sources)


def _value_of(value: Any, action: argparse.Action, config_path: str) -> Any:
    """Return the value of a config as the command line would give it; argparse checks only what is typed there."""
    if isinstance(value, str) and action.nargs in ("*", "+"):
        value = [value]
    choices = list(action.choices or ())
    if value is False and "no" in choices:  # YAML reads `no` as false
        value = "no"
    if action.type is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    several = value if isinstance(value, list) else [value]
    wrong: list[Any] = []
    if choices:
        wrong, limits = [each for each in several if each is not None and each not in choices], "one of "
    elif action.type is int:
        wrong, limits = [each for each in several if isinstance(each, (bool, float))], "a whole number"
    if wrong:
        raise JobError(
            f"{config_path}: {action.dest} cannot be {wrong[0]!r}{near_miss(str(wrong[0]), map(str, choices))}",
            f"it must be {limits}{', '.join(map(str, choices))}",
            "fix that line",
        )
    return value


def _read_config(name: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(
            f"cannot read the config {name!r}", str(error.strerror), "give the path of the file inside the container"
        ) from error
    except yaml.YAMLError as error:
        raise JobError(f"{name} is not valid YAML", " ".join(str(error).split()), "fix the line named above") from error
    if not isinstance(config, dict):
        raise JobError(
            f"{name} is not a mapping",
            "a config must consist of lines of the form `name: value`",
            "write one argument per line",
        )
    for variable, value in (config.pop("env", None) or {}).items():
        os.environ[str(variable)] = str(value)
    known = {action.dest for action in parser._actions}
    for word in config:
        if word not in known:
            raise JobError(
                f"{name}: unknown argument {word!r}{near_miss(str(word), sorted(known))}",
                "neither the script nor its libraries accept this argument",
                "correct the name or remove the line",
            )
    return config


def _printable(name: str, value: Any) -> Any:
    """Return a value that JSON can hold; secrets are hidden."""
    lowered = name.lower()
    if value and any(word in lowered for word in SECRETS) and not any(word in lowered for word in NO_SECRETS):
        return "(hidden)"
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(getattr(value, "value", value))
