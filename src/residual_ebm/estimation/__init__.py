"""Estimators: pure mathematics on tensors, without models or files."""
