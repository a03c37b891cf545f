"""The store of validated hidden states: manifest, shards, index, quarantine, verify."""
