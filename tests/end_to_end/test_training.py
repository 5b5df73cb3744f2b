"""A real training step of two processes (gloo), inside a Python container, under each launcher.

The image is a small Debian with Python 3.11; torch is mounted into it from the environment that runs this test.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, environment, write

STEP = '''\
"""Three steps of data-parallel training; rank 0 writes what came out."""

import json, os, platform, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.arange(32.0).reshape(8, 4)[rank::world] / 32
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
print(f"rank {rank} of {world}: loss {loss.item():.6f}")
everybody = [None] * world
dist.all_gather_object(everybody, [value.tolist() for value in model.parameters()])
if rank == 0:
    with open(os.environ["RUNNER_RUN"] + "/result.json", "w") as file:
        json.dump({"world": world, "weights": everybody, "python": platform.python_version(),
                   "system": open("/etc/os-release").readline(), "threads": torch.get_num_threads()}, file)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads outlive the group, and sometimes abort Python at its end (pytorch's pull request 179291)
'''


def one_process(steps: int) -> list[float]:
    """The weights after the same steps on all the data at once: what data-parallel training must give."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(32.0).reshape(8, 4) / 32
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
    return [float(value) for parameter in model.parameters() for value in parameter.flatten()]


@pytest.fixture
def torch_box(project: Path, python_sqsh: Path) -> str:
    """An environment with the Python image, and this environment's site-packages mounted at their own path."""
    torch = pytest.importorskip("torch", reason="torch is not installed beside the tests")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image has Python 3.11, whose extension modules are not those of this Python")
    packages = Path(torch.__file__).parents[1]
    variables = {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    edf = environment(python_sqsh, [f"{packages}:{packages}:ro"], variables)
    write(project, {"edf/torch.toml": edf, "jobs/step.py": STEP})
    return "torch"


@pytest.mark.training
@pytest.mark.uses("bubblewrap", "squashfuse")
@pytest.mark.parametrize(
    ("site", "engine", "launcher", "nodes"),
    [
        ("generic-slurm", "ce", "torchrun", 2),
        ("generic-slurm", "ce", "srun", 2),
        ("generic-pyxis", "pyxis", "torchrun", 2),
        ("local", "sandbox", "torchrun", 1),
        ("local", "sandbox", "srun", 1),
    ],
)
def test_two_processes_train_as_one(
    cluster: Runner, torch_box: str, site: str, engine: str, launcher: str, nodes: int
) -> None:
    """Both ranks end with the same weights, and they are those of one process that sees all the data."""
    runner = Runner(cluster.project, cluster.environ, site)
    shape = ("--launcher", launcher, "--nodes", str(nodes), "--tasks-per-node", str(2 // nodes), "--time", "5")
    folder, log = runner.finished("--env", torch_box, "--engine", engine, *shape, "--script", "step", "--", "3")
    result = json.loads((folder / "result.json").read_text())
    assert result["world"] == 2
    assert "Debian" in result["system"] and result["python"].startswith("3.11.")
    first, second = result["weights"]
    assert first == second
    flat = [value for parameter in first for row in parameter for value in (row if isinstance(row, list) else [row])]
    assert flat == pytest.approx(one_process(3), abs=1e-6)
    assert "rank 0 of 2" in log
    assert "rank 1 of 2" in runner("logs", folder.name, "--rank", "1").stdout
