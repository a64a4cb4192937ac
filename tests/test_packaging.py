"""What a release consists of: the source archive, and the wheel that is built of it."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The unpacked source archive of the files that git has."""
    folder = tmp_path_factory.mktemp("archive")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout")
    for name in names.stdout.splitlines():
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "checkout" / name)
    [path] = build("sdist", folder / "checkout", folder)
    with tarfile.open(path) as file:
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / path.name.removesuffix(".tar.gz")


def build(what, source, target):
    """What `pip` runs, in an environment that has setuptools."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", code, target], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "eprecat" not in result.stderr, result.stderr
    return target.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[what])


def test_the_source_archive_is_the_repository(archive):
    wanted = {path for path in (archive.parent / "checkout").rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(archive.parent / "checkout")) for path in wanted}
    found = {str(path.relative_to(archive)) for path in archive.rglob("*") if path.is_file()}
    assert {name for name in wanted if not name.startswith(".git") and "egg-info" not in name} <= found


def test_the_wheel_of_the_source_archive_imports_with_its_version_and_its_types(archive, tmp_path):
    [path] = build("wheel", archive, tmp_path)
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "site")
        metadata = next(file.read(name).decode() for name in file.namelist() if name.endswith("/METADATA"))
    version = (ROOT / "VERSION").read_text().strip()
    assert f"\nVersion: {version}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    code = "import data_tools, evaluate_gpt2, generate_samples, megazero, pretrain_gpt2 as job; "
    code += "print(megazero.__version__, megazero.__file__, job.__file__)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True
    )
    paths = [str(tmp_path / "site" / name) for name in ("megazero/__init__.py", "pretrain_gpt2.py")]
    assert result.stdout.split() == [version, *paths], result.stderr
    assert (tmp_path / "site" / "megazero" / "py.typed").exists()
    assert {p.name for p in (ROOT / "data_tools").glob("*.yaml")} == {
        p.name for p in (tmp_path / "site" / "data_tools").glob("*.yaml")
    }
