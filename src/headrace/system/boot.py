"""Which boot of the kernel this is: what the page cache held is still there as long as it does not change."""

from __future__ import annotations

from typing import Final

BOOT_ID_FILE: Final = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Empty where the kernel does not say; an empty one equals no other."""
    try:
        with open(BOOT_ID_FILE) as file:
            return file.read().strip()
    except OSError:
        return ""
