"""Write compose/kubernetes/pipeline.yaml: the chart's objects as plain manifests.

Needs helm on PATH, or as an argument. The file holds a sha256 of the chart, so that a chart that
was changed alone is noticed without helm, too.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "compose" / "helm" / "lockstep"
MANIFESTS = ROOT / "compose" / "kubernetes" / "pipeline.yaml"
HEAD = """\
# A pipeline on Kubernetes: `cdc setup` as a Job, the daemon with a standby, the followers.
# Passwords are in a Secret of your own (docs/KUBERNETES.md); this file holds none.
# Made by `make manifests` from the chart in compose/helm/lockstep, sha256 {digest}.
"""


def digest() -> str:
    """Return the sha256 of the chart's files, names included, in hex."""
    found = hashlib.sha256()
    for path in sorted(each for each in CHART.rglob("*") if each.is_file()):
        content = path.read_bytes()
        found.update(f"{path.relative_to(CHART).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def manifests(helm: str) -> str:
    """Return the file: the default values, with nothing that only Helm understands."""
    rendered = subprocess.run(
        [helm, "template", "lockstep", str(CHART), "--set", "setup.hook=false"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    # Helm's own remark on each object, and blank lines that templates leave.
    kept = re.sub(r"^(# Source: .*|[ \t]*)\n", "", rendered, flags=re.MULTILINE)
    return HEAD.format(digest=digest()) + kept.removeprefix("---\n")


def main() -> None:
    helm = sys.argv[1] if len(sys.argv) > 1 else shutil.which("helm")
    if helm is None:
        sys.exit("helm is not on PATH: https://helm.sh/docs/intro/install, or name one here")
    MANIFESTS.write_text(manifests(helm), encoding="utf-8")
    print(f"wrote {MANIFESTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
