"""KV producer: runs shared prefills for a family and serves the KV layer by layer."""

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.prefill_nodes instead of the bare name {__name__!r}")
