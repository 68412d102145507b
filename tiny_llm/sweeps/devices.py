"""Devices of this machine and leases on them: a GPU trains one run at a time.

A lease is a lock on a file that is named after the device. The run's process inherits it, so the kernel gives
the device free at the moment the run is gone, however it went, and not before: a run that still saves after
its launcher was killed keeps its device. Launchers of several sweeps share the same files.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

NO_DEVICE = ("", "-1", "NoDevFiles")


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs this process may use; CUDA_VISIBLE_DEVICES' indices or UUIDs are kept as they are."""
    inherited = environment.get("CUDA_VISIBLE_DEVICES")
    if inherited is None:
        return _installed_devices()
    devices = []
    for name in inherited.split(","):
        if name.strip() in NO_DEVICE:
            break  # as CUDA does: what follows an invalid one is hidden
        devices.append(name.strip())
    return devices


def _installed_devices() -> list[str]:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed_devices(listed.stdout)


def listed_devices(listing: str) -> list[str]:
    """Return the devices that `nvidia-smi -L` lists: a GPU's index, or the UUIDs of its MIG parts."""
    devices: list[str] = []
    whole: str | None = None  # the GPU above, while no part of it was seen
    for line in listing.splitlines():
        if part := re.search(r"\(UUID: (MIG-[^)]+)\)", line):
            if whole is not None:
                devices.remove(whole)
                whole = None
            devices.append(part[1])
        elif gpu := re.match(r"GPU (\d+):", line):
            whole = gpu[1]
            devices.append(whole)
    return devices


class Lease:
    """One device, ours until every process that holds `file` is gone."""

    def __init__(self, device: str, file: IO[bytes]) -> None:
        self.device = device
        self.file = file


def take_lease(devices: Sequence[str]) -> Lease | None:
    """Lease the first free device; None when all are busy."""
    folder = Path(tempfile.gettempdir(), f"tiny_llm_devices_{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for device in devices:
        file = open(folder / re.sub(r"[^A-Za-z0-9-]", "-", device), "ab")  # noqa: SIM115 - held by the run
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        return Lease(device, file)
    return None
