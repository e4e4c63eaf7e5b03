"""What a client may be given as `tls`, and the context that it stands for."""

from __future__ import annotations

import ssl
from pathlib import Path

from headrace.errors import SettingError

Tls = ssl.SSLContext | str | Path | bool | None
"""True: trust the system's authorities. A file: trust the certificates in it, in PEM. None or False: no TLS."""


def context_of(tls: Tls) -> ssl.SSLContext | None:
    """SettingError says why a file cannot be used."""
    if tls is None or tls is False:
        return None
    if isinstance(tls, ssl.SSLContext):
        return tls
    if tls is True:
        return ssl.create_default_context()
    if not isinstance(tls, str | Path):
        raise TypeError(
            "tls is True (trust the system's authorities), the path of a PEM file with the certificates to trust, "
            f"an ssl.SSLContext, or None; not {type(tls).__name__}"
        )
    if not str(tls):
        raise SettingError("tls is an empty path; give the PEM file with the certificates to trust, or True")
    try:
        return ssl.create_default_context(cafile=tls)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"tls: cannot trust the certificates in {str(tls)!r}: {fault_of(error)}") from None


def fault_of(error: Exception) -> str:
    """What is wrong with a file of certificates or keys, in words."""
    reason = getattr(error, "reason", None)
    if isinstance(error, ssl.SSLError):
        return str(reason or error).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
