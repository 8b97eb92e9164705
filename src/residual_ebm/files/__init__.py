"""Everything on disk: run directories, shards, corpora, blocks."""
