"""Files and folders that are whole or not there."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk when the call returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
