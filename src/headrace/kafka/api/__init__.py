"""One file per API; each is headed by the versions it serves and what changed in them."""
