"""What the bench's image holds: packages of Debian and of PyPI, by layer."""

from __future__ import annotations

SUITE = "bookworm"
BASE = ("python3", "python3-dev", "ca-certificates", "g++", "git", "openssh-client", "perl", "gdb", "libopenmpi-dev")
# unpacked, not installed: libraries, headers and programs of every size
DEBIAN = (
    *("golang-1.19-go", "llvm-16-dev", "libllvm16", "libstd-rust-dev", "libclang-16-dev"),
    *("openjdk-17-jre-headless", "qemu-system-misc", "chromium", "blender", "libvtk9.1", "libreoffice-core"),
)
# the training stack: containers/pins/cpu.txt without what is built from source
NOT_FROM_PINS = ("torch", "deepspeed")
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SCIENCE = ("scipy", "scikit-learn", "joblib", "threadpoolctl", "narwhals")
MORE = (
    *("ml-dtypes", "opencv-python-headless", "polars", "polars-runtime-32", "vtk"),
    *("llvmlite", "numba", "botocore", "plotly", "babel", "xgboost-cpu", "jaxlib", "jax", "spacy", "onnxruntime"),
)
