"""import: OCI image -> squashfs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import DEFAULT_RECIPE, Verbs, chosen_site

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.images.importer.plan import ImportOptions
    from runner.site import Site


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser("import", parents=[common])
    sources = (
        "a recipe or image, podman://IMAGE, dockerd://IMAGE, docker://[USER@]REGISTRY#IMAGE[:TAG], oci:DIR[:TAG], "
        "oci-archive:FILE, docker-archive:FILE"
    )
    parser.add_argument("image", nargs="?", default=DEFAULT_RECIPE, metavar="IMAGE", help=sources)
    parser.add_argument("-o", "--output", metavar="FILE", help="write FILE, and create no symlink")
    parser.add_argument("--engine", metavar="NAME", help="podman or docker (default: podman, then docker)")
    parser.add_argument("--compression", default="lz4", metavar="NAME[:LEVEL]", help="lz4 (default), zstd:1, …")
    parser.add_argument("--owners", default="root", metavar="root|keep", help="owner of the files (default: root)")
    parser.add_argument("--xattrs", default="keep", metavar="keep|drop", help="extended attributes (default: keep)")
    parser.add_argument("--threads", type=int, metavar="N", help="compression threads (default: one per core)")
    parser.add_argument("--verify", default="all", metavar="all|digest", help="digest: fewer checks (default: all)")
    parser.add_argument(
        "--connections", type=int, default=8, metavar="N", help="parallel connections to a registry (default: 8)"
    )
    parser.add_argument(
        "--allow-http", action="count", default=0, help="allow a registry without TLS; twice: also send your login"
    )
    parser.add_argument("--trace", metavar="FILE", help="store together what a start reads (runner shell --trace)")
    parser.add_argument("--force", action="store_true", help="the same as --no-cache; with -o, replace any file")
    parser.add_argument("--no-cache", action="store_true", help="import again, from all layers")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--dry-run", action="store_true", help="print what would be read, reused and written")
    parser.set_defaults(run=import_squashfs)


def import_squashfs(args: argparse.Namespace, console: Console) -> int:
    """`runner import`: prints the squashfs file's path."""
    return import_source(args.image, chosen_site(args, console), args, console)


def import_source(source: str, site: Site, args: argparse.Namespace, console: Console) -> int:
    from runner.images.importer.importer import explain_import, import_image
    from runner.images.importer.plan import ImportRequest
    from runner.project import find_project

    output = getattr(args, "output", None)
    options = _import_options(args, site)
    folder = site.images(os.environ) if not output else Path(output).parent
    request = ImportRequest(source, folder, find_project(), os.environ, options)
    if args.dry_run:
        for line in explain_import(request, console):
            console.say(line)
        return 0
    imported = import_image(request, console)
    squashfs, packed = imported.squashfs, imported.packed
    console.say(f"{squashfs.size_bytes / 1e6:,.0f} MB, {squashfs.architecture}, image {squashfs.image_digest[:12]}")
    if squashfs.link != squashfs.path:
        console.say(f"{squashfs.link} -> {squashfs.path.name}")
    if args.json:
        counts = {"layers": packed.layers, "layers_copied": packed.layers_reused, "entries": packed.entries}
        console.answer_json({**squashfs.record(), "made": imported.made, **counts, "seconds": packed.seconds})
    else:
        console.answer(str(squashfs.path))
    return 0


def _import_options(args: argparse.Namespace, site: Site) -> ImportOptions:
    """The options of `import`; `build --import` uses the defaults."""
    from runner.images.importer.plan import STRIPING, ImportOptions

    output, trace = getattr(args, "output", None), getattr(args, "trace", None)
    names = ("compression", "owners", "xattrs", "threads", "verify", "connections", "allow_http")
    return ImportOptions(
        output=Path(output) if output else None,
        again=args.no_cache or getattr(args, "force", False),
        force=getattr(args, "force", False),
        engine=args.engine,
        architecture=site.architecture,
        striping=site.image_striping or STRIPING,
        trace=Path(trace) if trace else None,
        **{name: getattr(args, name) for name in names if hasattr(args, name)},
    )
