"""The share consumer (KIP-932): members of a share group acquire records and acknowledge each of them.

offset_runs, deliveries   what was handed out, and what was said of it
share_session             what a broker knows of this member between its requests
share_membership          joining the group, and staying in it
share_fetcher             records from the leaders, acknowledgements to them
share_collector           handing out: records or Arrow batches
core                      all of that together; `share_consumer` is its face for threads
"""
