"""Shared by all tests: eight virtual CPU devices, single-precision results that do not depend on the machine's mood."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
