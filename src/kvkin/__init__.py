"""kvkin: a prefill/decode cluster in which the fine-tunes of one base model share a context's KV cache.

The rooms of the code are top-level folders of the repository; this package links them under one
namespace (``kvkin.kv``, ``kvkin.router``, ...), so that nothing depends on the working directory.
"""

__version__ = "0.1.0"
