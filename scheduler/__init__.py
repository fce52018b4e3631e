"""Pagemill's scheduler."""
