"""Pagemill's router."""
