"""A session of a Spark Connect server: the Spark, its Java and its Python are elsewhere.

The server plans and runs everything, so it needs this package, as its executors do; a client needs PySpark's client and
a way to the server. Formats are found by the server. Left to itself the client tries for minutes to reach a server that
is not there, without a word. That is also why `SparkSession.builder.remote("local[2]")` with a chosen
`spark.connect.grpc.binding.port` seems to hang: PySpark 4.3 starts a server at that port, and then looks for it at
15002.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from headrace.errors import OperatorError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEME: Final = "sc://"
DEFAULT_PORT: Final = 15002
REACHED_WITHIN_S: Final = 10.0


def connect(name: str, address: str, settings: Mapping[str, str]) -> SparkSession:
    """The session of this process at the server; OperatorError says what is missing."""
    from pyspark.sql import SparkSession

    where = urlsplit(address)
    try:
        socket.create_connection((where.hostname or "", where.port or DEFAULT_PORT), REACHED_WITHIN_S).close()
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"nobody listens at {address} ({error}); is a Spark Connect server there? Spark's "
            "sbin/start-connect-server.sh starts one"
        ) from None
    builder = SparkSession.builder.appName(name).remote(address)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except ImportError as error:
        raise OperatorError(f"PySpark's client is not complete: pip install 'pyspark[connect]' ({error})") from None


def is_connected(spark: SparkSession) -> bool:
    """Whether a session is one of a Connect server, which gives no way to its JVM."""
    return type(spark).__module__.startswith("pyspark.sql.connect")
