"""Model families. `register` adds one from outside."""

from worker.models.registry import CausalLM, register, resolve, supported_architectures

__all__ = ["CausalLM", "register", "resolve", "supported_architectures"]
