"""A host as the console sees it; plans; the demo. No textual."""
