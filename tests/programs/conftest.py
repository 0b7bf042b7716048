"""programs layer: whole programs in processes of their own, which start engines."""

from tests.vllm.conftest import base

__all__ = ["base"]
