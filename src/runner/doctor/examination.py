"""Every diagnosis at once. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from runner.doctor import access, cluster, node, programs, storage
from runner.doctor.diagnosis import Diagnosis
from runner.site import Site


def examine(site: Site, environ: Mapping[str, str]) -> tuple[Diagnosis, ...]:
    """Every diagnosis, in the order in which they are to be read. Takes under two seconds."""
    checks: tuple[Callable[[], Diagnosis], ...] = (
        node.machine,
        partial(node.architecture, site),
        node.clock,
        partial(cluster.slurm, site, environ),
        partial(cluster.plugins, site),
        partial(cluster.edf_lookup, environ),
        *(partial(programs.program, name) for name in programs.PROGRAMS),
        node.fuse,
        node.namespaces,
        node.subordinate_ids,
        partial(storage.image_folder, site, environ),
        partial(storage.quota, site, environ),
        partial(storage.striping, site, environ),
        partial(storage.run_folder, site, environ),
        partial(access.credentials, environ),
        partial(access.registry_logins, environ),
        partial(access.hugging_face, environ),
    )
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return tuple(pool.map(lambda check: check(), checks))
