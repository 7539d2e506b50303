"""Build the source distribution and the wheel, check what they contain, install the wheel and use it.

    python -m release.package                                       # into dist/
    python -m release.package --repository https://host/owner/name --ref v0.1.0    # as they are published

Nothing is downloaded. The wheel is built from the unpacked source distribution, so that this is shown to be complete.
It is installed into an empty environment, which finds what steepest depends on in that of the Python that runs this.
"""

from __future__ import annotations

import argparse
import email
import email.message
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from release.project_address import RELATIVE, write_address

ROOT = Path(__file__).resolve().parent.parent
PASSED_OVER = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
#: what somebody needs who builds, tests, reads or changes the project without its repository
IN_SOURCES = (
    "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md",
    "Makefile", "constraints.txt", ".ci/run", "steepest/__init__.py", "steepest/py.typed", "tests/conftest.py",
    "tests/project/test_docs.py", "benchmarks/tests/conftest.py", "docs/howto/trainer.md",
    "examples/own_loop_digits.py", "release/package.py",
)  # fmt: skip


def build(source: Path, kind: str, out: Path) -> Path:
    """Build a distribution ("sdist" or "wheel") of the files of `source`, and return its path in `out`."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code, str(out)],
        cwd=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(
            f"the {kind} cannot be built:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return out / done.stdout.split()[-1]


def unpack(sdist: Path, into: Path) -> Path:
    """Return the folder of the unpacked source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (folder,) = into.iterdir()
    return folder


def wrong_in_sources(sources: Path) -> list[str]:
    """Return what the source distribution lacks, and what it should not have."""
    missing = [f"the sdist lacks {name}" for name in IN_SOURCES if not (sources / name).exists()]
    surplus = [
        f"the sdist has {path.relative_to(sources)}"
        for path in sources.rglob("*")
        if path.suffix in {".pyc", ".so", ".pem", ".key"} or path.name in {"__pycache__", ".git"}
    ]
    return missing + surplus


def wrong_in_wheel(wheel: Path, sources: Path, published: bool) -> list[str]:
    """Return what the wheel lacks: it has the package with its marker of types and its page, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    modules = {
        str(path.relative_to(sources))
        for path in (sources / "steepest").rglob("*")
        if path.suffix in {".py", ".html", ".css", ".js"} or path.name == "py.typed"
    }
    found = [f"the wheel lacks {name}" for name in sorted(modules - names)]
    found += [
        f"the wheel has {name}" for name in sorted(names - modules) if ".dist-info/" not in name
    ]
    return found + wrong_in_metadata(about, published)


def wrong_in_metadata(about: email.message.Message, published: bool) -> list[str]:
    """Return what an index would refuse or show wrongly."""
    wanted = [
        "Name",
        "Version",
        "Summary",
        "Author",
        "Keywords",
        "License-Expression",
        "License-File",
        "Requires-Python",
    ]
    found = [f"the metadata has no {field}" for field in wanted if not about[field]]
    if about["Description-Content-Type"] != "text/markdown":
        found.append(f"the README is {about['Description-Content-Type']}, not text/markdown")
    if published:
        found += [] if about["Project-URL"] else ["the metadata has no Project-URL"]
        found += [
            f"the README links to {target}, which an index does not have"
            for _, _, target in RELATIVE.findall(str(about.get_payload()))
        ]
    return found


def use_installed(wheel: Path, sources: Path, folder: Path) -> None:
    """Install the wheel into an empty environment, and use it there as a newcomer would."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    # a folder that a .pth names is searched last, and its own .pth files are not read: the checkout is not found
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)],
        check=True,
    )
    elsewhere = folder / "empty"
    elsewhere.mkdir()
    # the folder of the examples has no steepest beside it: what is imported is what was installed
    shutil.copytree(sources / "examples", elsewhere / "examples")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "PATH": f"{python.parent}{os.pathsep}{environment['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for command in (
        ["steepest", "--version"],
        ["python", str(Path(__file__).with_name("installed.py")), str(ROOT)],
        ["python", "examples/own_loop_digits.py", "--workers", "2"],
        ["steepest", "doctor"],
    ):
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
        )
        shown = " ".join(Path(part).name for part in command)
        if done.returncode:
            raise SystemExit(f"{shown} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        print(
            f"{time.monotonic() - began:5.1f} s  {shown}: {done.stdout.splitlines()[-1].strip()}",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m release.package", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="where the two files go (default: dist)"
    )
    parser.add_argument(
        "--repository", help="the address that the metadata and the README's links name"
    )
    parser.add_argument(
        "--ref", default="main", help="the tag whose files the links lead to (default: main)"
    )
    parser.add_argument("--contents-only", action="store_true", help="do not install the wheel")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "source"
        shutil.copytree(ROOT, source, ignore=PASSED_OVER)
        if chosen.repository:
            write_address(source, chosen.repository, chosen.ref)
        sdist = build(source, "sdist", folder)
        (folder / "unpacked").mkdir()
        sources = unpack(sdist, folder / "unpacked")
        wrong = wrong_in_sources(sources)
        wheel = build(sources, "wheel", folder)
        wrong += wrong_in_wheel(wheel, sources, published=bool(chosen.repository))
        if wrong:
            raise SystemExit("\n".join(wrong))
        print(
            *(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB" for path in (sdist, wheel)),
            sep="\n",
            flush=True,
        )
        if not chosen.contents_only:
            use_installed(wheel, sources, folder / "environment")
        chosen.out.mkdir(parents=True, exist_ok=True)
        for path in (sdist, wheel):
            shutil.copy(path, chosen.out)
    print(f"in {chosen.out}")


if __name__ == "__main__":
    main()
