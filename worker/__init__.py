"""Pagemill's worker."""
