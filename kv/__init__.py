"""Pure data and functions (no IO, no torch): identity, plans, state machines, cost model, errors."""

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.kv instead of the bare name {__name__!r}")
