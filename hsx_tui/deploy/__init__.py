"""asyncssh: sessions, remote calls, engine bundle, tails, the embedded host."""
