"""The client: connections without blocking (`connection`), producer and consumer on it, operators' questions (`admin`).

`headrace.Producer` and `headrace.Consumer` are the faces for threads; `headrace.aio` has those for asyncio.
"""

from typing import Final

DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
DEFAULT_REGISTRIES: Final = "127.0.0.1:8083"
"""HTTP ports."""
