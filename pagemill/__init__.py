"""Pagemill: a server for large language models."""
