"""The files of a cluster: rendered from templates, read as YAML, and replaced only if runner made them."""

import re
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.machine import files

_MARK = "# runner cluster made this file, and replaces it unless somebody edits it: "


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text of a template; `raw` is merged into YAML."""
    import jinja2  # slow to import

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.ChainableUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["resolve"] = _resolve
    try:
        text = environment.get_template(template).render(values).strip("\n") + "\n"
    except (TypeError, ValueError, LookupError, jinja2.TemplateError) as error:
        what = f"cannot read the adopted file ({template}): {error}"
        raise RunnerError(
            what, "a part that each cluster has is missing", "name a complete file"
        ) from error
    raw = values.get("cluster", {}).get("raw")
    if raw and template.endswith(".yaml.j2"):
        import yaml

        text = yaml.safe_dump(merge(yaml.safe_load(text), raw), sort_keys=False, width=1000)
    return text


def _resolve(value: Any, variables: Mapping[str, Any], default: Any = None) -> Any:
    """A value of a blueprint, with `$(vars.NAME)` replaced by the variable; `default` if it is empty.

    Raises RunnerError for a variable that `vars` does not have, or that is empty and has no default.
    """
    if isinstance(value, str) and (found := re.fullmatch(r"\$\(vars\.([\w.-]+)\)", value)):
        reference, value, known = value, variables, True
        for name in found[1].split("."):
            known = isinstance(value, Mapping) and name in value
            value = value[name] if known else None
        if not known or (value is None and default is None):
            what = f"cannot read {reference} of the adopted file"
            why = "`vars` of the blueprint does not set it, and runner does not read a deployment file"
            raise RunnerError(what, why, "add it to `vars` of the blueprint")
    return value if value or default is None else default


def read_adopted(provider: str, path: Path) -> dict[str, Any]:
    """What a file of the provider's tool says, as the values of a cluster file. Raises RunnerError."""
    template = f"read-{provider}.toml.j2"
    try:
        return tomllib.loads(render(template, {"data": read_yaml(path)}))
    except tomllib.TOMLDecodeError as error:
        what = f"cannot read the adopted file {path} ({template}): {error}"
        why = "a value is empty, or not of the usual type, or a name is given twice"
        raise RunnerError(what, why, "correct the file") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The data of a YAML file. Raises RunnerError if it is not a YAML mapping."""
    import yaml  # slow to import

    what = f"{path} is not the description of a cluster"
    fix = (
        "name the config.yaml of AWS ParallelCluster, or the blueprint of Google's Cluster Toolkit"
    )
    with files.explained(f"read {path}"):
        data = path.read_bytes()
    try:
        found = yaml.safe_load(data.decode())
    except (ValueError, yaml.YAMLError) as error:
        raise RunnerError(what, f"it is not YAML: {error}", fix) from error
    if not isinstance(found, dict):
        why = "its top level is not a YAML mapping (KEY: VALUE)" if found else "it is empty"
        raise RunnerError(what, why, fix)
    return found


def merge(base: Any, extra: Any) -> Any:
    """`base` with `extra` over it. Tables are merged, and so are lists of tables with names."""
    if isinstance(base, Mapping) and isinstance(extra, Mapping):
        merged = dict(base)
        for key, value in extra.items():
            merged[key] = merge(base[key], value) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(extra, list) and all(map(_name, (*base, *extra))):
        return list(
            merge(
                {_name(each): each for each in base}, {_name(each): each for each in extra}
            ).values()
        )
    return extra


def _name(item: Any) -> Any:
    return next(
        (item[key] for key in ("Name", "id", "group") if isinstance(item, Mapping) and key in item),
        None,
    )


MOVE_CHANGES = "move your changes to the cluster file, then add --force"


def write_own(path: Path, text: str, *, force: bool, fix: str = MOVE_CHANGES) -> str:
    """Write a file with a mark, and return its path. Raises RunnerError, with the fix, if another or an edited file is
    there."""
    head, _, rest = files.text_of(path).partition("\n")
    marks = [_MARK + sha256(each.strip().encode()).hexdigest()[:16] for each in (rest, text)]
    if path.exists() and not force and head != marks[0]:
        why = "runner did not make this file, or somebody has edited it"
        raise RunnerError(f"cannot replace {path}", why, fix)
    files.write(path, f"{marks[1]}\n{text}")
    return str(path)
