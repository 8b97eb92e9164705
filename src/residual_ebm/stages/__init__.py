"""The stages of a run: files in, files out."""
