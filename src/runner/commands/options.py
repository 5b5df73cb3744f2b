"""The parser's manners, and the options that every verb takes."""

from __future__ import annotations

import argparse
from typing import NoReturn

from runner.errors import RunnerError


class Parser(argparse.ArgumentParser):
    """argparse with our error form (what, why, what to do) and without abbreviations."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise the usage error; exit code 2."""
        raise RunnerError(f"{self.prog}: {message}", self.format_usage().strip(), f"{self.prog} --help", exit_code=2)


def common_options() -> argparse.ArgumentParser:
    """The options that every verb takes."""
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--site", metavar="NAME", help="the cluster (default: RUNNER_SITE, then detection)")
    common.add_argument("-v", "--verbose", action="store_true", help="say more on stderr")
    return common
