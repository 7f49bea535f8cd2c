"""Everything that crosses a process boundary: control messages, client, KV data plane, leases."""

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.transport instead of the bare name {__name__!r}")
