"""The launch scripts in a folder of their own, where they install nothing and use the Python of the tests."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}


def copy_scripts(folder: Path) -> Path:
    """Returns FOLDER/launch; the scripts run in FOLDER."""
    launch = folder / "launch"
    launch.mkdir()
    for script in (ROOT / "launch").iterdir():
        (launch / script.name).write_bytes(script.read_bytes())
        (launch / script.name).chmod(0o755)
    (launch / "setup.sh").write_text('set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    return launch
