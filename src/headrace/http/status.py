"""GET /: one plain page for a person: the broker, its topics, its groups. No scripts, no requests of its own."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from headrace import __version__
from headrace.cluster.image import Topic
from headrace.http.description import Answer, Operation
from headrace.http.exchange import Exchange
from headrace.http.message import HTML, Response
from headrace.http.process import process_figures
from headrace.http.services import HttpServices

ROWS_MAX: Final = 500
PAGE: Final = Operation("The status page", {200: Answer.html("The broker, its topics, its groups, for a person.")})
POLICY: Final = (("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),)

_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1a1a1a;
       background: #fff; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: #a40000; font-weight: 600; }
@media (prefers-color-scheme: dark) { body { background: #16181b; color: #e8e8e8; } th, td { border-color: #3a3d42; }
       .bad { color: #ff8a80; } a { color: #8ab4f8; } }
"""

Cell = str | int
Row = tuple[Cell, ...]


def page(exchange: Exchange) -> Response:
    services = exchange.services
    body = "".join(
        (
            f"<h1>Headrace broker {services.broker_id}</h1>",
            _broker(services),
            "<h2>Topics</h2>",
            _table(
                ("Topic", "Partitions", "Records", "Size", "Offsets", "State"),
                [_topic_row(services, topic) for _, topic in sorted(services.image().topics.items())],
                "No topics yet. A producer that names one creates it, as does <code>headrace topic create</code>.",
            ),
            "<h2>Groups</h2>",
            *(
                f'<p class="bad">Partition {closed.partition} of __consumer_offsets cannot be read at offset '
                f"{closed.offset:,}, so its groups are not answered: {escape(closed.reason)}</p>"
                for closed in services.closed_groups()
            ),
            _table(
                ("Group", "Topic", "Partition", "Committed", "Lag"),
                sorted(
                    (lag.group_id, lag.topic, lag.partition, lag.committed_offset, lag.lag)
                    for lag in services.group_lags()
                ),
                "No consumer group has committed an offset.",
            ),
            '<p>More: <a href="/topics">topics as JSON</a>, <a href="/metrics">metrics</a>, '
            '<a href="/ready">readiness</a>, <a href="/openapi.json">what this port answers (OpenAPI)</a>.</p>',
        )
    )
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Headrace broker {services.broker_id}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )
    return Response(200, HTML, [text.encode(errors="replace")], POLICY)


def _broker(services: HttpServices) -> str:
    image, process, metrics = services.image(), process_figures(), services.metrics
    known = image.brokers.get(services.broker_id)
    uptime = _duration((services.clock.wall_ms() - known.started_ms) // 1000) if known is not None else "not registered"
    reason, replicas = services.ready(), list(services.partitions)
    state = "ready" if reason is None else f'<span class="bad">not ready: {escape(reason)}</span>'
    rows = (
        ("State", state),
        ("Cluster", f"{escape(services.cluster_id)}, {len(image.brokers)} brokers"),
        ("Version", escape(__version__)),
        ("Uptime", uptime),
        ("Layout", escape(str(services.settings["log.layout"]))),
        ("Partitions", f"{sum(each.leading for each in replicas):,} led here, {len(replicas):,} held"),
        ("Connections", f"{metrics.connections_open:,} open, {metrics.paused_connections:,} held back"),
        ("Received, sent", f"{_size(metrics.bytes_in)}, {_size(metrics.bytes_out)}"),
        ("Memory", f"{_size(process.resident_bytes)} resident"),
        ("Processor", f"{process.cpu_seconds:,.1f} s"),
        ("Open files", f"{process.open_files:,} of {process.open_files_max:,}"),
    )
    return "<table>" + "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows) + "</table>"


def _topic_row(services: HttpServices, topic: Topic) -> Row:
    led = [services.partitions.find(topic.name, state.index) for state in topic.partitions]
    here = [partition for partition in led if partition is not None]
    records = sum(partition.high_watermark - partition.log.start_offset for partition in here)
    size = _size(sum(partition.log.size_bytes for partition in here))
    offsets = "-"
    if here:
        least = min(partition.log.start_offset for partition in here)
        offsets = f"{least:,} to {max(partition.high_watermark for partition in here):,}"
    offline = sum(partition.log.offline is not None for partition in here)
    state = "internal" if topic.internal else "live"
    if offline:
        state = f"{offline} of {len(here)} partitions are offline: see the broker's log"
    elif damaged := [partition for partition in here if partition in services.partitions.damaged]:
        state = f"{len(damaged)} of {len(here)} partitions cannot be read everywhere: see the broker's log"
    elif len(here) < len(led):
        state += f", {len(led) - len(here)} partitions on other brokers"
    logs = [partition.log for partition in here if partition.log.settings.retention_archived]
    if logs:
        archived = sum(max(0, log.archived_offset() - log.start_offset) for log in logs)
        state += f", {archived:,} records archived, {_size(sum(log.held_bytes for log in logs))} held for the archive"
    indexes = [services.key_indexes.get(partition.topic_partition) for partition in here]
    if any(indexes):
        state += f", key index {sum(keys.behind for keys in indexes if keys is not None):,} records behind"
    return topic.name, len(led), records, size, offsets, state


def _table(heads: tuple[str, ...], rows: Iterable[Row], empty: str) -> str:
    rows = list(rows)
    if not rows:
        return f"<p>{empty}</p>"
    numeric = [isinstance(cell, int) for cell in rows[0]]
    parts = ["<table><thead><tr>"]
    parts += [
        f'<th class="n">{head}</th>' if right else f"<th>{head}</th>"
        for head, right in zip(heads, numeric, strict=True)
    ]
    parts.append("</tr></thead><tbody>")
    for row in rows[:ROWS_MAX]:
        parts.append("<tr>")
        parts += [
            f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else f"<td>{escape(cell)}</td>" for cell in row
        ]
        parts.append("</tr>")
    parts.append("</tbody></table>")
    if len(rows) > ROWS_MAX:
        parts.append(f"<p>and {len(rows) - ROWS_MAX:,} more.</p>")
    return "".join(parts)


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def _duration(seconds: int) -> str:
    days, seconds = divmod(max(0, seconds), 86_400)
    hours, seconds = divmod(seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    return (f"{days} d " if days else "") + f"{hours:02d}:{minutes:02d}:{seconds:02d}"
