"""What the repository promises as a whole: the lock, the tracked files, the wheel, the documents."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def locked() -> dict[str, tuple[Requirement, list[str]]]:
    """The lock's entries by name: the requirement and its hashes."""
    entries = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    parsed: dict[str, tuple[Requirement, list[str]]] = {}
    for entry in entries:
        requirement, *hashes = entry.split("--hash=")
        parsed[canonicalize_name(Requirement(requirement).name)] = Requirement(requirement), [h.strip() for h in hashes]
    return parsed


def test_every_locked_package_has_one_version_and_sha256_hashes() -> None:
    for name, (requirement, hashes) in locked().items():
        assert re.fullmatch(r"==[^,*]+", str(requirement.specifier)), name
        assert hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes), name


def test_the_lock_names_no_index_and_no_url() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert not re.search(r"^\s*--(?!hash=)", text, flags=re.MULTILINE)


def test_the_lock_satisfies_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = locked()
    for line in project["dependencies"] + project["optional-dependencies"]["dev"]:
        wanted = Requirement(line)
        version = str(lock[canonicalize_name(wanted.name)][0].specifier).removeprefix("==")
        assert wanted.specifier.contains(version), f"{line}: the lock has {version}; run `make lock`"


def project_files() -> list[Path]:
    """The files git tracks or would add; the test is void in an unpacked archive, where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Written with gaps so that this file does not hold what it forbids.
FORBIDDEN = {
    "a package registry's host": r"py(pi)[.]org|python(hosted)[.]org|npm(js)[.]org|ana(conda)[.]org|deb(ian)[.]org",
    "a path of one machine": r"(?<![\w.~}])/(root|work|home/\w+|Users)/",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    for path in project_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        match = re.search(FORBIDDEN[what], text)
        assert match is None, f"{path.relative_to(ROOT)} names {what}: {match and match[0]}"


def test_notebooks_are_kept_as_scripts_only() -> None:
    assert [path for path in project_files() if path.suffix == ".ipynb"] == []


def make_targets() -> set[str]:
    (line,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return set(line.split())


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  make (\w+)", shown.stdout, flags=re.MULTILINE)) == make_targets()


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make report" in readme
    assert "make test" in readme


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_documents_name_only_targets_and_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    assert set(re.findall(r"`make (\w+)", text)) <= make_targets()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / link).exists(), f"{document} links to {link}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("labkit-*.whl")
    return built


def test_the_wheel_holds_labkit_and_its_data_only(wheel: Path) -> None:
    paths = [Path(name).parts for name in zipfile.ZipFile(wheel).namelist()]
    assert {parts[0].split("-")[0] for parts in paths} == {"labkit"}
    assert ("labkit", "data", "models", "moonlight-16b-a3b.yaml") in paths
    assert ("labkit", "notebooks", "recompute_study.py") in paths
    assert ("labkit", "cli", "jupyterlab_overrides.json") in paths
    assert ("labkit", "cli", "shells", "labkit.bash") in paths
    assert not [parts for parts in paths if parts[1:3] == ("data", "results")]


def test_an_installed_wheel_finds_its_own_data(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "from labkit.workload import Workload\n"
        "from labkit.workload.files import data_directory\n"
        "print(data_directory())\n"
        "print(Workload.load(data_directory() / 'workloads' / 'moonlight-16b.yaml').model.name)"
    )
    # -P keeps the checkout out of sys.path; PYTHONPATH comes before the editable install.
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == [str(tmp_path / "site" / "labkit" / "data"), "moonlight-16b-a3b"]
