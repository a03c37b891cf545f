"""Where hidden states come from. One Protocol, Source."""
