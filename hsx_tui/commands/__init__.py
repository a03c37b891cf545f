"""The verbs without a screen, one group a module. No textual; asyncssh only once a host is spoken to."""
