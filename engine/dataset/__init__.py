"""From conversations to token ids and a loss mask."""
