"""Decides between exact hit, partial reuse and private prefill; fronts for the clients (no torch)."""

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.router instead of the bare name {__name__!r}")
