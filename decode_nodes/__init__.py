"""KV consumer: executes reuse plans, generates tokens, publishes what it computed."""

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.decode_nodes instead of the bare name {__name__!r}")
