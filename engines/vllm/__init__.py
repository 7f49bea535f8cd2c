"""vLLM as kvkin's engine, on both sides of a cluster, reached through vLLM's public extension points.

``engine.py`` is the engine that nodes run on; ``connector.py`` is what vLLM loads. Nothing else in kvkin imports vllm.
"""
