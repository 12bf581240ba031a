"""Look at the wheel and the sdist in a folder, and use the wheel in a fresh environment with no repository on its path.

usage: python scripts/check_dist.py DIST

The environment is a new one that sees the packages beside this Python (torch and others), but not the editable
tilestep: the wheel is all it has of it. Commands and a part of the tests run there, outside of the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tilestep"
TESTS = ["tests/optimizer/test_tensors.py"]
"""Quick ones that use the package and nothing else of the repository."""

USE = """
import importlib.metadata, pathlib, sys
import torch, tilestep

package = pathlib.Path(tilestep.__file__).parent
assert package.is_relative_to(sys.prefix), package
assert (package / "py.typed").exists()
assert importlib.metadata.version("tilestep") == tilestep.__version__
for name in tilestep.__all__:
    getattr(tilestep, name)
torch.manual_seed(0)
weights = [torch.nn.Parameter(torch.randn(1000)) for _ in range(2)]
weights[1].data.copy_(weights[0].data)
for weight, optimizer in zip(weights, (tilestep.AdamW([weights[0]]), torch.optim.AdamW([weights[1]]))):
    for _ in range(3):
        weight.grad = weight.detach().sin()
        optimizer.step()
torch.testing.assert_close(weights[0], weights[1])
print("tilestep", tilestep.__version__, "from", package)
"""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise SystemExit(f"check_dist: {sentence}")


def only(folder: Path, pattern: str) -> Path:
    """The one file of a folder that a pattern names."""
    files = list(folder.glob(pattern))
    require(len(files) == 1, f"{folder} has {len(files)} files {pattern}; run make dist")
    return files[0]


def sources() -> set[str]:
    """Files that the package consists of, as git has them or, without git, as they lie there."""
    listed = subprocess.run(["git", "ls-files", "."], cwd=PACKAGE, capture_output=True, text=True)
    names = listed.stdout.split() if listed.returncode == 0 and listed.stdout else None
    files = map(str, names or (p.relative_to(PACKAGE) for p in PACKAGE.rglob("*") if "__pycache__" not in str(p)))
    return {name for name in files if (PACKAGE / name).is_file()}


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel has every file of the package and no other; the sdist has what a build and a reader need."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {f"tilestep/{name}" for name in sources()}
    require(wanted <= packed, f"the wheel lacks {sorted(wanted - packed)}")
    require(packed <= wanted, f"the wheel has {sorted(packed - wanted)}, which git does not know")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src/tilestep/py.typed", "docs/start.md"}
    require(needed <= names, f"the sdist lacks {sorted(needed - names)}")
    print(f"{wheel.name}: {len(packed)} files, {wheel.stat().st_size / 1e3:.0f} kB; {sdist.name}: {len(names)} files")


def fresh_environment(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel in it, beside the packages of this Python; its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    inside = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    # A folder that a .pth names has its packages, but its own .pth, such as the editable install's, are not read.
    beside = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (inside / "beside.pth").write_text("\n".join(beside) + "\n")
    install = [
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
    ]
    subprocess.run([sys.executable, *install, str(wheel)], check=True)
    return python


def main(dist: Path) -> None:
    wheel, sdist = only(dist, "*.whl"), only(dist, "*.tar.gz")
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory() as temporary:
        outside = Path(temporary) / "outside"
        outside.mkdir()
        python = fresh_environment(Path(temporary) / "environment", wheel)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"TILESTEP_CACHE_DIR": str(Path(temporary) / "cache"), "OMP_WAIT_POLICY": "passive"}

        def run(*command: object, **options: Any) -> None:
            subprocess.run([str(word) for word in command], cwd=outside, env=environment, check=True, **options)

        run(python, "-c", USE)
        run(python.parent / "tilestep", "version")
        run(python.parent / "tilestep", "show", "Lion", "--backend", "cpp", stdout=subprocess.DEVNULL)
        run(python.parent / "tilestep", "demo", "--steps", "3", "--device", "cpu")
        shutil.copytree(ROOT / "tests", outside / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", outside)
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    print("the wheel works where nothing else of the repository is")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
