"""What all tests share: hypothesis without a clock, because a busy machine is no reason to fail."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kvkin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvkin")
