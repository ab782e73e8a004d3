"""Fencepost: an HTTP job-control service on PostgreSQL."""

__version__ = "0.1.0"
