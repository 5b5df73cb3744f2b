"""import: OCI image -> squashfs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import chosen_site
from runner.environments.engines import choose, engine_of
from runner.images.importer.importer import explain_import, import_image
from runner.images.importer.plan import STRIPING, ImportOptions, ImportRequest
from runner.project import find_project
from runner.site import Site


def import_squashfs(args: argparse.Namespace, console: Console) -> int:
    """`runner import`: prints the squashfs file's path, or the reference in Sarus Suite's store."""
    return import_source(args.image, chosen_site(args, console), args, console)


def import_source(source: str, site: Site, args: argparse.Namespace, console: Console) -> int:
    output = getattr(args, "output", None)
    options = _import_options(args, site)
    folder = site.images(os.environ) if not output else Path(output).parent
    request = ImportRequest(source, folder, find_project(), os.environ, options)
    if engine_of(choose(site)[0]).has_store:
        return _import_to_store(request, args, console)
    if args.dry_run:
        for line in explain_import(request, console):
            console.say(line)
        return 0
    imported = import_image(request, console)
    squashfs, packed = imported.squashfs, imported.packed
    console.say(
        f"{squashfs.size_bytes / 1e6:,.0f} MB, {squashfs.architecture}, image {squashfs.image_digest[:12]}"
    )
    if squashfs.link != squashfs.path:
        console.say(f"{squashfs.link} -> {squashfs.path.name}")
    if args.json:
        counts = {
            "layers": packed.layers,
            "layers_copied": packed.layers_reused,
            "entries": packed.entries,
        }
        console.answer_json(
            {**squashfs.record(), "made": imported.made, **counts, "seconds": packed.seconds}
        )
    else:
        console.answer(str(squashfs.path))
    return 0


def _import_to_store(request: ImportRequest, args: argparse.Namespace, console: Console) -> int:
    """Put the image into Sarus Suite's store, and print its reference."""
    from runner.images.importer.sarus import explain, store_image

    if args.dry_run:
        for line in explain(request, console):
            console.say(line)
        return 0
    stored = store_image(request, console)
    console.say(
        f"{stored.architecture}, image {stored.image_digest[:12] or 'unknown'}, in the store {stored.id}"
    )
    if args.json:
        console.answer_json(stored.record())
    else:
        console.answer(stored.reference)
    return 0


def _import_options(args: argparse.Namespace, site: Site) -> ImportOptions:
    """The options of `import`; `build --import` uses the defaults."""
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
