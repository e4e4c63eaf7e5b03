"""The name under which Spark knows the archive's sink.

Spark makes the data source anew in a Python process for every commit, so this module imports nothing large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from headrace.pipelines.archive_sink import ArchiveWriter

FORMAT: Final = "headrace-archive"


class ArchiveSink(DataSource):
    """Options: `path`, the archive's folder, and `query`, the name under which its batches are counted."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> ArchiveWriter:
        from headrace.arrow.locations import location
        from headrace.pipelines.archive_sink import ArchiveWriter

        return ArchiveWriter(location(self.options["path"]), self.options["query"], schema)
