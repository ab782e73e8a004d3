"""API keys: who calls, and what the caller may do."""
