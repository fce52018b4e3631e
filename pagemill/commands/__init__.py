"""The commands of `pagemill`, one module each, imported when called."""
