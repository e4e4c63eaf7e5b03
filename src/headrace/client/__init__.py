"""The client, on one set of connections that never block.

errors              what can go wrong
fetch_requests      Fetch and ListOffsets, for all who read
connection          sockets, requests and metadata; driven by the threads that wait, or by an asyncio loop
producer, consumer  cores that are callback code on it, with their faces for threads: `headrace.Producer` and
                    `headrace.Consumer`; `headrace.aio` has the same for asyncio
share               the same of the share consumer, `headrace.ShareConsumer`
admin               blocking calls for operators, Spark and Arrow: topics, groups, settings, logs as they lie; their
                    public face is `headrace.Admin`, in `headrace.aio` too
"""

from typing import Final

DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
DEFAULT_REGISTRIES: Final = "127.0.0.1:8083"
"""HTTP ports."""
