"""The typed configuration tree, its loader, and checkpoint reading with cached digests."""

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.configs instead of the bare name {__name__!r}")
