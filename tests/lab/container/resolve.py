"""From the settings that the plugins hand over to one request."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.lab.container import edf, pyxis
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
    return pyxis.request(given, here, request) if given else request


def read_image_variables(image: str) -> dict[str, str]:
    """The image's own variables, without mounting it; none where the file is missing or has none."""
    if not image or not Path(image).is_file():
        return {}
    shown = subprocess.run(("unsquashfs", "-cat", image, "etc/environment"), capture_output=True, check=False)
    return image_variables(shown.stdout.decode(errors="surrogateescape"), {})
