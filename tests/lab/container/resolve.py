"""From the settings that the plugins hand over to one request."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.lab.container import edf, pyxis, sarus
from tests.lab.container.request import Request
from tests.lab.container.variables import PREFIX, image_variables


def resolve(environ: Mapping[str, str], here: str, lenient: bool = False) -> Request:
    """The container that is asked for. Raises Refusal. `lenient`: on the login node, before submission.

    An EDF and --container-* options combine, as on the Container Engine: the options win, the mounts add up.
    """
    request = Request()
    given = pyxis.options(environ)
    if name := environ.get(PREFIX + "EDF"):
        table = edf.load(name, here, environ)
        image = edf.image_path(table, here, environ, lenient)
        request = edf.request(table, here, environ, read_image_variables(image), lenient)
    if name := environ.get(PREFIX + "SARUS_EDF"):
        table = edf.load(name, here, environ)
        return sarus.request(table, environ, _in_store(str(table.get("image", "")), environ), lenient)
    return pyxis.request(given, here, request) if given else request


def _in_store(reference: str, environ: Mapping[str, str]) -> str:
    """The squashfs file of an image in the store of the lab's `sarusctl`; empty if it is not there."""
    os.environ["LAB_SARUS"] = environ.get("LAB_SARUS", "/nonexistent")
    from tests.lab import sarusctl

    found = sarusctl.find(reference)
    return str(sarusctl.squash(found)) if found else ""


def read_image_variables(image: str) -> dict[str, str]:
    """The image's own variables, without mounting it; none where the file is missing or has none."""
    if not image or not Path(image).is_file():
        return {}
    shown = subprocess.run(("unsquashfs", "-cat", image, "etc/environment"), capture_output=True, check=False)
    return image_variables(shown.stdout.decode(errors="surrogateescape"), {})
