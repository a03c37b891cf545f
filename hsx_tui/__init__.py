"""The console: what runs on the laptop. Holds no truth; files on the host do."""
