"""The kvkin command line: roles, ask, status, demo, finetune, bench."""

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.tools instead of the bare name {__name__!r}")
