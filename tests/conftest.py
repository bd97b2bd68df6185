"""Shared by all tests: eight virtual CPU devices, and shape annotations that are checked at every call of the model.

Both must be in place before anything imports jax or the model, hence here, in the first file that pytest reads.
"""

import os

import jaxtyping

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

CHECKED = ("attention", "decode", "elementary", "exchange", "layout", "loss", "moe", "ready", "transformer")
jaxtyping.install_import_hook([f"noonsight.model.{name}" for name in CHECKED], "beartype.beartype")
