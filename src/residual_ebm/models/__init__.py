"""Everything that holds weights."""
