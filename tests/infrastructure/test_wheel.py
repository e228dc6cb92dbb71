import subprocess
import sys
import zipfile
from pathlib import Path

from tests.processes import ROOT


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = (path for path in (ROOT / "celery_dlock").rglob("*") if path.is_file())
    expected = {str(path.relative_to(ROOT)) for path in package if path.suffix in {".py", ".lua", ".typed"}}
    assert packed == expected
    assert "celery_dlock/py.typed" in packed
