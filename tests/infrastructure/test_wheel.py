import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

from tests.support.processes import ROOT


def built_wheel(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    wheel = built_wheel(tmp_path)
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = (path for path in (ROOT / "celery_dlock").rglob("*") if path.is_file())
    expected = {str(path.relative_to(ROOT)) for path in package if path.suffix != ".pyc"} | {"pytest_celery_dlock.py"}
    assert packed == expected
    assert "celery_dlock/py.typed" in packed


def test_readme_links_in_the_wheel_lead_into_the_repository(tmp_path: Path) -> None:
    """An index shows the README away from the files that its relative links name."""
    wheel = built_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as packed:
        (metadata,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        shown = message_from_bytes(packed.read(metadata))
    source = dict(url.split(", ") for url in shown.get_all("Project-URL", []))["Source"]
    written = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    relative = [link for link in written if not re.match(r"https?://|#", link)]
    assert [link for link in relative if not (ROOT / link.partition("#")[0]).exists()] == []
    links = re.findall(r"\]\(([^)]+)\)", str(shown.get_payload()))
    # A picture needs the file itself, not the page that shows it.
    absolute = [f"{source}/{'raw' if link.endswith(('.svg', '.png')) else 'blob'}/main/{link}" for link in relative]
    assert [link for link in links if link.startswith(source)] == absolute
    assert len(relative) > 20
